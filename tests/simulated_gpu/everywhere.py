"""Tests of what names no device, with all of it on the simulated one.

``python -m pytest -p tests.simulated_gpu.everywhere tests/techniques``
"""

from __future__ import annotations

from typing import Any

from tests.simulated_gpu.device import REASON, torch

pytest_plugins = ['tests.simulated_gpu.device']
_DRAWING = (torch.rand, torch.randn, torch.randint, torch.randperm)


class _Drawn(torch.overrides.TorchFunctionMode):
    """What tests draw with a generator of the CPU is drawn there, and brought to the device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        generator = kwargs.get('generator')
        drawn_there = generator is not None and generator.device.type == 'cpu'
        if function in _DRAWING and drawn_there and kwargs.get('device') is None:
            return function(*args, **{**kwargs, 'device': 'cpu'}).cuda()
        return function(*args, **kwargs)


if REASON is None:
    torch.set_default_device('cuda')
    _Drawn().__enter__()
