"""Where Triton cannot compile, codecs and losses do without kernels of ours, and say so once."""

import warnings

import pytest
import torch

from memengine._torch_private import compiled_kernels
from memengine.losses import ClipLoss
from memengine.techniques.codecs.quantized import Quantizer

pytestmark = pytest.mark.gpu


def test_one_warning_and_the_eager_form(device, monkeypatch):
    monkeypatch.setattr(compiled_kernels, '_given_up', set())
    values = torch.randn(1000, device='cuda')
    with pytest.warns(UserWarning, match='quantizing are not used on cuda:0') as told:
        decoded = Quantizer(8)(values).decode()
    assert len(told) == 1 and (decoded - values).abs().max() < 0.1
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        Quantizer(2)(values.half()).decode()


def test_losses_in_tiles_are_what_they_are_whole(device, monkeypatch):
    monkeypatch.setattr(compiled_kernels, '_given_up', set())
    towers = torch.randn(2, 40, 16, device='cuda').bfloat16()
    with pytest.warns(UserWarning, match='similarity_tiles are not used on cuda:0') as told:
        loss = ClipLoss(tile_size=9)(*towers, 10.0)
    assert sum('kernels.similarity_tiles' in str(one.message) for one in told) == 1
    assert torch.allclose(loss, ClipLoss()(*towers, 10.0), rtol=1e-5)


def test_none_proves_itself_while_a_graph_is_captured(device, monkeypatch):
    monkeypatch.setattr(compiled_kernels, '_given_up', set())
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
    values = torch.randn(1000, device='cuda')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        Quantizer(8, stochastic=False)(values).decode()
    assert not compiled_kernels.given_up_on(values.device)
    with pytest.raises(RuntimeError, match='while a CUDA graph is captured'):
        Quantizer(8)(values)
