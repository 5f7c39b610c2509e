"""A run that stops at any iteration and resumes is the run that did not stop."""

import os
import signal
from itertools import islice
from multiprocessing import active_children
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import DefaultSampler, InfiniteSampler
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from torch.utils.data import DataLoader, RandomSampler, Sampler

from memengine.datasets import RepeatedAugmentation
from memengine.engine import data_order
from memengine.engine.data_order import (
    DrawnIndex,
    ResumableSampler,
    SeededDataset,
    derive_seed,
    seed_generators,
    train_loader,
)
from memengine.engine.faults import workers
from tests.engine.toy import Losses, ToyData, params, toy_runner

LOOPS = {
    'epochs': dict(by_epoch=True, max_epochs=3),
    'iterations': dict(by_epoch=False, max_iters=15, val_interval=100),
}


def uninterrupted(tmp_path, **kwargs):
    losses = Losses()
    runner = toy_runner(tmp_path / 'whole', losses, **kwargs)
    runner.train()
    return losses.seen, params(runner)


class EpochEnds(Hook):
    """Keeps (epoch, iteration) of every end of an epoch."""

    def __init__(self):
        self.seen = []

    def after_train_epoch(self, runner):
        self.seen.append((runner.epoch, runner.iter))


@pytest.mark.parametrize('loop', LOOPS)
@pytest.mark.parametrize('stop', [1, 5, 7, 14])
@pytest.mark.fault(
    'a stop after any iteration', '`--resume` takes the same steps as the run that did not stop'
)
def test_resume_after_any_iteration_is_bit_exact(tmp_path, loop, stop):
    whole, final = uninterrupted(tmp_path, train_cfg=LOOPS[loop])
    assert len(whole) == 15

    first, second = Losses(), Losses()
    toy_runner(tmp_path / 'parts', first, train_cfg=dict(LOOPS[loop], stop_at_iter=stop)).train()
    runner = toy_runner(tmp_path / 'parts', second, train_cfg=LOOPS[loop], resume=True)
    runner.train()
    assert first.seen + second.seen == whole
    for name, value in params(runner).items():
        assert torch.equal(value, final[name]), name


@pytest.mark.parametrize('workers', [1, 2])
def test_resume_is_bit_exact_with_workers_and_their_number_does_not_matter(tmp_path, workers):
    whole, _ = uninterrupted(tmp_path)
    first, second = Losses(), Losses()
    loader = dict(num_workers=workers, persistent_workers=True)
    stop = dict(LOOPS['epochs'], stop_at_iter=8)
    for losses, train_cfg in ((first, stop), (second, LOOPS['epochs'])):
        runner = toy_runner(tmp_path / 'parts', losses, train_cfg, loader, resume=losses is second)
        runner.train()
        assert not active_children(), 'the workers end with the run'
    assert first.seen + second.seen == whole


def test_resume_within_an_infinite_sampler_is_bit_exact(tmp_path):
    loader = dict(sampler=dict(type='InfiniteSampler', shuffle=True))
    whole, _ = uninterrupted(tmp_path, train_cfg=LOOPS['iterations'], loader=loader)
    first, second = Losses(), Losses()
    stop = dict(LOOPS['iterations'], stop_at_iter=9)  # within the second pass over the data
    toy_runner(tmp_path / 'parts', first, train_cfg=stop, loader=loader).train()
    toy_runner(
        tmp_path / 'parts', second, train_cfg=LOOPS['iterations'], loader=loader, resume=True
    ).train()
    assert first.seen + second.seen == whole


@pytest.mark.parametrize('strategy', ['cos', 'linear'])
def test_resume_within_a_schedule_that_holds_a_function_is_bit_exact(tmp_path, strategy):
    schedule = dict(type='OneCycleLR', eta_max=0.1, anneal_strategy=strategy, by_epoch=False)
    whole, _ = uninterrupted(tmp_path, param_scheduler=[dict(schedule, total_steps=15)])
    parts = []
    for stop in (7, None):
        losses = Losses()
        toy_runner(
            tmp_path / 'parts',
            losses,
            dict(by_epoch=True, max_epochs=3, stop_at_iter=stop),
            param_scheduler=[dict(schedule, total_steps=15)],
            resume=bool(parts),
        ).train()
        parts += losses.seen
    assert parts == whole


@pytest.mark.parametrize('sharded', [False, True])
@pytest.mark.parametrize(
    'settings', [dict(ranges='running'), dict(average_bits=4), dict(average_bits=4, allot_every=3)]
)
def test_resume_is_bit_exact_where_a_technique_follows_what_it_has_seen(
    tmp_path, settings, sharded
):
    options = dict(
        cfg=dict(quantized_activations=dict(settings, min_numel=1)),
        default_hooks=dict(checkpoint=dict(sharded=sharded)),
    )
    whole, _ = uninterrupted(tmp_path, **options)
    parts = []
    for stop in (7, None):
        losses, train_cfg = Losses(), dict(by_epoch=True, max_epochs=3, stop_at_iter=stop)
        toy_runner(tmp_path / 'parts', losses, train_cfg, resume=bool(parts), **options).train()
        parts += losses.seen
    assert parts == whole


class DrawsGlobally(Sampler):
    """As torch's RandomSampler: its order comes from the global generator."""

    def __init__(self, dataset, seed):
        self.size = len(dataset)

    def __iter__(self):
        return iter(torch.randperm(self.size).tolist())

    def __len__(self):
        return self.size


@pytest.mark.parametrize('loop', LOOPS)
def test_resume_within_an_order_of_the_global_generators_is_bit_exact(tmp_path, loop):
    loader = dict(sampler=dict(type=DrawsGlobally))
    whole, _ = uninterrupted(tmp_path, train_cfg=LOOPS[loop], loader=loader)
    parts = []
    for train_cfg in (dict(LOOPS[loop], stop_at_iter=8), LOOPS[loop]):
        losses, resume = Losses(), bool(parts)
        toy_runner(tmp_path / 'parts', losses, train_cfg, loader, resume=resume).train()
        parts += losses.seen
    assert parts == whole


def test_an_order_of_the_global_generators_is_another_one_in_each_pass_and_on_each_rank(
    monkeypatch,
):
    orders = set()
    for rank in range(2):
        monkeypatch.setattr(data_order, 'get_rank', lambda rank=rank: rank)
        sampler = ResumableSampler(DrawsGlobally(range(30), seed=0), 30)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            orders.add(tuple(sampler))
    assert len(orders) == 4


@pytest.mark.parametrize('loop', LOOPS)
def test_resume_among_the_repetitions_of_a_sample_is_bit_exact(tmp_path, loop):
    loader = dict(sampler=dict(type='RepeatedAugmentation'))
    whole, _ = uninterrupted(tmp_path, train_cfg=LOOPS[loop], loader=loader)
    first, second = Losses(), Losses()
    stop = dict(LOOPS[loop], stop_at_iter=7)  # after 8 draws of a pass: two and two thirds
    toy_runner(tmp_path / 'parts', first, train_cfg=stop, loader=loader).train()
    toy_runner(
        tmp_path / 'parts', second, train_cfg=LOOPS[loop], loader=loader, resume=True
    ).train()
    assert first.seen + second.seen == whole
    other = uninterrupted(tmp_path / 'once', train_cfg=LOOPS[loop])
    assert other[0] != whole


@pytest.mark.parametrize(
    ('stop', 'size', 'steps'),
    [
        (15, 11, [0, 2, 2, 2]),  # after the last step of the third epoch of 5 batches
        (15, 40, [0, 10, 10, 10]),
        (13, 40, [7, 10, 10, 10]),
        (13, 11, [0, 2, 2, 2]),  # the third one had three of its two batches
    ],
)
def test_data_of_another_size_make_epochs_of_another_length(tmp_path, stop, size, steps):
    whole = dict(by_epoch=True, max_epochs=6)
    toy_runner(tmp_path, train_cfg=dict(whole, stop_at_iter=stop)).train()
    for last in (stop + sum(steps[:-1]) + 1, None):  # and resumed again within the last epoch
        epochs = EpochEnds()
        train_cfg = dict(whole, stop_at_iter=last) if last else whole
        runner = toy_runner(
            tmp_path, train_cfg=train_cfg, loader=dict(dataset=ToyData(size)), resume=True
        )
        runner.register_hook(epochs)
        runner.train()
        first = 6 - len(steps)
        ends = [(first + n, stop + sum(steps[: n + 1])) for n in range(len(steps))]
        assert epochs.seen == (ends[:-1] if last else ends[-1:])


@pytest.mark.parametrize(('size', 'iterations'), [(11, 21), (40, 45)])
def test_of_epochs_that_are_not_noted_the_next_one_begins(tmp_path, size, iterations):
    whole = dict(by_epoch=True, max_epochs=6)
    runner = toy_runner(tmp_path, train_cfg=dict(whole, stop_at_iter=15))
    runner.train()
    saved = torch.load(tmp_path / 'iter_15.pth', weights_only=False)
    saved['message_hub']['runtime_info'].pop('epoch_began')
    torch.save({**saved, 'meta': {**saved['meta'], 'epoch': 3}}, tmp_path / 'older.pth')
    runner = toy_runner(
        tmp_path / 'resumed',
        train_cfg=whole,
        loader=dict(dataset=ToyData(size)),
        resume=True,
        load_from=str(tmp_path / 'older.pth'),
    )
    runner.train()
    assert runner.iter == iterations


@pytest.mark.parametrize('loop', LOOPS)
def test_stopping_where_a_run_already_is_trains_no_further(tmp_path, loop):
    stop = dict(LOOPS[loop], stop_at_iter=7)
    toy_runner(tmp_path, train_cfg=stop).train()
    losses = Losses()
    for at in (7, 3):
        again = dict(stop, stop_at_iter=at)
        toy_runner(tmp_path, losses, train_cfg=again, resume=True).train()
    assert losses.seen == []


def test_num_batch_per_epoch_shortens_an_epoch_and_keeps_what_the_data_say(tmp_path):
    losses = Losses()
    runner = toy_runner(tmp_path, losses, loader=dict(num_batch_per_epoch=2))
    runner.train()
    assert len(losses.seen) == 6
    assert runner.train_dataloader.dataset.metainfo == {'classes': ('a', 'b')}


class Interrupt(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 6:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.fault(
    'Ctrl-C in mid-epoch', 'checkpoint of that iteration; `--resume` goes on bit for bit'
)
def test_ctrl_c_saves_where_it_is_and_resume_goes_on(tmp_path):
    whole, final = uninterrupted(tmp_path)
    first, second = Losses(), Losses()
    handler = signal.getsignal(signal.SIGINT)  # a job in the background ignores the signal
    with pytest.raises(KeyboardInterrupt):
        toy_runner(tmp_path / 'parts', first, custom_hooks=[first, Interrupt()]).train()
    assert len(first.seen) == 7
    assert signal.getsignal(signal.SIGINT) is handler
    runner = toy_runner(tmp_path / 'parts', second, resume=True)
    runner.train()
    assert first.seen + second.seen == whole
    for name, value in params(runner).items():
        assert torch.equal(value, final[name]), name


def test_checkpoint_hook_by_iterations_resumes_within_an_epoch(tmp_path):
    whole, _ = uninterrupted(tmp_path)
    hooks = dict(checkpoint=dict(type='CheckpointHook', interval=3, by_epoch=False))
    first, second = Losses(), Losses()
    toy_runner(tmp_path / 'parts', first, default_hooks=hooks).train()
    toy_runner(
        tmp_path / 'parts', second, resume=True, load_from=str(tmp_path / 'parts' / 'iter_9.pth')
    ).train()
    assert second.seen == whole[9:]


def test_a_seed_that_was_drawn_is_gone_on_with(tmp_path):
    """And so the resumed run sees the rest of the epoch, not samples of another order again."""
    none, parts = dict(seed=None), []
    (tmp_path / 'config.py').touch()
    for stop in (7, None):
        losses, train_cfg = Losses(), dict(LOOPS['epochs'], stop_at_iter=stop)
        cfg = Config.fromfile(tmp_path / 'config.py')
        options = dict(randomness=none, resume=bool(parts), cfg=cfg)
        runner = toy_runner(tmp_path / 'parts', losses, train_cfg, **options)
        runner.train()
        parts += losses.seen
    seed = torch.load(tmp_path / 'parts/iter_7.pth', weights_only=False)['meta']['seed']
    whole, _ = uninterrupted(tmp_path, randomness=dict(seed=seed))
    assert parts == whole
    assert Config.fromfile(tmp_path / 'parts/config.py').randomness.seed == seed


class Validated(BaseMetric):
    """Keeps what it is shown of each evaluation."""

    default_prefix = ''

    def __init__(self):
        super().__init__()
        self.seen = []

    def process(self, data_batch, data_samples):
        self.results += data_batch['x'].tolist()

    def compute_metrics(self, results):
        self.seen.append(results)
        return {'samples': len(results)}


def test_a_resumed_run_validates_by_the_seed_that_was_drawn(tmp_path):
    loader = dict(dataset=ToyData(6), batch_size=3, num_workers=0)
    loader |= dict(
        sampler=dict(type='DefaultSampler', shuffle=False),
        collate_fn=dict(type='default_collate'),
    )
    metric = Validated()
    validated = dict(val_dataloader=loader, val_cfg={}, val_evaluator=[metric])
    for epochs in (1, 2):
        options = dict(randomness=dict(seed=None), resume=epochs == 2)
        train_cfg = dict(by_epoch=True, max_epochs=epochs)
        toy_runner(tmp_path, train_cfg=train_cfg, **options, **validated).train()
    first, second = metric.seen
    assert first == second


def test_what_a_killed_run_has_left_unfinished_is_removed(tmp_path):
    (tmp_path / '.iter_3.pth.partial').touch()
    (tmp_path / '.iter_4.dcp.partial').mkdir()
    (tmp_path / '.iter_4.dcp.partial/run.pth').touch()
    toy_runner(tmp_path, train_cfg=dict(by_epoch=False, max_iters=1)).train()
    assert not list(tmp_path.glob('.*.partial'))


def test_another_seed_draws_other_batches(tmp_path):
    whole, _ = uninterrupted(tmp_path)
    losses = Losses()
    toy_runner(tmp_path / 'other', losses, randomness=dict(seed=4)).train()
    assert losses.seen != whole


def test_sampler_starts_in_the_middle_and_tells_passes_apart():
    sampler = ResumableSampler([5, 3, 1, 5, 3], dataset_size=3)
    assert list(sampler) == [5, 3, 1, 5, 3]
    assert [draw.epoch for draw in sampler] == [0, 0, 0, 0, 0]
    sampler.set_epoch(7)
    sampler.start = 2
    assert [(int(draw), draw.epoch) for draw in sampler] == [(1, 7), (5, 7), (3, 7)]
    assert len(list(sampler)) == 5, 'the start holds for one pass only'


def test_draw_survives_the_way_to_a_worker():
    import pickle

    draw = pickle.loads(pickle.dumps(DrawnIndex(4, 2, 1)))
    assert (draw, draw.epoch, draw.repetition) == (4, 2, 1)


def test_repetitions_of_a_sample_are_augmented_anew_and_alike_in_every_run():
    sampler = RepeatedAugmentation(range(6), seed=3)
    data = SeededDataset(ToyData(6), seed=5)
    passes = [[data[draw]['x'] for draw in ResumableSampler(sampler, 6)] for _ in range(2)]
    assert torch.equal(torch.stack(passes[0]), torch.stack(passes[1]))
    for sample in torch.stack(passes[0]).split(3):
        assert len(sample.unique(dim=0)) == 3
    once = data[DrawnIndex(4, 0)]['x']
    assert torch.equal(once, data[DrawnIndex(4, 0, 0)]['x']) and torch.equal(once, data[4]['x'])


@pytest.mark.parametrize('ranks', [1, 3])
def test_a_foreign_samplers_repetitions_are_augmented_anew_on_all_ranks(monkeypatch, ranks):
    """Drawn with replacement, or as mmpretrain repeats samples: to each rank the same one."""
    monkeypatch.setattr(data_order, 'get_world_size', lambda: ranks)
    data, seen = SeededDataset(ToyData(6), seed=5), []
    for rank in range(ranks):
        monkeypatch.setattr(data_order, 'get_rank', lambda rank=rank: rank)
        sampler = ResumableSampler([4, 1, 4, 4, 1, 0], dataset_size=60)
        seen += [tuple(data[draw]['x'].tolist()) for draw in sampler]
        sampler.start = 3
        assert [tuple(data[draw]['x'].tolist()) for draw in sampler] == seen[-3:]
    assert len(set(seen)) == len(seen) == 6 * ranks
    assert seen[5] == tuple(data[0]['x'].tolist()), 'what is drawn once is as it always was'


FOREIGN = {
    'of all samples to each rank': lambda: RandomSampler(range(7)),
    'of twice as many draws': lambda: RandomSampler(range(7), replacement=True, num_samples=14),
    'without an end': lambda: InfiniteSampler(range(7), seed=3),  # which two ranks do not divide
}


@pytest.mark.parametrize('name', FOREIGN)
def test_no_two_draws_of_several_passes_are_augmented_alike(monkeypatch, name):
    seeds = []
    for rank in range(2):
        monkeypatch.setattr('mmengine.dataset.sampler.get_dist_info', lambda rank=rank: (rank, 2))
        monkeypatch.setattr(data_order, 'get_world_size', lambda: 2)
        monkeypatch.setattr(data_order, 'get_rank', lambda rank=rank: rank)
        sampler = FOREIGN[name]()
        data, draws = SeededDataset(range(7), seed=5), ResumableSampler(sampler, 7)
        for epoch in range(1 if isinstance(sampler, InfiniteSampler) else 4):
            draws.set_epoch(epoch)
            seeds += [data._seed_of(draw) for draw in islice(draws, 28)]
    assert len(seeds) >= 56 and len(set(seeds)) == len(seeds)


class LooksNowhere(int):
    """An index that has been passed over, and so must not be looked at."""

    def __getattribute__(self, name):
        raise AssertionError(f'{name} of what is passed over is looked at')


def test_draws_before_the_start_are_passed_over_where_no_sample_comes_twice():
    class Ordered(DefaultSampler):
        def __iter__(self):
            yield from map(LooksNowhere, range(4))
            yield from range(4, 6)

    sampler = ResumableSampler(Ordered(range(6), shuffle=False), dataset_size=6)
    sampler.start = 4
    assert list(sampler) == [4, 5]


def test_what_is_counted_of_a_sampler_without_end_is_one_pass():
    def without_end():
        while True:
            yield from range(3)

    iterator = iter(ResumableSampler(without_end(), dataset_size=3))
    assert [draw.repetition for draw in islice(iterator, 9)] == [0] * 9
    assert len(iterator.gi_frame.f_locals['times']) == 3


class FetchesBatches(ToyData):
    """A data set with torch's method for a whole batch, as those of Hugging Face."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class TakesTheirSeeds(ToyData):
    """Makes a batch from seeds alone, and remembers what was in hand while it read each sample."""

    def seeded_items(self, indices, seeds):
        read = [(index, self.in_hand.read()[0].sample, self[index]['x']) for index in indices]
        self.seen = [each[:2] for each in read]
        return [
            dict(index=index, seed=seed, x=x)
            for (index, _, x), seed in zip(read, seeds, strict=True)
        ]


def test_a_batch_that_a_data_set_fetches_itself_is_seeded_by_sample():
    data = SeededDataset(FetchesBatches(6), seed=5)
    one_by_one = [data[index]['x'] for index in range(4)]
    together = [item['x'] for item in DataLoader(data, batch_size=None, sampler=range(4))]
    fetched = next(iter(DataLoader(data, batch_size=4, collate_fn=list)))
    for alone, item, drawn in zip(one_by_one, fetched, together, strict=True):
        assert torch.equal(alone, item['x']) and torch.equal(alone, drawn)


def test_a_data_set_that_makes_batches_gets_each_samples_seed_and_names_what_it_reads(monkeypatch):
    dataset = TakesTheirSeeds(6)
    data = SeededDataset(dataset, seed=5, workers=1)
    dataset.in_hand = data.in_hand
    monkeypatch.setattr(workers, 'get_worker_info', lambda: SimpleNamespace(id=0))
    draws = [DrawnIndex(4, 2), DrawnIndex(1, 2, 1), DrawnIndex(3, 0)]
    items = data.__getitems__(draws)
    assert all(
        torch.equal(item['x'], data[draw]['x']) for item, draw in zip(items, draws, strict=True)
    )
    seeds = [item['seed'] for item in items]
    assert seeds == [derive_seed(5, 2, 4), derive_seed(5, 2, 1, 1), derive_seed(5, 0, 3)]
    assert dataset.seen == [(4, 4), (1, 1), (3, 3)]
    assert data.in_hand.read()[0].sample == -1


def test_numbers_that_have_a_method_of_that_kind_are_plain_indices():
    for indices in (np.arange(3), torch.arange(3)):
        assert [draw.repetition for draw in ResumableSampler(indices, 3)] == [0, 0, 0]


def test_seeds_of_neighbours_differ():
    seeds = {derive_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000


@pytest.mark.parametrize('in_use', [True, False])
def test_a_device_is_seeded_where_it_is_in_use(monkeypatch, in_use):
    seeded = []
    monkeypatch.setattr(torch.accelerator, 'is_available', lambda: True)
    monkeypatch.setattr(torch, 'get_device_module', lambda: torch.cuda)
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: in_use)
    monkeypatch.setattr(torch.cuda, 'manual_seed_all', seeded.append)
    seed_generators(5)
    drawn = torch.rand(3)
    assert seeded == ([5] if in_use else [])
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize(
    ('batch_size', 'said'), [(50, 'batch_size=50.*22'), (0, 'positive integer, got 0')]
)
def test_an_impossible_batch_size_is_refused(tmp_path, batch_size, said):
    with pytest.raises(ValueError, match=said):
        toy_runner(tmp_path, loader=dict(batch_size=batch_size)).train()


def batches_of(rank, ranks, epoch, monkeypatch, size=23, batch=12):
    """What a rank trains on in a pass, as a set for each step."""
    monkeypatch.setattr('mmengine.dataset.sampler.get_dist_info', lambda: (rank, ranks))
    monkeypatch.setattr(data_order, 'get_world_size', lambda: ranks)
    sampler = ResumableSampler(DefaultSampler(range(size), seed=3), size)
    loader = DataLoader(range(size), batch // ranks, sampler=sampler, collate_fn=list)
    sampler.set_epoch(epoch)
    batches = [set(batch) for batch in train_loader(None, loader)]
    assert len(batches) == len(loader)
    return batches


@pytest.mark.parametrize('ranks', [2, 3, 4, 6])
@pytest.mark.parametrize('epoch', [0, 1])
def test_ranks_share_each_step_and_no_sample_comes_twice(monkeypatch, ranks, epoch):
    alone = batches_of(0, 1, epoch, monkeypatch)
    assert set().union(*alone) == set(range(23))
    of_ranks = [batches_of(rank, ranks, epoch, monkeypatch) for rank in range(ranks)]
    drawn = [sample for batches in of_ranks for batch in batches for sample in batch]
    assert len(drawn) == len(set(drawn)) == 23 // ranks * ranks
    assert len({len(batches) for batches in of_ranks}) == 1, 'no rank waits for a batch of others'
    assert set().union(*(batches[0] for batches in of_ranks)) == alone[0], 'the same full steps'


def test_more_ranks_than_samples_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r'4 ranks share 3 sample\(s\)'):
        batches_of(0, 4, 0, monkeypatch, size=3)
