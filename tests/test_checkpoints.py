"""State dicts: runs resume bit for bit, and states that do not fit are refused."""

import operator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc
from commands import run_script
from nested import leaves


def test_a_resumed_run_continues_bit_for_bit(tmp_path):
    program = Path(__file__).with_name("resume_run.py")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, first, last in ((whole, 0, 20), (parts, 0, 7), (parts, 7, 20)):
        folder.mkdir(exist_ok=True)
        done = run_script(program, folder, first, last)
        assert done.returncode == 0, done.stderr
    for name in ("factored.pt", "eigen.pt"):
        one, other = (
            dict(leaves(torch.load(folder / name, weights_only=True))) for folder in (whole, parts)
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
        for path, value in leaves(optimizer.state_dict())
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
    state["curvature"]["curvature"]["layers"]["0"]["running"][0] = torch.zeros(1, 7, 7)
    with pytest.raises(ValueError, match=r"0: .*\(1, 7, 7\)"):
        trained(net()).load_state_dict(state)


@pytest.mark.parametrize("key", ["state", "param_groups", "curvature", "parameters", "clip"])
def test_an_incomplete_state_dict_is_refused(key):
    optimizer = trained(net())
    state = optimizer.state_dict()
    del state[key]
    with pytest.raises(ValueError, match=f"incomplete.*{key}"):
        optimizer.load_state_dict(state)
    state = optimizer.state_dict()
    del state["curvature"]["curvature"]
    with pytest.raises(ValueError, match=r"incomplete.*curvature"):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="must be a dict"):
        optimizer.load_state_dict([])


def paths_of(value, path=()):
    """Yield the path of every key in nested dicts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from paths_of(inner, (*path, key))


def test_every_missing_part_is_refused_before_anything_changes():
    source = trained(net())
    optimizer = trained(net(), steps=3)
    before = snapshot(optimizer)
    # A parameter may lack momentum or an average, if it had no gradient yet; a norm layer's only
    # inverse, if it was never due.
    paths = [
        path
        for path in paths_of(source.state_dict())
        if (path[0] != "state" or len(path) == 1) and path[-2:] != ("inverse", "inverse")
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
        (("curvature", "steps"), None),
        (("curvature", "generator", "seed"), "a"),
        (("curvature", "generator", "state"), 3),
        (("curvature", "curvature", "inverse_kind"), "qr"),
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


def test_a_state_can_be_loaded_repeatedly():
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


METHODS = [kfc.KFC, kfc.KFAC, kfc.WhitenedAdam, kfc.Preconditioner]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("version", [None, 1, 99])
def test_state_dicts_of_other_versions_are_refused(method, version):
    state = method(net()).state_dict()
    current = state["version"]
    assert isinstance(current, int)
    if version is None:
        del state["version"]
        message = "the state dict has no version.* older version of kfc"
    else:
        state["version"] = version
        message = f"the state dict has version {version}"
    with pytest.raises(ValueError, match=f"{message}.*loads version {current} only"):
        method(net()).load_state_dict(state)


@pytest.mark.parametrize("method", METHODS)
def test_state_dicts_of_this_version_are_loaded(method):
    method(net()).load_state_dict(method(net()).state_dict())


def test_a_plain_optimizers_state_dict_is_refused():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="another optimizer"):
        kfc.KFC(model).load_state_dict(sgd.state_dict())


def test_another_kind_of_inverse_is_computed_again():
    state = trained(net(), curvature=kfc.Kronecker(inverse="factored")).state_dict()
    model = net()
    optimizer = kfc.KFC(
        model, curvature=kfc.Kronecker(inverse="eigen"), schedule=kfc.Periods(100, 100)
    )
    optimizer.load_state_dict(state)
    F.cross_entropy(model(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()
    inverse = optimizer.state_dict()["curvature"]["curvature"]["layers"]["0"]["inverse"]
    assert "eigenvalues" in inverse


def test_a_state_dict_is_a_snapshot():
    model = net()
    optimizer = trained(model)
    state = optimizer.state_dict()["curvature"]
    before = {path: v.clone() for path, v in leaves(state) if isinstance(v, torch.Tensor)}
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long)).backward()
        optimizer.step()
    for path, value in leaves(state):
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, before[path])


def test_state_before_the_first_step_can_be_loaded():
    fresh = kfc.KFC(net())
    other = kfc.KFC(net())
    other.load_state_dict(fresh.state_dict())
    assert other.diagnostics["step"] == 0


def test_statistics_of_a_layer_frozen_since_are_ignored():
    model = net()
    state = trained(model).state_dict()
    other = net()
    other[0].requires_grad_(False)
    optimizer = kfc.KFC(other, averaging_timescale=3)
    optimizer.load_state_dict(state)
    F.cross_entropy(other(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()
