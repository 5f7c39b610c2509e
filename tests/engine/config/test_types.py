"""Names and signatures, as the checker reads them."""

import functools

import torch
from mmengine.optim import CosineAnnealingLR
from torch import nn

from memengine.engine.config.schema.types import Arguments, arguments_of, find_anywhere, find_type


class Closed:
    def __init__(self, a, b=1):
        pass


class HandsOn(Closed):
    def __init__(self, c, **kwargs):
        super().__init__(**kwargs)


class NamesBase(Closed):
    def __init__(self, c, **kwargs):
        Closed.__init__(self, **kwargs)


class TakesOut(HandsOn):
    def __init__(self, **kwargs):
        self.x = kwargs.pop('x', 1)
        if 'y' in kwargs:
            kwargs['z'] = 1
        super().__init__(c=1, **kwargs)


class UsesItself(Closed):
    def __init__(self, c, **kwargs):
        super().__init__(a=1)
        self.other = dict(**kwargs)


class UsesBoth(Closed):
    def __init__(self, c, **kwargs):
        print(kwargs)
        super().__init__(**kwargs)


class Inherits(HandsOn):
    pass


class States:
    __signature__ = __import__('inspect').signature(Closed)

    def __init__(self, *args, **kwargs):
        pass


def wraps(function):
    @functools.wraps(function)
    def wrapper(self, **kwargs):
        kwargs['a'] = kwargs.pop('old', 1)
        function(self, **kwargs)

    return wrapper


class Wrapped(Closed):
    @wraps
    def __init__(self, a, **kwargs):
        super().__init__(a, **kwargs)


def names(target, **kwargs):
    arguments = arguments_of(target, **kwargs)
    return ''.join(sorted(arguments.names)) + ('*' if arguments.open else '')


def test_arguments_of_classes():
    assert arguments_of(Closed) == Arguments(frozenset('ab'), frozenset('a'))
    assert names(Closed, positional=1) == 'b'
    assert names(HandsOn) == names(NamesBase) == names(Inherits) == 'abc'
    assert names(TakesOut) == 'abcxyz'
    assert arguments_of(HandsOn).required == {'c'}
    assert names(States) == 'ab'


def test_keyword_arguments_that_go_elsewhere_are_open():
    assert names(UsesItself) == 'abc*'[2:]
    assert names(UsesBoth) == 'c*'
    assert names(nn.Module).endswith('*')
    assert arguments_of(Wrapped).open


def test_arguments_of_functions():
    assert names(lambda batch, x, *, y=1: 0, positional=1) == 'xy'
    assert names(lambda batch, *rest, y=1: 0, positional=1) == 'y'
    assert names(lambda batch, **rest: 0, positional=1) == '*'
    assert names(functools.partial(Closed, 1)) == 'b'
    assert arguments_of(len).names == frozenset()


def test_arguments_of_what_people_use():
    assert arguments_of(torch.optim.SGD, positional=1).names >= {'lr', 'momentum', 'nesterov'}
    assert not arguments_of(torch.optim.SGD).open
    scheduler = arguments_of(CosineAnnealingLR)
    assert scheduler.names >= {'optimizer', 'T_max', 'eta_min', 'begin', 'end', 'by_epoch'}
    assert not scheduler.open
    wrapper = find_type('MODEL_WRAPPERS', 'MMDistributedDataParallel', 'memengine')
    assert arguments_of(wrapper).names >= {'detect_anomalous_params', 'find_unused_parameters'}
    assert not arguments_of(wrapper).open


def test_names_are_looked_up_as_mmengine_does():
    ours = find_type('OPTIM_WRAPPERS', 'OptimWrapper', 'memengine')
    theirs = find_type('OPTIM_WRAPPERS', 'OptimWrapper', 'mmengine')
    assert ours.__module__.startswith('memengine.')
    assert theirs.__module__.startswith('mmengine.')
    assert find_type('OPTIM_WRAPPERS', 'mmengine.OptimWrapper', 'memengine') is theirs
    assert find_type('OPTIM_WRAPPERS', 'memengine.OptimWrapper', 'mmengine') is ours
    assert find_type('OPTIMIZERS', 'SGD', 'memengine') is torch.optim.SGD
    assert find_type('OPTIMIZERS', 'torch.optim.SGD', 'memengine') is torch.optim.SGD
    assert find_type('OPTIMIZERS', 'SGD', 'no_such_scope') is torch.optim.SGD


def test_names_that_stand_for_nothing():
    for name in ('SDG', 'json', 'torch.optim', 'torch.optim.SDG', 'no_such_scope.SGD', 'a..b', ''):
        assert find_type('OPTIMIZERS', name, 'memengine') is None


def test_other_registries_are_searched():
    assert find_anywhere('SGD', 'memengine') == ('OPTIMIZERS', torch.optim.SGD)
    assert find_anywhere('NoSuchThing', 'memengine') is None
