"""Kernels in the place of codecs' operations: by Triton's interpreter, by its compiler, chosen."""

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from memengine._torch_private import compiled_kernels
from memengine._torch_private.compiled_kernels import proven_kernels
from memengine.techniques.codecs.lossless import positive_mask
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.codecs.sparse import Sparsifier
from tests.triton import compile_for_gpu, needs_triton, run_interpreted


@needs_triton
@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted('tests/techniques/codecs/interpreted_kernels.py')


@pytest.fixture
def kernels(monkeypatch):
    """Kernels of a module that counts when it is asked to prove them, for CPU tensors."""
    proofs = []
    module = SimpleNamespace(
        compare_with_eager=lambda like, *variant: proofs.append(variant), proofs=proofs
    )
    monkeypatch.setitem(sys.modules, 'kernels_of_a_test', module)
    monkeypatch.setattr(compiled_kernels, '_can_be_read', lambda *_: True)
    monkeypatch.setattr(compiled_kernels, '_agreed', {})
    monkeypatch.setattr(compiled_kernels, '_given_up', set())
    return module


def test_kernels_prove_themselves_once_for_each_variant(kernels):
    for variant in [(8,), (8,), (4,), (8,)]:
        assert proven_kernels('kernels_of_a_test', torch.ones(3), *variant) is kernels
    proven_kernels('kernels_of_a_test', torch.ones(3).half(), 8)
    assert kernels.proofs == [(8,), (4,), (8,)]


def test_after_an_error_they_are_given_up_with_one_warning(kernels):
    assert proven_kernels('kernels_of_a_test', torch.ones(3), 8) is kernels

    def fail(like, *variant):
        raise RuntimeError('no compiler\nof that kind')

    kernels.compare_with_eager = fail
    with pytest.warns(UserWarning, match=r'not used on cpu \(RuntimeError: no compiler\)'):
        assert proven_kernels('kernels_of_a_test', torch.ones(3), 4) is None
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert proven_kernels('kernels_of_a_test', torch.ones(3), 8) is None
        assert proven_kernels('kernels_of_a_test', torch.ones(3), 2) is None
    with pytest.warns(UserWarning, match='ModuleNotFoundError'):
        assert proven_kernels('a_module_that_is_missing', torch.ones(3)) is None


def test_running_out_of_memory_is_no_proof(kernels):
    works = kernels.compare_with_eager

    def fail(like, *variant):
        raise torch.OutOfMemoryError

    kernels.compare_with_eager = fail
    with pytest.raises(torch.OutOfMemoryError):
        proven_kernels('kernels_of_a_test', torch.ones(3))
    kernels.compare_with_eager = works
    assert proven_kernels('kernels_of_a_test', torch.ones(3)) is kernels


def test_nothing_is_asked_for_a_tensor_of_the_cpu():
    assert proven_kernels('a_module_that_is_missing', torch.ones(3)) is None


def kernels_to_compile(dtype, bits):
    """Each with the types of what it takes and the settings that it is compiled for."""
    from memengine.techniques.codecs.kernels import bits as of_bits
    from memengine.techniques.codecs.kernels import largest_values, quantizing, selection

    flat = dict(flat=f'*{dtype}', packed='*u8', numel='i32')
    of_channels = dict(of_channels=f'*{dtype}', number='i32', stride='i32', count='i32')
    groups = {**flat, **of_channels, 'extremes': f'*{dtype}', 'seed': 'i64'}
    yield quantizing._extremes_of_channels, groups, dict(at_once=4096)
    for by_channel in (False, True):
        tile = dict(by_channel=by_channel, **quantizing._tile(bits, 256))
        yield quantizing._quantize, groups, dict(stochastic=True, **tile)
        yield quantizing._dequantize, groups, tile
        groups['extremes'] = '*fp32'
    bounds = dict(low='fp32', high='fp32')
    yield of_bits._pack_within, {**flat, **bounds}, dict(bounded=True, nan=True, block=256)
    values = dict(packed='*u8', chosen='*i16', numel='i64', off='i32', on='i32')
    yield of_bits._select, values, dict(block=256)
    integers = dict.fromkeys(('flat', 'values'), '*i32' if dtype == 'fp32' else '*i16')
    numbers = 'numel', 'size', 'kept', 'kept_of_last', 'total', 'block_size', 'share'
    numbers = dict.fromkeys(numbers, 'i32')
    of_blocks = {**numbers, **integers, 'places': '*u8'}
    yield selection._largest_of_blocks, of_blocks, dict(as_offsets=bits == 8, rows=8, width=256)
    places = {**numbers, 'values': f'*{dtype}', 'flat': f'*{dtype}', 'offsets': '*u8'}
    places['counts'] = '*u8' if bits == 8 else '*i16'
    how = dict(constant=bits == 8, rows=16, width=256, num_warps=8)
    yield selection._scatter, places, how
    tensors = {**integers, 'packed': '*u8', 'offsets': '*u8', 'of_pages': '*i16'}
    of_all = {**tensors, **dict.fromkeys(('counts', 'found'), '*i32')}
    of_all |= dict.fromkeys(('numel', 'kept', 'share'), 'i32')
    tile = dict(tile=4096)
    how = dict(passes=3, width=11) if dtype == 'fp32' else dict(passes=2, width=8)
    how |= dict(most=128, num_warps=8, **tile)
    yield largest_values._count, of_all, dict(number=1, **how)
    yield largest_values._take, of_all, dict(as_offsets=bits == 8, page=256, **how)
    tile |= dict(in_order=bits == 8)
    of_bits = {**of_all, **dict.fromkeys(('flat', 'values'), f'*{dtype}'), 'counts': '*i16'}
    yield largest_values._count_bits, of_bits, tile
    yield largest_values._scatter, of_bits, tile


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(('dtype', 'bits', 'capability'), [('fp32', 8, 90), ('bf16', 1, 80)])
def test_they_compile_for_gpus(monkeypatch, tmp_path, dtype, bits, capability):
    monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path))
    for kernel, types, settings in kernels_to_compile(dtype, bits):
        compile_for_gpu(kernel, types, settings, capability)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_they_agree_and_are_used(dtype):
    if 'tests.simulated_gpu.device' in sys.modules:
        pytest.skip('Triton cannot compile for the simulated GPU')
    for bits in (8, 4, 2, 1):
        values = torch.randn(100_003, device='cuda').to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter('error')  # that none is used
            code = Quantizer(bits)(values)
            image = values[:99_000].view(10, 99, 100)
            for tensor in (image, image.transpose(1, 2)):
                of_channels = Quantizer(bits, by_channel=True)(tensor)
                assert of_channels.part_numel == of_channels.group_size
                assert (of_channels.decode() - tensor).abs().amax() < 12 / (2**bits - 1)
            mask = positive_mask(values).decode()
            kept = [
                Sparsifier(strategy, gamma)(values).decode()
                for strategy in ('mink', 'block_mink')
                for gamma in (0.5, 0.9)
            ]
        assert code.part_numel == code.group_size
        assert code.decode().isfinite().all()
        assert torch.equal(mask, (values > 0).to(dtype))
        assert all(torch.equal(one[one != 0], values[one != 0]) for one in kept)
