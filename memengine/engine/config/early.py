"""Misspelt keys at the top of a config, seen in its text before torch and MMEngine are imported.

These take seconds, and a misspelt key is what a user wants to hear of at once. What the text does
not tell for sure is left to the check of the whole config (:mod:`memengine.engine.config.check`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memengine.engine.config.bases import config_files, find_config, used_names
from memengine.engine.config.error import ConfigError, unknown_key, unknown_option
from memengine.suggest import STRICT, similar

__all__ = ['KNOWN', 'check_top_keys']

# Written down, as the classes that say so cannot be asked here. One that is not listed here is only
# refused where it looks like one that is.
KNOWN = frozenset(
    [
        '_scope_',
        'activation_checkpointing',
        'activation_offload',
        'auto_scale_lr',
        'cfg',
        'compile',
        'compile_blocks',
        'console',
        'custom',
        'custom_hooks',
        'custom_imports',
        'data_preprocessor',
        'default_hooks',
        'default_scope',
        'dropit',
        'efficient_conv_bn_eval',
        'embed',
        'env_cfg',
        'experiment_name',
        'export',
        'find_unused_parameters',
        'launcher',
        'load_from',
        'log_level',
        'log_processor',
        'model',
        'model_wrapper_cfg',
        'optim_wrapper',
        'param_scheduler',
        'probe',
        'quantized_activations',
        'randomness',
        'recomputed_activations',
        'resume',
        'retrieve',
        'runner_type',
        'sync_bn',
        'test_cfg',
        'test_dataloader',
        'test_evaluator',
        'train_cfg',
        'train_dataloader',
        'trusted_globals',
        'tta_model',
        'tta_pipeline',
        'val_cfg',
        'val_dataloader',
        'val_evaluator',
        'vars',
        'visualizer',
        'work_dir',
        'zeroshot',
    ]
)
_BRING_OTHERS = {'custom_imports', 'runner_type'}


def check_top_keys(config: str | Path, options: Mapping[str, Any] | None) -> None:
    """Refuse keys that are misspelt for sure.

    Args:
        config: As on the command line.
        options: Dotted path to value, as ``--cfg-options`` gives them.

    Raises:
        ConfigError: With one sentence for each.
    """
    file = find_config(config)
    if file.suffix != '.py' or not file.is_file():
        return
    try:
        files = [path for path, _ in config_files(file) if path.suffix == '.py' and path.is_file()]
        keys = dict(key for path in files for key in _assigned(path))
        used = used_names(file)
    except (SyntaxError, ValueError):
        return  # which reading the config explains
    first = [path.partition('.')[0] for path in options or ()]
    # What a run has written holds the names that its config used, without their use.
    if _BRING_OTHERS & {*keys, *first} or 'work_dir' in keys and used <= {'dict'}:
        return
    problems = [unknown_option(key, KNOWN) for key in first if _misspelt(key) and key not in keys]
    problems += [
        unknown_key(key, KNOWN)
        for key, plain in keys.items()
        if plain and _misspelt(key) and key not in used
    ]
    if problems:
        raise ConfigError(problems)


def _misspelt(key: str) -> bool:
    return key not in KNOWN and bool(similar(key, KNOWN, STRICT))


def _assigned(file: Path) -> Iterator[tuple[str, bool]]:
    """Names that a config's top level assigns, and whether to a plain value."""
    for node in ast.parse(file.read_text(encoding='utf-8')).body:
        if isinstance(node, ast.Assign):
            value = node.value
            plain = isinstance(value, (ast.Constant, ast.Dict, ast.List, ast.Tuple)) or (
                isinstance(value, ast.Call) and ast.unparse(value.func) == 'dict'
            )
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id != '_base_':
                    yield target.id, plain
