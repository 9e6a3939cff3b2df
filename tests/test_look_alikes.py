"""Modules of other libraries, written as they compute, compared with dense references."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc
from kfc.layers import find_layers
from reference import cross_entropy, derivative_factor, fitting_loss
from test_layers import Locations, after_one_batch

pytestmark = pytest.mark.usefixtures("double")


class Conv1D(nn.Module):
    """``transformers.pytorch_utils.Conv1D``"""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / 3)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class TimmLinear(nn.Linear):
    """``timm.layers.Linear``"""

    def forward(self, input):
        if torch.jit.is_scripting():
            bias = self.bias.to(dtype=input.dtype) if self.bias is not None else None
            return F.linear(input, self.weight.to(dtype=input.dtype), bias=bias)
        return F.linear(input, self.weight, self.bias)


class Conv2dSame(nn.Conv2d):
    """``timm.layers.Conv2dSame``"""

    def __init__(self, inputs, outputs, kernel_size, stride=1, dilation=1, groups=1, bias=True):
        super().__init__(inputs, outputs, kernel_size, stride, 0, dilation, groups, bias)

    def forward(self, x):
        amounts = [
            max((math.ceil(n / s) - 1) * s + (k - 1) * d + 1 - n, 0)
            for n, k, s, d in zip(
                x.shape[-2:], self.kernel_size, self.stride, self.dilation, strict=True
            )
        ]
        (h, w) = amounts
        x = F.pad(x, [w // 2, w - w // 2, h // 2, h - h // 2])
        options = self.stride, self.padding, self.dilation, self.groups
        return F.conv2d(x, self.weight, self.bias, *options)


class DropConnect(nn.Linear):
    def forward(self, x):
        return F.linear(x, F.dropout(self.weight, 0.5, self.training), self.bias)


class LinearReLU(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


class Scaled(nn.Linear):
    """An argument that the probe cannot know."""

    def forward(self, x, scale=1.0):
        return scale * super().forward(x)


def jacobian_rows(module, inputs, is_linear):
    """Return (rows, I, parameters): the Jacobian of each location's outputs in (bias, weight)."""
    state = {name: p.detach() for name, p in module.named_parameters()}

    def outputs(parameters):
        out = torch.func.functional_call(module, parameters, (inputs,))
        out = out if is_linear else out.movedim(1, -1)
        return out.reshape(-1, out.shape[-1])

    return torch.func.jacrev(outputs)(state)


def check_against_jacobian(module, inputs, is_linear):
    """Compare the factors, and the natural gradient in the weight's own layout."""
    groups = getattr(module, "groups", 1)
    output = module(inputs)
    model = nn.Sequential(module, Locations(output))
    jacobian = jacobian_rows(module, inputs, is_linear)
    maps = jacobian["weight"].shape[1]
    activations, places = [], []
    numbers = torch.arange(module.weight.numel()).reshape(module.weight.shape)
    for channel in range(0, maps, maps // groups):
        # Entries of the weight that this output depends on, in the order of the weight
        weight = jacobian["weight"][:, channel].flatten(1)
        used = numbers.flatten()[weight.abs().sum(0) > 0]
        rows = torch.cat([torch.ones(len(weight), 1), weight[:, used]], dim=1)
        activations.append(rows.T @ rows / len(inputs))
        places.append(used)
    derivative = derivative_factor(
        model[1], output, cross_entropy(), groups, channels_last=is_linear
    )
    preconditioner = kfc.Preconditioner(model, curvature=kfc.Kronecker(fisher="exact"), damping=0.1)
    fitting_loss(model(inputs)).backward()
    gradient = {role: p.grad.clone() for role, p in module.named_parameters()}
    preconditioner.step()
    factors = preconditioner.factors["0"]
    activation = torch.stack(activations)
    torch.testing.assert_close(factors.activation.reshape_as(activation), activation)
    torch.testing.assert_close(factors.derivative.reshape_as(derivative), derivative)
    if groups == 1:
        check_natural_gradient(module, gradient, activation[0], derivative[0], jacobian)


def check_natural_gradient(module, gradient, activation, derivative, jacobian):
    """Solve with the damped factors in coordinates that the Jacobian defines."""
    balance = (activation.trace() / len(activation)) / (derivative.trace() / len(derivative))
    pi, root = balance.sqrt(), 0.1**0.5
    damped = (
        activation + pi * root * torch.eye(len(activation)),
        derivative + root / pi * torch.eye(len(derivative)),
    )
    # Where the weights of each output map are
    used = jacobian["weight"].abs().sum(0).flatten(1) > 0
    places = torch.stack([row.nonzero().flatten() for row in used])
    matrix = gradient["weight"].flatten()[places]
    matrix = torch.cat([gradient["bias"][:, None], matrix], dim=1)
    dense = torch.kron(damped[0].contiguous(), damped[1].contiguous())
    solution = torch.linalg.solve(dense, matrix.T.flatten()).reshape(matrix.T.shape).T
    torch.testing.assert_close(module.bias.grad, solution[:, 0])
    torch.testing.assert_close(module.weight.grad.flatten()[places], solution[:, 1:])


@pytest.mark.parametrize("shape", [(6, 3), (4, 2, 3)])
@pytest.mark.parametrize("outputs", [2, 3])
def test_a_linear_layer_with_a_transposed_weight(shape, outputs):
    check_against_jacobian(Conv1D(outputs, 3), torch.randn(shape), is_linear=True)


def test_a_linear_layer_with_its_own_forward():
    check_against_jacobian(TimmLinear(3, 2), torch.randn(5, 2, 3), is_linear=True)


@pytest.mark.parametrize("size", [(5, 6), (8, 7)])
@pytest.mark.parametrize(
    "conv",
    [
        Conv2dSame(2, 3, 3, stride=2),
        Conv2dSame(2, 3, (2, 4), stride=(1, 3)),
        Conv2dSame(2, 3, 2, dilation=2),
        Conv2dSame(4, 4, 3, stride=2, groups=2),
    ],
)
def test_convolutions_with_same_padding(conv, size):
    check_against_jacobian(conv.double(), torch.randn(3, conv.in_channels, *size), is_linear=False)


@pytest.mark.parametrize(
    "curvature",
    [kfc.Kronecker(inverse="eigen"), kfc.SUA(), kfc.EKFAC(), kfc.Diagonal(), kfc.PRONG()],
)
def test_every_curvature_treats_a_look_alike_as_the_layer_that_it_resembles(curvature):
    options = {"curvature": curvature, "seed": 0}
    stock = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 3))
    other = nn.Sequential(Conv2dSame(1, 3, 3), nn.Flatten(), Conv1D(3, 48))
    other[0].load_state_dict(stock[0].state_dict())
    with torch.no_grad():
        other[2].weight.copy_(stock[2].weight.T)
        other[2].bias.copy_(stock[2].bias)
    inputs = torch.randn(8, 1, 4, 4)
    for model in (stock, other):
        after_one_batch(model, inputs, **options)
    torch.testing.assert_close(other[0].weight.grad, stock[0].weight.grad)
    torch.testing.assert_close(other[2].weight.grad.T, stock[2].weight.grad)
    torch.testing.assert_close(other[2].bias.grad, stock[2].bias.grad)


@pytest.mark.parametrize("kind", [kfc.KFC, kfc.WhitenedAdam])
def test_training_follows_that_of_the_stock_layer(kind):
    stock = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    other = nn.Sequential(Conv1D(4, 5), nn.Tanh(), Conv1D(3, 4))
    with torch.no_grad():
        for one, two in ((stock[0], other[0]), (stock[2], other[2])):
            two.weight.copy_(one.weight.T)
            two.bias.copy_(one.bias)
    for model in (stock, other):
        torch.manual_seed(1)
        optimizer = kind(model, lr=0.1)
        for _ in range(4):
            x, y = torch.randn(8, 5), torch.randint(3, (8,))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert "Conv1D, treated as TransposedLinearLayer" in optimizer.describe()
    for place in (0, 2):
        torch.testing.assert_close(other[place].weight.T, stock[place].weight)
        torch.testing.assert_close(other[place].bias, stock[place].bias)


@pytest.mark.parametrize(
    "module",
    [
        DropConnect(3, 4),
        Scaled(3, 4),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_that_compute_something_else_have_no_factors(module):
    plan = find_layers(nn.Sequential(module))
    assert not plan.layers
    assert len(plan.plain) == len(list(module.parameters()))


def test_initial_values_do_not_hide_what_a_module_computes():
    """With a weight of zero, a rectified linear layer and a linear one have equal outputs."""
    rectified, linear = LinearReLU(3, 4), TimmLinear(3, 4)
    for module in (rectified, linear):
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)
    layers = find_layers(nn.Sequential(rectified, linear)).layers
    assert layers["0"].functional
    assert not layers["1"].functional


class Recording(nn.Linear):
    """Changes everything that a forward pass may change, and counts its calls."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()))
        self.drop, self.seen = nn.Dropout(0.0), []

    def forward(self, x):
        self.calls += 1
        self.seen.append(x.shape)
        torch.rand(1)
        random.random()
        return self.drop(super().forward(x))


def test_probing_leaves_no_traces():
    module = Recording(3, 4).eval()
    module.weight.grad = gradient = torch.ones_like(module.weight)
    hooked = []
    for each in (module, module.drop):
        each.register_forward_hook(lambda *call: hooked.append(call))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    assert set(find_layers(nn.Sequential(module)).layers) == {"0"}
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert module.weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert not hooked
    assert not module.seen
    assert not module.training


COUNT = []


class Counting(nn.Linear):
    def forward(self, x):
        COUNT.append(x)
        return super().forward(x)


def test_frozen_modules_are_not_run_and_others_only_once():
    model = nn.Sequential(Counting(3, 4).requires_grad_(False))
    COUNT.clear()
    find_layers(model)
    assert not COUNT
    model.requires_grad_(True)
    find_layers(model)
    runs = len(COUNT)
    assert runs > 0
    model.requires_grad_(False)
    assert set(find_layers(model).layers) == {"0"}
    assert len(COUNT) == runs


def test_modules_that_fail_are_left_alone():
    class Failing(nn.Linear):
        def forward(self, x):
            raise RuntimeError("out of order")

    class Uncopied(nn.Linear):
        def __copy__(self):
            raise RuntimeError("only one of me")

        def forward(self, x):
            return super().forward(x)

    plan = find_layers(nn.Sequential(Failing(3, 4), Uncopied(4, 4), nn.EmbeddingBag(3, 4)))
    assert not plan.layers
    assert "overrides forward" in plan.plain["0.weight"]
    assert "no layer class for EmbeddingBag" in plan.plain["2.weight"]


# Normalisation


class LlamaRMSNorm(nn.Module):
    """``transformers.models.llama.modeling_llama.LlamaRMSNorm``; T5's is the same."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.promote_types(dtype, torch.float32))
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(dtype)


class GemmaRMSNorm(nn.Module):
    """A scale of 1 + weight."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


class TimmLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class LayerNorm2d(nn.LayerNorm):
    """``timm.layers.LayerNorm2d``"""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNextV2LayerNorm(nn.Module):
    """``transformers.models.convnextv2.modeling_convnextv2.ConvNextV2LayerNorm``"""

    def __init__(self, size, eps=1e-6, data_format="channels_last"):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps, self.data_format, self.normalized_shape = eps, data_format, (size,)

    def forward(self, x):
        if self.data_format == "channels_last":
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class BatchNormAct2d(nn.BatchNorm2d):
    """``timm.layers.BatchNormAct2d``"""

    def __init__(self, size, act):
        super().__init__(size)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x):
        uses_batch = self.training or self.running_mean is None
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        statistics = (self.running_mean, self.running_var)
        options = (uses_batch, self.momentum, self.eps)
        return self.act(self.drop(F.batch_norm(x, *statistics, self.weight, self.bias, *options)))


class Whichever(nn.LayerNorm):
    """Channels are the last dimension of sequences, and dimension 1 of maps."""

    def forward(self, x):
        return (
            super().forward(x.movedim(1, -1)).movedim(-1, 1) if x.dim() == 4 else super().forward(x)
        )


class Batchwise(nn.Module):
    """Mixes examples in a way that nothing announces."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * (x - x.mean(0))


NORMS = {
    "llama": (LlamaRMSNorm(4), (3, 2, 4)),
    "llama of rows": (LlamaRMSNorm(4), (5, 4)),
    "gemma": (GemmaRMSNorm(4), (3, 2, 4)),
    "timm": (TimmLayerNorm(4), (3, 2, 4)),
    "timm without shift": (TimmLayerNorm(4, bias=False), (3, 2, 4)),
    "timm 2d": (LayerNorm2d(5), (3, 5, 2, 2)),
    "convnext last": (ConvNextV2LayerNorm(4), (3, 2, 2, 4)),
    "convnext first": (ConvNextV2LayerNorm(4, data_format="channels_first"), (3, 4, 2, 2)),
    "large eps": (LlamaRMSNorm(4, eps=2.0), (3, 2, 4)),
    "activation of slopes": (nn.PReLU(4), (3, 4, 2)),
    "batch with identity": (BatchNormAct2d(3, nn.Identity()), (4, 3, 2, 2)),
    "batch in eval": (BatchNormAct2d(3, nn.Identity()).eval(), (4, 3, 2, 2)),
}


def example_block(norm, inputs, head):
    """Return the mean over examples of J_nᵀ R J_n, per channel, by differentiation.

    J_n is the Jacobian through the outputs of example n only; it is linear in the module's own
    Jacobian in its parameters.
    """
    roles, shape = list(dict(norm.named_parameters())), norm.weight.shape
    buffers = {name: b.clone() for name, b in norm.named_buffers()}

    def outputs(*parameters):
        state = dict(zip(roles, parameters, strict=True)) | {
            k: b.clone() for k, b in buffers.items()
        }
        return torch.func.functional_call(norm, state, (inputs,))

    point = tuple(p.detach() for p in norm.parameters())
    own = torch.autograd.functional.jacobian(outputs, point)  # (*inputs, channels) by role
    values, expected = outputs(*point).detach(), 0
    for n in range(len(inputs)):
        through = torch.func.jacrev(lambda v: head(v[None])[0])(values[n])  # (classes, *example)
        p = head(values[n][None])[0].softmax(0)
        hessian = p.diag() - p.outer(p)
        parts = [through.flatten(1) @ part[n].flatten(0, -2) for part in own]
        jacobian = torch.stack(parts, dim=-1)  # (classes, channels, roles)
        expected += torch.einsum("acr,ab,bcs->crs", jacobian, hessian, jacobian) / len(inputs)
    assert expected.shape == (*shape, len(roles), len(roles))
    return expected


@pytest.mark.parametrize("name", NORMS)
def test_normalisation(name):
    norm, shape = NORMS[name]
    norm = norm.double()
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(torch.randn_like(p) / 3)
    inputs = torch.randn(shape)
    head = Locations(inputs)
    expected = example_block(norm, inputs, head)
    preconditioner = after_one_batch(nn.Sequential(norm, head), inputs)
    torch.testing.assert_close(preconditioner.blocks["0"], expected)


def test_statistics_of_a_look_alike_leave_its_buffers_as_the_forward_pass_did():
    stock, other = nn.BatchNorm2d(3), BatchNormAct2d(3, nn.Identity())
    inputs = torch.randn(4, 3, 2, 2)
    for norm in (stock, other):
        after_one_batch(nn.Sequential(norm, Locations(inputs)), inputs)
    torch.testing.assert_close(other.state_dict(), stock.state_dict())


@pytest.mark.parametrize(
    "module",
    [BatchNormAct2d(3, nn.PReLU()), Whichever(3), Batchwise(3), nn.PReLU()],
    ids=lambda module: type(module).__name__,
)
def test_modules_that_are_not_affine_per_channel_have_no_blocks(module):
    assert not find_layers(nn.Sequential(module)).layers


# Modules that do more than a function that they call


class ConvReLU(nn.Conv2d):
    def forward(self, x):
        return super().forward(x).relu()


class TwiceLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu() + super().forward(-x)


@pytest.mark.parametrize(
    ("joined", "stock", "shape"),
    [
        (LinearReLU(3, 4), nn.Linear(3, 4), (5, 2, 3)),
        (ConvReLU(2, 4, 3, 2, 1, groups=2), nn.Conv2d(2, 4, 3, 2, 1, groups=2), (4, 2, 5, 6)),
        (BatchNormAct2d(3, nn.ReLU()), nn.BatchNorm2d(3), (4, 3, 2, 5)),
    ],
    ids=["linear", "convolution", "batch normalisation"],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_module_that_does_more_than_its_base_class(joined, stock, shape, training):
    """Compared with the stock layer, followed by what the module adds."""
    joined, stock = joined.double(), stock.double()
    nn.init.uniform_(joined.weight)
    stock.load_state_dict(joined.state_dict())
    inputs = torch.randn(shape)
    head = Locations(stock(inputs).detach())
    stock.load_state_dict(joined.state_dict())
    curvature = kfc.Kronecker(fisher="exact", gather_in_eval=True)
    models = nn.Sequential(joined, head), nn.Sequential(nn.Sequential(stock, nn.ReLU()), head)
    found = []
    for model in models:
        model.train(training)
        model.zero_grad()
        found.append(after_one_batch(model, inputs, curvature, damping=0.1))
    if isinstance(stock, nn.BatchNorm2d):
        torch.testing.assert_close(found[0].blocks["0"], found[1].blocks["0.0"])
    else:
        torch.testing.assert_close(found[0].factors["0"], found[1].factors["0.0"])
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(joined.state_dict(), stock.state_dict())
    kind = type(found[0].engine.plan.layers["0"]).__name__
    assert f"{type(joined).__name__}, treated as {kind}" in found[0].describe()


def test_functions_that_are_called_twice_are_left_alone():
    assert not find_layers(nn.Sequential(TwiceLinear(3, 3))).layers
