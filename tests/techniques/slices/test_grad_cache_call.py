"""The calls that people already type: grad-cache-con-learning's and GradCache's."""

from __future__ import annotations

import copy
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memengine import GradCache
from memengine.losses import ClipLoss, ConLoss, NTXentLoss, SupConLoss
from memengine.testing import assert_same_step, relative_error
from tests.techniques.toy import Encoder, SelfConEncoder, gradients

B = 5

# grad-cache-con-learning's README, with the two import lines changed and nothing else. The first
# string is its set-up, the second its plain loop, the third what replaces that loop.
README = {
    'SupCon': (
        """
from memengine import GradCache
from memengine.losses import NTXentLoss, SupConLoss
loss_fn = SupConLoss()
gc = GradCache(
  model=model,
  chunk_sizes=2,
  loss_fn=loss_fn,
  loss_type="SupCon"
)
""",
        """
optimizer.zero_grad()
features = model(images)
f1, f2 = torch.split(features, [batch_size, batch_size], dim=0)
features = torch.cat([f1.unsqueeze(1), f2.unsqueeze(1)], dim=1)
loss = criterion(features, y)
loss.backward()
optimizer.step()
""",
        """
optimizer.zero_grad()
gc(x, y)
optimizer.step()
""",
    ),
    'SimCLR': (
        """
from memengine import GradCache
from memengine.losses import NTXentLoss, SupConLoss
loss_fn = SupConLoss()
gc = GradCache(
  model=model,
  chunk_size=2,
  loss_fn=loss_fn,
  loss_type="SimCLR"
)
""",
        """
optimizer.zero_grad()
features = model(images)
f1, f2 = torch.split(features, [batch_size, batch_size], dim=0)
features = torch.cat([f1.unsqueeze(1), f2.unsqueeze(1)], dim=1)
loss = criterion(features)
loss.backward()
optimizer.step()
""",
        """
optimizer.zero_grad()
gc(images)
optimizer.step()
""",
    ),
    'SelfCon': (
        """
from memengine import GradCache
from memengine.losses import ConLoss
loss_fn = ConLoss()
gc = GradCache(
  model=model,
  chunk_size=2,
  loss_fn=loss_fn,
  loss_type="SelfCon"
)
""",
        """
optimizer.zero_grad()
features = model(images)
f1, f2 = features
features = torch.cat([f.unsqueeze(1) for f in f1] + [f2.unsqueeze(1)], dim=1)
loss = criterion(features, labels)
loss.backward()
optimizer.step()
""",
        """
optimizer.zero_grad()
gc(images, labels)
optimizer.step()
""",
    ),
}


@pytest.mark.parametrize('kind', README)
def test_readme_of_grad_cache_con_learning(kind):
    set_up, plain_loop, cached_loop = README[kind]
    torch.manual_seed(0)
    model = (SelfConEncoder() if kind == 'SelfCon' else Encoder()).double()
    images = torch.randn(B if kind == 'SelfCon' else 2 * B, 12, dtype=torch.float64)
    labels = torch.tensor([0, 1, 0, 2, 1])

    def run(model, *sources):
        scope = {
            'torch': torch,
            'model': model,
            'images': images,
            'x': images,
            'labels': labels,
            'y': labels,
            'batch_size': B,
            'criterion': ConLoss() if kind == 'SelfCon' else SupConLoss(),
            'optimizer': torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        }
        for source in sources:
            exec(source, scope)

    expected = copy.deepcopy(model)
    run(expected, *[plain_loop] * 5)
    run(model, set_up, *[cached_loop] * 5)
    assert_same_step(gradients(model), gradients(expected))
    assert_same_step(model.state_dict(), expected.state_dict())


def test_returns_the_detached_loss_and_passes_loss_arguments_on():
    model, x = SelfConEncoder(), torch.randn(6, 12)
    gc = GradCache(model=model, chunk_size=4, loss_fn=ConLoss(), loss_type='SelfCon')
    loss = gc.cache_step(x, torch.tensor([0, 1, 0, 2, 1, 3]), selfcon_s_FG=True)
    exits, own = model(x)
    features = torch.stack([*exits, own], dim=1)
    want = ConLoss()(features, torch.tensor([0, 1, 0, 2, 1, 3]), selfcon_s_FG=True)
    assert not loss.requires_grad
    assert relative_error(loss, want) < 1e-6
    assert gc(x, labels=None).item() == pytest.approx(ConLoss()(features).item(), rel=1e-5)


def test_without_labels_a_loss_need_not_take_them():
    def loss(features):
        return features.prod(dim=1).sum().square()

    model, x = Encoder(), torch.randn(8, 12)
    gc = GradCache(model=model, chunk_size=3, loss_fn=loss, loss_type='SimCLR')
    first, second = model(x).chunk(2)
    assert relative_error(gc(x), (first * second).sum().square()) < 1e-5


def test_supcon_takes_a_mask_for_labels():
    model, x = Encoder(), torch.randn(8, 12)
    gc = GradCache(model=model, chunk_size=3, loss_fn=SupConLoss())
    loss = gc(x, mask=torch.eye(4))
    assert loss.item() == pytest.approx(
        GradCache(model=model, chunk_size=8, loss_fn=SupConLoss(), loss_type='SimCLR')(x).item()
    )


class HubEncoder(nn.Module):
    """A Transformers model as far as the call goes."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()

    def forward(self, input_ids, attention_mask):
        x = F.one_hot(input_ids, 12).to(self.encoder.head.weight) * attention_mask[..., None]
        return SimpleNamespace(pooler_output=self.encoder(x.sum(1)))


def contrastive(x, y, reduction='mean'):
    scores = 10 * x @ y.T
    return F.cross_entropy(scores, torch.arange(len(x)), reduction=reduction)


def tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    return UserDict(
        input_ids=torch.randint(12, (7, 4), generator=generator),
        attention_mask=torch.randint(2, (7, 4), generator=generator),
    )


@pytest.mark.parametrize('tied', [False, True])
def test_readme_of_grad_cache(tied):
    torch.manual_seed(0)
    encoder1 = HubEncoder().double()
    encoder2 = encoder1 if tied else HubEncoder().double()
    plain1, plain2 = copy.deepcopy((encoder1, encoder2))
    xx, yy = tokens(1), tokens(2)
    gc = GradCache(
        models=[encoder1, encoder2],
        chunk_sizes=2,
        loss_fn=contrastive,
        get_rep_fn=lambda v: v.pooler_output,
    )
    loss = gc(xx, yy, reduction='mean')
    want = contrastive(plain1(**xx).pooler_output, plain2(**yy).pooler_output)
    want.backward()
    assert relative_error(loss, want) < 1e-12
    assert_same_step(gradients(encoder1, encoder2), gradients(plain1, plain2))
    assert relative_error(gc(xx, yy, reduction='sum'), 7 * want) < 1e-12


def test_all_kinds_of_input_of_grad_cache():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 4)

        def forward(self, a, b, scale=None):
            return self.linear(a + b) * (1 if scale is None else scale[:, None])

    a, b, scale = torch.randn(6, 12), torch.randn(6, 12), torch.rand(6)
    model, other = Both(), nn.Linear(12, 4)

    def loss(first, second=a):
        return GradCache(models=[model, other], chunk_sizes=[4, 5], loss_fn=contrastive)(
            first, second
        )

    with torch.no_grad():
        unscaled = contrastive(model(a, b), other(a))
        scaled = contrastive(model(a, b, scale), other(a))
    torch.testing.assert_close(loss([a, b]), unscaled)
    torch.testing.assert_close(loss({'a': a, 'b': b}), unscaled)
    torch.testing.assert_close(loss({'a': a, 'b': b, 'scale': None}), unscaled)
    torch.testing.assert_close(loss(([a, b], {'scale': scale})), scaled)


def test_inputs_that_only_the_user_can_split():
    words = ['a', 'bb', 'cccc', 'dd', 'a', 'cc']

    class Texts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 4)

        def forward(self, *words):
            return self.linear(torch.tensor([[float(len(word))] for word in words]))

    texts, images = Texts(), nn.Linear(12, 4)
    arguments = {'models': [texts, images], 'chunk_sizes': 4, 'loss_fn': contrastive}
    x = torch.randn(6, 12)
    with pytest.raises(TypeError, match=r'a str in the batch .*\(split_input_fn'):
        GradCache(**arguments)(words, x)

    def split(inputs, size):
        return [inputs[i : i + size] for i in range(0, len(inputs), size)]

    loss = GradCache(**arguments, split_input_fn=split)(words, x)
    torch.testing.assert_close(loss, contrastive(texts(*words), images(x)).detach())
    assert texts.linear.weight.grad.abs().sum() > 0


def test_fp16_scales_the_loss_with_the_callers_scaler():
    torch.manual_seed(0)
    encoders = [nn.Linear(12, 4), nn.Linear(12, 4)]
    expected = copy.deepcopy(encoders)
    x, y = torch.randn(6, 12), torch.randn(6, 12)
    scaler = torch.amp.GradScaler('cpu', init_scale=512.0)
    optimizer = torch.optim.SGD([p for e in encoders for p in e.parameters()], lr=0.1)
    gc = GradCache(
        models=encoders, chunk_sizes=2, loss_fn=ClipLossAtTen(), fp16=True, scaler=scaler
    )
    loss = gc(x, y)
    ClipLossAtTen()(expected[0](x), expected[1](y)).backward()
    raw = encoders[0].weight.grad.clone()
    scaler.unscale_(optimizer)
    assert relative_error(raw, 512 * expected[0].weight.grad) < 0.01
    assert relative_error(raw, expected[0].weight.grad) > 1
    for actual, want in zip(encoders, expected, strict=True):
        assert relative_error(actual.weight.grad, want.weight.grad) < 0.01
    assert loss.item() < 20  # not scaled


def test_fp16_with_a_model_without_parameters():
    encoder, x = nn.Linear(12, 12), torch.randn(6, 12)
    types = []
    encoder.register_forward_hook(lambda *call: types.append(call[2].dtype))
    scaler = torch.amp.GradScaler('cpu', init_scale=2.0)
    arguments = {'chunk_sizes': 4, 'loss_fn': contrastive, 'fp16': True, 'scaler': scaler}
    GradCache(models=[nn.Identity(), encoder], **arguments)(x, x)
    assert set(types) == {torch.float16}
    assert encoder.weight.grad.abs().sum() > 0


def test_scripts_may_pass_a_disabled_scaler():
    scaler = torch.amp.GradScaler('cpu', enabled=False)
    arguments = {'chunk_size': 2, 'loss_fn': SupConLoss(), 'loss_type': 'SimCLR'}
    gc = GradCache(model=Encoder(), **arguments, fp16=False, scaler=scaler)
    assert gc(torch.randn(8, 12)).item() > 0


class ClipLossAtTen(ClipLoss):
    def forward(self, x, y):
        assert x.dtype in (torch.float16, torch.float32)
        return super().forward(F.normalize(x), F.normalize(y), 10.0)


def test_knobs_reach_the_step():
    model, x = Encoder(), torch.randn(16, 12)
    arguments = {'model': model, 'chunk_size': 2, 'loss_fn': SupConLoss(), 'loss_type': 'SimCLR'}
    GradCache(**arguments, keep_graph=3, forward_chunk_size=4)(x)
    assert model.calls == 3 + 3 + 5  # 5 of 8 slices in twos, 3 kept, 5 repeated


class CanWait(Encoder):
    """As DDP: counts forwards outside ``no_sync``."""

    def __init__(self):
        super().__init__()
        self.waiting, self.synced = False, 0

    def no_sync(self):
        from contextlib import contextmanager

        @contextmanager
        def context():
            self.waiting = True
            yield
            self.waiting = False

        return context()

    def forward(self, x):
        self.synced += torch.is_grad_enabled() and not self.waiting
        return super().forward(x)


@pytest.mark.parametrize('keep_graph', [0, 2, 4])
def test_synchronises_in_the_last_backward_only(keep_graph):
    model, x = CanWait(), torch.randn(8, 12)
    backwards = []
    model.head.bias.register_hook(lambda _: backwards.append(model.waiting))
    gc = GradCache(
        model=model,
        chunk_size=2,
        loss_fn=SupConLoss(),
        loss_type='SimCLR',
        keep_graph=keep_graph,
    )
    gc(x, no_sync_except_last=True)
    assert (model.synced, model.waiting) == (1, False)
    passes = {0: 4, 2: 3, 4: 1}[keep_graph]  # of kept graphs together, of others one by one
    assert backwards == [True] * (passes - 1) + [False]


def test_what_a_trainer_has_wrapped_synchronises_in_the_last_backward_only():
    around, waiting = CanWait(), []

    def backward(loss):
        waiting.append(around.waiting)
        loss.backward()

    gc = GradCache(Encoder(), 2, SupConLoss(), 'SimCLR', backward=backward, within=around)
    gc(torch.randn(8, 12))
    assert waiting == [True] * 4 + [False]  # the loss's, and those of four chunks


MODEL, LOSS = Encoder(), SupConLoss()


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'chunk_size': 2, 'loss_fn': LOSS}, TypeError, 'either model= .* or models='),
        ({'model': MODEL, 'models': [MODEL], 'chunk_size': 2}, TypeError, 'either model='),
        ({'model': MODEL, 'loss_fn': LOSS}, TypeError, 'chunk_size= or chunk_sizes='),
        ({'model': MODEL, 'chunk_size': 2}, TypeError, 'loss_fn is missing'),
        (
            {'model': MODEL, 'chunk_size': 0, 'loss_fn': LOSS},
            ValueError,
            'number of samples, at least 1.*got 0',
        ),
        *[
            ({'model': MODEL, 'chunk_size': size, 'loss_fn': LOSS}, ValueError, f'got {size!r}')
            for size in ('2', 2.5, True)
        ],
        (
            {'models': MODEL, 'chunk_sizes': 2, 'loss_fn': LOSS},
            TypeError,
            'models= is a list of encoders',
        ),
        ({'model': MODEL, 'chunk_size': -3, 'loss_fn': LOSS}, ValueError, 'got -3'),
        (
            {'models': [MODEL, MODEL], 'chunk_sizes': [2], 'loss_fn': LOSS},
            ValueError,
            '1 chunk sizes for 2 models',
        ),
        (
            {'model': MODEL, 'chunk_size': 2, 'loss_fn': LOSS, 'loss_type': 'SimClr'},
            ValueError,
            "got 'SimClr'; did you mean 'SimCLR'",
        ),
        (
            {'models': [MODEL], 'chunk_size': 2, 'loss_fn': LOSS, 'loss_type': 'SimCLR'},
            TypeError,
            'loss_type is for model=',
        ),
        (
            {'model': MODEL, 'chunk_size': 2, 'loss_fn': LOSS, 'fp16': True},
            ValueError,
            'fp16=True needs a scaler=',
        ),
        (
            {
                'model': MODEL,
                'chunk_size': 2,
                'loss_fn': LOSS,
                'scaler': torch.amp.GradScaler('cpu'),
            },
            ValueError,
            'scaler= would not be used',
        ),
        (
            {'model': MODEL, 'chunk_size': 4, 'loss_fn': LOSS, 'forward_chunk_size': 6},
            ValueError,
            'multiple of chunk_size=4, got 6',
        ),
    ],
)
def test_errors_of_the_constructor(arguments, error, message):
    with pytest.raises(error, match=message):
        GradCache(**arguments)


@pytest.mark.parametrize(
    ('arguments', 'call', 'error', 'message'),
    [
        (
            {'model': MODEL, 'loss_type': 'SimCLR'},
            lambda gc: gc(torch.randn(4, 12), torch.arange(2)),
            ValueError,
            "takes no labels; use 'SupCon'",
        ),
        ({'model': MODEL}, lambda gc: gc(torch.randn(4, 12)), ValueError, 'needs labels'),
        (
            {'model': MODEL, 'loss_type': 'SimCLR', 'keep_graph': 'auto'},
            lambda gc: gc(torch.randn(4, 12)),
            ValueError,
            "keep_graph must be a number of slices, got 'auto'",
        ),
        (
            {'model': MODEL},
            lambda gc: gc(torch.randn(5, 12), torch.arange(2)),
            ValueError,
            r'\[2B, D\] of cat\(\[view1, view2\]\), got \(5, 6\)',
        ),
        (
            {'model': MODEL},
            lambda gc: gc(torch.randn(4, 12), torch.arange(4)),
            ValueError,
            r'labels must be one per sample, \[2\]',
        ),
        (
            {'model': MODEL, 'loss_type': 'SelfCon'},
            lambda gc: gc(torch.randn(4, 12)),
            ValueError,
            r'must return \(list of sub-network features, features\)',
        ),
        (
            {'models': [MODEL, MODEL]},
            lambda gc: gc(torch.randn(4, 12)),
            TypeError,
            'one input for each of 2 models, got 1',
        ),
        (
            {'model': MODEL, 'loss_type': 'SimCLR'},
            lambda gc: gc(torch.randn(4, 12), no_sync_except_last=True),
            ValueError,
            'no_sync_except_last=True needs models wrapped .* got Encoder',
        ),
        (
            {'model': MODEL, 'loss_type': 'SimCLR'},
            lambda gc: gc({'flag': True}),
            ValueError,
            'the batch holds no tensor',
        ),
        (
            {'model': MODEL, 'loss_type': 'SimCLR'},
            lambda gc: gc([torch.randn(4, 12), torch.randn(3, 12)]),
            ValueError,
            'same samples in dimension 0',
        ),
        (
            {'model': MODEL, 'loss_type': 'SimCLR', 'loss_fn': NTXentLoss()},
            lambda gc: gc(torch.randn(4, 12)),
            TypeError,
            r'features \[B, V, D\], which NTXentLoss does not take .*view2.*features.unbind\(1\)',
        ),
        (
            {'model': MODEL, 'loss_fn': NTXentLoss()},
            lambda gc: gc(torch.randn(4, 12), torch.arange(2), weight=1),
            TypeError,
            r'features \[B, V, D\] and labels, which NTXentLoss does not take .*weight',
        ),
    ],
)
def test_errors_of_the_call(arguments, call, error, message):
    with pytest.raises(error, match=message):
        call(GradCache(**{'chunk_size': 2, 'loss_fn': LOSS, **arguments}))


def test_somebody_elses_backward_is_called_for_each_chunk():
    encoder, x = Encoder().double(), torch.randn(8, 12, dtype=torch.float64)
    called = []

    def manual_backward(loss):
        called.append(loss.ndim)
        (2 * loss).backward()  # as one that scales

    def gradient(**settings):
        encoder.zero_grad()
        GradCache(encoder, 2, SupConLoss(), 'SimCLR', **settings)(x)
        return {name: p.grad.clone() for name, p in encoder.named_parameters()}

    expected = gradient()
    doubled = gradient(backward=manual_backward)
    assert called == [0] * 5, 'the loss, and each of four chunks'
    assert_same_step(doubled, {name: 2 * value for name, value in expected.items()})


def test_a_backward_that_scales_goes_without_scaler():
    with pytest.raises(ValueError, match='backward= scales the loss by itself; leave out scaler='):
        GradCache(
            Encoder(),
            2,
            SupConLoss(),
            fp16=True,
            scaler=torch.amp.GradScaler('cpu'),
            backward=torch.Tensor.backward,
        )


def test_several_ranks_without_ddp_are_refused_unless_backward_is_given(monkeypatch):
    monkeypatch.setattr('torch.distributed.is_initialized', lambda: True)
    monkeypatch.setattr('torch.distributed.get_world_size', lambda *group: 2)
    x = torch.randn(8, 12)
    with pytest.raises(ValueError, match="Encoder is on several ranks.*Lightning's self.manual"):
        GradCache(Encoder(), 2, SupConLoss(), 'SimCLR')(x)
    GradCache(Encoder(), 2, SupConLoss(), 'SimCLR', backward=torch.Tensor.backward)(x)
    GradCache(CanWait(), 2, SupConLoss(), 'SimCLR')(x)
