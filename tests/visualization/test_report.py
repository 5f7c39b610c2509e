"""The report: which panels there are, what they show, and the summary."""

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from memengine.visualization import write_report
from tests.visualization.test_scalars import train, val, write_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    saved = []
    plain = Figure.savefig
    monkeypatch.setattr(
        Figure, 'savefig', lambda self, *a, **k: (saved.append(self), plain(self, *a, **k))[1]
    )
    return saved


def full_run(work_dir):
    signs = dict(lr=0.1, teacher_temp=0.04, ema_momentum=0.99, teacher_entropy=5.0, feature_std=0.8)
    memory = dict(saved_mib=30.0, rss_mib=800.0, images_per_s=500.0)
    yardsticks = dict(knn_top1_untrained=37.0, knn_top1_raw_pixels=96.9)
    lines = [val(0, 37.0) | yardsticks]
    for i in range(1, 5):
        lines.append(train(10 * i, 6.0 - i, **signs, **(memory | {'saved_mib': 30.0 + i % 3})))
    lines += [
        val(1, 97.0) | yardsticks,
        train(50, 0.5, **signs, **memory),
        val(3, 95.0) | yardsticks,
    ]
    write_run(work_dir, '20260101_000000', lines)


def panels(figure):
    return {axis.get_title(): axis for axis in figure.axes if axis.get_visible()}


def test_every_quantity_has_its_panel(tmp_path, figures):
    full_run(tmp_path)
    assert write_report(tmp_path) == tmp_path / 'report'
    (figure,) = figures
    assert list(panels(figure)) == [
        'Loss',
        'k-NN top-1 (%): 95.0',
        'Learning rate',
        'Teacher temperature',
        'Teacher momentum',
        'Teacher entropy (nats)',
        'Feature spread',
        'Saved for backward, peak (MiB)',
        'Resident memory (MiB)',
        'Throughput (images/s)',
    ]
    assert panels(figure)['Throughput (images/s)'].get_ylim()[0] == 0
    assert panels(figure)['Feature spread'].get_ylim()[0] > 0
    (loss,) = panels(figure)['Loss'].lines
    assert loss.get_xydata().tolist() == [[10, 5], [20, 4], [30, 3], [40, 2], [50, 0.5]]
    trained, raw, untrained = panels(figure)['k-NN top-1 (%): 95.0'].lines
    assert trained.get_ydata().tolist() == [37.0, 97.0, 95.0]
    assert (raw.get_label(), set(raw.get_ydata())) == ('raw pixels 96.9', {96.9})
    assert (untrained.get_label(), set(untrained.get_ydata())) == ('untrained 37.0', {37.0})
    with Image.open(tmp_path / 'report' / 'curves.png') as picture:
        assert picture.format == 'PNG' and picture.width > 1500
        assert len(picture.convert('L').getcolors()) > 20  # something is drawn


def test_only_panels_that_have_data(tmp_path, figures):
    lines = [{'loss': 1.0, 'loss_b': 0.5, 'memory_mib': 900.0, 'iter': 10, 'step': 10}]
    write_run(tmp_path, '20260101_000000', lines)
    write_report(tmp_path)
    assert list(panels(figures[0])) == ['Loss', 'GPU memory, peak (MiB)']
    assert [line.get_label() for line in panels(figures[0])['Loss'].lines] == ['loss', 'loss_b']


def test_summary(tmp_path, undrawn):
    full_run(tmp_path)
    write_report(tmp_path)
    summary = json.loads((tmp_path / 'report' / 'summary.json').read_text())
    assert summary['runs'] == ['20260101_000000']
    assert (summary['iterations'], summary['epochs']) == (50, 3)
    assert summary['train_time_s'] == pytest.approx(25.0)
    assert summary['final']['loss'] == 0.5
    assert summary['final']['knn_top1'] == 95.0
    assert summary['final']['knn_top1_untrained'] == 37.0
    assert summary['best'] == {'knn_top1': {'value': 97.0, 'iter': 40}}
    assert summary['peak'] == {'saved_mib': 32.0, 'rss_mib': 800.0}


def test_figures_that_are_no_numbers_are_null(tmp_path, undrawn):
    write_run(tmp_path, '20260101_000000', [train(10, math.nan)])
    write_report(tmp_path)
    text = (tmp_path / 'report' / 'summary.json').read_text()
    assert json.loads(text)['final']['loss'] is None and 'NaN' not in text


def test_written_again_it_is_replaced(tmp_path, undrawn):
    full_run(tmp_path)
    write_report(tmp_path)
    write_run(tmp_path, '20260102_000000', [train(60, 0.25)])
    write_report(tmp_path)
    assert json.loads((tmp_path / 'report' / 'summary.json').read_text())['final']['loss'] == 0.25
    names = {path.name for path in (tmp_path / 'report').iterdir()}
    assert names == {'curves.png', 'summary.json'}


TOOL = ROOT / 'tools/analysis/report.py'


def test_the_tool(tmp_path, monkeypatch, capsys, undrawn):
    full_run(tmp_path)
    monkeypatch.setattr(sys, 'argv', [str(TOOL), str(tmp_path)])
    monkeypatch.setattr(sys, 'path', [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOOL), run_name='__main__')
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / 'report')
    assert (tmp_path / 'report' / 'curves.png').exists()


def test_the_tool_without_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', [str(TOOL), str(tmp_path)])
    monkeypatch.setattr(sys, 'path', [*sys.path])
    with pytest.raises(SystemExit, match='1'):
        runpy.run_path(str(TOOL), run_name='__main__')
    said = capsys.readouterr().err
    assert said.startswith('error: ') and 'no run there' in said


@pytest.mark.slow  # imports torch anew
def test_the_tool_as_a_process_without_a_run(tmp_path):
    command = [sys.executable, str(TOOL), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path.parent)
    assert done.returncode == 1
    assert done.stderr.startswith('error: ') and 'no run there' in done.stderr
    assert 'Traceback' not in done.stderr
