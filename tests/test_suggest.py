import pytest

from memengine.suggest import ONE_LETTER, STRICT, did_you_mean, similar


@pytest.mark.parametrize('written', ['lr', 'l', 'rl', 'lrr', 'LR', 'xlr'])
def test_one_slip_in_a_short_name(written):
    assert similar(written, ['momentum', 'lr'], ONE_LETTER) == ['lr']


@pytest.mark.parametrize('written', ['momentun', 'moemntum', 'mmentum', 'momentumm'])
def test_one_slip_in_a_long_name(written):
    assert similar(written, ['momentum', 'lr'], ONE_LETTER) == ['momentum']


def test_other_short_names_are_no_slips():
    assert similar('lr', ['wd', 'ls', 'k'], ONE_LETTER) == []


def test_a_scope_in_front_is_ignored():
    assert similar('ToImag', ['torchvision/ToImage', 'Other']) == ['torchvision/ToImage']
    assert similar('mmengin.EMAHook', ['EMAHook', 'LoggerHook']) == ['EMAHook']


def test_the_beginning_of_a_name_is_near_enough_to_suggest_but_no_misspelling():
    assert similar('KNN', ['KNNMetric']) == ['KNNMetric']
    assert similar('KNN', ['KNNMetric'], STRICT) == []


def test_similar_names_are_left_out_beside_one_that_is_one_letter_off():
    assert similar('max_epoch', ['by_epoch', 'max_epochs']) == ['max_epochs']


def test_the_clause():
    assert did_you_mean('dept', ['depth', 'width']) == ": did you mean 'depth'?"
    assert did_you_mean('splat', ['split', 'splits', 'plate']).startswith(": did you mean 'split'")
    assert did_you_mean('zzz', ['depth']) == ''
