"""The losses' kernels: by Triton's interpreter, by its compiler, and on a GPU."""

import sys
import warnings

import pytest
import torch
from torch.nn import functional as F

from memengine.losses import ClipLoss, NTXentLoss, SigLipLoss, SupConLoss
from memengine.losses.batch_loss import Products
from memengine.testing import assert_same_step
from tests.losses.cases import step
from tests.triton import compile_for_gpu, needs_triton, run_interpreted


@needs_triton
@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted('tests/losses/kernels/interpreted.py')


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(('dtype', 'capability'), [('fp32', 80), ('bf16', 90)])
def test_they_compile_for_gpus(monkeypatch, tmp_path, dtype, capability):
    from memengine.losses.kernels import similarity_tiles

    monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path))
    like = torch.empty(0, dtype=torch.float32 if dtype == 'fp32' else torch.bfloat16)
    options = similarity_tiles._settings(like)
    sizes = dict.fromkeys(('height', 'width', 'features', 'shift'), 'i32')
    of_rows = 'by_row', 'row_lse', 'row_grad', 'on_diagonal'
    of_columns = 'by_column', 'column_lse', 'column_grad'
    tensors = dict.fromkeys(('scale', 'bias', 'totals', *of_rows, *of_columns), '*fp32')
    types = {**sizes, **tensors, **dict.fromkeys(('left', 'right', 'slope'), f'*{dtype}')}
    for kernel in (similarity_tiles._sums, similarity_tiles._slope):
        for sigmoid, columns in ((True, False), (False, True)):
            kind = dict(sigmoid=sigmoid, without_diagonal=False, columns=columns)
            compiled = compile_for_gpu(kernel, types, {**options, **kind}, capability)
            assert compiled.metadata.shared <= 99 * 2**10  # of the smallest GPU's multiprocessor


def test_which_products_kernels_may_compute():
    half, single, double = (
        torch.empty(1, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)
    )
    assert Products.of('auto', half).on_tensor_cores
    assert Products.of('fp16', double).on_tensor_cores
    assert Products.of('tf32', single).on_tensor_cores
    for precision, like in [('fp32', half), ('auto', single), ('fp32', single), ('auto', double)]:
        assert not Products.of(precision, like).on_tensor_cores
    assert not Products.of('tf32', double).on_tensor_cores


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_they_agree_and_are_used(dtype):
    if 'tests.simulated_gpu.device' in sys.modules:
        pytest.skip('Triton cannot compile for the simulated GPU')
    torch.manual_seed(0)
    towers = {name: F.normalize(torch.randn(1000, 200)) for name in ('first', 'second')}
    exact = {name: tower.cuda().to(dtype).double() for name, tower in towers.items()}
    scalars = {name: torch.tensor(value).cuda() for name, value in (('t', 20.0), ('b', -10.0))}
    calls = {
        ClipLoss: lambda loss, t: loss(t['first'], t['second'], t['t']),
        SigLipLoss: lambda loss, t: loss(t['first'], t['second'], t['t'], t['b']),
        NTXentLoss: lambda loss, t: loss(t['first'], t['second']),
        SupConLoss: lambda loss, t: loss(torch.stack([t['first'], t['second']], 1)),
    }
    eps = 2e-3 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for make, call in calls.items():
        names = {ClipLoss: 't', SigLipLoss: 'tb'}.get(make, '')
        given = {name: scalars[name] for name in names}
        low = {**{name: tower.to(dtype) for name, tower in exact.items()}, **given}
        wide = {**exact, **{name: value.double() for name, value in given.items()}}
        with warnings.catch_warnings():
            warnings.simplefilter('error')  # that none is used
            loss = make(tile_size=300, precision='tf32' if dtype == torch.float32 else 'auto')
            fused = step(lambda t, call=call, loss=loss: call(loss, t), low)
        whole = step(lambda t, call=call, make=make: call(make(), t), wide)
        assert_same_step({k: v.double() for k, v in fused.items()}, whole, eps)
