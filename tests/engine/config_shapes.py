"""Toy types, and configs of the shapes that people write, for the tests of the config checker."""

from collections.abc import Sequence
from typing import Any, TypedDict

import mmcv.cnn  # noqa: F401  whose names (bilinear, nearest, ...) a config may mean too
from mmengine.hooks import Hook
from mmengine.model import BaseModel, BaseModule
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import TASK_UTILS
from mmengine.visualization import Visualizer
from torch import nn
from torch.utils.data import BatchSampler, Dataset

from memengine.registry import (
    DATASETS,
    FUNCTIONS,
    HOOKS,
    METRICS,
    MODELS,
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    TRANSFORMS,
    VISUALIZERS,
)


@MODELS.register_module()
class ShapeBackbone(BaseModule):
    def __init__(self, depth, norm_cfg=None, stages=(), **kwargs):
        super().__init__(**kwargs)  # takes init_cfg


@MODELS.register_module()
class ShapeOpenBackbone(nn.Module):
    def __init__(self, name, pretrained=False, **kwargs):
        super().__init__()
        self.kwargs = kwargs


@MODELS.register_module()
class ShapeHead(BaseModule):
    def __init__(self, num_classes, loss=None, init_cfg=None, topk=(1,)):
        super().__init__(init_cfg)


@MODELS.register_module()
class ShapeLoss(nn.Module):
    def __init__(self, loss_weight=1.0):
        super().__init__()


@MODELS.register_module()
class ShapeModel(BaseModel):
    def __init__(
        self, backbone, neck=None, head=None, train_cfg=None, test_cfg=None, schedule=None, **kwargs
    ):
        super().__init__(**kwargs)


@TASK_UTILS.register_module()
class ShapeAssigner:
    def __init__(self, iou=0.5):
        pass


class Group(TypedDict):
    num: int
    pipeline: list[Any]


@TRANSFORMS.register_module()
class ShapeViews:
    def __init__(self, views: Sequence[Group]):
        pass


@TRANSFORMS.register_module()
class ShapeResize:
    def __init__(self, size, keep_ratio=False):
        pass


@TRANSFORMS.register_module()
class ShapeApply:
    def __init__(self, transforms, p=0.5):
        pass


@TRANSFORMS.register_module()
class ShapePolicies:
    def __init__(self, policies):
        self.names = [policy.pop('magnitude_name', None) for policy in policies]


@DATASETS.register_module()
class ShapeData(Dataset):
    def __init__(self, root='', data_prefix=None, pipeline=(), metainfo=None, schedule=None):
        pass


@HOOKS.register_module()
class ShapeHook(Hook):
    def __init__(self, *, interval=1, **kwargs):
        self.rest = kwargs.pop('rest', None)
        super().__init__(**kwargs)


@METRICS.register_module()
class ShapeMetric:
    def __init__(self, topk=1, prefix=None):
        pass


@FUNCTIONS.register_module(name='memengine_only_collate')
def memengine_only_collate(batch):
    return batch


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class ShapeConstructor(DefaultOptimWrapperConstructor):
    """Takes keys of its own in paramwise_cfg."""


@OPTIM_WRAPPERS.register_module()
class ShapeWrapper:
    """Neither precision nor dtype."""

    def __init__(self, optimizer, chunk_size=2):
        pass


@VISUALIZERS.register_module()
class ShapeVisualizer(Visualizer):
    def __init__(self, name='v', fancy=True, **kwargs):
        super().__init__(name, **kwargs)


def loader(**kwargs):
    return dict(
        batch_size=4,
        num_workers=0,
        dataset=dict(type='ShapeData', root='data', pipeline=[dict(type='ShapeResize', size=2)]),
        sampler=dict(type='DefaultSampler', shuffle=True),
        collate_fn=dict(type='default_collate'),
        **kwargs,
    )


def base(**kwargs):
    """A whole config, with ``kwargs`` at its top."""
    config = dict(
        default_scope='memengine',
        model=dict(
            type='ShapeModel',
            backbone=dict(type='ShapeBackbone', depth=2),
            head=dict(type='ShapeHead', num_classes=2, loss=dict(type='ShapeLoss')),
        ),
        train_dataloader=loader(),
        train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1),
        optim_wrapper=dict(
            type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1, momentum=0.9, weight_decay=0)
        ),
        param_scheduler=[dict(type='MultiStepLR', milestones=[1], gamma=0.1)],
        val_dataloader=loader(),
        val_cfg=dict(),
        val_evaluator=dict(type='ShapeMetric'),
    )
    config.update(kwargs)
    return config


EMA = dict(
    type='EMAHook', ema_type='ExponentialMovingAverage', momentum=2e-4, priority='ABOVE_NORMAL'
)
NESTED = dict(
    type='RepeatDataset',
    times=2,
    dataset=dict(
        type='ConcatDataset',
        datasets=[
            dict(type='ShapeData', data_prefix=dict(img_path='a', seg='b')),
            dict(
                type='ClassBalancedDataset',
                oversample_thr=0.1,
                dataset=dict(type='ShapeData', metainfo=dict(classes=('a', 'b'), palette=[1])),
            ),
        ],
    ),
)

# What must pass, by what is special about it.
VALID = {
    'plain': base(),
    'no training': dict(
        model=dict(type='ShapeModel', backbone=dict(type='ShapeBackbone', depth=1))
    ),
    'one scheduler': base(param_scheduler=dict(type='CosineAnnealingLR', T_max=3, eta_min=1e-6)),
    'schedulers': base(
        param_scheduler=[
            dict(type='LinearLR', start_factor=0.1, begin=0, end=5, convert_to_iter_based=True),
            dict(type='mmengine.PolyLR', power=2, by_epoch=False),
            dict(type='OneCycleLR', eta_max=0.1, total_steps=10),
            dict(type='ReduceOnPlateauLR', monitor='acc'),
        ]
    ),
    'schedulers by optimiser': base(
        optim_wrapper=dict(
            generator=dict(type='OptimWrapper', optimizer=dict(type='Adam', lr=1e-4)),
            critic=dict(optimizer=dict(type='mmengine.SGD', lr=1e-4), accumulative_counts=2),
            constructor='ShapeConstructor',
        ),
        param_scheduler=dict(
            generator=dict(type='MultiStepLR', milestones=[1]),
            critic=[dict(type='ConstantLR'), dict(type='MultiStepLR', milestones=[1])],
        ),
    ),
    'paramwise': base(
        optim_wrapper=dict(
            type='AmpOptimWrapper',
            loss_scale='dynamic',
            dtype='bfloat16',
            accumulative_counts=4,
            optimizer=dict(type='AdamW', lr=1e-3, betas=(0.9, 0.99), fused=True),
            clip_grad=dict(max_norm=1.0, norm_type=2, error_if_nonfinite=True),
            paramwise_cfg=dict(
                norm_decay_mult=0.0,
                bypass_duplicate=True,
                custom_keys={
                    'backbone': dict(lr_mult=0.1, decay_mult=2),
                    '.cls_token': dict(weight_decay=0.0, name='token'),
                },
            ),
        )
    ),
    'own constructor': base(
        optim_wrapper=dict(
            optimizer=dict(type='SGD', lr=0.1),
            constructor='ShapeConstructor',
            paramwise_cfg=dict(num_layers=12, layer_decay_rate=0.7),
        )
    ),
    'clipping by value': base(
        optim_wrapper=dict(
            optimizer=dict(type='SGD', lr=0.1), clip_grad=dict(type='value', clip_value=0.5)
        )
    ),
    'wrapped data sets': base(train_dataloader={**loader(), 'dataset': NESTED}),
    'loader options': base(
        train_dataloader=dict(
            num_workers=2,
            persistent_workers=True,
            prefetch_factor=4,
            pin_memory=True,
            drop_last=True,
            num_batch_per_epoch=3,
            disable_subprocess_warning=True,
            batch_size=2,
            dataset=dict(type='ShapeData'),
            sampler=dict(type='InfiniteSampler', shuffle=True, seed=3),
            batch_sampler=dict(type=BatchSampler, drop_last=True),
            worker_init_fn=dict(type=print, sep=''),
            collate_fn=print,
        )
    ),
    'several loaders': base(
        val_dataloader=[loader(), loader()], val_evaluator=[dict(type='ShapeMetric')]
    ),
    'evaluators': base(
        val_evaluator=[
            dict(type='ShapeMetric', topk=5),
            dict(type='DumpResults', out_file_path='x.pkl'),
        ]
    ),
    'an evaluator with metrics': base(val_evaluator=dict(metrics=[dict(type='ShapeMetric')])),
    'loops': base(
        train_cfg=dict(type='IterBasedTrainLoop', max_iters=10, val_begin=2, val_interval=5),
        val_cfg=dict(type='ValLoop', fp16=True),
    ),
    'iterations': base(
        train_cfg=dict(by_epoch=False, max_iters=10, dynamic_intervals=[(5, 1)], stop_at_iter=3)
    ),
    'hooks': base(
        default_hooks=dict(
            runtime_info=dict(type='RuntimeInfoHook'),
            timer=None,
            logger=dict(interval=5),
            checkpoint=dict(
                type='CheckpointHook',
                interval=1,
                save_best=['acc', 'loss'],
                rule=['greater', 'less'],
                max_keep_ckpts=3,
                published_keys=['meta'],
            ),
            visualization=dict(type='NaiveVisualizationHook', interval=1),
            mine=dict(type='ShapeHook', rest=1, interval=2, priority=5),
        ),
        custom_hooks=[
            EMA,
            dict(type='EarlyStoppingHook', monitor='acc', patience=2, min_delta=0.1),
            dict(type=ShapeHook, interval=2),
            ShapeHook(),
            dict(type='ProfilerHook', on_trace_ready=dict(type='tb_trace', dir_name='x')),
            dict(type='PrepareTTAHook', tta_cfg=dict(type='BaseTTAModel')),
        ],
    ),
    'model parts': base(
        data_preprocessor=dict(mean=[0.5], std=[0.5], to_rgb=True),
        model=dict(
            type='memengine.ShapeModel',
            data_preprocessor=dict(type='ImgDataPreprocessor', mean=[1], std=[1]),
            init_cfg=dict(type='Pretrained', checkpoint='x.pth', prefix='backbone.'),
            backbone=dict(
                type='ShapeBackbone',
                depth=2,
                norm_cfg=dict(type='BN', requires_grad=False),
                init_cfg=[
                    dict(type='Kaiming', layer='Conv2d', mode='fan_in'),
                    dict(
                        type='Constant', val=1, layer='BN', override=dict(type='Xavier', name='fc')
                    ),
                ],
                stages=[dict(type='ShapeLoss'), dict(type='ShapeHead', num_classes=1)],
            ),
            neck=[dict(type='ShapeLoss'), dict(type='torch.nn.ReLU', inplace=True)],
            train_cfg=dict(
                assigner=dict(type='ShapeAssigner', iou=1), anything=[1, dict(at='all')]
            ),
            test_cfg=dict(nms=dict(type='soft_nms', iou_threshold=0.5), max_per_img=100),
            schedule=dict(type='linear', steps=3),
        ),
    ),
    'open arguments': base(
        model=dict(
            type='ShapeModel',
            backbone=dict(
                type='ShapeOpenBackbone', name='vit', pretrained_cfg=dict(url='x'), img_size=2
            ),
        )
    ),
    'keys that the parent takes out': base(
        tta_pipeline=[
            dict(
                type='ShapePolicies',
                policies=[dict(type='ShapeResize', size=2, magnitude_name='size')],
            )
        ]
    ),
    'views': base(
        train_dataloader={
            **loader(),
            'dataset': dict(
                type='ShapeData',
                pipeline=[
                    dict(
                        type='ShapeViews',
                        views=[
                            dict(num=2, pipeline=[dict(type='ShapeResize', size=2)]),
                            dict(
                                num=1,
                                pipeline=[
                                    dict(
                                        type='ShapeApply',
                                        transforms=[dict(type='ShapeResize', size=(1, 2))],
                                    )
                                ],
                            ),
                        ],
                    ),
                    print,
                ],
            ),
        }
    ),
    'environment': base(
        env_cfg=dict(
            cudnn_benchmark=True,
            mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
            dist_cfg=dict(backend='gloo', timeout=100, port=2),
            resource_limit=100,
        ),
        randomness=dict(seed=None, deterministic=True, diff_rank_seed=False),
        log_processor=dict(
            window_size=5,
            custom_cfg=[dict(data_src='loss', log_name='x', method_name='mean', window_size=3)],
        ),
        visualizer=dict(
            type='ShapeVisualizer',
            fancy=False,
            name='v',
            vis_backends=[dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')],
        ),
        log_level='INFO',
        launcher='none',
        resume=False,
        load_from=None,
        work_dir='x',
        experiment_name='x',
        auto_scale_lr=dict(base_batch_size=256, enable=True),
        model_wrapper_cfg=dict(find_unused_parameters=True, broadcast_buffers=False),
        activation_checkpointing=['backbone.blocks'],
        efficient_conv_bn_eval='[backbone]',
        find_unused_parameters=True,
        sync_bn='torch',
        compile=dict(backend='eager', dynamic=True, mode='default'),
        trusted_globals=['pathlib.PosixPath'],
        runner_type='Runner',
        custom_imports=dict(imports=['json'], allow_failed_imports=False),
        vars=dict(anything=dict(typ='goes', lrr=1)),
        custom=dict(type='whatever'),
        tta_model=dict(type='BaseTTAModel'),
        tta_pipeline=[dict(type='ShapeResize', size=2)],
    ),
    'compile on': base(compile=True),
    'fsdp': base(
        model_wrapper_cfg=dict(
            type='MMFullyShardedDataParallel', cpu_offload=True, use_orig_params=True
        )
    ),
    'classes for types': base(
        model=dict(type=ShapeModel, backbone=dict(type=ShapeBackbone, depth=3)),
        optim_wrapper=dict(optimizer=dict(type='torch.optim.AdamW', lr=1e-3, weight_decay=1)),
    ),
    'scopes': base(
        default_scope='mmengine',
        model=dict(
            type='ShapeModel',
            _scope_='memengine',
            backbone=dict(type='ShapeBackbone', depth=3),
        ),
        train_dataloader={**loader(), 'dataset': dict(type='memengine.ShapeData')},
        val_dataloader=None,
        val_cfg=None,
        val_evaluator=None,
    ),
    'built objects': base(model=nn.Linear(1, 1), custom_hooks=[ShapeHook()]),
    'nothing to say': base(
        custom_hooks=None, default_hooks=None, visualizer=None, param_scheduler=None
    ),
}
