import pytest
from mmengine.registry import Registry

from memengine.datasets.build import build, did_you_mean, one_line

PARENT = Registry('thing', scope='toys')
THINGS = Registry('thing', parent=PARENT, scope='toys.sub')


@THINGS.register_module()
class Ball:
    def __init__(self, radius, colour='red', *, squeak=False):
        if radius <= 0:
            raise ValueError('radius must be\n  positive')
        self.settings = radius, colour, squeak


@PARENT.register_module(name='shop/Kite')
def make_kite(**settings):
    return settings


def test_a_config_is_built_by_name_and_by_class():
    for kind in ('Ball', Ball):
        assert build(THINGS, dict(type=kind, radius=2, squeak=True), 'x').settings == (
            2,
            'red',
            True,
        )


def test_the_parent_registry_is_searched():
    assert build(THINGS, dict(type='shop/Kite', tail=3), 'x') == {'tail': 3}


def test_the_config_is_left_as_it_was():
    cfg = dict(type='Ball', radius=1)
    build(THINGS, cfg, 'x')
    assert cfg == dict(type='Ball', radius=1)


def test_a_built_object_is_taken_as_it_is():
    ball = Ball(1)
    assert build(THINGS, ball, 'x') is ball


@pytest.mark.parametrize('cfg', ['Ball', None, 3, [dict(type='Ball')]])
def test_what_is_no_config_is_refused(cfg):
    with pytest.raises(TypeError, match=r"toys\[1\] must be a dict with the key 'type'"):
        build(THINGS, cfg, 'toys[1]')


def test_a_config_without_type_is_refused():
    with pytest.raises(TypeError, match=r"toys\[1\] lacks the key 'type'.*radius"):
        build(THINGS, dict(radius=1), 'toys[1]')


@pytest.mark.parametrize(
    ('wrong', 'right'),
    [('Bal', 'Ball'), ('ball', 'Ball'), ('Kites', 'shop/Kite'), ('shp/Kite', 'shop/Kite')],
)
def test_a_misspelt_type_gives_the_nearest_name(wrong, right):
    with pytest.raises(
        ValueError, match=rf"toys: there is no thing named '{wrong}'; did you mean '{right}'"
    ):
        build(THINGS, dict(type=wrong), 'toys')


def test_a_type_that_is_only_a_module_is_not_found():
    with pytest.raises(ValueError, match="no thing named 'random'"):
        build(THINGS, dict(type='random'), 'toys')


def test_a_misspelt_argument_gives_the_nearest_name():
    message = (
        r"toys \(Ball\) has no setting 'color'; did you mean 'colour'\? \(known: radius, colour"
    )
    with pytest.raises(ValueError, match=message):
        build(THINGS, dict(type='Ball', radius=1, color='blue'), 'toys')


def test_a_missing_argument_is_named():
    with pytest.raises(ValueError, match=r"toys \(Ball\) needs the setting 'radius'"):
        build(THINGS, dict(type='Ball'), 'toys')


def test_a_refused_value_is_one_line_with_the_setting():
    with pytest.raises(ValueError, match=r'^toys \(Ball\): radius must be positive$'):
        build(THINGS, dict(type='Ball', radius=0), 'toys')


def test_a_missing_name_may_be_registered_late():
    late = Registry('late', scope='late')

    def register(kind):
        late.register_module(name=kind, module=Ball)
        return ''

    assert isinstance(build(late, dict(type='Globe', radius=1), 'x', on_missing=register), Ball)
    with pytest.raises(ValueError, match='no late named .Cube. .install cubes'):
        build(late, dict(type='Cube'), 'x', on_missing=lambda kind: ' (install cubes)')


def test_names_that_are_far_from_all_give_no_suggestion():
    assert did_you_mean('zebra', ['Ball', 'Kite']) == ''


def test_errors_become_one_line():
    assert one_line(ValueError('a\n  b')) == 'a b'
    assert one_line(KeyError('label')) == "KeyError 'label'"
    assert one_line(RuntimeError()) == 'RuntimeError'
