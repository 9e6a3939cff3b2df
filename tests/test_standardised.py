"""Convolutions that standardise their weight, compared with differentiation."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc
from kfc.curvature.gradients import SquaredGradients
from kfc.curvature.kronecker import Bases
from kfc.layers import StandardisedConvolutionLayer, find_layers
from reference import cross_entropy, derivative_factor
from test_layers import Locations, after_one_batch

pytestmark = pytest.mark.usefixtures("double")


class ScaledStdConv2d(nn.Conv2d):
    """``timm.layers.ScaledStdConv2d``"""

    def __init__(self, inputs, outputs, kernel_size, gain_init=1.0, **options):
        super().__init__(inputs, outputs, kernel_size, **options)
        self.gain = nn.Parameter(torch.full((outputs, 1, 1, 1), gain_init))
        self.scale = 1.3 * self.weight[0].numel() ** -0.5
        self.eps = 1e-6

    def standardised(self):
        flat = self.weight.reshape(1, self.out_channels, -1)
        gain = (self.gain * self.scale).view(-1)
        weight = F.batch_norm(flat, None, None, gain, training=True, momentum=0.0, eps=self.eps)
        return weight.reshape_as(self.weight)

    def forward(self, x):
        options = self.stride, self.padding, self.dilation, self.groups
        return F.conv2d(x, self.standardised(), self.bias, *options)


class ScaledStdConv2dSame(ScaledStdConv2d):
    """``timm.layers.ScaledStdConv2dSame``"""

    def forward(self, x):
        sizes = zip(x.shape[2:], self.kernel_size, self.stride, strict=True)
        h, w = (max((math.ceil(n / s) - 1) * s + k - n, 0) for n, k, s in sizes)
        x = F.pad(x, [w // 2, w - w // 2, h // 2, h - h // 2])
        return F.conv2d(x, self.standardised(), self.bias, self.stride, 0, 1, self.groups)


class StdConv2d(nn.Conv2d):
    """The convolution of the original implementation of BiT"""

    def forward(self, x):
        variance, mean = torch.var_mean(self.weight, dim=[1, 2, 3], keepdim=True, unbiased=False)
        weight = (self.weight - mean) / torch.sqrt(variance + 1e-10)
        options = self.stride, self.padding, self.dilation, self.groups
        return F.conv2d(x, weight, self.bias, *options)


MODULES = [
    ScaledStdConv2d(2, 3, 3, padding=1),
    ScaledStdConv2d(2, 3, (2, 3), bias=False, stride=2, dilation=(1, 2)),
    ScaledStdConv2d(4, 6, 3, groups=2),
    ScaledStdConv2d(3, 2, 3, padding=1, padding_mode="zeros", gain_init=-0.4),
    ScaledStdConv2dSame(2, 3, 3, stride=2),
    ScaledStdConv2dSame(4, 4, (2, 3), stride=(1, 2), groups=2),
    StdConv2d(2, 3, 2),
]


def prepared(module):
    """Return a copy in float64 whose gains differ."""
    module = module.double()
    if hasattr(module, "gain"):
        with torch.no_grad():
            module.gain.mul_(torch.linspace(0.5, 1.5, module.out_channels).view(-1, 1, 1, 1))
    return module


def layer_of(module):
    layer = find_layers(nn.Sequential(module)).layers["0"]
    assert isinstance(layer, StandardisedConvolutionLayer)
    return layer


def jacobian(module, inputs):
    """Return the derivatives of all outputs in the weight, (groups, I, rows, n)."""
    state = {name: p.detach() for name, p in module.named_parameters()}

    def outputs(weight):
        parameters = {**state, "weight": weight}
        return torch.func.functional_call(module, parameters, (inputs,)).movedim(1, 0).flatten(1)

    full = torch.func.jacrev(outputs)(state["weight"]).flatten(3).flatten(3)
    own = torch.stack([full[i, :, i].flatten(1) for i in range(module.out_channels)])
    return own.unflatten(0, (module.groups, -1))


def projections(module):
    """Return I - x̂x̂ᵀ/n of every row of the weight, (groups, I, n, n)."""
    rows = module.weight.detach().flatten(1)
    variance, mean = torch.var_mean(rows, dim=1, unbiased=False, keepdim=True)
    unit = (rows - mean) / (variance + getattr(module, "eps", 0.0)).sqrt()
    size = rows.shape[1]
    found = torch.eye(size) - unit.unsqueeze(2) * unit.unsqueeze(1) / size
    return found.unflatten(0, (module.groups, -1))


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_rows_are_the_jacobian_but_for_the_direction_of_the_weight(module):
    module = prepared(module)
    inputs = torch.randn(3, module.in_channels, 5, 6)
    layer = layer_of(module)
    rows = layer.activation_rows(layer.row_source(inputs, module(inputs)))
    slopes = layer.slopes().view(module.groups, -1, 1, 1)
    expected = slopes * rows.unsqueeze(1) @ projections(module)
    torch.testing.assert_close(expected, jacobian(module, inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_factors(module):
    """Ω is the moment of the rows above, and Γ that of the outputs times c_i on both sides."""
    module = prepared(module)
    inputs = torch.randn(4, module.in_channels, 5, 6)
    output = module(inputs)
    model = nn.Sequential(module, Locations(output))
    factors = after_one_batch(model, inputs).factors["0"]
    layer = layer_of(module)
    rows = layer.activation_rows(layer.row_source(inputs, output))
    activation = rows.mT @ rows / 4
    torch.testing.assert_close(factors.activation.reshape_as(activation), activation)
    slopes = layer.slopes().unflatten(0, (module.groups, -1))
    derivative = derivative_factor(model[1], output, cross_entropy(), module.groups)
    derivative = derivative * slopes.unsqueeze(2) * slopes.unsqueeze(1)
    torch.testing.assert_close(factors.derivative.reshape_as(derivative), derivative)


def test_gradients_of_examples():
    module = prepared(ScaledStdConv2d(4, 6, 3, groups=2))
    inputs = torch.randn(3, 4, 5, 6)
    layer = layer_of(module)
    output = module(inputs)
    derivatives = torch.randn_like(output)
    found = layer.example_gradients(layer.row_source(inputs, output), derivatives, 3)
    for example in range(3):
        loss = (module(inputs[example, None]) * derivatives[example]).sum()
        (expected,) = torch.autograd.grad(loss, module.weight)
        torch.testing.assert_close(
            layer.weight_from_matrix(found[example]), expected, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("pixels", [4, 16])
def test_moments_are_those_of_rows_without_means(pixels):
    """With many pixels, Ω is computed from autocorrelations."""
    layer = layer_of(ScaledStdConv2d(16, 3, 5, padding=2).double())
    source = 3 + torch.randn(6, 16, pixels, pixels)
    patches = F.unfold(source, 5, padding=2).mT.reshape(-1, 400)
    patches = patches - patches.mean(1, keepdim=True)
    moment = patches.mT @ patches
    found = layer.activation_moment(source, homogeneous=False, diagonal=False)[0]
    torch.testing.assert_close(found, moment)
    found = layer.activation_moment(source, homogeneous=False, diagonal=True)[0]
    torch.testing.assert_close(found, moment.diagonal())
    found = layer.block_moment(source, 4, homogeneous=False)
    torch.testing.assert_close(found[1], moment[100:200, 100:200])


def network(**options):
    convolutions = ScaledStdConv2d(2, 6, 3, **options), ScaledStdConv2d(6, 4, 3, **options)
    first, second = convolutions
    return nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(64, 3)).double()


def trained(model, steps=3, **options):
    torch.manual_seed(1)
    optimizer = kfc.KFC(model, seed=0, **options)
    for _ in range(steps):
        inputs, targets = torch.randn(16, 2, 8, 8), torch.randint(3, (16,))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_steps_do_not_depend_on_the_scale_of_the_weight(scale):
    """Without damping, the outputs after some steps are those of the network with other weights."""
    torch.manual_seed(0)
    models = [network(), network()]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        for convolution in (model[0], model[2]):
            convolution.eps = 1e-20
    with torch.no_grad():
        models[1][0].weight.mul_(scale)
    for model in models:
        trained(model, damping=1e-12, lr=1e-3, clip=None)
    inputs = torch.randn(4, 2, 8, 8)
    torch.testing.assert_close(models[0](inputs), models[1](inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "curvature",
    ["kfc", kfc.Kronecker(inverse="eigen"), kfc.SUA(), kfc.EKFAC(), kfc.Diagonal(), kfc.PRONG()],
)
def test_every_curvature_trains_it(curvature):
    model = network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = trained(model, curvature=curvature)
    assert "ScaledStdConv2d, treated as StandardisedConvolutionLayer" in optimizer.describe()
    for name, p in model.named_parameters():
        assert p.isfinite().all()
        assert not torch.equal(p, before[name]), name


@pytest.mark.parametrize("kind", [kfc.KFAC, kfc.WhitenedAdam])
def test_other_optimizers_train_it(kind):
    model = network()
    torch.manual_seed(1)
    inputs, targets = torch.randn(16, 2, 8, 8), torch.randint(3, (16,))
    optimizer, losses = kind(model), []

    def closure():
        return F.cross_entropy(model(inputs), targets)

    for _ in range(10):
        optimizer.zero_grad()
        if kind is kfc.KFAC:
            loss = optimizer.step(closure)
        else:
            loss = closure()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_a_gain_of_zero_moves():
    """As in the last convolution of a residual branch, where the weight has no gradient."""
    model = network(gain_init=0.0)
    weight = model[2].weight.detach().clone()
    trained(model, steps=1)
    assert all(p.isfinite().all() for p in model.parameters())
    assert torch.equal(model[2].weight, weight)
    assert (model[2].gain != 0).any()


@pytest.mark.parametrize("epsilon", [0.0, 1e-10, 1e-6, 1e-3])
def test_epsilon_is_found_by_what_the_module_computes(epsilon):
    """Whatever its name is, and also if the weight is small."""

    class Literal(nn.Conv2d):
        def forward(self, x):
            rows = self.weight.flatten(1)
            variance, mean = torch.var_mean(rows, dim=1, unbiased=False, keepdim=True)
            weight = 0.7 * ((rows - mean) / (variance + epsilon).sqrt()).view_as(self.weight)
            return F.conv2d(x, weight, self.bias)

    for size in (1.0, 1e-3, 1e-5):
        module = Literal(4, 3, 3).double()
        with torch.no_grad():
            module.weight.mul_(size)
        variances = module.weight.detach().flatten(1).var(1, unbiased=False)
        expected = 0.7 / (variances + epsilon).sqrt()
        torch.testing.assert_close(layer_of(module).slopes(), expected, rtol=1e-3, atol=0.0)


def test_a_weight_of_zeros_trains():
    torch.manual_seed(0)
    layers = StdConv2d(3, 8, 3), nn.ReLU(), StdConv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 3)
    model = nn.Sequential(*layers).double()
    nn.init.zeros_(model[2].weight)
    optimizer = kfc.KFC(model, seed=0)
    x, y = torch.randn(16, 3, 6, 6), torch.randint(3, (16,))
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert optimizer.diagnostics["skipped_steps"] == 0
    assert loss < 0.8


@pytest.mark.parametrize("size", [3, 4])
def test_squares_of_gradients(size):
    """Also at one location, where they would be products without the projection."""
    module = prepared(ScaledStdConv2d(2, 3, 3))
    inputs = torch.randn(5, 2, size, size)
    output = module(inputs)
    derivatives = torch.randn_like(output)
    squares = SquaredGradients(layer_of(module), Bases())
    squares.backward(squares.forward(inputs, output), derivatives, 5)
    expected = torch.zeros_like(module.weight)
    for example in range(5):
        loss = (module(inputs[example, None]) * derivatives[example]).sum()
        expected += torch.autograd.grad(loss, module.weight)[0].square()
    found = squares.moments(5)[0].total.view_as(expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_what_is_not_such_a_convolution():
    class OtherDeviation(nn.Conv2d):
        def forward(self, x):
            deviation, mean = torch.std_mean(self.weight, dim=[1, 2, 3], keepdim=True)
            return F.conv2d(x, (self.weight - mean) / (deviation + 1e-5), self.bias)

    class OtherGain(ScaledStdConv2d):
        def forward(self, x):
            return super().forward(x) * self.gain.abs().max()

    class WithActivation(ScaledStdConv2d):
        def forward(self, x):
            return super().forward(x).relu()

    others = OtherGain, WithActivation, OtherDeviation
    for module in (*(kind(2, 3, 2) for kind in others), ScaledStdConv2d(2, 3, 1)):
        plan = find_layers(nn.Sequential(module))
        assert not plan.layers, module
        assert len(plan.plain) == len(list(module.parameters()))


def test_all_products_are_counted_as_those_of_layers():
    optimizer = trained(network())
    assert optimizer.engine.allowance.others == 0
