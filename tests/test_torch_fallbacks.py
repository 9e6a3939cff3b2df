"""Results without the private parts of torch that the library uses where they exist."""

import subprocess
import sys
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.testing import assert_close

import kfc
from kfc import _helpers


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("missing", [(torch, "_make_dual"), (forward_ad, "_current_level")])
def test_fisher_products(missing, monkeypatch):
    model, inputs = network(), torch.randn(4, 2, 4, 4, dtype=torch.float64)
    vector = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    expected = kfc.fisher.vector_product(model, inputs, vector)
    form = kfc.fisher.quadratic_form(model, inputs, vector)
    owner, name = missing
    if owner is torch:
        monkeypatch.delattr(owner, name)
    else:  # forward_ad itself needs its level
        monkeypatch.setattr(_helpers, "forward_ad", WithoutLevel())
    assert_close(kfc.fisher.vector_product(model, inputs, vector), expected, rtol=0, atol=0)
    assert_close(kfc.fisher.quadratic_form(model, inputs, vector), form, rtol=0, atol=0)


class WithoutLevel:
    """``forward_ad`` with its public functions only."""

    dual_level = staticmethod(forward_ad.dual_level)
    make_dual = staticmethod(forward_ad.make_dual)


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f)(torch.ones(2)),
    "vmap": lambda f: torch.vmap(f)(torch.ones(3, 2)),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(2),), (torch.ones(2),)),
    "vjp": lambda f: torch.func.vjp(f, torch.ones(2)),
    "hessian": lambda f: torch.func.hessian(f)(torch.ones(2)),
}


@pytest.mark.parametrize("missing", ["", "level", "stack"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_functional_transforms_are_noticed(name, missing, monkeypatch):
    if missing == "level":
        monkeypatch.setattr(_helpers, "forward_ad", WithoutLevel())
    if missing == "stack":
        monkeypatch.delattr(torch._C._functorch, "peek_interpreter_stack")
    seen = []

    def probed(x):
        seen.append(_helpers.is_transformed())
        return x.square().sum()

    assert not _helpers.is_transformed()
    TRANSFORMS[name](probed)
    assert seen
    assert all(seen)
    assert not _helpers.is_transformed()


def test_forward_mode_is_noticed():
    with forward_ad.dual_level():
        assert _helpers.is_transformed()
    assert not _helpers.is_transformed()


@pytest.mark.parametrize("private", [True, False])
def test_a_backward_that_keeps_its_graph(private, monkeypatch):
    if not private:
        monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    kept = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda derivative: kept.append(_helpers.keeps_graph()))
    for retain in (True, False):
        x.square().sum().backward(retain_graph=retain)
    assert kept == ([True, False] if private else [True, True])


def test_empirical_statistics_if_the_graph_may_be_kept(monkeypatch):
    def factors():
        model = network()
        optimizer = kfc.KFC(model, curvature=kfc.Kronecker(fisher="empirical"))
        inputs = torch.arange(128, dtype=torch.float64).reshape(4, 2, 4, 4).sin()
        loss = nn.functional.cross_entropy(model(inputs), torch.tensor([0, 1, 2, 0]))
        loss.backward()
        optimizer.step()
        return [
            f for pair in optimizer.factors.values() for f in (pair.activation, pair.derivative)
        ]

    expected = factors()
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert_close(factors(), expected, rtol=0, atol=0)


def test_decompositions_are_loaded_only_when_needed():
    """As by a model that differentiates a layer normalisation in its forward pass."""
    program = """
import sys, torch, kfc
from torch import nn

class Slope(nn.Sequential):
    def forward(self, x):
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)[0]

def form(model):
    return kfc.fisher.quadratic_form(
        model, torch.ones(4, 2), [torch.ones_like(p) for p in model.parameters()]
    )

name = "torch._decomp.decompositions_for_jvp"
form(nn.Linear(2, 3))
assert name not in sys.modules
form(Slope(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 3)))
assert name in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


class TorchWithoutCallbacks:
    """``torch`` as the helpers see it without the engine that calls functions after a backward."""

    autograd = SimpleNamespace(Variable=None)

    def __getattr__(self, name):
        return getattr(torch, name)


def without(name: str, monkeypatch) -> None:
    """Hide a private part of torch from the helpers."""
    if name == "_execution_engine":  # torch itself needs it
        monkeypatch.setattr(_helpers, "torch", TorchWithoutCallbacks())
    elif name == "_pytree":
        monkeypatch.setattr(_helpers, "_pytree", None)
    else:
        monkeypatch.delattr(torch._C, name)


@pytest.mark.parametrize(
    "missing",
    ["_current_graph_task_id", "_execution_engine", "_will_engine_execute_node", "_pytree"],
)
@pytest.mark.parametrize("nested", [False, True])
def test_training(missing, nested, monkeypatch):
    """As with them, for one backward pass in each step."""

    def trained():
        model = WithNestedOutput() if nested else network()
        output = (lambda returned: returned["logits"][0]) if nested else None
        optimizer = kfc.KFC(model, output=output, schedule=kfc.Periods(1, 1), seed=0)
        inputs = torch.arange(128, dtype=torch.float64).reshape(4, 2, 4, 4).sin()
        for _ in range(3):
            optimizer.zero_grad()
            returned = model(inputs)
            logits = returned["logits"][0] if nested else returned
            nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 0])).backward()
            optimizer.step()
        return list(model.parameters())

    expected = trained()
    without(missing, monkeypatch)
    assert_close(trained(), expected, rtol=0, atol=0)


class WithNestedOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, inputs):
        return {"logits": (self.network(inputs), "name"), "inputs": [inputs]}


@pytest.mark.parametrize("private", [True, False])
def test_numbers_of_backward_passes(private, monkeypatch):
    if not private:
        without("_current_graph_task_id", monkeypatch)
    found = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda derivative: found.append(_helpers.graph_task()))
    for _ in range(2):
        x.square().sum().backward()
    assert len(set(found)) == 2 if private else found == [None, None]


@pytest.mark.parametrize("private", [True, False])
def test_actions_after_a_backward_pass(private, monkeypatch):
    """Without torch's callbacks, they happen at once."""
    if not private:
        without("_execution_engine", monkeypatch)
    events = []
    x = torch.ones(2, requires_grad=True)
    y = x.square()

    def hook(derivative):
        _helpers.after_backward(lambda: events.append("action"))
        events.append("hook")

    y.register_hook(hook)
    x.register_hook(lambda derivative: events.append("input"))
    y.sum().backward()
    assert events == (["hook", "input", "action"] if private else ["action", "hook", "input"])


@pytest.mark.parametrize("private", [True, False])
def test_parameters_that_a_backward_pass_reaches(private, monkeypatch):
    """Without torch's answer, any backward pass may be one of training."""
    if not private:
        without("_will_engine_execute_node", monkeypatch)
    found, reached = [], set()
    weight, x = (torch.ones(2, requires_grad=True) for _ in range(2))

    def product():
        y = weight * x.to(weight.dtype)
        y.register_hook(lambda derivative: found.append(_helpers.will_reach([weight], reached)))
        return y.sum()

    for _ in range(2):  # the second time, what was reached before is known
        torch.autograd.grad(product(), x)
        product().backward()
    weight.grad, weight.data = None, weight.data.double()  # the graph ends in another node now
    product().backward()
    weight.requires_grad_(False)
    product().backward()
    expected = [*["nothing", "gradients"] * 2, "gradients", "nothing"]
    assert found == (expected if private else ["unknown"] * 6)


@pytest.mark.parametrize(
    ("enabled", "expected"), [([True], 0), ([False, True], 1), ([True, True], None), ([], None)]
)
def test_scalers_without_a_record_of_their_optimizers(enabled, expected, monkeypatch):
    scalers = [SimpleNamespace(is_enabled=lambda value=value: value) for value in enabled]
    monkeypatch.setattr(_helpers, "grad_scalers", lambda: scalers)
    found = _helpers.scaler_of(object())
    assert found is (None if expected is None else scalers[expected])


def test_containers(monkeypatch):
    pair = namedtuple("pair", "first second")
    trees = [1, [], {"a": [1, (2, 3)], "b": pair(4, {"c": 5})}, OrderedDict(x=1, y=[2])]
    expected = [(_helpers.tree_leaves(t), _helpers.tree_map(lambda x: 10 * x, t)) for t in trees]
    without("_pytree", monkeypatch)
    found = [(_helpers.tree_leaves(t), _helpers.tree_map(lambda x: 10 * x, t)) for t in trees]
    assert found == expected
    types = [type(tree) for _, tree in found]
    assert types == [type(tree) for _, tree in expected]


def test_views():
    x = torch.ones(6)
    assert _helpers.view_base(x.view(2, 3)) is x
    assert _helpers.view_base(x) is None
    assert _helpers.view_base(SimpleNamespace()) is None


def test_process_groups():
    assert _helpers.group_timeout(SimpleNamespace()) is None
    assert not _helpers.is_in_join(SimpleNamespace())
