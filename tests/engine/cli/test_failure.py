"""What the user is told when building or training fails."""

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS as ALL_HOOKS
from mmengine.registry import MODELS as ALL_MODELS
from mmengine.registry import DefaultScope
from torch import nn
from torch.utils.data import DataLoader, Dataset

from memengine.engine.cli.failure import explain, explain_lost_connection
from memengine.engine.config.check import ConfigError
from memengine.engine.faults.ranks import lost_connection
from memengine.engine.runner import Runner
from memengine.registry import DATASETS, HOOKS, MODELS


@MODELS.register_module()
class FailingPart(nn.Module):
    def __init__(self, width=1):
        super().__init__()
        if width > 2:
            raise ValueError(f'width must be at most 2, got {width}')
        if width < 0:
            raise {}['nothing']


@MODELS.register_module()
class FailingModel(nn.Module):
    def __init__(self, parts=(), neck=None):
        super().__init__()
        for part in parts:
            ALL_MODELS.build({'added': 1, **part} if 'added' in part else dict(part))


@HOOKS.register_module()
class FailingHook(Hook):
    def __init__(self, when=0):
        raise ValueError('no hook today')


class FailingData(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise KeyError('label') if index else ValueError('image 0 is broken')


def raised(function, *args, **kwargs):
    with pytest.raises((Exception, KeyError)) as error:
        function(*args, **kwargs)
    return error.value


@pytest.fixture
def scope():
    with DefaultScope.overwrite_default_scope('memengine'):
        yield


def test_problems_of_a_config_stay_as_they_are():
    assert explain(ConfigError(['a: wrong', 'b: wrong too'])) == 'a: wrong\nb: wrong too'


def test_what_was_being_built_is_named_by_its_path(scope):
    parts = [dict(type='FailingPart'), dict(type='FailingPart', width=3)]
    cfg = Config(dict(custom_hooks=[], model=dict(type='FailingModel', parts=parts)))
    error = raised(ALL_MODELS.build, cfg.model)
    assert explain(error, cfg) == 'model.parts.1 (FailingPart): width must be at most 2, got 3'
    assert explain(error) == 'width must be at most 2, got 3'


def test_an_argument_that_only_the_build_refuses(scope):
    cfg = Config(dict(model=dict(type='FailingModel', parts=[dict(type='FailingPart', foo=3)])))
    said = explain(raised(ALL_MODELS.build, cfg.model), cfg)
    assert said.startswith('model.parts.0: TypeError: FailingPart.__init__() got an unexpected')
    assert said.endswith(')')
    assert ', line ' in said


def test_an_argument_that_is_passed_on_to_another_library(scope):
    cfg = Config(dict(model=dict(type='TimmBackbone', model_name='vit_tiny_patch16_224', dept=2)))
    said = explain(raised(ALL_MODELS.build, cfg.model), cfg)
    assert said.startswith('model: TimmBackbone: vit_tiny_patch16_224 does not take')
    assert "argument 'dept'" in said
    assert "id you mean 'depth'?" in said


def test_a_type_that_only_the_build_misses(scope):
    cfg = Config(dict(model=dict(type='FailingModel', parts=[dict(type='Zyx')])))
    said = explain(raised(ALL_MODELS.build, cfg.model), cfg)
    assert said.startswith('model.parts.0: KeyError: Zyx is not in the memengine::model registry.')


class WorkingPart(nn.Module):
    def forward(self, x):
        return torch._assert(False, 'wrong shape')


def test_what_was_at_work_is_named_by_its_path():
    def run(x):
        return nn.Sequential(WorkingPart())(x)

    model = dict(type='M', backbone=dict(type='WorkingPart'), head=dict(type='H'))
    error = raised(run, torch.zeros(1))
    wanted = 'model.backbone (WorkingPart): AssertionError: wrong shape (test_failure.py, line '
    assert explain(error, Config(dict(model=model))).startswith(wanted)
    twice = Config(dict(model=model, other=dict(type='WorkingPart')))
    assert explain(error, twice).startswith('AssertionError: '), 'it could be either'


def test_a_hook_whose_priority_was_taken_out(scope):
    cfg = Config(dict(custom_hooks=[dict(type='FailingHook', when=1, priority=3)]))
    error = raised(ALL_HOOKS.build, dict(type='FailingHook', when=1))
    assert explain(error, cfg) == 'custom_hooks.0 (FailingHook): no hook today'


def test_a_loader_is_told_from_another(scope):
    def loader(size):
        return dict(batch_size=size, sampler=dict(type='DefaultSampler'), dataset=FailingData())

    cfg = Config(dict(val_dataloader=loader(2), train_dataloader=loader(0)))
    error = raised(Runner.build_dataloader, cfg.train_dataloader, seed=1)
    assert explain(error, cfg).startswith('train_dataloader: batch_size must be a positive integer')


@DATASETS.register_module()
class FailingSource(Dataset):
    def __init__(self, root):
        open(root).close()


def test_a_missing_file(scope):
    dataset = dict(type='FailingSource', root='no/such/file')
    cfg = Config(dict(train_dataloader=dict(sampler=dict(type='DefaultSampler'), dataset=dataset)))
    error = raised(Runner.build_dataloader, cfg.train_dataloader)
    wanted = 'train_dataloader.dataset (FailingSource): No such file or directory: no/such/file'
    assert explain(error, cfg).startswith(wanted)


def test_errors_of_workers_are_told_without_their_traceback():
    loader = DataLoader(FailingData(), batch_size=2, num_workers=1)
    assert explain(raised(list, loader)) == 'image 0 is broken'
    loader = DataLoader(torch.utils.data.Subset(FailingData(), [1]), num_workers=1)
    assert explain(raised(list, loader)).startswith("KeyError: 'label'")


def test_mmengines_older_prefixes_are_taken_off():
    error = ValueError('class `A` in a/b.py: class `B` in c/d.py: width must be 1')
    assert explain(error) == 'B: width must be 1'


def test_addresses_are_taken_off():
    said = explain(TypeError('f() missing in <x.y.MyHook object at 0x7f3a2b>'))
    assert said == 'TypeError: f() missing in x.y.MyHook'


def test_an_error_that_says_little_gets_its_name_and_place():
    def users_code():
        assert 1 > 2

    said = explain(raised(users_code))
    assert said.startswith('AssertionError')
    assert '(test_failure.py, line ' in said
    assert explain(raised(lambda: {}['x'])).startswith('KeyError: x (test_failure.py, line ')


def test_a_key_that_is_not_there():
    def best(scores, key):
        return scores[key]

    said = explain(raised(best, {'knn_top1': 1}, 'knn_top2'))
    assert said.startswith("KeyError: knn_top2: did you mean 'knn_top1'? (test_failure.py, line ")


def test_an_error_in_a_library_is_placed_in_the_users_code():
    said = explain(raised(lambda: torch.zeros(2) @ 'x'))
    assert said.startswith('TypeError: ')
    assert '(test_failure.py, line ' in said


def test_long_texts_are_one_line_and_cut():
    said = explain(
        RuntimeError('Error(s) in loading state_dict:\n\tMissing key(s): ' + 'x ' * 2000)
    )
    assert '\n' not in said
    assert said.endswith(' ...')
    assert len(said) < 1200


@pytest.mark.parametrize(
    'error',
    [
        torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...'),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        MemoryError(),
    ],
)
def test_out_of_memory_says_what_to_do(error):
    said = explain(error, dict(train_dataloader=dict(batch_size=64)))
    assert said.startswith('out of memory: ')
    for remedy in ('train_dataloader.batch_size (now 64)', 'chunk_size=16', '--amp bf16'):
        assert remedy in said
    sliced = dict(optim_wrapper=dict(type='GradCacheOptimWrapper', chunk_size=4))
    assert 'Not even the smallest slice fits: use --amp bf16' in explain(error, sliced)


@pytest.mark.fault('a data worker is killed from outside', 'one sentence that says so')
def test_a_worker_that_was_killed():
    said = explain(RuntimeError('DataLoader worker (pid 12) is killed by signal: Killed. '))
    assert said.startswith('a data-loader worker was killed, by the system if memory ran out')
    assert 'lower train_dataloader.num_workers;' in said
    shared = explain(RuntimeError('DataLoader worker (pid 12) is killed by signal: Bus error. '))
    assert shared.startswith(
        'a data-loader worker ran out of memory: lower train_dataloader.num_workers;'
    )
    named = explain(RuntimeError('val_dataloader: a worker (pid 12) was killed by signal: Killed'))
    assert 'lower val_dataloader.num_workers;' in named


@pytest.mark.fault('another rank went away', 'one sentence that points to the other ranks')
def test_a_rank_whose_peer_went_away():
    assert lost_connection(RuntimeError('[gloo/tcp/pair.cc:553] Connection closed by peer [::1]:4'))
    assert not lost_connection(ValueError('width must be 1'))


def test_a_rank_that_does_not_answer_names_the_timeout():
    late = RuntimeError('[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 9000ms for')
    assert lost_connection(late)
    said = explain_lost_connection(late, dict(env_cfg=dict(dist_cfg=dict(timeout=9))))
    assert said.startswith('another rank did not answer within 9 s (env_cfg.dist_cfg.timeout)')
    closed = RuntimeError('[gloo/tcp/pair.cc:553] Connection closed by peer [::1]:4')
    assert explain_lost_connection(closed).startswith('the connection to another rank was lost')
