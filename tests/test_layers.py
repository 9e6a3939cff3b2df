"""Compare the factors of every layer type with Jacobians and enumeration, in float64."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import kfc
from kfc.curvature.channels import invert_blocks
from kfc.layers import layer_for
from reference import (
    activation_factor,
    cross_entropy,
    derivative_factor,
    exact_fisher,
    fitting_loss,
    flat_parameters,
    receptive_rows,
    squared_error,
)
from test_patches import convolutions

pytestmark = pytest.mark.usefixtures("double")


class Locations(nn.Module):
    """A nonlinear head that mixes channels and locations into three outputs."""

    def __init__(self, example: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mix", torch.randn(example[0].numel(), 3) / 3)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return maps.tanh().flatten(1) @ self.mix


EXACT = kfc.Kronecker(fisher="exact")


def after_one_batch(
    model: nn.Module, inputs: torch.Tensor, curvature=EXACT, loss=fitting_loss, **options
):
    """Return the preconditioner after one batch, with the exact Fisher matrix."""
    preconditioner = kfc.Preconditioner(model, curvature=curvature, **options)
    loss(model(inputs)).backward()
    preconditioner.step()
    return preconditioner


def check_factors(layer: nn.Module, inputs: torch.Tensor) -> None:
    output = layer(inputs)
    model = nn.Sequential(layer, Locations(output))
    factors = after_one_batch(model, inputs).factors["0"]
    groups = getattr(layer, "groups", 1)
    activation = activation_factor(layer, inputs)
    derivative = derivative_factor(
        model[1], output, cross_entropy(), groups, channels_last=isinstance(layer, nn.Linear)
    )
    if groups == 1:
        activation, derivative = activation[0], derivative[0]
    torch.testing.assert_close(factors.activation, activation, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(factors.derivative, derivative, rtol=1e-9, atol=1e-10)
    check_example_gradients(layer, inputs)


def check_example_gradients(layer: nn.Module, inputs: torch.Tensor) -> None:
    """Compare with a backward pass for each example."""
    geometry, outputs = layer_for(layer), layer(inputs)
    derivatives = torch.randn_like(outputs)
    source = geometry.row_source(inputs, outputs)
    gradients = geometry.example_gradients(source, derivatives, len(inputs))
    for example, gradient in enumerate(gradients):
        layer.zero_grad()
        (outputs[example] * derivatives[example]).sum().backward(retain_graph=True)
        parts = [geometry.weight_to_matrix(layer.weight.grad)]
        if layer.bias is not None:
            parts.insert(0, layer.bias.grad.reshape(geometry.groups, -1, 1))
        torch.testing.assert_close(gradient, torch.cat(parts, dim=2), rtol=1e-9, atol=1e-10)


@settings(max_examples=50)
@given(convolutions())
def test_convolutions(case):
    check_factors(*case)


@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 3), max_size=2), st.booleans())
def test_linear_with_any_leading_dimensions(inputs, outputs, leading, bias):
    check_factors(nn.Linear(inputs, outputs, bias=bias), torch.randn(3, *leading, inputs))


@st.composite
def transposed_convolutions(draw):
    dims = draw(st.integers(1, 3))
    kind = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    stride, dilation, kernel = each(1, 3), each(1, 2), each(1, {1: 4, 2: 3, 3: 2}[dims])
    padding = tuple(
        draw(st.integers(0, d * (k - 1))) for k, d in zip(kernel, dilation, strict=True)
    )
    most = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
    output_padding = tuple(draw(st.integers(0, m)) for m in most)
    groups = draw(st.sampled_from([1, 2, 3]))
    channels = groups * draw(st.integers(1, 2))
    module = kind(
        channels,
        groups * draw(st.integers(1, 2)),
        kernel,
        stride=stride,
        padding=padding,
        output_padding=output_padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        dtype=torch.float64,
    )
    inputs = torch.randn(2, channels, *each(1, {1: 5, 2: 3, 3: 2}[dims]), dtype=torch.float64)
    try:
        empty = module(inputs).numel() == 0
    except RuntimeError:
        empty = True
    assume(not empty)
    return module, inputs


@settings(max_examples=50)
@given(transposed_convolutions())
def test_transposed_convolutions(case):
    check_factors(*case)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(3, 2, dtype=torch.float64),
        nn.Conv2d(4, 6, 3, groups=2, dtype=torch.float64),
        nn.Conv1d(4, 4, 3, groups=4, bias=False, dtype=torch.float64),
        nn.ConvTranspose2d(4, 6, 2, groups=2, dtype=torch.float64),
        nn.ConvTranspose1d(2, 3, 2, bias=False, dtype=torch.float64),
    ],
)
def test_gradient_matrix_matches_the_factors_coordinates(layer):
    """The gradient of a layer is Σ DsᵀP, in the same order of coordinates as the factors."""
    geometry = layer_for(layer)
    shape = (2, 3) if isinstance(layer, nn.Linear) else (2, layer.in_channels, *[4] * geometry.dims)
    inputs = torch.randn(shape)
    output = layer(inputs)
    derivatives = torch.randn_like(output)
    output.backward(derivatives)
    rows, deltas = receptive_rows(layer, inputs), geometry.derivative_rows(derivatives)
    expected = deltas.mT @ rows
    gradients = {role: p.grad for role, p in geometry.trained().items()}
    matrix = geometry.to_matrix(gradients)
    torch.testing.assert_close(matrix, expected)
    back = geometry.from_matrix(matrix)
    for role, gradient in gradients.items():
        torch.testing.assert_close(back[role], gradient)


# Where KFC is exact


def exact_block(model: nn.Module, inputs: torch.Tensor, loss, layer: nn.Module) -> torch.Tensor:
    """The exact Fisher block of a layer in the coordinates vec(bias, weight), column by column."""
    full = exact_fisher(model, inputs, loss)
    numbers = torch.arange(len(flat_parameters(model)))
    position, where = 0, {}
    for p in model.parameters():
        where[id(p)] = numbers[position : position + p.numel()].reshape(p.shape)
        position += p.numel()
    matrix = torch.cat([where[id(layer.bias)][:, None], where[id(layer.weight)].flatten(1)], dim=1)
    order = matrix.T.flatten()
    return full[order][:, order]


def test_exact_for_a_convolution_with_gaussian_outputs():
    model = nn.Sequential(nn.Conv2d(2, 3, 2, stride=2))
    inputs = torch.randn(4, 2, 6, 6)
    options = {"likelihood": "gaussian", "loss": squared_error}
    factors = after_one_batch(model, inputs, **options).factors["0"]
    kfc_block = torch.kron(factors.activation, factors.derivative)
    torch.testing.assert_close(kfc_block, exact_block(model, inputs, squared_error, model[0]))


def test_exact_for_a_deep_linear_network_with_gaussian_outputs():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    inputs = torch.randn(5, 3)
    options = {"likelihood": "gaussian", "loss": squared_error}
    factors = after_one_batch(model, inputs, **options).factors
    for name, layer in model.named_children():
        kfc_block = torch.kron(factors[name].activation, factors[name].derivative)
        torch.testing.assert_close(kfc_block, exact_block(model, inputs, squared_error, layer))


def test_exact_for_one_example_with_one_location():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3, 4))
    inputs = torch.randn(1, 2, 3, 3)
    factors = after_one_batch(model, inputs).factors
    for name in ("0", "3"):
        kfc_block = torch.kron(factors[name].activation, factors[name].derivative)
        exact = exact_block(model, inputs, cross_entropy(), model[int(name)])
        torch.testing.assert_close(kfc_block, exact)


# Normalisation layers

NORMS = {
    "batch 1d": (nn.BatchNorm1d(3), (4, 3)),
    "batch 1d maps": (nn.BatchNorm1d(3), (4, 3, 5)),
    "batch 2d": (nn.BatchNorm2d(3), (4, 3, 2, 2)),
    "batch 3d": (nn.BatchNorm3d(2), (3, 2, 2, 2, 2)),
    "batch without running": (nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 2, 2)),
    "batch in eval": (nn.BatchNorm2d(3).eval(), (4, 3, 2, 2)),
    "group": (nn.GroupNorm(2, 4), (3, 4, 2, 2)),
    "instance 1d": (nn.InstanceNorm1d(3, affine=True), (3, 3, 4)),
    "instance 2d": (nn.InstanceNorm2d(3, affine=True), (3, 3, 2, 2)),
    "instance 2d running": (
        nn.InstanceNorm2d(3, affine=True, track_running_stats=True).eval(),
        (3, 3, 2, 2),
    ),
    "instance 3d": (nn.InstanceNorm3d(2, affine=True), (2, 2, 2, 2, 2)),
    "layer": (nn.LayerNorm(4), (3, 2, 4)),
    "layer of maps": (nn.LayerNorm((2, 3)), (3, 2, 3)),
    "layer without shift": (nn.LayerNorm(4, bias=False), (3, 2, 4)),
    "rms": (nn.RMSNorm(4), (3, 2, 4)),
}


def norm_block(norm: nn.Module, inputs: torch.Tensor, head: nn.Module) -> torch.Tensor:
    """Return Σ J_nᵀ R J_n per channel, with J_n through the outputs of example n only."""
    channels = norm.weight.numel()
    bias = getattr(norm, "bias", None)
    roles = [p for p in (norm.weight, bias) if p is not None]
    expected = torch.zeros(channels, len(roles), len(roles))
    with torch.no_grad():
        normalised = norm(inputs)
    for n in range(len(inputs)):
        # Given the normalised values, the outputs of example n depend on no other example.
        x_hat = (normalised[n] - _wide(norm, bias, normalised[n])) / _wide(
            norm, norm.weight, normalised[n]
        )

        def outputs(theta: torch.Tensor, x_hat=x_hat, n=n) -> torch.Tensor:
            parts = theta.reshape(len(roles), channels)
            scale = _wide(norm, parts[0].reshape(norm.weight.shape), x_hat)
            shift = _wide(norm, parts[1].reshape(norm.weight.shape), x_hat) if len(roles) > 1 else 0
            return head((scale * x_hat + shift)[None])

        theta = torch.cat([p.detach().flatten() for p in roles])
        jacobian = torch.autograd.functional.jacobian(outputs, theta)[0]
        probabilities = outputs(theta)[0].softmax(0)
        hessian = torch.diag(probabilities) - probabilities.outer(probabilities)
        fisher = jacobian.T @ hessian @ jacobian / len(inputs)
        for c in range(channels):
            index = torch.arange(len(roles)) * channels + c
            expected[c] += fisher[index][:, index]
    return expected


def _wide(norm: nn.Module, parameter, like: torch.Tensor):
    if parameter is None:
        return 0
    if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)):
        return parameter.detach() if not parameter.requires_grad else parameter
    return parameter.reshape(-1, *[1] * (like.dim() - 1))


@pytest.mark.parametrize("name", NORMS)
def test_norm_blocks(name):
    norm, shape = NORMS[name]
    norm = norm.double()
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(torch.randn_like(p) / 3)
    inputs = torch.randn(shape)
    head = Locations(inputs)
    model = nn.Sequential(norm, head)
    preconditioner = after_one_batch(model, inputs)
    assert not preconditioner.factors
    expected = norm_block(norm, inputs, head)
    torch.testing.assert_close(preconditioner.blocks["0"], expected)


def test_a_scale_of_zero_has_a_block():
    norm = nn.BatchNorm2d(2)
    nn.init.zeros_(norm.weight)
    inputs = torch.randn(4, 2, 3, 3)
    blocks = after_one_batch(nn.Sequential(norm, Locations(inputs)), inputs).blocks["0"]
    assert (blocks[:, 0, 0] > 0).all()
    assert torch.isfinite(blocks).all()


@pytest.mark.parametrize("damping", [1e-2, 0.0])
def test_norm_natural_gradient_solves_the_damped_blocks(damping):
    norm = nn.GroupNorm(2, 4)
    inputs = torch.randn(6, 4, 3)
    model = nn.Sequential(norm, Locations(inputs))
    preconditioner = kfc.Preconditioner(model, curvature=EXACT, damping=damping)
    fitting_loss(model(inputs)).backward()
    gradient = torch.stack([norm.weight.grad, norm.bias.grad], dim=1)
    preconditioner.step()
    damped = preconditioner.blocks["0"] + damping * torch.eye(2)
    expected = torch.linalg.solve(damped, gradient)
    torch.testing.assert_close(torch.stack([norm.weight.grad, norm.bias.grad], dim=1), expected)


@pytest.mark.parametrize("damping", [1e-3, 1.0])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_norm_inverses_are_accurate_in_float32_where_the_determinant_cancels(size, damping):
    direction = torch.randn(50, 2, 1) * torch.tensor([[1.0], [1e-2]])
    blocks = torch.cat([direction, direction.flip(1)])
    blocks = size * blocks @ blocks.mT
    true = torch.linalg.inv(blocks + damping * torch.eye(2))
    torch.testing.assert_close(invert_blocks(blocks, damping), true, rtol=1e-5, atol=1e-5)
    got = invert_blocks(blocks.float(), damping)
    torch.testing.assert_close(got.double(), true, rtol=1e-3, atol=1e-3)


def test_norm_inverses_of_degenerate_blocks():
    assert torch.isfinite(invert_blocks(torch.zeros(3, 2, 2), 0.0)).all()
    shift_only = torch.diag(torch.tensor([0.0, 4.0]))[None]
    torch.testing.assert_close(
        invert_blocks(shift_only, 0.0), torch.diag(torch.tensor([0.0, 0.25]))[None]
    )


# Several calls, ties, frozen parts, wide layers


def test_several_calls_count_as_locations():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("mix", torch.randn(6, 4))

        def forward(self, x):
            first = self.layer(x)
            second = self.layer(first.tanh())
            return torch.cat([first, second], dim=1).sin() @ self.mix

    model, inputs = Twice(), torch.randn(5, 3)
    factors = after_one_batch(model, inputs).factors["layer"]
    with torch.no_grad():
        first = model.layer(inputs)
        second = model.layer(first.tanh())
    rows = torch.cat([inputs, first.tanh()])
    rows = torch.cat([torch.ones(len(rows), 1), rows], dim=1)
    torch.testing.assert_close(factors.activation, rows.T @ rows / 5)

    def rest(calls):
        one = calls[:, 0]
        two = calls[:, 1] + torch.nn.functional.linear(one.tanh(), model.layer.weight.detach())
        return torch.cat([one, two], dim=1).sin() @ model.mix

    calls = torch.stack(
        [first, second - torch.nn.functional.linear(first.tanh(), model.layer.weight)], 1
    )
    expected = derivative_factor(rest, calls.detach(), cross_entropy(), channels_last=True)[0]
    torch.testing.assert_close(factors.derivative, expected)


def test_tied_modules_of_one_configuration_are_one_layer():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight, second.bias = first.weight, first.bias
    tied = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(3, 2))
    once = nn.Sequential(first, nn.Tanh(), first, nn.Tanh(), tied[4])
    inputs = torch.randn(4, 3)
    expected = after_one_batch(once, inputs).factors["0"]
    tied.zero_grad()
    optimizer = kfc.KFC(tied, curvature=EXACT)
    optimizer.zero_grad()
    fitting_loss(tied(inputs)).backward()
    optimizer.step()
    assert set(optimizer.factors) == {"0", "4"}
    torch.testing.assert_close(optimizer.factors["0"], expected)
    assert "2 tied modules" in optimizer.describe()


def tied_with_other_dilation():
    model = nn.Sequential(nn.Conv1d(2, 2, 2), nn.Conv1d(2, 2, 2, dilation=2), nn.Flatten())
    model[1].weight = model[0].weight
    return model, torch.randn(3, 2, 6), {"0.weight", "0.bias", "1.bias"}


def tied_with_other_bias():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model, torch.randn(3, 3), {"0.weight", "0.bias", "1.bias"}


@pytest.mark.parametrize("make", [tied_with_other_dilation, tied_with_other_bias])
def test_other_tied_modules_have_no_factors(make):
    model, inputs, plain = make()
    groups = [{"prefix": sorted(plain), "treatment": "plain"}]
    optimizer = kfc.KFC(model, lr=0.1, momentum=0.0, clip=None, groups=groups)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fitting_loss(model(inputs)).backward()
    optimizer.step()
    assert set(optimizer.engine.plan.plain) == plain
    for name, p in model.named_parameters():
        if name in plain:
            torch.testing.assert_close(p.detach(), before[name] - 0.1 * p.grad)


def test_bias_alone_is_its_own_block():
    layer = nn.Conv2d(2, 3, 2)
    layer.weight.requires_grad_(False)
    inputs = torch.randn(4, 2, 4, 4)
    output = layer(inputs)
    model = nn.Sequential(layer, Locations(output))
    factors = after_one_batch(model, inputs).factors["0"]
    torch.testing.assert_close(factors.activation, torch.full((1, 1), 9.0))
    torch.testing.assert_close(
        factors.derivative, derivative_factor(model[1], output, cross_entropy())[0]
    )


def test_weight_alone_has_no_homogeneous_coordinate():
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    inputs = torch.randn(4, 3)
    factors = after_one_batch(nn.Sequential(layer), inputs).factors["0"]
    torch.testing.assert_close(factors.activation, inputs.T @ inputs / 4)


def test_wide_factors_keep_their_diagonals():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 2))
    inputs = torch.randn(5, 2, 4, 4)
    whole = after_one_batch(model, inputs).factors
    model.zero_grad()
    narrow = after_one_batch(
        model, inputs, curvature=kfc.Kronecker(fisher="exact", max_factor_size=2)
    ).factors
    for name in whole:
        torch.testing.assert_close(narrow[name].activation, whole[name].activation.diagonal())
    torch.testing.assert_close(narrow["0"].derivative, whole["0"].derivative.diagonal())
    torch.testing.assert_close(narrow["2"].derivative, whole["2"].derivative)


def test_unbatched_maps_inside_a_model():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True)
            self.head = nn.Linear(3, 4)

        def forward(self, x):
            return torch.stack([self.head(self.norm(self.conv(one)).sum(-1)) for one in x])

    class Batched(Inside):
        def forward(self, x):
            return self.head(self.norm(self.conv(x)).sum(-1))

    inside, inputs = Inside(), torch.randn(3, 2, 5)
    batched = Batched()
    batched.load_state_dict(inside.state_dict())
    one, other = after_one_batch(inside, inputs), after_one_batch(batched, inputs)
    torch.testing.assert_close(one.factors["conv"], other.factors["conv"])


def test_frames_folded_into_the_batch_are_locations():
    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)

        def forward(self, x):  # (N, F, 3)
            n, f, _ = x.shape
            return self.norm(self.layer(x.reshape(n * f, 3))).reshape(n, f, 4).tanh().sum(1)

    class Direct(Frames):
        def forward(self, x):
            return self.norm(self.layer(x)).tanh().sum(1)

    folded, direct, inputs = Frames(), Direct(), torch.randn(3, 2, 3)
    direct.load_state_dict(folded.state_dict())
    one, other = after_one_batch(folded, inputs), after_one_batch(direct, inputs)
    torch.testing.assert_close(one.factors["layer"], other.factors["layer"])
    torch.testing.assert_close(one.blocks["norm"], other.blocks["norm"])


@pytest.mark.parametrize("size", [7, 8])
def test_transposed_convolution_with_an_output_size(size):
    class Upsample(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(2, 1, 3, stride=2, padding=1)

        def forward(self, x):
            return self.up(output_size=[size, size], input=x).flatten(1)

    model, inputs = Upsample(), torch.randn(3, 2, 4, 4)
    factors = after_one_batch(model, inputs).factors["up"]
    stock = nn.ConvTranspose2d(2, 1, 3, stride=2, padding=1, output_padding=size - 7)
    stock.load_state_dict(model.up.state_dict())
    torch.testing.assert_close(factors.activation, activation_factor(stock, inputs)[0])
    assert factors.activation[0, 0] == size**2


def test_exact_factors_behind_batch_normalisation():
    """There outputs depend on all examples, but targets are independent."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    inputs = torch.randn(4, 4)
    preconditioner = after_one_batch(model, inputs)
    output = model[0](inputs)
    expected = derivative_factor(model[1:], output, cross_entropy(), channels_last=True)[0]
    torch.testing.assert_close(preconditioner.factors["0"].derivative, expected)
    wide = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300))
    refused = kfc.Preconditioner(wide, curvature=EXACT)
    with pytest.raises(ValueError, match="behind batch normalisation"):
        fitting_loss(wide(torch.randn(8, 4))).backward()
    refused.close()


class SharedNorm(nn.Module):
    """A normalisation layer called on the examples and on a parameter that they share."""

    def __init__(self):
        super().__init__()
        self.norm, self.latent = nn.LayerNorm(3), nn.Parameter(torch.randn(1, 2, 3))

    def forward(self, x):
        return (self.norm(x).tanh() + self.norm(self.latent).sin()).sum(1)


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3)

    def forward(self, x):
        return self.norm(x.transpose(0, 1)).tanh().sum(0)


class UnevenRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3)

    def forward(self, x):
        rows = x.flatten(0, 1)
        return (self.norm(rows[:5]).sum() + self.norm(rows[:7]).sin().sum()) + x.sum(1)


def test_norm_blocks_of_shared_rows_are_the_enumerations():
    model, inputs = SharedNorm(), torch.randn(4, 2, 3)
    block = after_one_batch(model, inputs).blocks["norm"]
    x_hat = nn.functional.layer_norm(inputs, (3,))
    shared_hat = nn.functional.layer_norm(model.latent.detach(), (3,))
    expected = torch.zeros(3, 2, 2)
    for hats, function in ((x_hat, torch.tanh), (shared_hat.expand(4, 2, 3), torch.sin)):
        # The derivative of output c in (scale_c, shift_c) through this call; others are zero.
        slope = torch.func.vmap(torch.func.vmap(torch.func.vmap(torch.func.grad(function))))(hats)
        gradient = torch.stack([(slope * hats).sum(1), slope.sum(1)], dim=-1)
        p = model(inputs).detach().softmax(1)
        expected += torch.einsum("nc,nci,ncj->cij", p * (1 - p), gradient, gradient) / 4
    # Where rows are shared, the calls are treated as uncorrelated.
    torch.testing.assert_close(block, expected)


@pytest.mark.parametrize("length", [1, 3, 8])
def test_norm_blocks_with_sequences_first(length):
    model, inputs = SequenceFirst(), torch.randn(4, length, 3)

    class BatchFirst(SequenceFirst):
        def forward(self, x):
            return self.norm(x).tanh().sum(1)

    other = BatchFirst()
    torch.testing.assert_close(
        after_one_batch(model, inputs).blocks["norm"], after_one_batch(other, inputs).blocks["norm"]
    )


def test_norm_calls_of_different_row_counts_do_not_fail():
    block = after_one_batch(UnevenRows(), torch.randn(4, 2, 3)).blocks["norm"]
    assert torch.isfinite(block).all()


def test_tied_batch_norms_with_separate_statistics_have_no_blocks():
    first, second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    second.weight, second.bias = first.weight, first.bias
    optimizer = kfc.KFC(nn.Sequential(first, nn.Tanh(), second))
    assert set(optimizer.engine.plan.plain) == {"0.weight", "0.bias"}


def test_a_layer_needs_a_weight():
    class Kernel(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.zeros(2))

    @kfc.layers.layer_for.register
    def _(module: Kernel) -> kfc.layers.Layer:
        return kfc.layers.LinearLayer(module)

    with pytest.raises(ValueError, match="no parameter called 'weight'"):
        kfc.KFC(nn.Sequential(Kernel()))


def test_layers_may_be_called_by_keyword():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(input=x)

    inputs = torch.randn(4, 3)
    assert after_one_batch(Keyword(), inputs).factors["layer"].activation.shape == (4, 4)
