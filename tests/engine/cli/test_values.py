"""What stands behind KEY= on the command line: one syntax, and an error for all else."""

import math

import pytest

from memengine.engine.cli.parser import make_parser
from memengine.engine.cli.values import ValueSyntaxError, parse_value

VALUES = {
    '1': 1,
    '-2': -2,
    '1e-3': 0.001,
    '.5': 0.5,
    '007': 7,
    'inf': math.inf,
    'True': True,
    'false': False,
    'None': None,
    '': '',
    'a b': 'a b',
    "it's": "it's",
    "'1'": '1',
    '"a, b"': 'a, b',
    "'(a'": '(a',
    'my (1).pth': 'my (1).pth',
    'torchvision/Resize': 'torchvision/Resize',
    '${HOME}/x': '${HOME}/x',
    '(0.9,0.95)': (0.9, 0.95),
    '(0.9, 0.95)': (0.9, 0.95),
    '( 0.9 , 0.95, )': (0.9, 0.95),
    '0.9,0.95': [0.9, 0.95],
    '[]': [],
    '()': (),
    '{}': {},
    '[blocks.0, True, "None"]': ['blocks.0', True, 'None'],
    '[[1, 2], (3,), {a: {b: 4}}]': [[1, 2], (3,), {'a': {'b': 4}}],
    'dict(type=SGD, lr=0.1)': {'type': 'SGD', 'lr': 0.1},
    "{'a b': 1, c: dict(d=[x])}": {'a b': 1, 'c': {'d': ['x']}},
    '[1e-3,vit_tiny,(a,)]': [0.001, 'vit_tiny', ('a',)],
}


@pytest.mark.parametrize('text', VALUES)
def test_values(text):
    value = parse_value(text)
    assert value == VALUES[text]
    assert type(value) is type(VALUES[text]), 'True is no 1'


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('[1', 'its [ is not closed'),
        ('1)', 'its ) closes nothing'),
        ('(1]', 'its ] closes nothing'),
        ('[1]x', "'x' follows its ]"),
        ('(1,,2)', 'nothing between'),
        (',1', 'nothing between'),
        ("'a", "its ' is not closed"),
        ("['a]", "its ' is not closed"),
        ("'a'b", 'do not enclose'),
        ('dict(1)', "'1' is not NAME=VALUE"),
        ('dict(a=)', "'a=' is not NAME=VALUE"),
        ('{a}', "'a' is not NAME:VALUE"),
    ],
)
def test_anything_else_is_refused_at_once(text, said, capsys):
    with pytest.raises(ValueSyntaxError) as caught:
        parse_value(text)
    assert said in str(caught.value)
    with pytest.raises(SystemExit):
        make_parser().parse_args(['train', 'a.py', '--cfg-options', f'key={text}'])
    assert said in capsys.readouterr().err


def test_what_is_deleted_by_its_path_is_replaced_whole():
    """As MMEngine's options do, of which ``_delete_`` is one among others."""
    pairs = ['a.b.lr=1', 'a.b._delete_=True', 'a.b.type=X', 'a.b.c.d=2', 'a.bc=3', 'e=4']
    options = make_parser().parse_args(['train', 'x', '--cfg-options', *pairs]).cfg_options
    replaced = {'lr': 1, '_delete_': True, 'type': 'X', 'c': {'d': 2}}
    assert options == {'a.b': replaced, 'a.bc': 3, 'e': 4}
    outer = ['a._delete_=True', 'a.b._delete_=True', 'a.b.type=X']
    options = make_parser().parse_args(['train', 'x', '--cfg-options', *outer]).cfg_options
    assert options == {'a': {'_delete_': True, 'b': {'_delete_': True, 'type': 'X'}}}
