"""What coding takes of a device beside the tensor and its code."""

import pytest
import torch

from memengine.memory.allocated import allocated_peak_bytes
from memengine.techniques.codecs.lossless import between, positive_mask
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.codecs.running_range import RunningRangeQuantizer

pytestmark = pytest.mark.gpu
MIB = 2**20
CODECS = {
    '8 bits': Quantizer(8),
    '4 bits': Quantizer(4),
    '1 bit': Quantizer(1),
    'running ranges': lambda tensor: RunningRangeQuantizer()(tensor),
    'running ranges of channels': lambda tensor: RunningRangeQuantizer(-1)(tensor),
    'where positive': positive_mask,
    'where between': lambda tensor: between(tensor, 0, 6, 3, 7),
}


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('name', CODECS)
def test_coding_64_mib_takes_16_more_at_most(name, dtype):
    tensor = torch.randn(64, 4, 256, MIB // (4 * 256) // dtype.itemsize, device='cuda')
    tensor = tensor.to(dtype)
    before = torch.cuda.memory_allocated()
    codes = []
    peak = allocated_peak_bytes(lambda: codes.append(CODECS[name](tensor)), 'cuda')
    kept = torch.cuda.memory_allocated() - before
    assert peak - kept <= 16 * MIB
    peak = allocated_peak_bytes(lambda: codes[0].decode().numel(), 'cuda')
    assert peak - tensor.nbytes <= 16 * MIB or 'where' in name  # which decodes all bits at once
