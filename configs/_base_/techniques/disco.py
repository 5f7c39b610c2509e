"""DisCo: a contrastive loss of the samples of all ranks, of which each computes its rows.

Add this file to ``_base_``, or set ``model_wrapper_cfg.type=DisCoDistributedDataParallel`` on the
command line, and start several processes. ``train_dataloader.batch_size`` is that of one rank.
"""

model_wrapper_cfg = dict(type='DisCoDistributedDataParallel')
