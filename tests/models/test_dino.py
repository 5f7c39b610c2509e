"""DINO as a whole against its definition, written here once more as a plain loop."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memengine.engine.optim import OptimWrapper
from memengine.engine.step import Progress, run_step
from memengine.models import DINO, DINOHead, TimmBackbone
from memengine.models.algorithms.base import feature_rank, rows_of
from memengine.models.algorithms.dino import TeacherTargets
from memengine.testing import assert_same_step

B, K = 3, 11


def config(**kwargs):
    options = dict(
        backbone=dict(
            type='TimmBackbone',
            model_name='vit_tiny_patch16_224',
            img_size=16,
            patch_size=8,
            embed_dim=12,
            depth=2,
            num_heads=2,
            dynamic_img_size=True,
        ),
        head=dict(
            type='DINOHead', out_dim=K, hidden_dim=8, bottleneck_dim=6, norm_last_layer=False
        ),
        local_crops=3,
        warmup_teacher_temp=0.04,
        teacher_temp=0.07,
        warmup_teacher_temp_epochs=2,
        freeze_last_layer=1,
    )
    options['backbone'].update(kwargs.pop('backbone', {}))
    options['head'].update(kwargs.pop('head', {}))
    return {**options, **kwargs}


def build(**kwargs):
    torch.manual_seed(0)
    return DINO(**config(**kwargs)).double()


def crops(seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = [16, 16, 8, 8, 8]
    return [torch.randn(B, 3, s, s, dtype=torch.float64, generator=generator) for s in sizes]


def definition_step(model, center, images, teacher_temp, momentum, optimizer, frozen):
    """One step as the paper writes it: crop by crop, view by view."""
    with torch.no_grad():
        teacher = [model.teacher.head(model.teacher.backbone(x)) for x in images[:2]]
    student = [model.student.head(model.student.backbone(x)) for x in images]
    terms = [
        -(F.softmax((t - center) / teacher_temp, -1) * F.log_softmax(s / 0.1, -1)).sum(-1).mean()
        for i, t in enumerate(teacher)
        for j, s in enumerate(student)
        if i != j
    ]
    loss = torch.stack(terms).mean()
    optimizer.zero_grad()
    loss.backward()
    if frozen:
        for parameter in model.student.head.last_layer.parameters():
            parameter.grad = None
    optimizer.step()
    with torch.no_grad():
        for t, s in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            t.mul_(momentum).add_(s, alpha=1 - momentum)
        center = 0.9 * center + 0.1 * torch.cat(teacher).mean(0)
    return loss, center


def test_six_steps_follow_the_definition():
    ours, plain = build(), build()
    optimizer = torch.optim.AdamW(ours.student.parameters(), lr=0.01, weight_decay=0.1)
    optimizer.register_step_pre_hook(lambda *_: ours.before_update())
    optimizer.register_step_post_hook(lambda *_: ours.after_update())
    wrapper = OptimWrapper(optimizer)
    reference = torch.optim.AdamW(plain.student.parameters(), lr=0.01, weight_decay=0.1)
    center = torch.zeros(K, dtype=torch.float64)
    for step in range(6):
        epoch = step // 2
        ours.set_progress(Progress(iter=step, max_iters=6, epoch=epoch, max_epochs=3))
        log_vars = run_step(ours, dict(inputs=crops(step), data_samples=None), wrapper)
        momentum = 1 + (0.996 - 1) * (1 + math.cos(math.pi * step / 6)) / 2
        temp = [0.04, 0.07, 0.07][epoch]
        loss, center = definition_step(
            plain, center, crops(step), temp, momentum, reference, epoch < 1
        )
        assert_same_step({'loss': log_vars['loss']}, {'loss': loss}, tolerance=1e-10)
        assert log_vars['ema_momentum'].item() == pytest.approx(momentum)
        assert log_vars['teacher_temp'].item() == pytest.approx(temp)
        for name, expected in plain.named_parameters():
            # timm resamples position embeddings in fp32
            tolerance = 1e-7 if name.endswith('pos_embed') else 1e-9
            assert_same_step({name: ours.get_parameter(name)}, {name: expected}, tolerance)
        assert_same_step({'c': ours.loss.center[0]}, {'c': center}, tolerance=1e-10)


@pytest.mark.parametrize('size', [1, 2, 3, 8, 100])
def test_slices_hold_every_crop_once_and_their_losses_are_the_batchs(size):
    model, images = build(), crops()
    model.loss.center.normal_()
    targets = model.targets(images)
    slices = model.slices(images, None, size)
    seen = [(c, s) for piece in slices for c in piece.rows.crops for s in piece.rows.samples]
    assert sorted(seen) == [(c, s) for c in range(5) for s in range(B)]
    assert all(len(rows_of(piece.inputs)) <= 4 * size for piece in slices)
    whole = model.embedding_loss(model.embed(images), targets)
    parts = [
        model.slice_loss(model(piece.inputs, piece.data_samples), targets, piece)
        for piece in slices
    ]
    sums = {name: sum(part[name] for part in parts) for name in parts[0]}
    assert_same_step(model.batch_losses(sums, targets), whole)
    sums['loss'].backward()
    sliced = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    whole['loss'].backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    pos_embed = 'student.backbone.model.pos_embed'  # timm resamples it in fp32
    tolerance = {pos_embed: 1e-7}
    for name in expected:
        assert_same_step({name: sliced[name]}, {name: expected[name]}, tolerance.get(name, 1e-9))


def test_crops_of_one_size_go_through_together():
    model, calls = build(), []
    model.student.backbone.register_forward_hook(
        lambda *args: calls.append(tuple(args[1][0].shape))
    )
    model(crops(), mode='loss')
    assert calls == [(2 * B, 3, 16, 16), (3 * B, 3, 8, 8)]


def test_teacher_starts_as_the_student_and_is_never_trained():
    model = build(backbone=dict(drop_path_rate=0.5))
    student, teacher = model.student.state_dict(), model.teacher.state_dict()
    assert student.keys() == teacher.keys()
    assert all(torch.equal(student[key], teacher[key]) for key in student)
    assert not any(p.requires_grad for p in model.teacher.parameters())
    losses = model(crops(), mode='loss')
    losses['loss'].backward()
    assert all(p.grad is None for p in model.teacher.parameters())
    assert all(p.grad is not None for p in model.student.parameters())


def test_drop_path_is_the_students_only():
    model = build(backbone=dict(drop_path_rate=0.9, depth=4)).train()
    teacher = [model.teacher(crops()[:2])[1] for _ in range(2)]
    student = [model.student(crops()[:2])[1] for _ in range(2)]
    assert torch.equal(*teacher)
    assert not torch.equal(*student)


def test_head_normalises_its_prototypes():
    head = DINOHead(12, K, hidden_dim=8, bottleneck_dim=6).double()
    out = head(torch.randn(50, 12, dtype=torch.float64) * 100)
    assert out.abs().max() <= 1  # cosines
    trained = [name for name, p in head.last_layer.named_parameters() if p.requires_grad]
    assert trained == ['weight_v']
    free = DINOHead(12, K, norm_last_layer=False)
    assert all(p.requires_grad for p in free.last_layer.parameters())


def test_logged_figures_tell_collapse_from_health():
    model = build()
    healthy = model.embedding_loss(
        (torch.randn(5 * B, 400), torch.randn(5 * B, K)),
        TeacherTargets(torch.full((2, B, K), 1 / K), torch.tensor(7.0)),
    )
    assert healthy['teacher_entropy'].item() == pytest.approx(math.log(K), rel=1e-5)
    assert healthy['teacher_sample_entropy'].item() == pytest.approx(math.log(K), rel=1e-5)
    assert 0.8 < healthy['feature_std'].item() < 1.1
    one_hot = F.one_hot(torch.zeros(2, B, dtype=torch.long), K).float()
    collapsed = model.embedding_loss(
        (torch.ones(5 * B, 400), torch.zeros(5 * B, K)),
        TeacherTargets(one_hot, torch.tensor(0.0)),
    )
    assert collapsed['teacher_entropy'].item() == pytest.approx(0)
    assert collapsed['teacher_sample_entropy'].item() == pytest.approx(0)
    assert collapsed['feature_std'].item() == pytest.approx(0, abs=1e-6)


def test_the_rank_is_of_the_teachers_features_of_the_global_crops():
    model, views = build(), crops()
    features = torch.cat([model.teacher.backbone(view) for view in views[:2]])
    logged = model(views, mode='loss')['feature_rank']
    assert logged.item() == pytest.approx(feature_rank(features).item())


def test_predict_gives_the_teachers_features():
    model = build().eval()
    images = crops()[0]
    predictions = model(images, mode='predict')
    expected = model.teacher.backbone(images)
    assert torch.equal(torch.stack([p['feature'] for p in predictions]), expected)
    with pytest.raises(ValueError, match='mode'):
        model(images, mode='lose')


@pytest.mark.parametrize(
    ('settings', 'named'),
    [
        (dict(local_crops=-1), 'local_crops'),
        (dict(momentum_teacher=1.1), 'momentum_teacher'),
        (dict(teacher_temp=0), 'teacher_temp'),
        (dict(head=dict(nlayers=0)), 'nlayers'),
    ],
)
def test_bad_settings_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        build(**settings)


@pytest.mark.parametrize('images', [crops()[:4], crops()[0]])
def test_a_batch_with_other_crops_is_refused(images):
    with pytest.raises(ValueError, match=r'model\.local_crops=3'):
        build()(images, mode='loss')


def test_any_timm_backbone_and_its_errors():
    backbone = TimmBackbone('resnet18', in_chans=1)
    assert backbone(torch.randn(2, 1, 32, 32)).shape == (2, backbone.num_features) == (2, 512)
    with pytest.raises(ValueError, match="did you mean 'vit_small_patch16_224'"):
        TimmBackbone('vit_smal_patch16_224')
    with pytest.raises(ValueError, match='patch_sise'):
        TimmBackbone('vit_tiny_patch16_224', patch_sise=8)


def test_official_weights_load_into_the_head():
    """The original script's checkpoints call the prototypes weight_g and weight_v."""
    head = DINOHead(12, K, hidden_dim=8, bottleneck_dim=6)
    oracle = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, K, bias=False))
    official = {
        **{
            key: torch.randn_like(value)
            for key, value in head.mlp.state_dict(prefix='mlp.').items()
        },
        'last_layer.weight_g': torch.ones(K, 1),
        'last_layer.weight_v': torch.randn(K, 6),
    }
    head.load_state_dict(official)
    oracle.load_state_dict(
        {key.removeprefix('last_layer.'): official[key] for key in official if 'last' in key}
    )
    features = torch.randn(5, 12)
    bottleneck = torch.nn.functional.normalize(head.mlp(features), dim=-1)
    torch.testing.assert_close(head(features), oracle(bottleneck))


def test_a_seed_gives_the_head_that_dinos_script_draws():
    """Layers, their truncated normals, then the prototypes: runs of one seed stay comparable."""
    torch.manual_seed(3)
    head = DINOHead(12, K, hidden_dim=8, bottleneck_dim=6)
    torch.manual_seed(3)
    layers = [nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 6)]
    for layer in layers:
        nn.init.trunc_normal_(layer.weight, std=0.02)
    prototypes = nn.Linear(6, K, bias=False)
    drawn = [layer.weight for layer in head.mlp if isinstance(layer, nn.Linear)]
    drawn.append(head.last_layer.weight_v)
    assert all(torch.equal(a, b.weight) for a, b in zip(drawn, [*layers, prototypes], strict=True))
