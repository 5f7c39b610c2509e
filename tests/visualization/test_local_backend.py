"""Curves whose file cannot be written do not end training."""

import resource
import shutil

import pytest

from memengine.visualization import LocalVisBackend


@pytest.mark.fault('the disk is full when curves are written', 'said once; no line is half written')
def test_curves_go_on_after_a_full_disk(tmp_path, capsys):
    backend = LocalVisBackend(str(tmp_path / 'vis'))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(4):
        if step in (1, 2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
        try:
            backend.add_scalars(dict(loss=0.5), step=step)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    lines = (tmp_path / 'vis' / 'scalars.json').read_text().splitlines()
    assert lines == ['{"loss": 0.5, "step": 0}', '{"loss": 0.5, "step": 3}']
    assert capsys.readouterr().out.count('cannot be written') <= 1


def test_curves_of_a_work_dir_that_is_gone_are_left_out(tmp_path):
    backend = LocalVisBackend(str(tmp_path / 'vis'))
    backend.add_scalars(dict(loss=0.5), step=0)
    shutil.rmtree(tmp_path / 'vis')
    backend.add_scalars(dict(loss=0.5), step=1)
    assert not (tmp_path / 'vis').exists()
