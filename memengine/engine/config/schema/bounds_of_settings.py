"""Which bounds settings have: by their place in a config, by type hint and by name.

Neither torch nor MMEngine is imported here, so that a number that is out of bounds can be refused
before they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from memengine.engine.config.before_torch.sizes import FITS, parse_bytes, parse_fit
from memengine.engine.config.schema.bounds import (
    BOOL,
    FINITE,
    FRACTION,
    NON_NEGATIVE_INT,
    NON_NEGATIVE_NUMBER,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    Constraint,
    each,
    number_within,
    of_hint,
    one_of,
)
from memengine.technique import is_of

_SEED = Constraint(
    'an integer of 0 or more, or None', lambda value: value is None or NON_NEGATIVE_INT.holds(value)
)

_POSITIVE_OR_INF = Constraint(
    'a positive number', lambda value: value in ('inf', math.inf) or POSITIVE_NUMBER.holds(value)
)
_LOADER = {
    'batch_size': POSITIVE_INT,
    'num_workers': NON_NEGATIVE_INT,
    'num_batch_per_epoch': POSITIVE_INT,
}
MULTIPLIERS = (
    'bias_lr_mult',
    'bias_decay_mult',
    'norm_decay_mult',
    'dwconv_decay_mult',
    'flat_decay_mult',
    'dcn_offset_lr_mult',
)
# What the Runner, or who builds for it, asks of settings, by the path of the dict that has them.
BOUNDS_AT: Mapping[str, Mapping[str, Constraint]] = {
    'optim_wrapper': {
        'accumulative_counts': POSITIVE_INT,
        'on_nonfinite': one_of('stop', 'skip', 'rollback'),
        'nonfinite_limit': POSITIVE_INT,
    },
    'optim_wrapper.optimizer': {'lr': POSITIVE_NUMBER, 'weight_decay': NON_NEGATIVE_NUMBER},
    'optim_wrapper.clip_grad': {
        'type': one_of('norm', 'value', 'each_norm'),
        'max_norm': _POSITIVE_OR_INF,
        'norm_type': _POSITIVE_OR_INF,
        'clip_value': POSITIVE_NUMBER,
    },
    'optim_wrapper.paramwise_cfg': {
        **dict.fromkeys(MULTIPLIERS, NON_NEGATIVE_NUMBER),
        'bypass_duplicate': BOOL,
    },
    'param_scheduler': {'convert_to_iter_based': BOOL},
    'train_dataloader': _LOADER,
    'val_dataloader': _LOADER,
    'test_dataloader': _LOADER,
    'train_cfg': {
        'max_epochs': POSITIVE_INT,
        'max_iters': POSITIVE_INT,
        'val_interval': POSITIVE_INT,
        'stop_at_iter': POSITIVE_INT,
        'by_epoch': BOOL,
    },
    'val_cfg': {'fp16': BOOL},
    'test_cfg': {'fp16': BOOL},
    'auto_scale_lr': {'base_batch_size': POSITIVE_INT, 'enable': BOOL},
    'env_cfg': {'cudnn_benchmark': BOOL, 'resource_limit': POSITIVE_INT},
    'env_cfg.dist_cfg': {'timeout': POSITIVE_NUMBER},
    'env_cfg.mp_cfg': {
        'mp_start_method': one_of('fork', 'spawn', 'forkserver'),
        'opencv_num_threads': Constraint('a whole number', lambda value: is_of(value, int)),
    },
    'randomness': {'seed': _SEED, 'deterministic': BOOL, 'diff_rank_seed': BOOL},
    'verify_exactness': {
        'every': POSITIVE_INT,
        'samples': Constraint(
            'a positive integer or None',
            lambda value: value is None or POSITIVE_INT.holds(value),
        ),
        'tolerance': Constraint(
            'a positive number or None',
            lambda value: value is None or POSITIVE_NUMBER.holds(value),
        ),
    },
}


def _scheduler_rule(scheduler: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    begin, end = scheduler.get('begin', 0), scheduler.get('end', math.inf)
    if is_of(begin, int) and is_of(end, float) and end <= begin:
        yield 'end', f'must be more than begin={begin}, got {end}'


def _loader_rule(loader: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    if loader.get('num_workers', 0) == 0:
        for key, off in (('persistent_workers', False), ('prefetch_factor', None), ('timeout', 0)):
            if loader.get(key, off) != off:
                yield key, f'needs num_workers above 0; set {key}={off} or num_workers=1'
    if loader.get('collate_fn', ...) is None:
        yield 'collate_fn', "must be a dict with a 'type' or a function, got None; or leave it out"
    if 'shuffle' in loader:
        advice = f"sampler=dict(type='DefaultSampler', shuffle={loader['shuffle']})"
        yield 'shuffle', f'the sampler decides about the order; write {advice} instead'


# What settings of one dict ask of each other, as (key, sentence), in the same way.
RULES_AT: Mapping[str, Callable[[Mapping[Any, Any]], Iterator[tuple[str, str]]]] = {
    'param_scheduler': _scheduler_rule,
    **dict.fromkeys(('train_dataloader', 'val_dataloader', 'test_dataloader'), _loader_rule),
}


def _names_weights(value: Any) -> bool:
    texts, switches = ('path', 'part', 'into'), ('strict',)
    if not isinstance(value, Mapping):
        return value is None or isinstance(value, str)
    return 'path' in value and all(
        (key in texts and isinstance(entry, str)) or (key in switches and isinstance(entry, bool))
        for key, entry in value.items()
    )


def _parses(parse: Callable[[Any], Any]) -> Callable[[Any], bool]:
    def allows(value: Any) -> bool:
        try:
            return value is None or parse(value) is not None
        except ValueError:
            return False

    return allows


_DICT = Constraint('a dict', lambda value: isinstance(value, Mapping))
TOP_BOUNDS: Mapping[str, Constraint] = {
    **dict.fromkeys(('env_cfg', 'randomness'), _DICT),
    'launcher': one_of('none', 'pytorch', 'slurm', 'mpi'),
    'log_level': one_of('CRITICAL', 'ERROR', 'WARNING', 'INFO', 'DEBUG', 'NOTSET'),
    'console': one_of('quiet', 'normal', 'verbose'),
    'load_from': Constraint(
        'a path, or dict(path=..., part=..., into=..., strict=True or False)', _names_weights
    ),
    'find_unused_parameters': BOOL,
    'verify_exactness': Constraint(
        'True, False or dict(every=..., samples=..., tolerance=...)',
        lambda value: value is None or isinstance(value, (bool, Mapping)),
    ),
    'memory': Constraint(
        f'a number from 0 (least memory) to 1 (fastest), {", ".join(map(repr, FITS))} or None',
        _parses(parse_fit),
    ),
    'memory_budget': Constraint("a size such as '20GiB', or None", _parses(parse_bytes)),
}

# The types of default hooks, which an entry without type takes.
DEFAULT_HOOK_TYPES: Mapping[str, str] = {
    'runtime_info': 'RuntimeInfoHook',
    'timer': 'IterTimerHook',
    'sampler_seed': 'DistSamplerSeedHook',
    'logger': 'LoggerHook',
    'param_scheduler': 'ParamSchedulerHook',
    'checkpoint': 'CheckpointHook',
    'finite_loss': 'NonFiniteHook',
}


def _by_name(bound: Constraint, names: str) -> dict[str, Constraint]:
    return dict.fromkeys(names.split(), each(bound))


# Ranges of numbers that go by these names in constructors of MMEngine, torch and this library.
BOUNDS_BY_NAME: Mapping[str, Constraint] = {
    **_by_name(FINITE, 'degrees mean shear threshold value'),
    **_by_name(
        POSITIVE_INT,
        'batch_size block_size bottleneck_dim channels chunk_size context_length crop_size '
        'crops_per_image depth embed_dim hidden_dim image_size img_size in_chans in_dim '
        'interval interval_exp_name k kernel_size max_keep_ckpts micro_batch_size nlayers '
        'num_classes num_digits num_heads num_layers num_repeats out_dim output_stride '
        'patch_size patience prefetch_factor save_begin size step_size T_max tile_size topk '
        'total_iters vocab_size width window_size',
    ),
    **_by_name(
        NON_NEGATIVE_INT,
        'begin end freeze_last_layer indices local_crops milestones num num_images pad_id seed '
        'trainable_layers val_begin warmup_teacher_temp_epochs',
    ),
    **_by_name(
        POSITIVE_NUMBER,
        'base_temperature init_scale lr max_scale mlp_ratio power ratio std student_temp '
        'teacher_temp temperature warmup_teacher_temp',
    ),
    **_by_name(
        NON_NEGATIVE_NUMBER,
        'brightness contrast cutmix_alpha end_value eps eta_min gamma koleo_weight '
        'min_feature_rank mixup_alpha saturation sigma timeout weight_decay',
    ),
    **_by_name(
        number_within('a number between 0 and 1', lambda value: 0 < value < 1), 'test_fraction'
    ),
    **_by_name(
        FRACTION,
        'attn_drop_rate betas center_momentum drop_path_rate drop_rate dropout end_factor '
        'eta_min_ratio label_smoothing max_skipped min_entropy min_feature_std min_information '
        'momentum momentum_teacher momentum_teacher_end p proj_drop_rate start_factor',
    ),
}


def value_fault(
    key: Any,
    value: Any,
    bounds: Mapping[Any, Constraint],
    hint: Any = None,
    defaults: Collection[Any] = (),
    ours: bool = False,
) -> str | None:
    """What is wrong with the value of an argument: by a bound, its type hint or its name.

    Args:
        key: The argument.
        value: Its value.
        bounds: Those of the place.
        hint: What its constructor says; None says nothing.
        defaults: What it is when it is left out, which is never wrong.
        ours: Whether the hint's word is taken for it, and names mean what they mean here.
    """
    if key in bounds:
        return bounds[key].fault(value)
    if any(value is it or (type(value) is type(it) and value == it) for it in defaults):
        return None
    fault = None if hint is None else of_hint(hint, strict=ours).fault(value)
    by_name = BOUNDS_BY_NAME.get(key) if ours else None
    return fault or (by_name.fault(value) if by_name else None)
