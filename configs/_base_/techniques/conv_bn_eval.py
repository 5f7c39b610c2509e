"""Frozen BatchNorm keeps nothing of its own after a convolution: exact, and half of the bytes.

Add this file to ``_base_``, or set ``efficient_conv_bn_eval="[backbone]"`` on the command line.
BatchNorm layers have to be in eval mode while the model trains (``norm_eval=True`` in mmdet and
mmpretrain); if none is, the first iteration says so.
"""

custom_hooks = [dict(type='EfficientConvBNEvalHook')]
