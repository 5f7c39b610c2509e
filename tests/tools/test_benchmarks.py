"""The benchmarks at their quick size; and that pages show what the committed results say."""

import importlib.util
import json
import re
import sys

import pytest
import torch

from tests.docs_pages import ROOT
from tests.marks import NEEDS_SHARDING

PAGES = {
    'grad_cache': ROOT / 'docs/techniques/grad_cache.md',
    'dino_slices': ROOT / 'docs/techniques/accumulation.md',
    'optimizer_memory': ROOT / 'docs/techniques/optimizer_memory.md',
    'compressed_activations': ROOT / 'docs/techniques/compressed_activations.md',
    'dropit_learning': ROOT / 'docs/techniques/compressed_activations.md',
    'recomputed_activations': ROOT / 'docs/techniques/recomputed_activations.md',
    'dropit_selection': ROOT / 'docs/techniques/compressed_activations.md',
    'sharding_memory': ROOT / 'docs/techniques/fsdp.md',
    'plans': ROOT / 'docs/memory.md',
    'plans_beside_hand_made': ROOT / 'docs/memory.md',
    'deep_plans': ROOT / 'docs/memory.md',
    'memory_prediction': ROOT / 'docs/memory.md',
    'meter_cost': ROOT / 'docs/memory.md',
    'batched_augmentation': ROOT / 'docs/data.md',
    'first_run': ROOT / 'docs/data.md',
    'loss_precision': ROOT / 'docs/techniques/disco.md',
}


@pytest.fixture
def script(monkeypatch):
    """Loads a script of tools/benchmarks/, with a function ``run`` that takes its arguments."""
    monkeypatch.syspath_prepend(ROOT / 'tools/benchmarks')
    threads = torch.get_num_threads()

    def load(name):
        file = ROOT / f'tools/benchmarks/{name}.py'
        spec = importlib.util.spec_from_file_location(f'benchmark_{name}', file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

        def run(*words):
            monkeypatch.setattr(sys, 'argv', [str(file), *map(str, words)])
            module.main()

        module.run = run
        return module

    yield load
    torch.set_num_threads(threads)


def results_of(folder, name):
    return json.loads((folder / f'{name}.json').read_text())


def page_with(folder, *marks):
    page = folder / 'page.md'
    page.write_text(''.join(f'<!-- {m}:begin (x) -->\n<!-- {m}:end -->\n' for m in marks))
    return page


def test_batched_augmentation(script, tmp_path):
    page = page_with(tmp_path, 'batched_augmentation')
    script('batched_augmentation').run('--quick', '--out', tmp_path, '--page', page)
    rows = results_of(tmp_path, 'batched_augmentation')['rows']
    assert all(min(row['ms']) > 0 for row in rows.values())
    assert all(f'| `{name}` |' in page.read_text() for name in rows)


@pytest.mark.slow
def test_first_run(script, tmp_path):
    page = page_with(tmp_path, 'first_run')
    script('first_run').run('--quick', '--out', tmp_path, '--page', page)
    results = results_of(tmp_path, 'first_run')
    assert results['iterations'] == 2 and 0 < results['waited'] < 1
    assert min(results[clock][key] for clock in ('wall', 'cpu') for key in results[clock]) > 0
    assert f'{results["wall"]["ratio"]:.3f} ×' in page.read_text()


def test_throughput(script, tmp_path):
    page = page_with(tmp_path, 'throughput')
    script('throughput').run('--quick', '--out', tmp_path, '--page', page)
    results = results_of(tmp_path, 'throughput')
    assert results['embed'] > 0
    assert f'{results["loader"]:.3f} ×' in page.read_text()


def test_plans_beside_hand_made(script, tmp_path, monkeypatch):
    page = page_with(tmp_path, 'plans_beside_hand_made')
    beside = script('plans_beside_hand_made')
    digits = beside.plans.Step('classify_vit', ('train_dataloader.batch_size=32',), 1, ())
    monkeypatch.setitem(beside.plans.STEPS, 'digits', digits)
    monkeypatch.setattr(beside, 'SETTINGS', {'digits': [beside.BLOCKS]})
    beside.run('--repeats', '1', '--out', tmp_path, '--page', page)
    (row,) = results_of(tmp_path, 'plans_beside_hand_made')['rows']
    assert row['planned'] and 0 < row['planned_bytes'] <= row['bytes'] and row['time'] > 0
    assert '| digits | `activation_checkpointing=[blocks]` |' in page.read_text()


def test_deep_plans(script, tmp_path, monkeypatch):
    page = page_with(tmp_path, 'deep_plans')
    plans = script('deep_plans')
    shallow = plans.Search('classify_vit', '20MiB', 64, ('model.backbone.depth=1',), gpus=1)
    monkeypatch.setattr(plans, 'SEARCHES', {'shallow': shallow})
    plans.run('--out', tmp_path, '--page', page)
    (row,) = results_of(tmp_path, 'deep_plans')['rows']
    assert row['plan']['train_dataloader.batch_size'] == 64 and 0 < row['share'] <= 1
    assert row['cpu_s'] > 0 and '| shallow | 20MiB | 64 |' in page.read_text()


def test_grad_cache(script, tmp_path):
    page = page_with(tmp_path, 'grad_cache', 'grad_cache_batches')
    script('grad_cache').run('--quick', '--out', tmp_path, '--page', page)
    results = results_of(tmp_path, 'grad_cache')
    rows = [row for row in results['rows'] if row['chunk_size']]
    ours = [row for row in rows if row['who'] == 'memengine']
    for row in ours:
        assert row['extra_forwards'] == row['chunks'] - row['kept']
    for row in rows:
        assert row.get('gradient_error', 0) < 1e-5
    saved = {row['chunk_size']: row['saved_mib'] for row in ours if row['kept'] == 0}
    assert saved[2] < saved[4] < saved[16]
    kept = [row['saved_mib'] for row in ours if row['chunk_size'] == 4]
    assert kept == sorted(kept) and len({*kept}) == len(kept) == 3
    first, last = (row['saved_mib'] for row in results['batches'])
    assert last < 1.02 * first
    assert f'| memengine | 4 | 2 | {kept[1]:.1f} | 2 of 4 |' in page.read_text()
    assert {path.name for path in tmp_path.glob('*.png')} == {
        'grad_cache.png',
        'grad_cache_keep_graph.png',
    }


def test_dino_slices(script, tmp_path):
    page = page_with(tmp_path, 'dino_slices')
    script('dino_slices').run('--quick', '--out', tmp_path, '--page', page)
    rows = results_of(tmp_path, 'dino_slices')['rows']
    images = 2 * 6
    through = {name: row['rows'] / images for name, row in rows.items()}
    assert through.pop('issue #269') == pytest.approx(10 / 6, rel=1e-4)
    assert {*through.values()} == {1}
    assert all(row['gradient_error'] < 1e-5 for row in rows.values())
    bytes_in_order = ["plain, DINO's script", 'issue #269', 'slices of 2', 'slices of 1']
    saved = [rows[name]['saved_mib'] for name in bytes_in_order]
    assert saved == sorted(saved, reverse=True) and len({*saved}) == 4
    for name in ('slices of 2', 'slices of 1'):
        assert rows[f'{name}, recomputed']['saved_mib'] < 0.8 * rows[name]['saved_mib']
    assert "| plain, DINO's script |" in page.read_text()
    assert (tmp_path / 'dino_slices.png').stat().st_size > 0


def test_recomputed_activations(script, tmp_path):
    page = page_with(tmp_path, 'recomputed_activations')
    options = ['--models', 'test_efficientnet', '--batch', '1', '--repeats', '1']
    script('recomputed_activations').run(*options, '--out', tmp_path, '--page', page)
    ways = results_of(tmp_path, 'recomputed_activations')['models']['test_efficientnet']
    plain, recomputed = ways['plain'], ways['recomputed']
    assert recomputed['saved_mib'] < 0.5 * plain['saved_mib']
    assert recomputed['flops'] == plain['flops'] and recomputed['error'] == 0
    assert ways['recomputed, 8 bits']['saved_mib'] < 0.6 * ways['8 bits']['saved_mib']
    assert '| test_efficientnet | recomputed |' in page.read_text()


def test_optimizer_memory(script, tmp_path, monkeypatch):
    page = page_with(tmp_path, 'optimizer_memory')
    optimizers = script('optimizer_memory')
    monkeypatch.setattr(optimizers, 'STEPS', 3)
    optimizers.run('--quick', '--out', tmp_path, '--page', page)
    rows = results_of(tmp_path, 'optimizer_memory')['rows']
    plain, fused, bf16 = (rows[way] for way in ('AdamW', 'AdamW in backward', 'AdamWBf16'))
    assert (plain['state_bytes_per_number'], bf16['state_bytes_per_number']) == (8, 4)
    assert plain['gradients_mib'] == plain['parameters_mib']
    assert fused['gradients_mib'] == pytest.approx(plain['largest_mib'], rel=0.01)
    assert fused['allocated_mib'] < plain['allocated_mib']
    assert fused['distance'] == 0 < bf16['distance'] < 0.01
    assert rows['AdamW, multi-tensor']['operations'] < plain['operations'] < fused['operations']
    assert '| AdamWBf16 | 4.00 |' in page.read_text()
    assert (tmp_path / 'optimizer_memory.png').stat().st_size > 0


@NEEDS_SHARDING
def test_sharding_memory(script, tmp_path, monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')  # which the script sets
    page = page_with(tmp_path, 'sharding_memory')
    script('sharding_memory').run('--quick', '--out', tmp_path, '--page', page)
    results = results_of(tmp_path, 'sharding_memory')
    blocks = {
        way: [peak / results['block_mib'] for peak in peaks]
        for way, peaks in results['rows'].items()
    }
    plain = blocks['units are blocks']
    assert min(plain) > 3 and plain[1] > plain[0] + 0.9
    assert max(blocks['`offload=True`']) < 2 < min(blocks["`offload=True, units='blocks'`"])
    assert '| `offload=True` | 1.' in page.read_text()


PEER = """
class GradCache:
    def __init__(self, models, chunk_sizes, loss_fn):
        self.step = lambda images: loss_fn(models[0](images)).backward()

    def __call__(self, images):
        self.step(images)
"""


def test_a_peer_comes_from_its_folder_and_not_from_the_script_of_its_name(script, tmp_path):
    task = script('grad_cache').Task(dict(image_size=32, depth=1, pairs=2), torch.device('cpu'))
    assert 'GradCache' not in task.peers([]), 'the script was taken for the peer'
    (tmp_path / 'grad_cache.py').write_text(PEER)
    try:
        task.peers([str(tmp_path)])['GradCache'](2)
    finally:
        del sys.modules['grad_cache']
    assert all(parameter.grad is not None for parameter in task.model.parameters())


@pytest.mark.slow
@NEEDS_SHARDING
def test_plans(script, tmp_path, monkeypatch):
    benchmark, name = script('plans'), 'classifier, sharded over two ranks'
    step, figures = benchmark.STEPS[name], {'predicted_bytes': 2**20, 'measured_bytes': 2**20}
    measured = []
    monkeypatch.setitem(benchmark.STEPS, name, step._replace(shares=(1.0,)))
    monkeypatch.setattr(benchmark, 'taken', lambda *one: measured.append(one) or figures)
    page = page_with(tmp_path, 'plans')
    for again in ((), (), ('--again',)):  # what is there is kept, or measured anew
        benchmark.run('--out', tmp_path, '--page', page, '--only', name, *again)
    (row,) = results_of(tmp_path, 'plans')['rows']
    assert not row['options'] and row['measured_bytes'] <= row['budget']
    assert [(one.ranks, options) for one, options in measured] == [(2, []), (2, [])]
    assert '1 of 1 plans within their budget' in page.read_text()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='asks the kernel')
def test_memory_prediction(script, tmp_path):
    benchmark = script('memory_prediction')
    benchmark.run('--out', tmp_path, '--quick')
    (row,) = results_of(tmp_path, 'memory_prediction')['rows']
    assert row['config'] == 'classify_vit' and abs(benchmark.error(row)) < 0.25


def test_loss_precision(script, tmp_path):
    """Gradients of half-precision embeddings are no worse than those of eager half precision."""
    benchmark = script('loss_precision')
    benchmark.run('--out', tmp_path, '--rows', 64, '--width', 64)
    for kinds in results_of(tmp_path, 'loss_precision')['errors'].values():
        for forms in kinds.values():
            for form in ('memengine', 'memengine, in tiles'):
                for key in ('embeddings', 'scalars'):
                    assert forms[form].get(key, 0) <= forms['eager'].get(key, 0), (form, key)


def test_meter_cost(script, tmp_path):
    script('meter_cost').run('--out', tmp_path, '--quick')
    (row,) = results_of(tmp_path, 'meter_cost')['rows']
    assert row['model'] == 'vit_tiny_patch16_224' and row['metered'] > 0 and row['off'] > 0


@pytest.mark.parametrize('name', PAGES)
def test_page_shows_the_committed_results(script, name):
    results = results_of(ROOT / 'docs/benchmarks', name)
    page = PAGES[name].read_text()
    for mark, text in script(name).tables(results).items():
        shown = re.search(rf'<!-- {mark}:begin .*?-->\n(.*?)\n<!-- {mark}:end -->', page, re.S)
        assert shown[1] == text, f'{mark} in {PAGES[name].name} is not what {name}.json says'


def test_a_page_without_the_place_is_an_error(script, tmp_path):
    measuring = script('measuring')
    page = page_with(tmp_path, 'other')
    with pytest.raises(ValueError, match='0 places for table'):
        measuring.fill_page(page, 'table', 'x')
