"""Recomputed activations: the plain step bit for bit, fewer bytes, no product more."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from memengine.memory import SavedBytes
from memengine.techniques.activation_checkpointing.checkpoint_activations import (
    checkpoint_activations,
)
from memengine.techniques.activation_offload import offload_activations
from memengine.techniques.compression.quantized_activations import quantize_activations
from memengine.techniques.compression.recomputed_activations import recompute_activations
from memengine.techniques.compression.rule_handle import rules_of
from memengine.testing import relative_error, saved_bytes


class Gate(nn.Module):
    """Squeeze and excitation: a product of two results."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 16)

    def forward(self, x):
        return x * self.gate(x).sigmoid()


class Attend(nn.Module):
    """Attention written out, with dropout of its probabilities."""

    def forward(self, x):
        probabilities = F.dropout(F.softmax(x @ x.transpose(-1, -2), -1), 0.3, self.training)
        return probabilities @ x


class NativeDropout(nn.Module):
    """As on a GPU: a mask instead of noise."""

    def forward(self, x):
        return torch.native_dropout(x, 0.4, True)[0]


class Residual(nn.Module):
    """A residual branch of BatchNorm, and ReLU after the sum."""

    def __init__(self, inplace=False):
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(6)
        self.relu = nn.ReLU(inplace)

    def forward(self, x):
        return self.relu(self.norm(self.layer(x)) + x)


OPERATIONS = {
    'gelu': nn.GELU,
    'gelu by tanh': lambda: nn.GELU('tanh'),
    'silu': nn.SiLU,
    'mish': nn.Mish,
    'hardswish': nn.Hardswish,
    'softplus': lambda: nn.Softplus(beta=2, threshold=5),
    'layer norm': lambda: nn.LayerNorm(16, eps=1e-3),
    'layer norm without bias': lambda: nn.LayerNorm(16, bias=False),
    'layer norm without weights': lambda: nn.LayerNorm(16, elementwise_affine=False),
    'rms norm': lambda: nn.RMSNorm(16),
    'group norm': lambda: nn.GroupNorm(2, 6),
    'batch norm': lambda: nn.BatchNorm1d(6),
    'batch norm in eval mode': lambda: nn.BatchNorm1d(6).eval(),
    'batch norm without statistics': lambda: nn.BatchNorm1d(6, track_running_stats=False),
    'batch norm, relu': lambda: nn.Sequential(nn.BatchNorm1d(6), nn.ReLU()),
    'batch norm, relu in place': lambda: nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(inplace=True)),
    'batch norm, silu in place': lambda: nn.Sequential(nn.BatchNorm1d(6), nn.SiLU(inplace=True)),
    'gelu, dropout': lambda: nn.Sequential(nn.GELU(), nn.Dropout(0.3)),
    'layer norm, masked dropout': lambda: nn.Sequential(nn.LayerNorm(16), NativeDropout()),
    'layer norm, a factor': lambda: nn.Sequential(nn.LayerNorm(16), Gate()),
    'attention': Attend,
    'residual sum': lambda: nn.Sequential(nn.ReLU(), Residual()),
    'residual sum, in place': lambda: nn.Sequential(nn.ReLU(), Residual(inplace=True)),
}


def network(operation, dtype=torch.float64):
    """A layer, the operation, a layer; the first makes the operation's input one to be kept."""
    torch.manual_seed(0)
    parts = nn.Linear(16, 16), OPERATIONS[operation](), nn.Linear(16, 16)
    return nn.Sequential(*parts).to(dtype), torch.randn(5, 6, 16, dtype=dtype)


def step(model, x, amp=False):
    """Output, gradients and state of a step in which no two elements weigh alike."""
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
        output = model(x)
    weights = torch.linspace(0.5, 2, output.numel(), dtype=output.dtype, device=x.device)
    (output * weights.view_as(output)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    buffers = {f'buffer {name}': b.clone() for name, b in model.named_buffers()}
    return {
        'output': output.detach(),
        **gradients,
        **buffers,
        'next random': torch.rand(3, device=x.device),
    }


def assert_bitwise(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize('amp', [False, True], ids=['', 'bf16'])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=['float64', 'float32'])
@pytest.mark.parametrize('operation', OPERATIONS)
def test_a_step_is_the_plain_one_bit_for_bit(operation, dtype, amp):
    model, x = network(operation, dtype)
    same, _ = network(operation, dtype)
    with recompute_activations(model) as handle:
        for _ in range(3):  # two compare what they compute again, the third follows their plan
            assert_bitwise(step(model, x, amp), step(same, x, amp))
    # On CPU masked dropout rounds to bf16 twice, which cannot be repeated; so its result is kept.
    is_kept = amp and dtype == torch.float32 and operation == 'layer norm, masked dropout'
    assert (handle.kept.before > handle.kept.after) != is_kept


@pytest.mark.gpu
@pytest.mark.parametrize('amp', [False, True], ids=['', 'bf16'])
@pytest.mark.parametrize('operation', OPERATIONS)
def test_on_a_gpu_it_is_the_plain_one_too(operation, amp):
    model, x = network(operation, torch.float32)
    model, x = model.cuda(), x.cuda()
    same = copy.deepcopy(model)
    with recompute_activations(model) as handle:
        for _ in range(3):
            assert_bitwise(step(model, x, amp), step(same, x, amp))
    assert handle.kept.before > handle.kept.after


@pytest.mark.parametrize('operation', OPERATIONS)
def test_less_is_kept_and_no_product_computed_again(operation):
    model, x = network(operation)

    def flops():
        with FlopCounterMode(display=False) as counter:
            step(model, x)
        return counter.get_total_flops()

    plain, plain_flops = saved_bytes(lambda: model(x), model, x), flops()
    recompute_activations(model)
    assert saved_bytes(lambda: model(x), model, x) < plain
    assert flops() == plain_flops


class Block(nn.Module):
    """A transformer's."""

    def __init__(self, width=32):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def test_of_a_vision_transformer_just_the_results_of_norms_and_gelu_are_not_kept():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    plain = saved_bytes(lambda: model(x), model)
    handle = recompute_activations(model)
    tokens = x.nbytes
    assert plain - saved_bytes(lambda: model(x), model) == 2 * (1 + 1 + 4) * tokens
    assert {need for _, need in handle.kept.places} == {'linear'}
    assert handle.kept.after == 0


def test_a_result_that_several_layers_need_and_one_that_backward_needs_whole():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(16)
            self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
            self.power = False

        def forward(self, x):
            x = self.norm(x)
            y = self.one(x) + self.two(x)
            return y + x.pow(3) if self.power else y

    model, x = Branches().double(), torch.randn(4, 16, dtype=torch.float64)
    plain = saved_bytes(lambda: model(x), model)
    with recompute_activations(model):
        assert plain - saved_bytes(lambda: model(x), model) == x.nbytes
    model.power = True
    plain = saved_bytes(lambda: model(x), model)
    with recompute_activations(model):
        assert saved_bytes(lambda: model(x), model) == plain


def test_the_graph_may_be_used_twice_and_differentiated():
    model, x = network('gelu, dropout')

    def gradients():
        torch.manual_seed(1)
        output = model(x).square().sum()
        weights = list(model.parameters())
        first = torch.autograd.grad(output, weights, create_graph=True)
        second = torch.autograd.grad(output, weights, retain_graph=True)
        of_first = torch.autograd.grad(sum(g.square().sum() for g in first), weights)
        return [*first, *second, *of_first]

    expected = gradients()
    recompute_activations(model)
    assert all(map(torch.equal, gradients(), expected))


def test_of_residual_sums_every_second_is_computed_again():
    """From the one before, which is kept: chains do not grow with depth."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), *(Residual() for _ in range(5))).double()
    x = torch.randn(5, 6, 16, dtype=torch.float64)
    plain = saved_bytes(lambda: model(x), model)
    handle = recompute_activations(model)
    less = plain - saved_bytes(lambda: model(x), model)
    again = {place for place, _ in handle.kept.places}
    assert again == {'3.layer', '5.layer'}  # what blocks 2 and 4 gave; no layer takes what 6 gave
    bits = x.numel() // 8  # where ReLU was positive: all that is kept of the three
    assert less == 3 * (x.nbytes - bits)


class Edited(nn.Module):
    """Changes a result behind autograd's back, from some forward on."""

    def __init__(self, begin=0, data=False):
        super().__init__()
        self.begin, self.data, self.calls = begin, data, 0

    def forward(self, x):
        x = F.gelu(x)
        self.calls += 1
        if self.calls > self.begin:
            with torch.no_grad():
                (x.data if self.data else x).mul_(2)
        return x


class OtherEpsilon(nn.LayerNorm):
    """A module whose setting is not what it uses."""

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 0.1)


class InFunction(nn.Module):
    """A norm that is in no module of norms: its epsilon is not to be had."""

    def forward(self, x):
        return F.layer_norm(x, (16,), eps=0.1)


class Scaled(nn.LayerNorm):
    """Uses its weight with a factor that is one at first."""

    def __init__(self):
        super().__init__(16)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight * self.gain, self.bias)


class PerDomain(nn.BatchNorm1d):
    """Has its own weight and bias, and uses others."""

    def __init__(self):
        super().__init__(6)
        self.others = nn.ParameterList([torch.ones(6), torch.zeros(6)])

    def forward(self, x):
        return F.batch_norm(x, None, None, *self.others, True, 0.1, self.eps)


class OwnFunction(torch.autograd.Function):
    """Somebody's function of the name of an operation."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Mimic(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.norm, self.function = nn.BatchNorm1d(6), type(name, (OwnFunction,), {})

    def forward(self, x):
        return self.function.apply(self.norm(x))


class ToChannelsLast(nn.Module):
    """A cast that lays its result out otherwise, which at height 1 is the same."""

    def forward(self, x):
        x = F.gelu(x).unflatten(-1, (2, 8))
        return x.to(torch.float32, memory_format=torch.channels_last).flatten(2).to(torch.float64)


class Scalars(nn.Module):
    """Operations that have another form, with a number in a tensor's place."""

    def forward(self, x):
        x = torch.ops.aten.mul.Scalar(F.gelu(x), 2.0)
        return F.relu(torch.ops.aten.add.Scalar(x, 1.0))


KEPT = {
    'edited': Edited,
    'other epsilon': lambda: OtherEpsilon(16),
    'in a function': InFunction,
    'weight with a factor': Scaled,
    'other weights': PerDomain,
    'own relu': lambda: Mimic('Relu'),
    'own gelu': lambda: Mimic('Gelu'),
    'own product': lambda: Mimic('Mul'),
    'scalars': Scalars,
}


@pytest.mark.parametrize('operation', KEPT)
def test_what_does_not_come_out_the_same_is_kept(operation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), KEPT[operation](), nn.Linear(16, 16)).double()
    x = torch.randn(5, 6, 16, dtype=torch.float64)
    same = copy.deepcopy(model)
    handle = recompute_activations(model)
    for _ in range(5):
        assert_bitwise(step(model, x), step(same, x))
        with torch.no_grad():
            for p in filter(
                lambda p: p.grad is not None, [*model.parameters(), *same.parameters()]
            ):
                p.sub_(0.1 * p.grad)
    assert ('2', 'linear') not in handle.kept.places


@pytest.mark.edge(
    'recomputed_activations',
    'exact',
    'A norm with a forward of one’s own: compared in each step, and kept where it differs',
)
def test_the_norm_that_is_not_a_librarys_is_compared_each_time():
    class OwnForward(nn.LayerNorm):
        eps_in_use = 1e-5

        def forward(self, x):
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps_in_use)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), OwnForward(16), nn.Linear(16, 16)).double()
    x = torch.randn(8, 16, dtype=torch.float64)
    same = copy.deepcopy(model)
    handle = recompute_activations(model)
    saved = []
    for eps in (1e-5, 1e-5, 1e-5, 0.1, 1e-5):
        model[1].eps_in_use = same[1].eps_in_use = eps
        before = handle.kept.before
        assert_bitwise(step(model, x), step(same, x))
        saved.append(handle.kept.before > before)
    assert saved == [True, True, True, False, True]


@pytest.mark.edge(
    'recomputed_activations',
    'exact',
    'A result that is written to, from whichever step on',
)
def test_an_edit_that_begins_later_is_seen_by_its_version():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Edited(begin=1), nn.Linear(16, 16)).double()
    x = torch.randn(6, 16, dtype=torch.float64)
    same = copy.deepcopy(model)
    recompute_activations(model)
    for _ in range(3):
        assert_bitwise(step(model, x), step(same, x))


@pytest.mark.edge(
    'recomputed_activations',
    'refused',
    'A result that is written to through `.data`, in the step in which its place is compared',
)
def test_one_that_no_version_counts_is_an_error_when_it_is_compared():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Edited(1, data=True), nn.Linear(16, 16))
    recompute_activations(model)
    x = torch.randn(6, 16)
    model(x)
    with pytest.raises(RuntimeError, match=r"Gelu in the first steps .* set exclude=\['2'\]"):
        model(x)


@pytest.mark.gpu
@pytest.mark.parametrize('within', [False, True], ids=['alone', 'within a model with rules'])
def test_on_a_gpu_the_error_comes_in_the_next_forward(within):
    model = nn.Sequential(nn.Linear(16, 16), Edited(1, data=True), nn.Linear(16, 16)).cuda()
    recompute_activations(model)
    if within:
        model = nn.Sequential(model, nn.Linear(16, 16)).cuda()
        quantize_activations(model, min_numel=10**6)
    x = torch.randn(6, 16, device='cuda')
    model(x), model(x)
    with pytest.raises(RuntimeError, match=r"Gelu in the first steps .* set exclude=\['2'\]"):
        model(x)


@pytest.mark.gpu
def test_on_a_gpu_the_error_of_the_last_forward_comes_when_it_is_undone():
    model = nn.Sequential(nn.Linear(16, 16), Edited(1, data=True), nn.Linear(16, 16)).cuda()
    rule = recompute_activations(model)
    x = torch.randn(6, 16, device='cuda')
    model(x), model(x)
    with pytest.raises(RuntimeError, match=r"Gelu in the first steps .* set exclude=\['2'\]"):
        rule.undo()
    assert not rules_of(model)


class EditedInOnePlace(nn.Module):
    """Calls a layer three times, and changes what the last call is given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        for call in range(3):
            x = F.gelu(x)
            if call == 2:
                x.data.mul_(2)
            x = self.layer(x)
        return x


@pytest.mark.edge(
    'recomputed_activations',
    'exact',
    'A layer that is called several times, with `.data` edits at one of them: each call is '
    'compared by itself',
)
def test_each_place_is_compared_also_where_a_module_has_several():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), EditedInOnePlace()).double()
    x = torch.randn(6, 16, dtype=torch.float64)
    same = copy.deepcopy(model)
    handle = recompute_activations(model)
    for _ in range(3):
        assert_bitwise(step(model, x), step(same, x))
    assert {place for place, _ in handle.kept.places} == {'1.layer'}  # the other two are not kept


class Counted(nn.Module):
    """A parametrisation that counts how often it is evaluated."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * 2


@pytest.mark.edge(
    'recomputed_activations',
    'exact',
    'Norms whose weight is computed: it is computed once',
)
def test_weights_that_are_computed_are_not_computed_once_more():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)).double()
    counted = Counted()
    nn.utils.parametrize.register_parametrization(model[1], 'weight', counted)
    recompute_activations(model)
    counted.calls = 0
    model(torch.randn(6, 16, dtype=torch.float64)).sum().backward()
    assert counted.calls == 1


@pytest.mark.edge('recomputed_activations', 'exact', '`eps` that changes before backward')
@pytest.mark.parametrize('norm', [nn.LayerNorm(16), nn.GroupNorm(4, 16), nn.BatchNorm1d(16)])
def test_epsilon_is_that_of_the_forward(norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), norm, nn.Linear(16, 16)).double()
    x = torch.randn(6, 16, dtype=torch.float64)
    plain = copy.deepcopy(model)
    recompute_activations(model)
    for each in (plain, model):
        loss = each(x).square().sum()
        each[1].eps = 0.5
        loss.backward()
    assert_bitwise(*({name: p.grad for name, p in m.named_parameters()} for m in (model, plain)))


def test_a_cast_that_lays_out_otherwise():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), ToChannelsLast(), nn.Linear(16, 16)).double()
    same = copy.deepcopy(model)
    recompute_activations(model)
    for height in (1, 5):
        x = torch.randn(3, height, 16, dtype=torch.float64)
        assert_bitwise(step(model, x), step(same, x))


def test_beside_codes_only_what_needs_no_comparison():
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    for norm, again in ((nn.LayerNorm(16), True), (OtherEpsilon(16), False)):
        model = nn.Sequential(nn.Linear(16, 16), norm, nn.Linear(16, 16))
        quantize_activations(model, min_numel=1)
        handle = recompute_activations(model)
        step(model, x)
        assert (handle.kept.before > 0) == again


def test_layers_of_torch_with_attention_written_out():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double()
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    same = copy.deepcopy(model)
    handle = recompute_activations(model)
    for _ in range(2):
        assert_bitwise(step(model, x), step(same, x))
    assert handle.kept.before


@pytest.mark.edge('recomputed_activations', 'exact', '`torch.func`: nothing is left out')
def test_under_transforms_of_functions_nothing_happens():
    model, x = network('gelu')
    parameters = dict(model.named_parameters())

    def gradient():
        def loss(p):
            return torch.func.functional_call(model, p, (x,)).square().sum()

        return torch.func.grad(loss)(parameters)

    expected = gradient()
    recompute_activations(model)
    assert_bitwise(gradient(), expected)


@pytest.mark.edge(
    'recomputed_activations',
    'refused',
    'Weights that are written to before backward, as in the plain step',
)
def test_weights_changed_before_backward_are_an_error():
    model, x = network('layer norm')
    recompute_activations(model)
    output = model(x).sum()
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        output.backward()


def test_nothing_happens_in_evaluation_and_without_gradients():
    model, x = network('gelu')
    handle = recompute_activations(model)
    with torch.no_grad():
        model(x)
    model.eval()
    model(x).sum().backward()
    assert handle.kept.before == 0


def test_copies_recompute_and_undoing_leaves_no_trace():
    model, x = network('gelu')
    plain = saved_bytes(lambda: model(x), model)
    state = model.state_dict().keys()
    handle = recompute_activations(model)
    assert model.state_dict().keys() == state
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert saved_bytes(lambda of=copied: of(x), copied) < plain
    handle.undo()
    assert all('forward' not in vars(module) for module in model.modules())
    assert saved_bytes(lambda: model(x), model) == plain


def test_with_quantised_activations_each_saves_its_part():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    x = torch.randn(8, 9, 32)
    exact = step(model, x)

    def measured():
        return saved_bytes(lambda: model(x), model), relative_error(
            step(model, x)['1.up.weight'], exact['1.up.weight']
        )

    with quantize_activations(model, min_numel=1):
        quantised, error = measured()
        with recompute_activations(model):
            both, error_of_both = measured()
    assert both < 0.8 * quantised
    assert 0 < error_of_both < 2 * error


@pytest.mark.parametrize('store', ['pinned', 'disk'])
def test_with_offload_the_sources_move(store, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    expected = step(model, x)
    recompute_activations(model)
    options = dict(store='disk', folder=tmp_path) if store == 'disk' else {}
    offload_activations(model, min_bytes=64, **options)
    assert_bitwise(step(model, x), expected)


def test_in_so_many_of_the_blocks():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block(), nn.LayerNorm(32), nn.Linear(32, 32)).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    expected, kept = step(model, x), []
    for settings in (dict(first=1), dict(first=2), dict(first=3), {}):
        with recompute_activations(model, **settings) as handle:
            assert_bitwise(step(model, x), expected)
        kept.append(handle.kept.before)
        places = {int(place.partition('.')[0]) for place, _ in handle.kept.places}
        assert places == set(range(settings.get('first', 5))) - {3}
    assert kept[1:3] == [2 * kept[0], 3 * kept[0]] and kept[3] > kept[2]
    with recompute_activations(model, modules=['1', '2'], first=1) as handle:
        step(model, x)
    assert handle.kept.before == kept[0]
    with pytest.raises(ValueError, match='first is how many of 3 modules, got 4'):
        recompute_activations(model, first=4)
    with pytest.raises(ValueError, match='recomputed_activations: '):
        recompute_activations(model, modules=[], first=1)


class Slices(nn.Module):
    """Views of a result that overlap; it may change once they are saved."""

    def __init__(self, changes):
        super().__init__()
        self.up, self.changes = nn.Linear(16, 32), changes

    def forward(self, x):
        y = self.up(x).exp()
        total = sum(y[..., first : first + 16].sin() for first in range(16))
        if self.changes:
            y.add_(1)
        return total


def test_with_offload_views_of_one_memory_move_once():
    torch.manual_seed(0)
    model, x = Slices(changes=False), torch.randn(64, 8, 16)
    expected = step(model, x)
    recompute_activations(model)
    offload = offload_activations(model, 'host', min_bytes=1)
    assert_bitwise(step(model, x), expected)
    assert offload.peak_stored_bytes == 64 * 8 * 32 * 4


def test_with_offload_what_has_changed_since_it_was_saved_is_an_error():
    model, x = Slices(changes=True), torch.randn(64, 8, 16)
    recompute_activations(model)
    offload_activations(model, 'host', min_bytes=1)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        step(model, x)


def test_inside_checkpointing_there_is_nothing_to_do():
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block(), Block()]).double()

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model, x = Network(), torch.randn(2, 9, 32, dtype=torch.float64)
    expected = step(model, x)
    handle = recompute_activations(model)
    assert_bitwise(step(model, x), expected)
    assert handle.kept.before == 0


SIZES = []  # of a module's own it would be as it was before the second forward


class Counting(nn.Module):
    """Fails on anything but images, as most forwards do."""

    def __init__(self, ends_in_place):
        super().__init__()
        self.ends_in_place = ends_in_place
        self.norm, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        SIZES.append(len(x))
        x = F.gelu(self.norm(x))
        x = self.conv(x).tanh() * x
        return x.relu_() if self.ends_in_place else x


@pytest.mark.parametrize('ends_in_place', [True, False])
@pytest.mark.parametrize('keep', [[], ['aten.gelu'], ['matmuls', 'aten.tanh']])
def test_what_is_checkpointed_is_not_computed_again_to_look_into_it(keep, ends_in_place):
    torch.manual_seed(0)
    block = Counting(ends_in_place)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), block, nn.Conv2d(4, 4, 1)).double()
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    plain = copy.deepcopy(model)
    recompute_activations(model)
    checkpoint_activations(model, ['1'], keep=keep)
    assert_bitwise(step(model, x), step(plain, x))  # in which it is measured what may be kept
    SIZES.clear()
    loss = model(x).square().sum()
    assert SIZES == [2]
    loss.backward()
    assert SIZES == [2, 2]


def test_backward_holds_no_more_at_once_than_the_plain_one():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    with SavedBytes(model, x) as plain:
        model(x).sum().backward()
    recompute_activations(model)
    step(model, x)
    with SavedBytes(model, x) as recomputed:
        model(x).sum().backward()
    assert recomputed.peak_bytes < 0.7 * plain.peak_bytes


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (dict(modules='bloks'), "recomputed_activations: .* 'bloks'"),
        (dict(exclude=['nothing.*']), "recomputed_activations: .* 'nothing"),
    ],
)
def test_names_that_match_nothing_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        recompute_activations(nn.Sequential(Block(), Block()), **settings)


def test_twice_is_an_error_and_some_modules_can_be_chosen():
    model = nn.Sequential(Block(), Block()).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    plain = saved_bytes(lambda: model(x), model)
    recompute_activations(model, modules=['0', '1'], exclude='1.*')
    with pytest.raises(ValueError, match='has it already; undo that first'):
        recompute_activations(model)
    saved = plain - saved_bytes(lambda: model(x), model)
    assert saved == (6 + 4 - 4) * x.nbytes


def test_a_forward_that_is_refused_at_its_start_leaves_the_next_ones_compressed(monkeypatch):
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    with recompute_activations(model) as rule:
        with monkeypatch.context() as patched:
            patched.setattr(rule, 'begin_forward', lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(x)
        model(x).sum().backward()
        assert rule.kept.before > 0


def test_a_rule_of_a_part_knows_that_a_forward_begins_once(monkeypatch):
    part = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    model = nn.Sequential(part, nn.Linear(4, 4), part)
    rules = {'whole': quantize_activations(model), 'part': recompute_activations(part)}
    begun = []
    for name, rule in rules.items():
        monkeypatch.setattr(rule, 'begin_forward', lambda name=name: begun.append(name))
    for _ in range(2):
        model(torch.randn(2, 4))
    assert begun == ['whole', 'part'] * 2


@pytest.mark.parametrize('first', ['part', 'whole'])
def test_a_rule_of_a_part_is_paused_by_itself(first):
    torch.manual_seed(0)
    part = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    model = nn.Sequential(part, nn.Linear(16, 16))
    x = torch.randn(64, 16, requires_grad=True)
    plain = step(copy.deepcopy(model), x)
    apply = {'part': lambda: quantize_activations(part, 2, min_numel=1)}
    apply['whole'] = lambda: recompute_activations(model)
    rules = {name: apply[name]() for name in sorted(apply, reverse=first == 'whole')}
    for _ in range(5):  # with a plan, without one, and with another's
        with rules['part'].paused():
            kept = rules['part'].kept.before
            assert_bitwise(step(model, x), plain)
            assert rules['part'].kept.before == kept
        lossy = step(model, x)
        assert rules['part'].kept.before > kept
        assert not torch.equal(lossy['0.1.weight'], plain['0.1.weight'])


class InPlaceBlock(nn.Module):
    """The end of a ResNet's block, as libraries write it; may edit it behind autograd's back."""

    def __init__(self, edited=None):
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.shortcut = nn.Sequential(nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.edited = edited

    def forward(self, x):
        result = self.branch(x)
        self.edit(result, 'norm')
        result += self.shortcut(x)
        self.edit(result, 'sum')
        return F.relu_(result)

    def edit(self, x, what):
        if self.edited == what:
            with torch.no_grad():
                x.mul_(-3)


@pytest.mark.parametrize('edited', [None, 'norm', 'sum'])
def test_from_codes_what_is_summed_in_place_is_computed_again_if_nobody_else_wrote_there(edited):
    torch.manual_seed(0)
    model = nn.Sequential(InPlaceBlock(edited), nn.Conv2d(8, 4, 1))
    x = torch.randn(4, 4, 16, 16)
    plain = step(copy.deepcopy(model), x)
    recomputed = recompute_activations(model)
    quantize_activations(model, bits=8, min_numel=1)
    gradients = step(model, x)
    assert (('1', 'convolution') in recomputed.kept.places) == (edited is None)
    for name, _ in model.named_parameters():
        assert relative_error(gradients[name], plain[name]) < 0.05
