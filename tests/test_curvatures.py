"""Test every `curvature=` in use: theorems, training, checkpoints, descriptions."""

import copy
import functools
import operator
from contextlib import nullcontext as nothing

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten_with_path

import kfc
from approximations import CURVATURES, FACTORED, approximation
from kfc.curvature.gradients import SquaredGradients
from kfc.curvature.statistics import Moment
from kfc.moments.stationary import uncorrelated_factor
from reference import fitting_loss
from test_algorithm import borderless_net, transformed_net


def leaves(state) -> dict:
    """Return every leaf of nested dicts and lists, by its path."""
    found, _ = tree_flatten_with_path(state)
    return {
        tuple(step.key if hasattr(step, "key") else step.idx for step in path): value
        for path, value in found
    }


def assert_identical(one, other) -> None:
    """Compare nested dicts and lists, tensors bit for bit."""
    one, other = leaves(one), leaves(other)
    assert one.keys() == other.keys()
    for path, value in one.items():
        same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
        assert same(value, other[path]), path


def layers_of(optimizer) -> dict:
    """Return the saved running averages and inverse of every layer, by name."""
    return optimizer.state_dict()["curvature"]["curvature"]["layers"]


# Theorem 4


def literal_prong_step(conv, inputs, loss_of_maps, lr):
    """Return the change of weight and bias in an SGD step in white coordinates."""
    pixels = inputs.movedim(1, -1).reshape(-1, inputs.shape[1])
    mean, covariance = (
        pixels.mean(0),
        torch.cov(pixels.T, correction=0).reshape(inputs.shape[1], -1),
    )
    values, basis = torch.linalg.eigh(covariance)
    root, whitening = ((basis * values**p) @ basis.T for p in (0.5, -0.5))
    centred = inputs - mean.reshape(-1, *[1] * (inputs.dim() - 2))
    white = torch.einsum("jk,nk...->nj...", whitening, centred)
    # The same function of white activations: a = root · white + mean.
    weight = torch.einsum("ij...,jk->ik...", conv.weight.detach(), root).requires_grad_()
    bias = conv.bias.detach() + torch.einsum("ij...,j->i", conv.weight.detach(), mean)
    bias.requires_grad_()
    in_white = functional_call(conv, {"weight": weight, "bias": bias}, white)
    assert_close(in_white, conv(inputs))
    gradients = torch.autograd.grad(loss_of_maps(in_white), (weight, bias))
    with torch.no_grad():
        new_weight = torch.einsum("ij...,jk->ik...", weight - lr * gradients[0], whitening)
        new_bias = bias - lr * gradients[1] - torch.einsum("ij...,j->i", new_weight, mean)
    return new_weight - conv.weight.detach(), new_bias - conv.bias.detach()


@settings(max_examples=20)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 10_000),
)
@pytest.mark.usefixtures("double")
def test_prong_is_sgd_in_white_coordinates(channels, outputs, kernel, extra, circular, seed):
    torch.manual_seed(seed)
    padding = {"padding": kernel // 2, "padding_mode": "circular"} if circular else {}
    conv = nn.Conv2d(channels, outputs, kernel, **padding)
    inputs = torch.randn(6, channels, kernel + extra, kernel + extra + 1) + torch.randn(
        channels, 1, 1
    )
    maps = conv(inputs)
    mix = torch.randn(maps[0].numel(), 4)
    model = nn.Sequential(conv, nn.Flatten(), nn.Tanh(), Fixed(mix))
    y = torch.randint(4, (6,))

    def loss_of_maps(maps):
        return F.cross_entropy(model[1:](maps), y)

    expected = literal_prong_step(conv, inputs, loss_of_maps, lr=1.0)
    preconditioner = kfc.Preconditioner(model, curvature="prong", damping=0.0)
    F.cross_entropy(model(inputs), y).backward()
    preconditioner.step()
    factors = preconditioner.factors["0"]
    locations, level = factors.activation[0, 0], factors.derivative[0]
    assert locations == maps[0, 0].numel()
    # Without boundary counts and |T|, which padding 0 and circular padding make one number.
    rows = torch.cat([torch.ones_like(inputs[:, :1]), inputs], dim=1).movedim(1, -1).flatten(0, 2)
    pixel_moment = (rows.T @ rows / len(rows))[None]
    ones = torch.ones(1 + kernel**2, 1 + kernel**2)
    assert_close(factors.activation / locations, uncorrelated_factor(pixel_moment, ones)[0])
    for parameter, step in zip((conv.weight, conv.bias), expected, strict=True):
        assert_close(-parameter.grad * locations * level, step, rtol=1e-6, atol=1e-8)


class Fixed(nn.Module):
    def __init__(self, matrix):
        super().__init__()
        self.register_buffer("matrix", matrix)

    def forward(self, rows):
        return rows @ self.matrix


# Theorem 3, and weaker invariances


def orthogonal():
    return torch.linalg.qr(torch.randn(2, 2))[0]


def diagonal():
    return torch.diag(0.5 + torch.rand(2))


def general():
    return torch.eye(2) + 0.4 * torch.randn(2, 2)


#: Maps (of pre-activations, of activations, offset of activations) without an effect.
INVARIANT = {
    "kfc": (general, general, True),
    "sua": (general, general, True),
    # White derivatives stay white only under rotations and a scale.
    "prong": (lambda: 1.7 * orthogonal(), general, True),
    # An eigenbasis rotates with its matrix, but is not scaled or shifted with it.
    "ekfac": (lambda: 1.7 * orthogonal(), orthogonal, False),
    "diagonal": (diagonal, diagonal, False),
}
#: Maps with an effect.
VARIANT = {
    "prong": [(general, general, True)],
    "ekfac": [
        (general, orthogonal, False),
        (orthogonal, general, False),
        (orthogonal, orthogonal, True),
    ],
    "diagonal": [
        (orthogonal, diagonal, False),
        (diagonal, orthogonal, False),
        (diagonal, diagonal, True),
    ],
}


def move(model, x, y, curvature):
    """Take a natural-gradient step, with statistics of the same batch gathered twice."""
    preconditioner = kfc.Preconditioner(
        model,
        damping=0.0,
        curvature=approximation(curvature, fisher="exact", factor_decay=0.0),
        schedule=kfc.Periods(1, 1),
    )
    for _ in range(2):
        model.zero_grad()
        F.binary_cross_entropy_with_logits(model(x), y).backward()
        preconditioner.step()
    preconditioner.close()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-3 * parameter.grad


def moved_outputs(seed, mode, curvature, before, after, offset):
    """Return the changes of outputs by a step in the original and in other coordinates.

    The outputs are Bernoulli: without damping, the Fisher matrix of a softmax would be singular.
    """
    torch.manual_seed(seed)
    net = borderless_net(mode)
    x, y = torch.randn(40, 1, 4, 4), torch.rand(40, 3).round()
    start = net(x).detach()
    other = transformed_net(net, (before(), torch.randn(2)), (after(), offset * torch.randn(2)))
    assert_close(other(x), start)
    for model in (net, other):
        move(model, x, y, curvature)
    return net(x) - start, other(x) - start


@pytest.mark.parametrize("curvature", CURVATURES)
@settings(max_examples=4)
@given(seed=st.integers(0, 10_000), mode=st.sampled_from(["zeros", "circular"]))
@pytest.mark.usefixtures("double")
def test_invariance_to_maps_of_activations(curvature, seed, mode):
    # Circular padding of such small maps makes eigenvalues equal and eigenbases ambiguous.
    assume(curvature != "ekfac" or mode == "zeros")
    one, other = moved_outputs(seed, mode, curvature, *INVARIANT[curvature])
    assert_close(one, other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("curvature", "maps"), [(name, maps) for name, several in VARIANT.items() for maps in several]
)
@pytest.mark.usefixtures("double")
def test_other_maps_of_activations_have_an_effect(curvature, maps):
    one, other = moved_outputs(0, "zeros", curvature, *maps)
    assert (one - other).norm() > 0.01 * one.norm()


# Training


def digits_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(54, 10),
    )


@functools.cache
def all_digits():
    return load_digits(return_X_y=True)


def digits(count: int = 256):
    images, labels = all_digits()
    x = torch.tensor(images[:count], dtype=torch.get_default_dtype()).reshape(-1, 1, 8, 8) / 16
    return x, torch.tensor(labels[:count])


def train(model, optimizer, first, last):
    x, y = digits()
    for step in range(first, last):
        rows = slice(64 * (step % 4), 64 * (step % 4) + 64)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize(
    ("curvature", "fisher"), [*((name, "sampled") for name in CURVATURES), ("ekfac", "empirical")]
)
def test_every_curvature_trains(curvature, fisher):
    model = digits_net()
    seed = 0 if fisher == "sampled" else None
    optimizer = kfc.KFC(model, curvature=approximation(curvature, fisher=fisher), seed=seed)
    train(model, optimizer, 0, 24)
    optimizer.close()
    x, y = digits()
    assert F.cross_entropy(model(x), y) < 0.3  # from 2.3
    assert optimizer.diagnostics["skipped_steps"] == 0


@pytest.mark.parametrize("curvature", CURVATURES)
def test_kfac_takes_every_curvature(curvature):
    model, (x, y) = digits_net(), digits(64)
    adaptation = kfc.Adaptation(factor_damping_period=2)
    optimizer = kfc.KFAC(model, curvature=curvature, adaptation=adaptation, seed=0)
    losses = [optimizer.step(lambda: F.cross_entropy(model(x), y)).item() for _ in range(7)]
    assert losses[-1] < 0.5 * losses[0]


def test_an_error_leaves_the_bases_and_moments_of_kfac_as_they_were():
    model, (x, y) = digits_net(), digits(64)
    optimizer = kfc.KFAC(
        model,
        curvature="ekfac",
        schedule=kfc.Periods(1, 1),
        adaptation=kfc.Adaptation(model_damping_period=1),
        seed=0,
    )
    calls = []

    def closure():
        calls.append(len(calls))
        if calls[-1] == 7:
            raise ArithmeticError("while the update is measured")
        return F.cross_entropy(model(x), y)

    for _ in range(3):
        optimizer.step(closure)
    before = layers_of(optimizer)
    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    assert before["0"]["inverse"]["measured"]
    assert_identical(layers_of(optimizer), before)
    assert optimizer.step(closure) < 1.5


def test_kfc_is_the_default():
    results = []
    for options in ({}, {"curvature": "kfc"}):
        torch.manual_seed(0)
        model = digits_net()
        train(model, kfc.KFC(model, seed=0, **options), 0, 5)
        results.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("curvature", ["sua", "diagonal", "ekfac"])
def test_estimated_statistics_replace_averages_and_inverses(curvature):
    """Also the second moments that belong to the bases of an inverse."""
    model, (x, _) = digits_net(), digits(64)
    optimizer = kfc.KFC(model, curvature=curvature, seed=0)
    train(model, optimizer, 0, 3)
    optimizer.estimate_factors([x, x])
    saved, layer = layers_of(optimizer)["0"], optimizer.engine.curvature.layers["0"]
    assert not saved["inverse"]
    assert [tensor.shape for tensor in saved["running"]] == list(layer.running_shapes())
    train(model, optimizer, 3, 6)


def test_estimates_measure_nothing_in_bases_that_will_be_replaced(monkeypatch):
    model, (x, _) = digits_net(), digits(64)
    optimizer = kfc.KFC(model, curvature="ekfac", seed=0, schedule=kfc.Periods())
    train(model, optimizer, 0, 3)
    monkeypatch.setattr(SquaredGradients, "backward", lambda *_: pytest.fail("squares"))
    optimizer.estimate_factors([x, x])
    monkeypatch.undo()
    train(model, optimizer, 3, 5)
    assert layers_of(optimizer)["0"]["inverse"]["measured"]


def test_moments_must_state_whether_they_scale_with_derivatives():
    with pytest.raises(TypeError, match="of_derivatives"):
        Moment(torch.zeros(1, 2, 2), 1)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_batch_that_is_not_finite_changes_no_statistics(curvature):
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 3))
    optimizer = kfc.KFC(
        model, curvature=curvature, seed=0, schedule=kfc.Periods(1, kfc.Stretch(20))
    )
    x, y = torch.randn(4, 2, 4), torch.randint(3, (4,))
    for bad in (False, False, True):
        before = snapshot(optimizer) if bad else None
        optimizer.zero_grad()
        inputs = x.clone()
        inputs[0, 0, 1] = torch.inf if bad else 0.0
        with pytest.warns(UserWarning, match="finite") if bad else nothing():
            F.cross_entropy(model(inputs), y).backward()
            optimizer.step()
    after = snapshot(optimizer)
    for path, value in before.items():
        if isinstance(value, torch.Tensor) and "layers" in path:
            assert torch.equal(value, after[path]), path


@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_unfrozen_parameter_gets_statistics_of_its_own(curvature):
    model = digits_net()
    bias = model[6].bias.requires_grad_(False)
    optimizer = kfc.KFC(model, curvature=curvature, schedule=kfc.Periods(3, 3), seed=0)
    train(model, optimizer, 0, 4)
    bias.requires_grad_(True)
    before = bias.detach().clone()
    train(model, optimizer, 4, 8)
    assert not torch.equal(before, bias)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_layer_may_be_frozen_for_a_while(curvature):
    """Meanwhile its inverse is refreshed for the parameters that it has statistics of."""
    model = digits_net()
    optimizer = kfc.KFC(model, curvature=curvature, schedule=kfc.Periods(4, 1), seed=0)
    for frozen in ([], ["bias", "weight"], [], ["bias"], ["weight"], []):
        for role in ("bias", "weight"):
            getattr(model[6], role).requires_grad_(role not in frozen)
        train(model, optimizer, 0, 2)
        assert set(optimizer.factors) == ({"0", "3", "6"} if curvature in FACTORED else set())


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("inverse", ["factored", "eigen"])
@pytest.mark.parametrize("periods", [(1, 1), (1, 10), (10, 10)])
def test_training_continues_after_a_change_of_dtype(curvature, inverse, periods):
    """Whether or not statistics and inverses are due."""
    model, (x, y) = digits_net(), digits(64)
    optimizer = kfc.KFC(
        model,
        curvature=approximation(curvature, inverse=inverse),
        schedule=kfc.Periods(*periods),
        seed=0,
    )
    train(model, optimizer, 0, 3)
    model.double()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
    layer = layers_of(optimizer)["0"]
    if periods[0] == 1:
        assert {t.dtype for t in layer["running"]} == {torch.float64}
    assert {t.dtype for t in layer["inverse"].values()} <= {torch.float64, torch.int64}


@pytest.mark.parametrize("curvature", CURVATURES)
def test_statistics_have_full_precision_inside_autocast(curvature):
    model, (x, y) = digits_net().to(memory_format=torch.channels_last), digits(64)
    optimizer = kfc.KFC(model, curvature=curvature, seed=0)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for layer in layers_of(optimizer).values():
        assert {t.dtype for t in layer["running"]} == {torch.float32}
        dtypes = {t.dtype for t in layer["inverse"].values()}
        assert dtypes <= {torch.float32, torch.int64}


# Checkpoints


def snapshot(optimizer) -> dict:
    return {
        path: value.clone() if isinstance(value, torch.Tensor) else value
        for path, value in leaves(optimizer.state_dict()).items()
    }


def run(first, last, saved, curvature):
    torch.manual_seed(0)
    model = digits_net()
    optimizer = kfc.KFC(
        model,
        curvature=curvature,
        schedule=kfc.Periods(2, 3),
        averaging_timescale=5.0,
        seed=7 if saved is None else 99,
    )
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, first, last)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize(
    ("curvature", "stop"), [*((name, 5) for name in CURVATURES), ("ekfac", 1), ("ekfac", 2)]
)
def test_a_resumed_run_continues_bit_for_bit(curvature, stop, tmp_path):
    """Second moments in the eigenbasis are first measured in step 2."""
    torch.save(run(0, stop, None, curvature), tmp_path / "half.pt")
    half = torch.load(tmp_path / "half.pt", weights_only=True)
    whole, resumed = run(0, 8, None, curvature), run(stop, 8, half, curvature)
    assert_identical(whole, resumed)
    if curvature == "ekfac":
        measured = half["optimizer"]["curvature"]["curvature"]["layers"]["0"]["inverse"]
        assert bool(measured["measured"]) == (stop > 1)


def test_a_state_of_another_curvature_is_refused():
    states = {}
    for name in CURVATURES:
        model = digits_net()
        optimizer = kfc.KFC(model, curvature=name, seed=0)
        train(model, optimizer, 0, 1)
        states[name] = optimizer.state_dict()
    for name in CURVATURES:
        optimizer = kfc.KFC(digits_net(), curvature=name)
        for other, state in states.items():
            if other == name:
                optimizer.load_state_dict(state)
                continue
            with pytest.raises(ValueError, match=rf"saved with curvature='{other}', not '{name}'"):
                optimizer.load_state_dict(state)


@pytest.mark.parametrize("curvature", ["kfc", "sua", "prong"])
def test_a_state_with_another_kind_of_inverse_is_loaded_without_these_inverses(curvature):
    torch.manual_seed(0)
    model, schedule = digits_net(), kfc.Periods(kfc.Stretch(10), 3)
    optimizer = kfc.KFC(model, curvature=curvature, schedule=schedule, seed=0)
    train(model, optimizer, 0, 4)
    saved, eigen = layers_of(optimizer), approximation(curvature, inverse="eigen")
    other = kfc.KFC(model, curvature=eigen, schedule=schedule, seed=0)
    other.load_state_dict(optimizer.state_dict())
    for name, layer in layers_of(other).items():
        assert_identical(layer["running"], saved[name]["running"])
        # Batch normalisation has only one kind of inverse.
        expected = saved[name]["inverse"] if name == "1" else {}
        assert_identical(layer["inverse"], expected)
    optimizer.close()
    train(model, other, 4, 6)


def test_a_state_without_its_approximation_is_refused():
    model = digits_net()
    optimizer = kfc.KFC(model, seed=0)
    train(model, optimizer, 0, 1)
    state = optimizer.state_dict()
    del state["curvature"]["curvature"]["approximation"]
    with pytest.raises(ValueError, match="approximation"):
        kfc.KFC(digits_net()).load_state_dict(state)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_other_shapes_are_refused(curvature):
    model = digits_net()
    optimizer = kfc.KFC(model, curvature=curvature, seed=0)
    train(model, optimizer, 0, 2)
    paths = [
        path
        for path, value in leaves(optimizer.state_dict()).items()
        if isinstance(value, torch.Tensor) and ("running" in path or "inverse" in path)
    ]
    assert len(paths) > 6
    for path in paths:
        state = optimizer.state_dict()
        inner = state
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = torch.zeros(1, 7, 7, 7)
        with pytest.raises(ValueError, match=r"\(1, 7, 7, 7\)"):
            kfc.KFC(digits_net(), curvature=curvature).load_state_dict(state)


# Descriptions and errors


@pytest.mark.parametrize(
    ("curvature", "treatment", "shapes"),
    [
        ("kfc", "Kronecker factors ", "2x19x19, 2x3x3"),
        ("sua", "Kronecker factors, uncorrelated activations ", "2x3x3, 10x10, 2x3x3"),
        (
            "prong",
            "Kronecker factors, uncorrelated activations, white derivatives",
            "2x3x3, 10x10, 2x1",
        ),
        ("diagonal", "diagonal", "2x57"),
        ("ekfac", "Kronecker eigenbasis", "2x19x19, 2x3x3"),
    ],
)
def test_describe_states_treatment_shapes_and_memory(curvature, treatment, shapes):
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten())
    optimizer = kfc.KFC(model, curvature=curvature)
    text = optimizer.describe()
    assert treatment in text
    assert f"  {shapes}  " in text
    for _ in range(2):
        optimizer.zero_grad()
        fitting_loss(model(torch.randn(5, 4, 4, 4))).backward()
        optimizer.step()
    (layer,) = layers_of(optimizer).values()
    kept = [*layer["running"], *layer["inverse"].values()]
    size = sum(4 * tensor.numel() for tensor in kept)
    stated = f"{size} B" if size < 1024 else f"{size / 1024:.1f} KiB"
    assert f"  {stated}  " in text
    assert set(optimizer.factors) == ({"0"} if curvature in FACTORED else set())
    summary = optimizer.diagnostics["layers"]["0"]
    assert ("pi" in summary) == (curvature in FACTORED)


def test_an_unknown_curvature_is_refused():
    model = nn.Linear(3, 2)
    for make in (kfc.KFC, kfc.KFAC, kfc.Preconditioner):
        with pytest.raises(ValueError, match=r"curvature must be one of .*'prong'.* got 'shampoo'"):
            make(model, curvature="shampoo")
    assert not model._forward_hooks


@pytest.mark.parametrize("curvature", ["diagonal", "ekfac"])
def test_inputs_changed_in_place_are_an_error_if_gradients_need_them(curvature):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
            self.changes = False

        def forward(self, x):
            hidden = self.first(x)
            result = self.last(hidden)
            if self.changes:
                with torch.no_grad():
                    hidden.zero_()
            return result

    model, inputs = Model(), torch.randn(8, 4)
    twin = copy.deepcopy(model)
    options = {"curvature": approximation(curvature, fisher="exact"), "schedule": kfc.Periods(1, 1)}
    both = ((model, kfc.KFC(model, **options)), (twin, kfc.KFC(twin, **options)))

    def train_both():
        for network, trained in both:
            trained.zero_grad()
            fitting_loss(network(inputs)).backward()
            trained.step()

    train_both()  # EKFAC needs inputs once it has bases
    model.changes = True
    with pytest.raises(RuntimeError, match="changed in place"):
        fitting_loss(model(inputs)).backward()
    # No statistics of the failed backward pass remain.
    model.changes = False
    train_both()
    assert_identical(*(layers_of(trained) for _, trained in both))


def test_a_layer_without_activation_rows_is_an_error_if_gradients_need_them():
    class Rows(kfc.layers.LinearLayer):
        activation_rows = kfc.layers.MatrixLayer.activation_rows

    class Other(nn.Linear):
        pass

    kfc.layers.layer_for.register(Other, Rows)
    model = nn.Sequential(Other(3, 2))
    optimizer = kfc.KFC(model, curvature="diagonal")
    with pytest.raises(NotImplementedError, match="Rows does not define activation_rows"):
        fitting_loss(model(torch.randn(4, 3))).backward()
    optimizer.close()
