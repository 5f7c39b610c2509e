"""What is exported is read by other libraries alone, and gives the same features."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from memengine.engine.cli.main import main
from memengine.engine.runner import Runner
from memengine.evaluation.after_training.backbones import find_backbone, images_of
from memengine.evaluation.after_training.exporters import EXPORTERS, relative_error
from memengine.evaluation.after_training.model_card import normalisation_of
from memengine.registry import DATASETS, LOOPS, MODELS

VIT = dict(
    type='TimmBackbone',
    model_name='vit_tiny_patch16_224',
    img_size=16,
    patch_size=8,
    embed_dim=16,
    num_heads=2,
    depth=1,
)


class Whole(nn.Module):
    """A model with a backbone, as algorithms have one."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = MODELS.build(dict(backbone, _scope_='memengine'))


def runner_of(model, folder, **config):
    folder.mkdir()
    return SimpleNamespace(
        model=model,
        world_size=1,
        work_dir=str(folder),
        cfg=Config(dict(load_from='epoch_3.pth', train_dataloader=dict(batch_size=8), **config)),
        message_hub=SimpleNamespace(runtime_info={'epoch': 3}, get_info=lambda name: 3),
    )


def export(backbone, tmp_path, size=(3, 16, 16), **options):
    torch.manual_seed(0)
    model = Whole(backbone)
    for parameter in model.parameters():  # away from zero biases
        nn.init.normal_(parameter, std=0.1)
    folder = tmp_path / 'export'
    runner = runner_of(model, folder)
    loop = dict(type='ExportLoop', _scope_='memengine', runner=runner, input_size=size, **options)
    LOOPS.build(loop).run()
    images = torch.randn(3, *size)
    with torch.no_grad():
        return folder, images, model.backbone.eval()(images)


def test_timm_reads_it(tmp_path):
    import timm

    folder, images, features = export(VIT, tmp_path)
    config = json.loads((folder / 'config.json').read_text())
    network = timm.create_model(
        config['architecture'],
        num_classes=0,
        checkpoint_path=str(folder / 'model.safetensors'),
        **config['model_args'],
    )
    with torch.no_grad():
        assert torch.equal(network.eval()(images), features)
    card = (folder / 'README.md').read_text()
    assert "timm.create_model('vit_tiny_patch16_224'" in card and '| epochs | 3 |' in card


def test_the_card_tells_what_was_learned_and_not_how_the_run_went(tmp_path):
    final = dict(loss=0.5, top1=0.0, knn_top1=93.0, grad_norm=None)
    final |= dict(lr=1e-6, base_lr=1e-6, time=0.1, data_time=0.01, rss_mib=800.0, images_per_s=9.0)
    (tmp_path / 'summary.json').write_text(json.dumps(dict(final=final)))
    folder, _, _ = export(VIT, tmp_path)
    figures = (folder / 'README.md').read_text().split('## Figures')[1].split('## ')[0]
    named = [line.split('`')[1] for line in figures.splitlines() if '`' in line]
    assert named == ['loss', 'top1', 'knn_top1']


@pytest.mark.parametrize('others', [[], [dict(mean=[0.1] * 3, std=[0.2] * 3)]])
def test_timm_normalises_as_the_run_did(tmp_path, others):
    """By default it takes ImageNet's mean; where the data have several, none is said."""
    import timm

    kinds = [dict(mean=(0.4, 0.5, 0.6), std=[0.3] * 3), dict(mean=[0.4, 0.5, 0.6], std=[0.3] * 3)]
    pipelines = [[dict(type='torchvision/Normalize', **kind)] for kind in kinds + others]
    parts = [dict(dataset=dict(pipeline=pipeline)) for pipeline in pipelines]
    folder = tmp_path / 'export'
    runner = runner_of(Whole(VIT), folder, val_dataloader=dict(dataset=dict(parts=parts)))
    loop = dict(type='ExportLoop', _scope_='memengine', runner=runner, input_size=(3, 16, 16))
    LOOPS.build(loop).run()
    stated = json.loads((folder / 'config.json').read_text())['pretrained_cfg']
    config = timm.data.resolve_data_config(pretrained_cfg=stated)
    card = (folder / 'README.md').read_text()
    if others:
        assert 'mean [' not in card
    else:
        assert (config['mean'], config['std']) == ([0.4, 0.5, 0.6], [0.3, 0.3, 0.3])
        assert '| images | mean [0.4, 0.5, 0.6], std [0.3, 0.3, 0.3] |' in card


@DATASETS.register_module()
class Noise:
    """A source of images that are larger than the network takes, and no squares."""

    classes = ('noise',)

    def __len__(self):
        return 2

    def __getitem__(self, row):
        pixels = np.random.default_rng(row).integers(0, 255, (9, 13, 3), np.uint8)
        return Image.fromarray(pixels).resize((52, 36)), 0


SCALED = [
    dict(type='torchvision/PILToTensor'),
    dict(type='torchvision/ToDtype', dtype='float32', scale=True),
]


@pytest.mark.parametrize(
    ('pipeline', 'preprocessor'),
    [
        (
            [
                dict(type='torchvision/Resize', size=25, interpolation='bicubic'),
                dict(type='torchvision/CenterCrop', size=14),
                *SCALED,
            ],
            None,
        ),
        (
            [
                dict(type='torchvision/Resize', size=[16, 16]),
                *SCALED,
                dict(type='torchvision/Normalize', mean=[0.5] * 3, std=[0.2] * 3),
            ],
            None,
        ),
        (
            [
                dict(type='torchvision/Resize', size=[18]),
                dict(type='torchvision/CenterCrop', size=16),
                dict(type='torchvision/PILToTensor'),
                dict(type='torchvision/ToDtype', dtype='float32'),
            ],
            dict(type='ImgDataPreprocessor', mean=[100.0, 120, 140], std=[50.0, 60, 70]),
        ),
    ],
)
def test_timm_makes_images_as_the_run_did(tmp_path, pipeline, preprocessor):
    """By default it resizes to 8/7 of the size and crops, and takes ImageNet's mean."""
    import timm

    source, pipeline = dict(type='Noise'), [*pipeline, dict(type='PackInputs')]
    data = dict(type='ImageDataset', source=source, pipeline=pipeline)
    model = Whole(dict(VIT, dynamic_img_size=True, patch_size=2))
    model.data_preprocessor = MODELS.build(preprocessor or dict(type='BaseDataPreprocessor'))
    loader = dict(dataset=data, collate_fn=dict(type='stack_views'))
    runner = runner_of(model, tmp_path / 'export', val_dataloader=loader)
    runner.cfg.model = dict(data_preprocessor=preprocessor)
    runner.seed, runner.build_dataloader = 0, Runner.build_dataloader
    LOOPS.build(dict(type='ExportLoop', _scope_='memengine', runner=runner)).run()
    stated = json.loads((tmp_path / 'export' / 'config.json').read_text())['pretrained_cfg']
    config = timm.data.resolve_data_config(pretrained_cfg=stated)
    transform = timm.data.create_transform(**config)
    torch.testing.assert_close(transform(Noise()[0][0]), images_of(runner, [0])[0])


def test_a_mean_of_images_of_0_to_255_alone_is_told_by_its_size():
    """As of networks from Caffe, whose deviation is 1: it was stated as of images of 0 to 1."""
    preprocessor = dict(type='ImgDataPreprocessor', mean=[102.0, 51.0, 0.0], std=[1.0] * 3)
    found = normalisation_of(dict(model=dict(data_preprocessor=preprocessor)))
    assert found == dict(mean=[0.4, 0.2, 0.0], std=[1 / 255] * 3)


def test_torchvision_reads_it(tmp_path):
    from torchvision.models import resnet18

    folder, images, features = export(
        dict(type='TorchvisionBackbone', model_name='resnet18'), tmp_path, (3, 32, 32)
    )
    network = resnet18()
    network.fc = nn.Identity()
    network.load_state_dict(load_file(folder / 'model.safetensors'))
    with torch.no_grad():
        assert torch.equal(network.eval()(images), features)
    code = (folder / 'README.md').read_text().split('```python\n')[1].split('```')[0]
    namespace = {}
    exec(code.replace('model.safetensors', str(folder / 'model.safetensors')), namespace)
    with torch.no_grad():
        assert torch.equal(namespace['model'].eval()(images), features)


@pytest.mark.parametrize('pool', ['token', 'mean'])
def test_transformers_reads_it(tmp_path, pool):
    """The card says which tokens are the features: the library's own pooler has new weights."""
    transformers = pytest.importorskip('transformers', reason='transformers is not installed')
    small = dict(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
    )
    kind = dict(type='TransformersImage', model_name='vit', pretrained=False, config=small)
    folder, images, features = export(dict(kind, pool=pool), tmp_path)
    network = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        tokens = network(pixel_values=images).last_hidden_state
    torch.testing.assert_close(tokens[:, 0] if pool == 'token' else tokens.mean(1), features)
    code = (folder / 'README.md').read_text().split('```python\n')[1].split('```')[0]
    namespace = dict(FOLDER=folder, images=images)
    exec(code, namespace)
    torch.testing.assert_close(namespace['features'], features)


def test_a_card_does_not_guess_how_others_take_features_of_tokens(tmp_path):
    transformers = pytest.importorskip('transformers', reason='transformers is not installed')
    small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)

    class OfPatches(nn.Module):
        def __init__(self):
            super().__init__()
            config = transformers.ViTConfig(**small, image_size=16, patch_size=8)
            self.model, self.pool = transformers.ViTModel(config), 'mean'

        def forward(self, images):
            return self.model(images).last_hidden_state[:, 1:].mean(1)

    MODELS.register_module(module=OfPatches, force=True)
    folder, _, _ = export(dict(type='OfPatches'), tmp_path)
    assert 'tokens' not in (folder / 'README.md').read_text().split('```')[1]


def test_a_network_of_nobodys_keeps_its_own_names(tmp_path):
    class Own(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Flatten(), nn.Linear(12, 3))

    MODELS.register_module(module=Own, force=True)
    folder, images, features = export(dict(type='Own'), tmp_path, (3, 2, 2))
    state = load_file(folder / 'model.safetensors')
    assert torch.equal(images.flatten(1) @ state['1.weight'].T + state['1.bias'], features)


def test_weights_that_are_channels_last_are_written(tmp_path):
    """safetensors writes contiguous tensors only; a network may keep its filters otherwise."""

    class Last(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.to(memory_format=torch.channels_last)

    MODELS.register_module(module=Last, force=True)
    folder, images, features = export(dict(type='Last'), tmp_path, (3, 8, 8))
    network = Last().eval()
    network.load_state_dict(load_file(folder / 'model.safetensors'))
    with torch.no_grad():
        torch.testing.assert_close(network(images), features)


def test_torch_export_takes_any_batch(tmp_path):
    folder, images, features = export(VIT, tmp_path, to=['torch_export'])
    network = torch.export.load(folder / 'model.pt2').module()
    torch.testing.assert_close(network(images), features)
    torch.testing.assert_close(network(images.repeat(2, 1, 1, 1)), features.repeat(2, 1))


def test_onnx_takes_any_batch(tmp_path):
    onnxruntime = pytest.importorskip('onnxruntime', reason='onnxruntime is not installed')
    pytest.importorskip('onnxscript', reason='onnxscript is not installed')
    folder, images, features = export(VIT, tmp_path, to=['onnx'])
    session = onnxruntime.InferenceSession(folder / 'model.onnx')
    (found,) = session.run(None, {'images': images.repeat(2, 1, 1, 1).numpy()})
    assert relative_error(found, features.repeat(2, 1)) < 1e-4


def test_other_outputs_are_refused(tmp_path, monkeypatch):
    def wrong(backbone, images, folder):
        return '', relative_error(1.1 * backbone.module(images), backbone.module(images))

    monkeypatch.setitem(EXPORTERS, 'weights', wrong)
    with pytest.raises(ValueError, match='weights of backbone gives other outputs'):
        export(VIT, tmp_path)


@pytest.mark.parametrize(
    ('options', 'says'),
    [
        (dict(to=['tflite']), 'export.to must be a list of'),
        (dict(to='onnx'), 'export.to must be a list of'),
        (dict(part='head'), "no module 'head'; its backbones are backbone"),
    ],
)
def test_what_cannot_be_exported_is_said(tmp_path, options, says):
    with pytest.raises(ValueError, match=says):
        export(VIT, tmp_path, **options)


def test_the_teachers_backbone_is_the_one_that_is_meant():
    def network():
        return nn.ModuleDict({'backbone': nn.ReLU()})

    model = nn.ModuleDict({'student': network(), 'teacher': network()})
    assert find_backbone(model).name == 'teacher.backbone'
    assert find_backbone(model, 'student.backbone').name == 'student.backbone'
    towers = nn.ModuleDict({'image': network(), 'text': network()})
    with pytest.raises(ValueError, match='several backbones, image.backbone and text.backbone'):
        find_backbone(towers)
    with pytest.raises(ValueError, match='no module called backbone'):
        find_backbone(nn.ReLU())


def test_a_backbone_that_has_one_inside_is_one():
    """timm's hybrids have one for their patches, and PooledBackbone another library's."""
    hybrid = dict(VIT, model_name='vit_tiny_r_s16_p8_224', img_size=32, patch_size=1, num_heads=4)
    assert find_backbone(Whole(hybrid)).name == 'backbone'
    pooled = dict(type='PooledBackbone', backbone=VIT, num_features=16)
    towers = nn.ModuleDict({'student': Whole(pooled), 'teacher': Whole(pooled)})
    assert find_backbone(towers).name == 'teacher.backbone'
    assert find_backbone(towers, 'student.backbone.backbone').name == 'student.backbone.backbone'


def small_clip(tmp_path, kind='CLIP'):
    open_clip = pytest.importorskip('open_clip', reason='open_clip is not installed')
    vision = dict(image_size=16, layers=1, width=64, patch_size=8, head_width=32)
    text = dict(context_length=8, vocab_size=49408, width=32, heads=2, layers=1)
    path = tmp_path / 'memengine-small.json'
    path.write_text(json.dumps(dict(embed_dim=24, vision_cfg=vision, text_cfg=text)))
    open_clip.add_model_config(path)
    towers = {
        key: dict(type=of, model_name=path.stem)
        for key, of in (('image', 'OpenClipImage'), ('text', 'OpenClipText'))
    }
    torch.manual_seed(0)
    model = MODELS.build(dict(type=kind, embed_dim=10, _scope_='memengine', **towers)).eval()
    return open_clip, model


@pytest.mark.parametrize('kind', ['CLIP', 'SigLIP'])
def test_open_clip_reads_both_towers(tmp_path, kind):
    open_clip, model = small_clip(tmp_path, kind)
    options = dict(_scope_='memengine', input_size=(3, 16, 16), to=['open_clip'])
    folder = tmp_path / 'export'
    LOOPS.build(dict(type='ExportLoop', runner=runner_of(model, folder), **options)).run()
    assert (folder / 'memengine-small-memengine.json').is_file()
    weights = str(folder / 'open_clip.pt')
    loaded = open_clip.create_model('memengine-small-memengine', pretrained=weights).eval()
    images, tokens = torch.randn(3, 3, 16, 16), torch.randint(1, 100, (4, 8))
    with torch.no_grad():
        found = model.embed(images, {'tokens': tokens})
        torch.testing.assert_close(loaded.encode_image(images), found['image'])
        torch.testing.assert_close(loaded.encode_text(tokens), found['text'])
    assert torch.equal(loaded.logit_scale, model.logit_scale)
    assert (loaded.logit_bias is None) == (kind == 'CLIP')
    if kind == 'SigLIP':
        assert torch.equal(loaded.logit_bias, model.logit_bias)
    other = runner_of(Whole(VIT), tmp_path / 'other')
    with pytest.raises(ValueError, match='wants a CLIP whose towers are OpenClipImage'):
        LOOPS.build(dict(type='ExportLoop', runner=other, **options)).run()
    with pytest.raises(ValueError, match='no other form, no part'):
        LOOPS.build(dict(type='ExportLoop', runner=other, **options, part='backbone'))


@pytest.mark.parametrize(
    ('resizing', 'comment'),
    [
        ([dict(type='torchvision/Resize', size=[16, 16], interpolation='bicubic')], ''),
        (
            [
                dict(type='torchvision/Resize', size=16),
                dict(type='torchvision/CenterCrop', size=16),
            ],
            '',
        ),
        (
            [
                dict(type='torchvision/Resize', size=18),
                dict(type='torchvision/CenterCrop', size=16),
            ],
            "# transform's resizing: open_clip's own, not the run's",
        ),
    ],
)
def test_open_clip_makes_images_as_the_run_did(tmp_path, monkeypatch, resizing, comment):
    """By default it takes OpenAI's mean, and crops what it has resized with bicubic filters."""
    _, model = small_clip(tmp_path)
    normalise = dict(type='torchvision/Normalize', mean=[0.5] * 3, std=[0.2] * 3)
    pipeline = [*resizing, *SCALED, normalise, dict(type='PackInputs')]
    data = dict(type='ImageDataset', source=dict(type='Noise'), pipeline=pipeline)
    loader = dict(dataset=data, collate_fn=dict(type='stack_views'))
    folder = tmp_path / 'export'
    runner = runner_of(model, folder, val_dataloader=loader)
    runner.seed, runner.build_dataloader = 0, Runner.build_dataloader
    options = dict(_scope_='memengine', to=['open_clip'])
    LOOPS.build(dict(type='ExportLoop', runner=runner, **options)).run()
    code = (folder / 'README.md').read_text().split('```python\n')[1].split('```')[0]
    monkeypatch.chdir(folder)
    exec(code, namespace := {})
    made = namespace['transform'](Noise()[0][0])
    assert comment in code and ('#' in code) == bool(comment)
    if comment:
        normalised = namespace['transform'].transforms[-1]
        assert (*normalised.mean, *normalised.std) == (*[0.5] * 3, *[0.2] * 3)
    else:
        torch.testing.assert_close(made, images_of(runner, [0])[0])


def test_a_form_that_is_none_is_refused_at_once(capsys):
    with pytest.raises(SystemExit):
        main(['export', 'work_dirs/none', '--to', 'timm'])
    said = capsys.readouterr().err
    assert all(repr(form) in said for form in EXPORTERS)
