"""State dicts: a run resumed in a new process goes on bit for bit; what does not fit is refused."""

import operator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc
from commands import run_script


def tensors(value, path=()):
    """Every leaf of nested dicts and lists, by its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from tensors(inner, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from tensors(inner, (*path, index))
    else:
        yield path, value


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    program = Path(__file__).with_name("resume_run.py")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, first, last in ((whole, 0, 20), (parts, 0, 7), (parts, 7, 20)):
        folder.mkdir(exist_ok=True)
        done = run_script(program, folder, first, last)
        assert done.returncode == 0, done.stderr
    for name in ("factored.pt", "eigen.pt"):
        one, other = (
            dict(tensors(torch.load(folder / name, weights_only=True))) for folder in (whole, parts)
        )
        assert one.keys() == other.keys()
        for path, value in one.items():
            same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
            assert same(value, other[path]), path


def trained(model: nn.Module, steps: int = 2, **options) -> kfc.KFC:
    optimizer = kfc.KFC(model, averaging_timescale=3, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long)).backward()
        optimizer.step()
    return optimizer


def net(width: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.LayerNorm(width), nn.Linear(width, 2))


def snapshot(optimizer: kfc.KFC) -> dict:
    return {
        path: value.clone() if isinstance(value, torch.Tensor) else value
        for path, value in tensors(optimizer.state_dict())
    }


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: trained(net(6)), r"0\.weight: \[6, 3\] in the state dict, \[5, 3\] here"),
        (lambda: trained(nn.Sequential(nn.Linear(3, 2))), "missing from the state dict"),
        (lambda: trained(nn.Sequential(*net(), nn.Linear(2, 2))), "3.weight: only in the state"),
        (lambda: trained(net(), groups=[{"prefix": "0", "lr": 1.0}]), "param groups differ"),
    ],
)
def test_a_state_dict_from_another_model_is_refused(other, match):
    optimizer = trained(net())
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(other().state_dict())
    after = snapshot(optimizer)
    for path, value in before.items():
        same = torch.equal(value, after[path]) if isinstance(value, torch.Tensor) else True
        assert same, path


def test_a_state_dict_with_other_factors_is_refused():
    model = net()
    state = trained(model).state_dict()
    state["preconditioner"]["curvature"]["layers"]["0"]["running"][0] = torch.zeros(1, 7, 7)
    with pytest.raises(ValueError, match=r"0: .*\(1, 7, 7\)"):
        trained(net()).load_state_dict(state)


@pytest.mark.parametrize("key", ["state", "param_groups", "preconditioner", "parameters", "clip"])
def test_an_incomplete_state_dict_is_refused(key):
    optimizer = trained(net())
    state = optimizer.state_dict()
    del state[key]
    with pytest.raises(ValueError, match=f"incomplete.*{key}"):
        optimizer.load_state_dict(state)
    state = optimizer.state_dict()
    del state["preconditioner"]["curvature"]
    with pytest.raises(ValueError, match=r"incomplete.*curvature"):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="must be a dict"):
        optimizer.load_state_dict([])


def paths_of(value, path=()):
    """The path of every key in nested dicts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from paths_of(inner, (*path, key))


def test_a_state_from_before_there_were_workers_goes_on():
    source, optimizer = trained(net()), trained(net(), steps=3)
    state = source.state_dict()
    del state["preconditioner"]["renewal"]
    optimizer.load_state_dict(state)
    for name, factors in source.factors.items():
        assert torch.equal(optimizer.factors[name].activation, factors.activation)


def test_every_missing_part_is_refused_before_anything_changes():
    source = trained(net())
    optimizer = trained(net(), steps=3)
    before = snapshot(optimizer)
    # A parameter may lack momentum or an average, if it had no gradient yet; a norm layer's only
    # inverse, if it was never due; a state from before there were several kinds of curvature, or
    # workers, these.
    paths = [
        path
        for path in paths_of(source.state_dict())
        if (path[0] != "state" or len(path) == 1)
        and path[-2:] != ("inverse", "inverse")
        and path[-1] not in ("structure", "renewal")
    ]
    assert len(paths) > 30
    for path in paths:
        state = source.state_dict()
        inner = state
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        try:
            optimizer.load_state_dict(state)
        except ValueError:
            continue
        pytest.fail(f"a state dict without {path} was loaded")
    after = snapshot(optimizer)
    for path, value in before.items():
        same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
        assert same(value, after[path]), path


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("preconditioner", "steps"), None),
        (("preconditioner", "generator", "seed"), "a"),
        (("preconditioner", "generator", "state"), 3),
        (("preconditioner", "curvature", "inverse_kind"), "qr"),
        (("clip", "gap"), None),
        (("clip", "ratios"), 0.5),
    ],
)
def test_a_part_of_the_wrong_kind_is_refused(path, value):
    optimizer = trained(net())
    before = snapshot(optimizer)
    state = trained(net(), steps=3).state_dict()
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ValueError, match=path[-1]):
        optimizer.load_state_dict(state)
    assert snapshot(optimizer).keys() == before.keys()
    assert optimizer.diagnostics["step"] == 2


def test_a_state_can_be_loaded_again_and_again():
    optimizer = trained(net())
    state = optimizer.state_dict()
    for _ in range(2):
        optimizer.load_state_dict(state)
    optimizer.load_state_dict(optimizer.state_dict())


def test_momentum_of_another_shape_is_refused():
    state = trained(net()).state_dict()
    state["state"][0]["momentum_buffer"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"0\.weight: momentum_buffer"):
        trained(net()).load_state_dict(state)


def test_a_truncated_file_is_an_error_before_anything_changes(tmp_path):
    optimizer = trained(net())
    path = tmp_path / "checkpoint.pt"
    torch.save(optimizer.state_dict(), path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises((RuntimeError, OSError)):
        optimizer.load_state_dict(torch.load(path, weights_only=True))
    assert optimizer.diagnostics["step"] == 2


def test_a_plain_optimizers_state_dict_is_refused():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="another optimizer"):
        kfc.KFC(model).load_state_dict(sgd.state_dict())


def test_another_kind_of_inverse_is_computed_anew():
    state = trained(net(), inverse="factored").state_dict()
    model = net()
    optimizer = kfc.KFC(model, inverse="eigen", inverse_period=100, statistics_period=100)
    optimizer.load_state_dict(state)
    F.cross_entropy(model(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()
    inverse = optimizer.preconditioner.curvature.layers["0"].inverse
    assert "eigenvalues" in inverse.tensors


def test_a_state_dict_is_a_snapshot():
    model = net()
    optimizer = trained(model)
    state = optimizer.state_dict()["preconditioner"]
    before = {path: v.clone() for path, v in tensors(state) if isinstance(v, torch.Tensor)}
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long)).backward()
        optimizer.step()
    for path, value in tensors(state):
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, before[path])


def test_state_before_the_first_step_can_be_loaded():
    fresh = kfc.KFC(net())
    other = kfc.KFC(net())
    other.load_state_dict(fresh.state_dict())
    assert other.diagnostics["step"] == 0


def test_a_frozen_layers_old_statistics_do_not_stand_in_the_way():
    model = net()
    state = trained(model).state_dict()
    other = net()
    other[0].requires_grad_(False)
    optimizer = kfc.KFC(other, averaging_timescale=3)
    optimizer.load_state_dict(state)
    F.cross_entropy(other(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()
