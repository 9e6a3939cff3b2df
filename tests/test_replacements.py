"""Layers and parameters that are replaced in mid-training."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc

KINDS = [kfc.KFC, kfc.KFAC, kfc.WhitenedAdam]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def step(model, optimizer, seed: int = 0) -> None:
    torch.manual_seed(seed)
    x, y = torch.randn(12, 6), torch.randint(3, (12,))
    if isinstance(optimizer, kfc.KFAC):
        optimizer.step(lambda: F.cross_entropy(model(x), y))
        return
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_module_of_the_same_shape_is_trained(kind, steps_before):
    model = network()
    optimizer = kind(model, schedule=kfc.Periods(1, 1))
    for _ in range(steps_before):
        step(model, optimizer)
    old, model[3] = model[3], nn.Linear(8, 3)
    kept, before = old.weight.detach().clone(), model[3].weight.detach().clone()
    with pytest.warns(UserWarning, match=r"\['3.bias', '3.weight'\] were replaced"):
        step(model, optimizer)
    assert torch.equal(old.weight, kept)
    assert not torch.equal(model[3].weight, before)
    assert not old._forward_hooks
    factor = optimizer.activation_factors.get("3")
    step(model, optimizer)  # without another warning; statistics are those of the new module
    after = optimizer.activation_factors["3"]
    assert factor is None or not torch.equal(after, factor)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == set(
        map(id, model.parameters())
    )
    assert "plain gradient" not in optimizer.describe()


def test_a_new_parameter_in_the_same_module_starts_without_momentum():
    model = network()
    optimizer = kfc.KFC(model, averaging_timescale=10)
    step(model, optimizer)
    model[0].weight = nn.Parameter(torch.zeros(8, 6))
    with pytest.warns(UserWarning, match=r"\['0.weight'\] were replaced"):
        step(model, optimizer)
    state = optimizer.state[model[0].weight]
    torch.testing.assert_close(state["momentum_buffer"], model[0].weight.detach())
    with optimizer.averaged_parameters():
        assert model[0].weight.abs().max() < 0.2 * state["momentum_buffer"].abs().max()
    again = kfc.KFC(model, averaging_timescale=10)
    again.load_state_dict(optimizer.state_dict())


def test_loading_with_assign_is_taken_up():
    model = network()
    optimizer = kfc.KFC(model)
    step(model, optimizer)
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(copy.deepcopy(state), assign=True)
    with pytest.warns(UserWarning, match="were replaced"):
        step(model, optimizer)
    assert not any(torch.equal(p, state[name]) for name, p in model.named_parameters())


def test_natural_gradients_of_a_preconditioner_go_to_the_new_module():
    model = network()
    preconditioner = kfc.Preconditioner(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        sgd.zero_grad()
        F.cross_entropy(model(torch.randn(12, 6)), torch.arange(12) % 3).backward()
        preconditioner.step()
    model[3] = nn.Linear(8, 3)
    F.cross_entropy(model(torch.randn(12, 6)), torch.arange(12) % 3).backward()
    plain = model[3].weight.grad.clone()
    with pytest.warns(UserWarning, match="were replaced"):
        preconditioner.step()
    assert not torch.allclose(model[3].weight.grad, plain)


def replaced_shape(model):
    model[3] = nn.Linear(8, 5)


def resized(model):
    model[3].bias.data = torch.zeros(5)
    model[3].weight.data = torch.zeros(5, 8)


def added(model):
    model.append(nn.Linear(3, 3))


def another_type(model):
    class Scaled(nn.Linear):
        def forward(self, x):
            return F.linear(x, 2 * self.weight, self.bias)

    model[3] = Scaled(8, 3)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (replaced_shape, r"'3.weight' had shape \(3, 8\) when the optimizer was made, and has"),
        (resized, r"'3.weight' had shape \(3, 8\) when the optimizer was made, and has \(5, 8\)"),
        (added, r"'4.weight' was added to the model after its optimizer was made; make a new"),
        (another_type, "layer '3' was replaced by a Scaled, which is treated differently"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_other_changes_are_clear_errors(kind, change, match):
    model = network()
    optimizer = kind(model, schedule=kfc.Periods(100, 100))
    step(model, optimizer)
    change(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=match):
        step(model, optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
