"""Test `KFAC.step(held_out=)`, which measures the effect of an update on another batch."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import kfc
from reference import cross_entropy, exact_fisher, flat_parameters

pytestmark = pytest.mark.usefixtures("double")


def problem(count: int = 20) -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return model, torch.randn(count, 5), torch.randint(3, (count,))


def closure_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    return lambda: F.cross_entropy(model(inputs), labels)


def make(model: nn.Module, *, weight_decay=0.0, **options) -> kfc.KFAC:
    """Return an optimizer; other options are those of ``kfc.Adaptation``."""
    return kfc.KFAC(
        model,
        weight_decay=weight_decay,
        adaptation=kfc.Adaptation(**options),
        likelihood="categorical",
        seed=0,
    )


def test_the_reduction_ratio_is_measured_on_the_held_out_batch():
    model, inputs, labels = problem()
    others, truth = torch.randn(15, 5), torch.randint(3, (15,))
    decay = 0.02
    optimizer = make(model, weight_decay=decay, initial_model_damping=0.5, model_damping_period=1)

    def objective(inputs: Tensor, labels: Tensor) -> float:
        penalty = 0.5 * decay * sum(p.square().sum() for p in model.parameters())
        return (F.cross_entropy(model(inputs), labels) + penalty).item()

    for step in range(5):
        start, damping = flat_parameters(model), optimizer.model_damping.value
        first = objective(others, truth)
        loss = F.cross_entropy(model(inputs), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        gradient = torch.cat([g.flatten() for g in gradients]) + decay * start
        fisher = exact_fisher(model, inputs, cross_entropy()) + decay * torch.eye(len(start))
        found = optimizer.step(
            closure_of(model, inputs, labels), held_out=closure_of(model, others, truth)
        )
        assert found.item() == pytest.approx(loss.item())
        update, told = flat_parameters(model) - start, optimizer.step_diagnostics
        predicted = (gradient @ update + 0.5 * update @ fisher @ update).item()
        change = objective(others, truth) - first
        assert told["model_change"] == pytest.approx(predicted, rel=1e-7)
        assert told["objective_change"] == pytest.approx(change, rel=1e-7)
        assert told["reduction_ratio"] == pytest.approx(change / predicted, rel=1e-6)
        if step:
            power = (change / predicted > 0.75) - (change / predicted < 0.25)
            expected = damping * (19 / 20) ** (5 * power)
            assert optimizer.model_damping.value == pytest.approx(expected)


def test_a_held_out_batch_that_is_the_same_changes_nothing():
    """Dropout masks and running statistics are the same, and measuring leaves no trace."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 3))
    inputs, labels = torch.randn(20, 5), torch.randint(3, (20,))
    twin = copy.deepcopy(model)
    options = {"initial_model_damping": 0.5, "model_damping_period": 2}
    plain, other = make(model, **options), make(twin, **options)
    for _ in range(5):
        state = torch.get_rng_state()
        plain.step(closure_of(model, inputs, labels))
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        closure = closure_of(twin, inputs, labels)
        other.step(closure, held_out=closure)
        assert torch.equal(torch.get_rng_state(), after)
        for name, value in plain.step_diagnostics.items():
            found = other.step_diagnostics[name]
            assert found == (None if value is None else pytest.approx(value, rel=1e-9)), name
    for name, value in model.state_dict().items():
        assert_close(twin.state_dict()[name], value)


def test_the_held_out_batch_is_evaluated_only_where_needed():
    model, inputs, labels = problem()
    optimizer = make(model, initial_model_damping=1.0, model_damping_period=3)
    closure, calls = closure_of(model, inputs, labels), []

    def held_out() -> Tensor:
        assert not torch.is_grad_enabled()
        calls[-1] += 1
        return closure()

    for _ in range(6):
        calls.append(0)
        optimizer.step(closure, held_out)
    assert calls == [2, 0, 2, 0, 0, 2]


def test_model_damping_rises_when_the_held_out_loss_does_not_fall():
    """Random labels: what a batch teaches is of no use for another."""
    model, inputs, _ = problem(400)
    twin = copy.deepcopy(model)
    options = {"initial_model_damping": 0.1, "model_damping_period": 1}
    plain, other = make(model, **options), make(twin, **options)
    for step in range(40):
        rows = inputs[step * 10 : step * 10 + 10]
        noise, truth = torch.randint(3, (10,)), torch.randint(3, (10,))
        plain.step(closure_of(model, rows, noise))
        other.step(closure_of(twin, rows, noise), held_out=closure_of(twin, rows, truth))
    assert plain.model_damping.value < 0.1 < other.model_damping.value


def test_unusable_held_out_closures_are_refused():
    model, inputs, labels = problem()
    optimizer = make(model)
    closure, before = closure_of(model, inputs, labels), flat_parameters(model)
    cases = (
        (3, TypeError, "held_out=3"),
        (lambda: model(inputs), TypeError, r"shape \(20, 3\)"),
        (lambda: closure() * math.nan, FloatingPointError, "on the held-out batch before"),
    )
    for held_out, error, message in cases:
        with pytest.raises(error, match=message):
            optimizer.step(closure, held_out=held_out)
        assert torch.equal(flat_parameters(model), before)
    optimizer.step(closure)
    fixed = make(model, lr=0.1, momentum=0.5, model_damping=0.1)
    with pytest.raises(ValueError, match="held_out has no effect"):
        fixed.step(closure, held_out=closure)
