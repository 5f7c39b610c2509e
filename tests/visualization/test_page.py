"""The page of a run: one file, with all that is in its report."""

import json
import re

from PIL import Image

from memengine.visualization import write_page
from memengine.visualization.page import is_flat
from memengine.visualization.scalars import Curve
from tests.visualization.test_scalars import train, val, write_run


def curve(*values):
    return Curve(list(range(len(values))), list(values))


def test_what_a_flat_curve_is():
    assert is_flat(curve(5.0, 5.0, 5.0004)) and is_flat(curve(1.0)) and is_flat(curve(0.0, 0.0))
    assert is_flat(curve(float('nan'), float('nan'), 2.0))
    assert not is_flat(curve(5.0, 5.1)) and not is_flat(curve(0.0, 1e-9))


def figure_of(page, name):
    """Width of a curve's picture, and its points."""
    inside = re.search(rf'<figcaption>{name}: .*?</figure>', page, re.S)[0]
    points = re.search(r'points="([^"]*)"', inside)[1].split()
    return int(re.search(r'<svg width="(\d+)"', inside)[1]), points


def test_a_page_of_curves_tables_and_pictures(tmp_path):
    lines = [train(10 * i, 6.0 - i, lr=0.1, data_time=0.1, saved_mib=32.0) for i in range(1, 4)]
    write_run(tmp_path, '20260101_000000', [*lines, val(1, 70.0)])
    probe = tmp_path / 'report' / 'probe'
    probe.mkdir(parents=True)
    (probe / 'probe.md').write_text(
        '| of <2> images | top-1 (%) |\n| --- | --- |\n| linear | 9 |\n'
    )
    Image.new('RGB', (2, 2)).save(probe / 'probe.png')
    Image.new('RGB', (2, 2)).save(tmp_path / 'report' / 'attention.png')
    (tmp_path / 'report' / 'memory.json').write_text(
        json.dumps({'weights': 2**20, 'buffers': 0, 'process': 66 * 2**20})
    )
    page = write_page(tmp_path).read_text()
    large, points = figure_of(page, 'loss')
    small, _ = figure_of(page, 'lr')
    assert points == ['0.0,0.0', '150.0,75.0', '300.0,150.0'] and small < large / 3
    assert page.index('What did not move') < page.index('<figcaption>lr')
    assert '>12.0 s' in page and '>3.0 s' in page, 'steps, and waiting for data'
    assert '>1.0 MiB' in page and '>32.0 MiB' in page and 'buffers' not in page
    assert '>33.0 MiB' in page, 'the rest of the process'
    stack = re.search(r'Where memory went</h2>\n<svg.*?</svg>', page)[0]
    widths = [float(width) for width in re.findall(r'<rect x="[^"]*" width="([^"]*)"', stack)]
    assert widths == [9.7, 310.3, 320.0] and 'the rest: 50%' in stack
    assert '<th>of &lt;2&gt; images</th>' in page and '<td>linear</td><td>9</td>' in page
    assert page.count('src="data:image/png;base64,') == 2
    assert not re.search(r'(src|href)="(?!data:)', page), 'it needs no other file'


def test_a_page_without_a_training(tmp_path):
    (tmp_path / 'report').mkdir()
    page = write_page(tmp_path)
    assert page == tmp_path / 'report' / 'index.html' and 'Curves' not in page.read_text()
