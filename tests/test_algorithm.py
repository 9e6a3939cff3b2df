"""`KFC` against a dense transcription of Algorithm 1, and the paper's invariance theorem."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import kfc
from reference import (
    Affine,
    activation_factor,
    cross_entropy,
    derivative_factor,
    exact_fisher,
    fitting_loss,
)

pytestmark = pytest.mark.usefixtures("double")

DECAY, LAMBDA, GAMMA, TAU = 0.7, 0.01, 0.02, 4.0
PERIODS = kfc.Periods(2, 3)


def small_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 2, 2, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(18, 3)
    )


def dense_algorithm_1(model, batches, *, lr, momentum, clip, loss_bound=None):
    """Run Algorithm 1 with dense matrices.

    Return (parameters, average, ν, predicted decrease / excess) after every step; the last two are
    those before the step was shortened.
    """
    layers = [(0, nn.Sequential(*model[1:])), (4, nn.Identity())]
    factors, inverses, history = {}, {}, []
    theta = list(model.parameters())
    velocity = [torch.zeros_like(p) for p in theta]
    average = [p.detach().clone() for p in theta]
    for k, (x, y) in enumerate(batches, start=1):
        for index, rest in layers:
            layer, into = model[index], x
            for module in model[:index]:
                into = module(into).detach()
            if k == 1 or k % PERIODS.statistics == 0:
                new = [
                    activation_factor(layer, into)[0],
                    derivative_factor(rest, layer(into), cross_entropy())[0],
                ]
                old = factors.get(index)
                factors[index] = (
                    new
                    if old is None
                    else [DECAY * o + (1 - DECAY) * n for o, n in zip(old, new, strict=True)]
                )
            if k == 1 or k % PERIODS.inverse == 0:
                omega, gamma = factors[index]
                pi = ((omega.trace() / len(omega)) / (gamma.trace() / len(gamma))).sqrt()
                root = math.sqrt(LAMBDA + GAMMA)
                inverses[index] = torch.linalg.inv(
                    torch.kron(
                        omega + pi * root * torch.eye(len(omega)),
                        gamma + root / pi * torch.eye(len(gamma)),
                    )
                )
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        update, slopes = [], []
        for index, _ in layers:
            layer = model[index]
            gradients = [p.grad + LAMBDA * p.detach() for p in (layer.weight, layer.bias)]
            slopes += gradients
            matrix = torch.cat([gradients[1][:, None], gradients[0].flatten(1)], dim=1)
            natural = inverses[index] @ matrix.T.flatten()
            natural = natural.reshape(matrix.T.shape).T
            update += [-lr * natural[:, 1:].reshape(layer.weight.shape), -lr * natural[:, 0]]
        quarter = x[: math.ceil(len(x) / 4)]
        v = torch.cat([u.flatten() for u in update])
        norm = v @ exact_fisher(model, quarter, cross_entropy()) @ v + LAMBDA * v @ v
        if clip is not None and norm > clip:
            update = [u / (norm / clip).sqrt() for u in update]
        zeta = math.exp(-1 / TAU)
        steps = [momentum * m + u for m, u in zip(velocity, update, strict=True)]
        decrease = -sum((g * s).sum() for g, s in zip(slopes, steps, strict=True))
        if loss_bound is not None and decrease < 0:
            steps = update
            decrease = -sum((g * s).sum() for g, s in zip(slopes, steps, strict=True))
        objective = loss + 0.5 * LAMBDA * sum(p.square().sum() for p in theta)
        ratio = (decrease / objective).item()
        if loss_bound is not None:
            steps = [s * min(1.0, loss_bound / ratio) for s in steps]
            m = torch.cat([s.flatten() for s in steps])
            whole = m @ exact_fisher(model, quarter, cross_entropy()) @ m + LAMBDA * m @ m
            if momentum and whole > clip:
                steps = [s / (whole / clip).sqrt() for s in steps]
        with torch.no_grad():
            for p, m, s, a in zip(theta, velocity, steps, average, strict=True):
                m.copy_(s)
                p.add_(m)
                a.mul_(zeta).add_((1 - zeta) * p)
        history.append(
            (
                [p.detach().clone() for p in theta],
                [a.clone() for a in average],
                float(norm),
                ratio,
            )
        )
    return history


@pytest.mark.parametrize("lr", [0.05, 0.3])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("bounded", [False, True])
def test_ten_steps_equal_the_dense_transcription(lr, momentum, bounded):
    model = small_net()
    mine = copy.deepcopy(model)
    batches = [(torch.randn(6, 1, 5, 5), torch.randint(3, (6,))) for _ in range(10)]
    options = {"lr": lr, "momentum": momentum}
    free = dense_algorithm_1(copy.deepcopy(model), batches, **options, clip=None)
    clip = sorted(norm for _, _, norm, _ in free)[5]
    history = dense_algorithm_1(copy.deepcopy(model), batches, **options, clip=clip)
    loss_bound = None
    if bounded:
        loss_bound = sorted(ratio for *_, ratio in history)[5]
        history = dense_algorithm_1(model, batches, **options, clip=clip, loss_bound=loss_bound)
    clipped = [norm > clip for _, _, norm, _ in history]
    bounds = sum(ratio > loss_bound for *_, ratio in history) if bounded else 0
    if bounded:
        assert bounds
    else:
        assert any(clipped)
        assert not all(clipped)
    optimizer = kfc.KFC(
        mine,
        **options,
        schedule=PERIODS,
        weight_decay=LAMBDA,
        damping=GAMMA,
        curvature=kfc.Kronecker(factor_decay=DECAY, fisher="exact"),
        clip=kfc.FisherClip(clip, period=1, loss_bound=loss_bound),
        averaging_timescale=TAU,
    )
    for (x, y), (parameters, averages, norm, _) in zip(batches, history, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(mine(x), y).backward()
        optimizer.step()
        assert optimizer.diagnostics["fisher_norm"] == pytest.approx(norm, rel=1e-8)
        torch.testing.assert_close([p.detach() for p in mine.parameters()], parameters)
        with optimizer.averaged_parameters():
            torch.testing.assert_close([p.detach() for p in mine.parameters()], averages)
    assert optimizer.diagnostics.get("loss_bounds", 0) == bounds


@pytest.mark.parametrize("known", ["loss", "likelihood"])
def test_estimated_factors_are_those_of_the_whole_data_set(known):
    model = small_net()
    batches = [(torch.randn(n, 1, 5, 5), torch.randint(3, (n,))) for n in (4, 4, 2)]
    whole = torch.cat([x for x, _ in batches])
    optimizer = kfc.KFC(
        model,
        likelihood="auto" if known == "loss" else "categorical",
        curvature=kfc.Kronecker(fisher="exact"),
    )
    seen = []
    optimizer.estimate_factors(
        batches,
        (lambda outputs, batch: F.cross_entropy(outputs, batch[1])) if known == "loss" else None,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    torch.testing.assert_close(
        optimizer.factors["0"].activation, activation_factor(model[0], whole)[0]
    )
    pieces = [
        len(x) * derivative_factor(nn.Sequential(*model[1:]), model[0](x), cross_entropy())[0]
        for x, _ in batches
    ]
    torch.testing.assert_close(optimizer.factors["0"].derivative, sum(pieces) / 10)


def test_step_one_averages_after_estimate_factors():
    model = small_net()
    x = torch.randn(4, 1, 5, 5)
    optimizer = kfc.KFC(model, curvature=kfc.Kronecker(fisher="exact", factor_decay=0.25))
    optimizer.estimate_factors([x], lambda outputs, _: fitting_loss(outputs))
    before = optimizer.factors["0"].activation.clone()
    other = torch.randn(4, 1, 5, 5)
    F.cross_entropy(model(other), torch.zeros(4, dtype=torch.long)).backward()
    expected = 0.25 * before + 0.75 * activation_factor(model[0], other)[0]
    optimizer.step()
    torch.testing.assert_close(optimizer.factors["0"].activation, expected)


def test_sampled_factors_converge_to_the_exact_ones():
    model = small_net()
    x = torch.randn(8, 1, 5, 5)
    exact = kfc.Preconditioner(model, curvature=kfc.Kronecker(fisher="exact"))
    exact.estimate_factors([x], lambda outputs, _: fitting_loss(outputs))
    exact.close()
    errors = []
    for draws in (20, 500):
        sampled = kfc.Preconditioner(model, curvature=kfc.Kronecker(fisher="sampled"), seed=1)
        sampled.estimate_factors([x] * draws, lambda outputs, _: fitting_loss(outputs))
        sampled.close()
        for name in exact.factors:
            torch.testing.assert_close(
                sampled.factors[name].activation, exact.factors[name].activation
            )
        gap = sampled.factors["0"].derivative - exact.factors["0"].derivative
        errors.append(float(gap.norm() / exact.factors["0"].derivative.norm()))
    assert errors[1] < 0.1
    assert errors[1] < errors[0]


# Theorem 3


def transformed_net(net, before, after):
    """Return the same function with activations and pre-activations in other coordinates.

    Layer 1 computes s' = A s + a; its nonlinearity sees A⁻¹(s' - a), and layer 2 sees B h + b.
    """
    (a_matrix, a_offset), (b_matrix, b_offset) = before, after
    first, second = copy.deepcopy(net[0]), copy.deepcopy(net[2])
    with torch.no_grad():
        first.weight.copy_(torch.einsum("ij,j...->i...", a_matrix, net[0].weight))
        first.bias.copy_(a_matrix @ net[0].bias + a_offset)
        inverse = torch.linalg.inv(b_matrix)
        weight = torch.einsum("ij...,jk->ik...", net[2].weight, inverse)
        second.weight.copy_(weight)
        shift = torch.einsum("ij...,j->i", weight, b_offset)
        second.bias.copy_(net[2].bias - shift)
    undo = torch.linalg.inv(a_matrix)
    return nn.Sequential(
        first,
        Affine(undo, -undo @ a_offset),
        net[1],
        Affine(b_matrix, b_offset),
        second,
        *copy.deepcopy(net[3:]),
    )


def borderless_net(mode):
    """Return two convolutions without a border (no or circular padding), and a linear layer."""
    size, pad = (2, 0) if mode == "zeros" else (3, 1)
    return nn.Sequential(
        nn.Conv2d(1, 2, 2),
        nn.Tanh(),
        nn.Conv2d(2, 2, size, padding=pad, padding_mode=mode),
        nn.Flatten(),
        nn.Tanh(),
        nn.LazyLinear(3),
    )


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.sampled_from(["zeros", "circular"]))
def test_theorem_3_invariance_to_affine_maps_of_activations(seed, mode):
    """The outputs are Bernoulli: without damping, Γ of a softmax would be singular."""
    torch.manual_seed(seed)
    net = borderless_net(mode)
    x, y = torch.randn(40, 1, 4, 4), torch.rand(40, 3).round()
    net(x)

    def random_map():
        return torch.eye(2) + 0.4 * torch.randn(2, 2), torch.randn(2)

    other = transformed_net(net, random_map(), random_map())
    torch.testing.assert_close(other(x), net(x))
    for model in (net, other):
        optimizer = kfc.KFC(
            model,
            lr=1e-3,
            momentum=0.0,
            damping=0.0,
            likelihood="bernoulli",
            curvature=kfc.Kronecker(fisher="exact"),
            clip=None,
        )
        F.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()
        optimizer.close()
    torch.testing.assert_close(other(x), net(x), rtol=1e-7, atol=1e-7)


def test_plain_gradient_is_not_invariant():
    """Otherwise the test above would prove nothing."""
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Conv2d(2, 2, 2), nn.Flatten())
    x, y = torch.randn(10, 1, 4, 4), torch.randint(2, (10,))
    maps = [(torch.eye(2) + 0.4 * torch.randn(2, 2), torch.randn(2)) for _ in range(2)]
    other = transformed_net(net, *maps)
    for model in (net, other):
        F.cross_entropy(model(x), y).backward()
        torch.optim.SGD(model.parameters(), lr=1e-2).step()
    assert not torch.allclose(other(x), net(x), atol=1e-6)
