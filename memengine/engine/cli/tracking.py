"""``--track``: curves to TensorBoard, Weights & Biases or MLflow, beside those in the work dir."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config

from memengine.engine.config.error import ConfigError


def track(cfg: Config, names: Sequence[str]) -> None:
    """Add trackers to a config's visualizer, in place.

    Weights & Biases writes into the work dir and sends nothing, unless ``WANDB_MODE`` says
    ``online``; ``wandb sync`` sends it later.
    """
    run = Path(cfg.work_dir).name
    known: dict[str, dict[str, Any]] = dict(
        tensorboard=dict(type='TensorboardVisBackend'),
        wandb=dict(
            type='WandbVisBackend',
            init_kwargs=dict(
                project='memengine', name=run, mode=os.environ.get('WANDB_MODE', 'offline')
            ),
        ),
        mlflow=dict(type='MLflowVisBackend', exp_name='memengine', run_name=run),
    )
    visualizer = dict(cfg.get('visualizer') or {})
    visualizer.setdefault('type', 'Visualizer')
    backends = list(visualizer.get('vis_backends') or [dict(type='LocalVisBackend')])
    there = [backend.get('type') for backend in backends if isinstance(backend, dict)]
    for name in dict.fromkeys(names):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f'--track {name}: {name} is not installed; pip install {name}')
        if known[name]['type'] not in there:
            backends.append(known[name])
    cfg.visualizer = {**visualizer, 'vis_backends': backends}
