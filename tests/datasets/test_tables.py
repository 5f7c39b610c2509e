"""Images that tables list, with labels and several captions."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from memengine.datasets import ChooseCaption, CocoCaptions, ImageDataset, ImageTable
from tests.datasets.toy import TO_TENSOR, write_folder

CSV = """path,text,kind
cat/0.png,a cat,tom
dog/0.png,a dog,rex
cat/0.png,"a cat, again",tom
"""
ROWS = [
    {'path': 'cat/0.png', 'text': ['a cat', 'a cat, again'], 'kind': 'tom'},
    {'path': 'dog/0.png', 'text': 'a dog', 'kind': 'rex'},
]


def write(tmp_path, form):
    write_folder(tmp_path)
    table = tmp_path / f'list.{form}'
    table.write_text(
        {
            'csv': CSV,
            'tsv': CSV.replace(',', '\t').replace('"a cat\t again"', 'a cat, again'),
            'jsonl': ''.join(json.dumps(row) + '\n' for row in ROWS),
            'parquet': '',
        }[form]
    )
    return dict(table=str(table), root=str(tmp_path))


def put_pyarrow_there(monkeypatch):
    """A stand-in: pyarrow's batches of rows."""
    batches = [SimpleNamespace(to_pylist=lambda row=row: [row]) for row in ROWS]
    parquet = SimpleNamespace(ParquetFile=lambda _: SimpleNamespace(iter_batches=lambda: batches))
    monkeypatch.setitem(sys.modules, 'pyarrow', SimpleNamespace(parquet=parquet))
    monkeypatch.setitem(sys.modules, 'pyarrow.parquet', parquet)


@pytest.mark.parametrize('form', ['csv', 'tsv', 'jsonl', 'parquet'])
def test_tables(tmp_path, monkeypatch, form):
    put_pyarrow_there(monkeypatch)
    source = ImageTable(**write(tmp_path, form), caption='text', label='kind')
    assert len(source) == 2
    assert (source.classes, source.labels) == (['rex', 'tom'], [1, 0])
    assert source.captions(0) == ['a cat', 'a cat, again'] and source.captions(1) == ['a dog']
    image, label = source[0]
    assert (image.size, image.mode, label) == ((40, 30), 'RGB', 1)
    assert source.path(1) == str(tmp_path / 'dog/0.png')


def test_labels_that_are_numbers_are_sorted_by_value(tmp_path):
    (tmp_path / 'list.csv').write_text('file,class\na,10\nb,9\nc,10\n')
    source = ImageTable(str(tmp_path / 'list.csv'), str(tmp_path), path='file', label='class')
    assert (source.classes, source.labels) == (['9', '10'], [1, 0, 1])


def test_numbers_of_pandas_are_sorted_by_value(tmp_path):
    """It writes whole numbers with a point where one of them was missing."""
    (tmp_path / 'list.csv').write_text('path,class\na,10.0\nb,2.0\nc,-1.0\nd,x\n')
    source = ImageTable(str(tmp_path / 'list.csv'), str(tmp_path), label='class')
    assert (source.classes, source.labels) == (['-1.0', '2.0', '10.0', 'x'], [2, 1, 0, 3])


def test_empty_ends_lines_and_marks_of_an_encoding_are_passed_over(tmp_path):
    for name, text in (
        ('a.csv', 'path,text\nx,a cat,\ny,"a ""big"" dog, running",,\n\n'),
        ('a.jsonl', '\ufeff{"path": "x", "text": "a cat"}\n\n'),
    ):
        (tmp_path / name).write_text(text, encoding='utf-8')
        source = ImageTable(str(tmp_path / name), str(tmp_path), caption='text')
        texts = [source.captions(row) for row in range(len(source))]
        assert texts == [['a cat'], ['a "big" dog, running']][: len(texts)]


def test_a_table_of_paths_alone(tmp_path):
    source = ImageTable(**write(tmp_path, 'csv'))
    assert (source.labels, source.classes, source.captions(0)) == ([-1, -1], [], [])


@pytest.mark.parametrize(
    ('name', 'text', 'options', 'said'),
    [
        ('a.csv', CSV, dict(caption='txt'), "a.csv, row 1: there is no column 'txt'.*'text'"),
        ('a.csv', CSV, dict(path='file'), r"no column 'file' \(there are path, text, kind\)"),
        ('a.csv', 'path,text\nx.png,\n', dict(caption='text'), "row 1: 'text' is empty"),
        ('a.csv', 'path,kind\nx,1\nx,2\n', dict(label='kind'), "row 2: 'x' has another label"),
        ('a.csv', 'path\n', {}, 'lists no image'),
        ('a.csv', 'path,text\nx,a dog, running\n', {}, r'line 2: 1 value.* more .*\(. running'),
        ('a.tsv', 'path\ttext\nx\t"a dog\ny\ta cat\n', {}, 'a.tsv, line 2: unexpected end'),
        ('a.tsv', 'path\ttext\nx\t"A" dog\ny\ta cat\n', {}, 'line 2: .* are doubled'),
        ('a.csv', f'path,text\nx,{"x" * 200_000}\n', {}, 'line 2: field larger than'),
        ('a.csv', b'path,text\nx,h\xfcndin\n', {}, 'a.csv.* is no text in UTF-8'),
        ('a.csv', 'path,text\nx,"  "\n', dict(caption='text'), "row 1: 'text' is empty"),
        (
            'a.jsonl',
            '{"path": "x", "text": 3}',
            dict(caption='text'),
            "'text' must be a text, .* 3",
        ),
        ('a.jsonl', '{"path": "x", "t": ["y", null]}', dict(caption='t'), "'t' must be .*None"),
        ('a.jsonl', '{"path": "x", "t": {"en": "y"}}', dict(caption='t'), "'t' must be .*'en'"),
        ('a.jsonl', '{"path": "x", "k": NaN}', dict(label='k'), "row 1: 'k' is empty"),
        ('a.jsonl', '{"path": "x", "k": ["y"]}', dict(label='k'), "'k' must be a text or a number"),
        (
            'a.jsonl',
            '{"path": "x", "k": 1}\n{"path": "x"}',
            dict(label='k'),
            "row 2: there is no column 'k'",
        ),
        ('a.jsonl', '{"path": "x"}\n[1]\n', {}, 'line 2: no JSON object'),
        ('a.jsonl', '{"path": "x"}\n{', {}, 'line 2: no JSON object'),
        ('a.xls', '', {}, 'must be a .csv, .tsv, .jsonl or .parquet'),
        ('a.csv', CSV, dict(root='nowhere'), "no folder 'nowhere'"),
        ('a.csv', CSV, dict(table='nowhere.csv'), "no file 'nowhere.csv'"),
    ],
)
def test_wrong_tables_are_refused(tmp_path, name, text, options, said):
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=said):
        ImageTable(**{'table': str(tmp_path / name), 'root': str(tmp_path), **options})


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    with pytest.raises(ImportError, match='pip install pyarrow'):
        ImageTable(**write(tmp_path, 'parquet'))


def write_coco(tmp_path, content=None):
    write_folder(tmp_path)
    content = content or {
        'images': [
            {'id': 7, 'file_name': 'dog/1.png'},
            {'id': 3, 'file_name': 'cat/1.png'},
            {'id': 9, 'file_name': 'cat/0.png'},
        ],
        'annotations': [
            {'image_id': 7, 'caption': 'a dog'},
            {'image_id': 3, 'caption': 'a cat'},
            {'image_id': 7, 'caption': 'the same dog'},
        ],
    }
    (tmp_path / 'captions.json').write_text(json.dumps(content))
    return dict(root=str(tmp_path), annotations=str(tmp_path / 'captions.json'))


def test_captions_of_coco(tmp_path):
    source = CocoCaptions(**write_coco(tmp_path))
    assert [source.captions(row) for row in range(len(source))] == [
        ['a cat'],
        ['a dog', 'the same dog'],
    ]
    assert source.path(0).endswith('cat/1.png') and source[1][1] == -1


@pytest.mark.parametrize(
    ('content', 'said'),
    [
        ([], 'holds no captions of COCO'),
        (dict(images=[], annotations=[]), 'no image with a capt'),
        (dict(annotations=[dict(image_id=3, caption=None)]), 'annotation of image 3 has no text'),
        (dict(annotations=[dict(image_id=3, caption=' ')]), 'annotation of image 3 has no text'),
    ],
)
def test_other_json_is_refused(tmp_path, content, said):
    options = write_coco(tmp_path)
    (tmp_path / 'captions.json').write_text(json.dumps(content))
    with pytest.raises(ValueError, match=said):
        CocoCaptions(**options)


def test_a_caption_of_several_is_drawn_anew_each_time(tmp_path):
    def captions(choice):
        pipeline = [
            *TO_TENSOR,
            dict(type='ChooseCaption', choice=choice),
            dict(type='PackInputs', keys=['caption']),
        ]
        data = ImageDataset(source=CocoCaptions(**write_coco(tmp_path / choice)), pipeline=pipeline)
        torch.manual_seed(0)
        return {data[1]['data_samples']['caption'] for _ in range(30)}

    assert captions('random') == {'a dog', 'the same dog'}
    assert captions('first') == {'a dog'}


def test_captions_that_are_missing_are_said():
    with pytest.raises(ValueError, match='no captions; its source must'):
        ChooseCaption()({'img': None})
    with pytest.raises(ValueError, match="'random' or 'first', got 'last'"):
        ChooseCaption('last')
