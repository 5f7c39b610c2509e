"""What C computes of a tensor on a CPU is what torch's operations compute, bit for bit."""

import shutil
import sys

import pytest
import torch

from memengine._torch_private import compiled_kernels
from memengine._torch_private.compiled_kernels import given_up_on, without_kernels
from memengine.memory.prediction import on_fake_tensors
from memengine.techniques.codecs.kernels import compile_c, quantizing_on_cpu
from memengine.techniques.codecs.quantized import Quantizer
from memengine.techniques.modules.private_random import restart_private_generators

NEEDS_A_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ('cc', 'gcc', 'clang'))), reason='there is no C compiler'
)
CPU = torch.device('cpu')


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Also where tests make their tensors on another device."""
    with CPU:
        yield


@pytest.fixture
def nothing_compiled(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(compiled_kernels, '_agreed', {})
    monkeypatch.setattr(compiled_kernels, '_given_up', set())
    quantizing_on_cpu._library.cache_clear()
    yield
    quantizing_on_cpu._library.cache_clear()


def of_many_kinds(numel, dtype):
    """Numbers with equal, huge and infinite ones among them, and with a NaN."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).mul(3).to(dtype)
    if numel > 2000:
        values[5], values[6] = 3e38, -3e38
        values[256:512] = 1.5
        values[700], values[1200] = float('nan'), float('inf')
    return values


def coded(values, quantizer):
    torch.manual_seed(1)
    restart_private_generators()
    code = quantizer(values)
    return code, code.decode()


def assert_same(values, quantizer):
    with without_kernels():
        code, decoded = coded(values, quantizer)
    ours, ours_decoded = coded(values, quantizer)
    finite = decoded.isfinite()
    assert torch.equal(ours_decoded.isfinite(), finite)
    assert torch.equal(ours_decoded[finite], decoded[finite])
    assert torch.equal(ours.extremes.nan_to_num(), code.extremes.nan_to_num())
    if bool(finite.all()):
        assert torch.equal(ours.packed, code.packed)


@NEEDS_A_COMPILER
@pytest.mark.parametrize('numel', [0, 1, 77, 2560, 300_001, 2**18])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('bits', [8, 4, 2, 1])
def test_codes_and_values_are_the_same(numel, dtype, bits):
    values = of_many_kinds(numel, dtype)
    for group_size in (8, 256, 8192):
        for stochastic in (True, False):
            assert_same(values, Quantizer(bits, group_size, stochastic))
    assert not given_up_on(CPU)


@NEEDS_A_COMPILER
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('bits', [8, 2])
def test_codes_by_channel_are_the_same(dtype, bits):
    values = torch.randn(40, 24, 9, 11).mul(torch.logspace(-4, 4, 24).view(-1, 1, 1)).to(dtype)
    values[:, 5] = 0.3
    values[:, 6] *= 2.0**-140
    with_nan = values.clone()
    with_nan[3, 7, 2, 2], with_nan[20, 9, 0, 0] = float('nan'), float('-inf')
    last = values.to(memory_format=torch.channels_last)
    for tensor in (values, last, values.transpose(0, 1), values[:, :, 0, 0], with_nan):
        for stochastic in (True, False):
            assert_same(tensor, Quantizer(bits, 72, stochastic, by_channel=True))
    assert not given_up_on(CPU)


@NEEDS_A_COMPILER
@pytest.mark.parametrize('are_torchs', [True, False])
@pytest.mark.parametrize('bits', [8, 4])
def test_as_many_threads_as_torch_may_use(bits, are_torchs, monkeypatch):
    if not are_torchs:  # as where torch was built without OpenMP
        monkeypatch.setattr(quantizing_on_cpu, '_team', lambda: None)
    elif sys.platform == 'linux':
        assert quantizing_on_cpu._team() is not None
    values = torch.randn(2**22 + 2**20 + 300)  # in 8 bits three parts
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        assert_same(values, Quantizer(bits))
    finally:
        torch.set_num_threads(before)


@NEEDS_A_COMPILER
def test_they_are_used_and_draw_what_would_be_drawn(nothing_compiled, monkeypatch):
    used = []
    quantize = quantizing_on_cpu.quantize
    monkeypatch.setattr(
        quantizing_on_cpu, 'quantize', lambda *how: used.append(how[1]) or quantize(*how)
    )
    torch.manual_seed(1)
    restart_private_generators()
    values = torch.randn(1000)
    first = Quantizer(4)(values)  # which is compared before, in three widths
    assert used == [4, 4, 4]
    with without_kernels():
        torch.manual_seed(1)
        restart_private_generators()
        assert torch.equal(first.packed, Quantizer(4)(values).packed)
    Quantizer(4)(values.double()), Quantizer(4)(values.half()), Quantizer(4, 16_384)(values)
    assert used == [4, 4, 4]


def refused(reason):
    """It is said once, and the codes are the same."""
    values, quantizer = torch.linspace(-1, 1, 1000), Quantizer(8)
    with pytest.warns(UserWarning, match=f'not used on cpu .*{reason}') as warned:
        ours = [coded(values, quantizer) for _ in range(2)]
    assert len(warned) == 1
    with without_kernels():
        code, decoded = coded(values, quantizer)
    for our_code, our_decoded in ours:
        assert torch.equal(our_code.packed, code.packed)
        assert torch.equal(our_decoded, decoded)


@NEEDS_A_COMPILER
@pytest.mark.parametrize('bits', [8, 2])
def test_predictions_count_the_kernel(nothing_compiled, bits):
    def counted():
        with on_fake_tensors() as memory:
            Quantizer(bits)(torch.randn(2**20)).decode()
        return memory.operators, memory.moved_bytes

    operators, moved_bytes = first = counted()  # in which it is compiled and compared
    assert counted() == first
    with without_kernels():
        others, more_bytes = counted()
    assert operators < others / 2
    assert 2 * 4 * 2**20 < moved_bytes < more_bytes / 2


def test_without_a_compiler_torch_computes_it(nothing_compiled, monkeypatch):
    monkeypatch.delenv('CC', raising=False)
    monkeypatch.setattr(compile_c, '_COMPILERS', ('no-such-compiler',))
    refused('FileNotFoundError: no C compiler')


def test_a_compiler_that_fails_is_named(nothing_compiled, monkeypatch):
    monkeypatch.setenv('CC', f'{sys.executable} -c 1/0')
    refused('python.* cannot compile quantizing_on_cpu.c')


@NEEDS_A_COMPILER
def test_what_computes_something_else_is_not_used(nothing_compiled, monkeypatch):
    dequantize = quantizing_on_cpu.dequantize
    monkeypatch.setattr(quantizing_on_cpu, 'dequantize', lambda *how: dequantize(*how) * (1 + 1e-6))
    refused('ArithmeticError: 8 bits of torch.float32')
