"""What coding takes of a device beside the tensor and its code."""

import pytest
import torch

from memengine.memory.allocated import allocated_peak_bytes
from memengine.techniques.codecs.lossless import BitCode, between, positive_mask
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.codecs.running_range import RunningRangeQuantizer
from memengine.techniques.codecs.sparse import Cast, Sparsifier

pytestmark = pytest.mark.gpu
MIB = 2**20
CODECS = {
    '8 bits': Quantizer(8),
    '4 bits': Quantizer(4),
    '1 bit': Quantizer(1),
    '4 bits by channel': Quantizer(4, by_channel=True),
    'running ranges': lambda tensor: RunningRangeQuantizer()(tensor),
    'running ranges of one image': lambda tensor: RunningRangeQuantizer()(
        tensor.view(1, 4, 256, -1)
    ),
    'running ranges of channels': lambda tensor: RunningRangeQuantizer(-1)(tensor),
    'where positive': positive_mask,
    'where between': lambda tensor: between(tensor, 0, 6, 3, 7),
}


SELECTIONS = {
    'half': (Sparsifier(gamma=0.5), torch.bfloat16),
    'few': (Sparsifier(gamma=0.9), torch.float32),
    'any': (Sparsifier('random', 0.5), torch.float32),
    'most of blocks': (Sparsifier('block_mink', 0.1), torch.bfloat16),
    'few of blocks': (Sparsifier('block_mink', 0.9), torch.float32),
    'half of long blocks': (Sparsifier('block_mink', 0.5, 3 * 2**20), torch.float32),
    'half in float64': (Sparsifier(gamma=0.5), torch.float64),
    'any in float64': (Sparsifier('random', 0.9), torch.float64),
    'all in 16 bits': (Cast(), torch.float32),
    'half of blocks in float64': (Sparsifier('block_mink', 0.5), torch.float64),
    '8 bits of float64': (Quantizer(8), torch.float64),
    '8 bits of float64 by channel': (Quantizer(8, by_channel=True), torch.float64),
    'running ranges of float64': (CODECS['running ranges'], torch.float64),
}
EACH = [(codec, dtype) for codec in CODECS.values() for dtype in (torch.float32, torch.bfloat16)]


def peaks(codec, tensor):
    """While it is coded, beyond tensor and code, and while it is decoded; and the code."""
    before = torch.cuda.memory_allocated()
    codes = []
    peak = allocated_peak_bytes(lambda: codes.append(codec(tensor)), 'cuda')
    kept = torch.cuda.memory_allocated() - before
    return peak - kept, allocated_peak_bytes(lambda: codes[0].decode().numel(), 'cuda'), codes[0]


@pytest.mark.parametrize(('codec', 'dtype'), [*EACH, *SELECTIONS.values()])
def test_coding_64_mib_takes_16_more_at_most(codec, dtype):
    tensor = torch.randn(64, 4, 256, MIB // (4 * 256) // dtype.itemsize, device='cuda')
    coding, decoding, code = peaks(codec, tensor.to(dtype))
    assert coding <= 16 * MIB
    assert decoding - 64 * MIB <= 16 * MIB or isinstance(code, BitCode)  # all at once


@pytest.mark.parametrize('values', [Cast(), Quantizer(8)], ids=['16 bits', '8 bits'])
@pytest.mark.parametrize('gamma', [0.5, 0.9])
def test_what_is_kept_is_held_whole_until_it_is_coded(gamma, values):
    tensor = torch.randn(16 * MIB, device='cuda')
    coding, decoding, _ = peaks(Sparsifier(gamma=gamma, values=values), tensor)
    kept = 64 * MIB * (1 - gamma)
    assert coding <= 16 * MIB + kept
    assert decoding - 64 * MIB <= 16 * MIB + kept
