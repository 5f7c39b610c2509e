"""DistributedDataParallel that carries a step out by the step contract."""

from __future__ import annotations

from typing import Any

from mmengine.model import MMDistributedDataParallel as _MMDistributedDataParallel
from mmengine.model.utils import detect_anomalous_params
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from memengine.engine.step import carry_out_step, run_step
from memengine.registry import MODEL_WRAPPERS


@MODEL_WRAPPERS.register_module()
class MMDistributedDataParallel(_MMDistributedDataParallel):
    """MMEngine's DDP wrapper, on GPUs and on CPU, with :func:`run_step` as its step.

    Args are MMEngine's. Gradients are the mean over ranks: a loss that is the mean over a rank's
    samples gives the gradient of the mean over all samples, if ranks hold equally many.

    Raises:
        ValueError: In a step, for a parameter that was frozen when this was built and no longer is:
            torch reduces the gradients of what was trained then.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]

    def _check_frozen(self) -> None:
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            raise ValueError(
                f'{type(self).__name__}: {thawed[0]} ({len(thawed)} parameters in all) was frozen '
                "when the model was wrapped, so that its gradient would stay each rank's own. "
                'Begin with it trained, at a learning rate of 0 if need be, or set '
                "model_wrapper_cfg.type='FullyShardedDataParallel'"
            )

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        """Carry out one training step; see :func:`memengine.engine.step.run_step`."""
        self._check_frozen()
        if not self.detect_anomalous_params:
            return run_step(self, data, optim_wrapper)
        log_vars = carry_out_step(self, data, optim_wrapper)
        detect_anomalous_params(log_vars['loss'], model=self)
        return log_vars
