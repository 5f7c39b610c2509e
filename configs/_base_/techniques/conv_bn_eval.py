"""Frozen BatchNorm keeps nothing of its own after a convolution: exact, and half of the bytes.

Add this file to ``_base_``, or set ``efficient_conv_bn_eval="[backbone]"`` on the command line.
BatchNorm layers have to be in eval mode while the model trains (``norm_eval=True`` of mmdet's and
mmpretrain's backbones); if none is, the first iteration says so. ``EfficientConvBNEvalHook`` does
the same and can be told ``strict=False``.
"""

efficient_conv_bn_eval = ['*']
