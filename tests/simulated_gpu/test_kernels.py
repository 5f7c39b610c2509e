"""Where Triton cannot compile, codecs do without kernels of their own, and say so once."""

import warnings

import pytest
import torch

from memengine._torch_private import triton_kernels
from memengine.techniques.codecs.quantized import Quantizer

pytestmark = pytest.mark.gpu


def test_one_warning_and_the_eager_form(device, monkeypatch):
    monkeypatch.setattr(triton_kernels, '_given_up', set())
    values = torch.randn(1000, device='cuda')
    with pytest.warns(UserWarning, match='quantizing are not used on cuda:0') as told:
        decoded = Quantizer(8)(values).decode()
    assert len(told) == 1 and (decoded - values).abs().max() < 0.1
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        Quantizer(2)(values.half()).decode()
