"""SimCLR, SupCon and SelfCon against their definitions, written out as loops."""

import math

import pytest
import torch
from torch.nn import functional as F

from memengine.models import ProjectionHead, SelfCon, SimCLR, SupCon, TimmBackbone
from memengine.models.algorithms.base import feature_moments, feature_rank, feature_std
from tests.models.toy import HEAD, VIT, B, batch, build


def supervised_contrast(z, labels, temperature):
    """Khosla et al., equation 2, in units of the temperature. z: [N, D], labels: [N]."""
    z, terms = F.normalize(z, dim=1), []
    for i in range(len(z)):
        others = [a for a in range(len(z)) if a != i]
        partition = sum(torch.exp(z[i] @ z[a] / temperature) for a in others)
        positives = [p for p in others if labels[p] == labels[i]]
        logs = [(z[i] @ z[p] / temperature) - partition.log() for p in positives]
        terms.append(-sum(logs) / len(positives))
    return sum(terms) / len(terms)


def same_gradient(model, actual, expected):
    parameters = [p for p in model.parameters() if p.requires_grad]
    got = torch.autograd.grad(actual, parameters, retain_graph=True)
    want = torch.autograd.grad(expected, parameters)
    assert all(g.norm() > 0 for g in want)
    for g, w in zip(got, want, strict=True):
        assert (g - w).norm() <= 1e-9 * w.norm() + 1e-13
    return True


def test_simclr_is_its_definition():
    model, (views, samples) = (
        build(SimCLR, loss=dict(type='NTXentLoss', temperature=0.3)),
        batch(SimCLR),
    )
    losses = model(views, samples, mode='loss')
    z = torch.cat([model.head(model.backbone(view)) for view in views])
    expected = supervised_contrast(z, list(range(B)) * 2, 0.3)
    assert losses['loss'].item() == pytest.approx(expected.item(), rel=1e-10)
    assert same_gradient(model, losses['loss'], expected)
    directions = F.normalize(z, dim=1)
    spread = directions.std(dim=0).mean().item() * math.sqrt(6)
    assert losses['feature_std'].item() == pytest.approx(spread)
    eigenvalues = torch.linalg.eigvalsh(directions.T.cov())
    rank = eigenvalues.sum().item() ** 2 / eigenvalues.square().sum().item()
    assert losses['feature_rank'].item() == pytest.approx(rank)


@pytest.mark.parametrize(('rows', 'width'), [(300, 20), (20, 300)])
def test_rank_and_spread_are_two_signs(rows, width):
    """On two opposite directions features are far apart, and of rank one."""
    isotropic = torch.randn(rows, width)
    assert 0.5 * 20 < feature_rank(isotropic) <= 20
    line = torch.randn(rows, 1).sign() * torch.randn(width) + 0.01 * isotropic
    assert feature_rank(line).item() == pytest.approx(1, abs=0.01)
    assert feature_std(feature_moments(line)) > 0.5
    assert feature_rank(torch.ones(rows, width)) <= 1, 'not NaN'
    assert feature_rank(torch.ones(1, width)) == 0


@pytest.mark.parametrize('algorithm', [SupCon, SelfCon])
def test_the_rank_is_logged_where_labels_do_not_bound_it(algorithm):
    for use_labels in (True, False):
        options = dict(exits=[0]) if algorithm is SelfCon else {}
        model = build(algorithm, use_labels=use_labels, **options)
        losses = model(*batch(algorithm, 2), mode='loss')
        assert ('feature_rank' in losses) is not use_labels


@pytest.mark.parametrize('views', [None, 2, 3])
def test_supcon_is_its_definition(views):
    loss = dict(type='SupConLoss', temperature=0.2, base_temperature=0.2)
    model, (inputs, samples) = build(SupCon, loss=loss), batch(SupCon, views, batch_size=6)
    actual = model(inputs, samples, mode='loss')['loss']
    images = [inputs] if views is None else inputs
    z = torch.cat([model.head(model.backbone(view)) for view in images])
    expected = supervised_contrast(z, samples['label'].tolist() * len(images), 0.2)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-10)
    assert same_gradient(model, actual, expected)


def test_supcon_without_labels_is_simclr():
    loss = dict(type='SupConLoss', temperature=0.5, base_temperature=0.5)
    views, samples = batch(SupCon)
    unsupervised = build(SupCon, loss=loss, use_labels=False)(views, None, mode='loss')['loss']
    simclr = build(SimCLR)(views, None, mode='loss')['loss']
    assert unsupervised.item() == pytest.approx(simclr.item(), rel=1e-10)


@pytest.mark.parametrize('views', [None, 2])
@pytest.mark.parametrize('use_labels', [True, False])
def test_selfcon_is_its_definition(views, use_labels):
    loss = dict(type='ConLoss', temperature=0.2, base_temperature=0.2)
    model = build(SelfCon, loss=loss, use_labels=use_labels, exits=[0, -1])
    inputs, samples = batch(SelfCon, views)
    actual = model(inputs, samples, mode='loss')['loss']
    outputs, vit = [], model.backbone.model
    for view in [inputs] if views is None else inputs:
        hidden, blocks = vit._pos_embed(vit.patch_embed(view)), []
        for block in vit.blocks:
            hidden = block(hidden)
            blocks.append(hidden)
        outputs.append(model.head(vit(view)))
        for head, tokens in zip(model.sub_heads, blocks, strict=True):
            outputs.append(head(tokens[:, 1:].mean(dim=1)))  # without the class token
    labels = samples['label'].tolist() if use_labels else list(range(B))
    expected = supervised_contrast(torch.cat(outputs), labels * len(outputs), 0.2)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-10)
    assert same_gradient(model, actual, expected)


def test_selfcon_can_train_with_another_loss_and_sub_head():
    model = build(SelfCon, loss='SupConLoss', sub_head=dict(type='ProjectionHead', out_dim=6))
    losses = model(*batch(SelfCon), mode='loss')
    assert losses['loss'].isfinite()
    assert len(model.sub_heads) == 1


@pytest.mark.parametrize(('name', 'exits'), [('resnet18', [2, 1]), ('convnext_atto', [0])])
def test_features_beside_exits_are_the_backbones(name, exits):
    torch.manual_seed(0)
    backbone = TimmBackbone(name, in_chans=1).eval()
    images = torch.randn(2, 1, 32, 32)
    features, early = backbone.with_exits(images, exits)
    assert torch.equal(features, backbone(images))
    assert [stage.shape[1] for stage in early] == backbone.exit_widths(exits)
    module = backbone.model.get_submodule(backbone.model.feature_info[exits[0]]['module'])
    seen = []
    module.register_forward_hook(lambda *args: seen.append(args[2]))
    backbone(images)
    assert torch.allclose(early[0], seen[0].mean(dim=(2, 3)), atol=1e-6)


def test_exits_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match=r'exit 2 is none of the stages .* 0 blocks\.0, 1 blocks'):
        build(SelfCon, exits=[2])
    with pytest.raises(ValueError, match='exits must name'):
        build(SelfCon, exits=[])
    backbone = TimmBackbone('resnet18')
    backbone.model = torch.nn.Identity()  # older versions of timm have models that cannot be left
    with pytest.raises(ValueError, match='Identity has no intermediate features'):
        backbone.exit_widths([0])


def test_frozen_backbone_stays_as_it_is():
    model = build(SimCLR, backbone={**VIT, 'proj_drop_rate': 0.5}, freeze_backbone=True).train()
    views, samples = batch(SimCLR)
    assert torch.equal(model.embed(views), model.embed(views))  # no dropout
    model(views, samples, mode='loss')['loss'].backward()
    assert all(p.grad is None for p in model.backbone.parameters())
    assert all(p.grad.norm() > 0 for p in model.head.parameters())


def test_what_is_evaluated_are_the_backbones_features():
    for kind in (SimCLR, SupCon, SelfCon):
        model = build(kind).eval()
        images = batch(kind)[0][0]
        predicted = torch.stack([p['feature'] for p in model(images, mode='predict')])
        assert torch.equal(predicted, model.backbone(images))


def test_batches_that_do_not_fit_are_refused():
    views, samples = batch(SimCLR, views=3)
    with pytest.raises(ValueError, match='two views of each image, got 3'):
        build(SimCLR)(views, samples, mode='loss')
    with pytest.raises(ValueError, match=r"SupCon needs data_samples\['label'\]"):
        build(SupCon)(views, None, mode='loss')
    with pytest.raises(ValueError, match=r"SelfCon needs data_samples\['label'\]"):
        build(SelfCon)(views, dict(index=samples['index']), mode='loss')
    with pytest.raises(ValueError, match='several views, got 1'):
        build(SupCon, use_labels=False)(views[0], samples, mode='loss')


@pytest.mark.parametrize('algorithm', [SupCon, SelfCon])
def test_images_without_a_label_are_not_one_class(algorithm):
    model, (views, samples) = build(algorithm), batch(algorithm)
    samples['label'][1:3] = -1  # as sources without labels have it
    with pytest.raises(ValueError, match=r'2 of the 5 images .* have no label \(-1\); set use_l'):
        model(views, samples, mode='loss')
    with pytest.raises(ValueError, match='have no label'):
        model.data_preprocessor(dict(inputs=views, data_samples=samples), True)
    assert build(algorithm, use_labels=False)(views, samples, mode='loss')['loss'].isfinite()


def test_projection_head():
    head = ProjectionHead(12, 6, hidden_dim=20, nlayers=3)
    widths = [m.weight.shape for m in head.mlp if isinstance(m, torch.nn.Linear)]
    assert widths == [(20, 12), (20, 20), (6, 20)]
    with_bn = ProjectionHead(12, 6, use_bn=True)
    out = with_bn(torch.randn(64, 12))
    assert out.mean(dim=0).abs().max() < 1e-5
    assert [name for name, _ in with_bn.named_parameters()] == [
        'mlp.0.weight',
        'mlp.1.weight',
        'mlp.1.bias',
        'mlp.3.weight',
    ]
    with pytest.raises(ValueError, match='nlayers'):
        build(SimCLR, head={**HEAD, 'nlayers': 0})
