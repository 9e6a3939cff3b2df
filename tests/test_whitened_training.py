"""`WhitenedAdam` as a torch optimizer: what it needs, groups, bad batches, checkpoints, digits."""

import copy
import warnings
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import lr_scheduler

import kfc
from kfc.fisher.likelihoods import Likelihood
from kfc.statistics.backward import RecordedPass
from reference import small_batch as batch
from reference import small_net as net


def train(model, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def state_of(model, optimizer) -> dict:
    """Return copies of all tensors that training changes."""
    found = {f"model {name}": value.clone() for name, value in model.state_dict().items()}
    for index, parts in optimizer.state_dict()["state"].items():
        found |= {f"{index} {part}": value.clone() for part, value in parts.items()}
    factors = optimizer.activation_factors.items()
    return found | {f"factor {name}": value.clone() for name, value in factors}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# Statistics


def test_no_backward_pass_of_its_own(monkeypatch):
    """The collector neither draws targets nor runs a backward pass."""

    def refuse(*args, **options):
        raise AssertionError("not needed")

    for owner, name in (
        (RecordedPass, "backward"),
        (Likelihood, "sample_derivative"),
        (torch.autograd, "grad"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    model = net()
    optimizer = kfc.WhitenedAdam(model)
    passes = []
    model[0].weight.register_hook(lambda _: passes.append(1))
    train(model, optimizer, [batch() for _ in range(4)])
    assert len(passes) == 4
    assert optimizer.factors == {}
    assert {n: f.shape for n, f in optimizer.activation_factors.items()} == {
        "0": (10, 10),
        "5": (37, 37),
    }


def test_any_loss_will_do():
    """A loss that is no likelihood gives no warning; nor does a pass without a backward pass."""
    model = net()
    optimizer = kfc.WhitenedAdam(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.zero_grad()
            model(batch()[0])
            out = model(batch()[0])
            (out.exp().mean().log() - out[:, 0].mean()).backward()
            optimizer.step()
    assert optimizer.diagnostics["step"] == 3


def test_factors_of_passes_without_a_backward_pass_do_not_count():
    model, (x, y) = nn.Linear(4, 3), (torch.randn(8, 4), torch.randint(3, (8,)))
    optimizer = kfc.WhitenedAdam(model)
    model(100 * x)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    rows = torch.cat([torch.ones(8, 1), x], dim=1)
    torch.testing.assert_close(optimizer.activation_factors[""], rows.T @ rows / 8)


def test_factors_from_a_data_set_need_no_loss():
    model, data = nn.Linear(4, 3), [torch.randn(8, 4) for _ in range(3)]
    optimizer = kfc.WhitenedAdam(model)
    optimizer.estimate_factors(data)
    rows = F.pad(torch.cat(data), (1, 0), value=1.0)
    torch.testing.assert_close(optimizer.activation_factors[""], rows.T @ rows / 24)


def test_describe_and_diagnostics(capsys):
    optimizer = kfc.WhitenedAdam(net(), whitening=kfc.Whitening(max_factor_size=20))
    text = optimizer.describe()
    assert text == capsys.readouterr().out.rstrip("\n")
    by_name = {line.split()[0]: line for line in text.splitlines()}
    assert "whitened inputs" in by_name["0.weight"]
    assert "10x10" in by_name["0.weight"]
    assert "wider than 20: diagonal only" in by_name["5.weight"]
    assert "Adam" in by_name["1.weight"]
    assert "BatchNorm2d" in by_name["1.weight"]
    assert by_name["loss:"] == "loss: chosen in the first backward pass"
    train(optimizer.model, optimizer, [batch()])
    diagnostics = optimizer.diagnostics
    assert diagnostics["layers"]["0"]["damping"] == 0.3
    assert diagnostics["layers"]["0"]["activation_trace"] > 0
    assert diagnostics["periods"] == {"statistics": 2, "inverse": 2}


def test_blocks_of_a_wide_layer_are_described():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 4))
    optimizer = kfc.WhitenedAdam(model, whitening=kfc.Whitening(block_size=12))
    text = optimizer.describe()
    assert "in 3 blocks of inputs" in next(x for x in text.splitlines() if x.startswith("1.weight"))
    images, labels = torch.randn(8, 36), torch.randint(4, (8,))
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    assert optimizer.activation_factors["1"].shape == (3, 13, 13)
    found = optimizer.diagnostics["layers"]["1"]["activation_trace"]
    assert found == pytest.approx(1 + images.square().sum(1).mean().item())
    other = kfc.WhitenedAdam(copy.deepcopy(model), whitening=kfc.Whitening(block_size=36))
    with pytest.raises(ValueError, match=r"saved with other options; its layers differ"):
        other.load_state_dict(optimizer.state_dict())


def test_a_wide_layer_of_a_class_without_blocks_is_diagonal():
    class Plain(kfc.layers.LinearLayer):
        block_moment = kfc.layers.MatrixLayer.block_moment

    module = nn.Linear(36, 5)
    for limit, shape in ((40, (3, 13, 13)), (30, (1, 37))):
        whitening = kfc.Whitening(block_size=12, max_factor_size=limit)
        assert whitening.for_matrix(Plain(module)).running_shapes() == (shape,)


def test_a_budget_chooses_the_periods():
    model = net()
    optimizer = kfc.WhitenedAdam(model, schedule=kfc.Budget(50.0))
    train(model, optimizer, [batch() for _ in range(7)])
    assert optimizer.diagnostics["periods"]["measured_seconds"] is not None


# Groups, schedulers, precision


def test_groups_and_their_options():
    model = net()
    optimizer = kfc.WhitenedAdam(
        model,
        weight_decay=0.1,
        groups=[
            {"prefix": "5.bias", "lr": 0.0},
            {"prefix": "0", "betas": (0.0, 0.5), "damping": 0.5, "eps": 1e-3},
            {"prefix": "*.bias", "weight_decay": 0.0},
        ],
    )
    by_name = {n: g for g in optimizer.param_groups for n in g["param_names"]}
    assert by_name["0.weight"]["betas"] == (0.0, 0.5)
    assert by_name["1.bias"]["weight_decay"] == 0.0
    bias = model[5].bias.detach().clone()
    train(model, optimizer, [batch(), batch()])
    assert torch.equal(model[5].bias, bias)
    assert optimizer.diagnostics["layers"]["0"]["damping"] == 0.5


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": -1.0}, "lr must be"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must be"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"eps": -1e-8}, "eps must be"),
        ({"damping": float("nan")}, "damping must be"),
        ({"weight_decay": -1}, "weight_decay must be"),
        ({"rotation_period": 0}, "rotation_period must be"),
        ({"groups": [{"prefix": "0", "betas": (2, 0)}]}, r"groups\[0\]: betas\[0\]"),
        ({"groups": [{"prefix": "0", "momentum": 0.9}]}, "unknown options"),
        ({"groups": [{"prefix": "*.bias", "damping": 0.5}]}, "damping of 0.bias has no effect"),
        ({"groups": [{"prefix": "5.bias", "betas": (0.8, 0.9)}]}, "betas of 5.bias has no effect"),
        ({"groups": [{"prefix": "1", "damping": 0.5}]}, r"no effect on \['1.weight', '1.bias'\]"),
    ],
)
def test_bad_options_are_refused_and_leave_no_hooks(options, match):
    model = net()
    with pytest.raises(ValueError, match=match):
        kfc.WhitenedAdam(model, **options)
    assert not any(m._forward_hooks for m in model.modules())


def test_one_cycle_changes_rate_and_momentum():
    model = net()
    optimizer = kfc.WhitenedAdam(model)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=4)
    seen = []
    for _ in range(3):
        train(model, optimizer, [batch()])
        scheduler.step()
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0]))
    assert len(set(seen)) == 3
    assert optimizer.param_groups[0]["betas"][1] == 0.99


def test_a_closure_is_evaluated_once():
    model, (x, y) = net(), batch()
    optimizer, losses = kfc.WhitenedAdam(model), []

    def closure():
        optimizer.zero_grad()
        losses.append(F.cross_entropy(model(x), y))
        losses[-1].backward()
        return losses[-1]

    assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_have_wide_moments(dtype):
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    optimizer = kfc.WhitenedAdam(model, weight_decay=0.1)
    before = model[0].weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        x, y = torch.randn(8, 6, dtype=dtype), torch.randint(3, (8,))
        F.cross_entropy(model(x).float(), y).backward()
        optimizer.step()
    assert model[0].weight.dtype == dtype
    assert not torch.equal(model[0].weight, before)
    assert optimizer.state[model[0].weight]["exp_avg_sq"].dtype == torch.float32
    assert torch.isfinite(model[0].weight).all()


def test_half_precision_does_not_lose_small_steps():
    """Parameters and averages are those that the points of float32 give, rounded once."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).bfloat16()
    optimizer = kfc.WhitenedAdam(model, 1e-4)
    inputs, targets = torch.randn(64, 6).bfloat16(), torch.randint(3, (64,))
    weighted, total = torch.zeros(3, 6), 0
    for step in range(1, 101):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).float(), targets).backward()
        optimizer.step()
        point = optimizer.state[model.weight]["fast"]
        weighted, total = weighted + step**3 * point, total + step**3
    expected = 0.8 * weighted / total + 0.2 * point
    torch.testing.assert_close(model.weight.float(), expected, rtol=2**-8, atol=1e-5)
    with optimizer.averaged_parameters():
        torch.testing.assert_close(model.weight.float(), weighted / total, rtol=2**-8, atol=1e-5)


def test_a_parameter_that_is_set_between_steps_is_the_same_in_half_precision():
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Linear(6, 3).to(dtype)
        optimizer = kfc.WhitenedAdam(model, lr=1e-6)
        for value in (1.0, 2.0, 3.0):
            with torch.no_grad():
                model.weight.fill_(value)
            outputs = model(torch.ones(8, 6, dtype=dtype)).float()
            F.cross_entropy(outputs, torch.zeros(8).long()).backward()
            optimizer.step()
        found.append(model.weight.detach().float())
    torch.testing.assert_close(*found, rtol=2**-7, atol=0)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_changes_nothing(unscale):
    data, results = [batch() for _ in range(5)], []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = net().double()
        optimizer = kfc.WhitenedAdam(model, schedule=kfc.Periods(2, 2))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        for x, y in data:
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x.double()), y)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append(list(model.parameters()))
    torch.testing.assert_close(*results)


def test_a_step_inside_autocast_is_as_precise_as_outside():
    data, results = [batch() for _ in range(4)], []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = net()
        optimizer = kfc.WhitenedAdam(model, rotation_period=2)
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                optimizer.step()
        results.append(state_of(model, optimizer))
    assert_equal(*results)


def test_unfrozen_parameters_are_trained():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    optimizer = kfc.WhitenedAdam(model, schedule=kfc.Periods(5, 5))
    data = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(4)]
    before = model[0].bias.detach().clone()
    train(model, optimizer, data[:2])
    assert torch.equal(model[0].bias, before)
    model[0].bias.requires_grad_(True)
    train(model, optimizer, data[2:])
    assert not torch.equal(model[0].bias, before)
    assert optimizer.activation_factors["0"].shape == (7, 7)
    # The moments of a layer begin anew with its factor.
    assert optimizer.state[model[0].weight]["step"] == 2
    assert optimizer.state[model[2].weight]["step"] == 4


def test_a_missing_gradient_leaves_its_parameter_alone():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = kfc.WhitenedAdam(model, weight_decay=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    F.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,))).backward()
    model[0].bias.grad = None
    optimizer.step()
    same = [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert same == [False, True, False, False]


# Bad batches


def skipped_steps(model, optimizer, bad_batch):
    train(model, optimizer, [bad_batch])
    return optimizer.diagnostics["skipped_steps"]


@pytest.mark.usefixtures("asynchronous")
@pytest.mark.parametrize("period", [1, 100], ids=["due", "not due"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_batch_changes_nothing(bad, period):
    """Also if only the device knows that the batch was bad."""
    good = [batch() for _ in range(6)]
    worse = (batch()[0] * bad, torch.zeros(8, dtype=torch.long))
    models, optimizers = [net()], []
    models.append(copy.deepcopy(models[0]))
    for model in models:
        # A bad step that only the device knows of counts for periods other than 1.
        options = {"weight_decay": 0.1, "rotation_period": 1}
        schedule = kfc.Periods(period, period)
        optimizers.append(kfc.WhitenedAdam(model, schedule=schedule, **options))
    (one, other), (mine, theirs) = models, optimizers
    train(one, mine, good[:3])
    train(other, theirs, good[:3])
    before = state_of(one, mine)
    with pytest.warns(UserWarning, match="skipped"):
        skipped = skipped_steps(one, mine, worse)
    assert skipped == 1
    assert_equal(state_of(one, mine), before)
    train(one, mine, good[3:])
    train(other, theirs, good[3:])
    assert_equal(state_of(one, mine), state_of(other, theirs))


@pytest.mark.usefixtures("asynchronous")
def test_a_step_is_the_same_whether_or_not_the_host_checks_it():
    """A step in doubt takes another path through the arithmetic."""
    data, results = [batch() for _ in range(6)], []
    for wait in (False, True):
        torch.manual_seed(0)
        model = net()
        optimizer = kfc.WhitenedAdam(model, weight_decay=0.1, schedule=kfc.Periods(100, 100))
        if wait:
            begin = optimizer.engine.begin_step
            optimizer.engine.begin_step = lambda *a, begin=begin: begin(*a, wait=True)
        train(model, optimizer, data)
        results.append(state_of(model, optimizer))
    assert_equal(*results)


def test_a_step_without_a_forward_pass_is_an_error():
    model = net()
    optimizer = kfc.WhitenedAdam(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="before any forward pass"):
        optimizer.step()


# Averages and checkpoints


def test_the_average_is_the_mean_of_all_points_with_weights_of_the_third_power():
    model = net()
    optimizer = kfc.WhitenedAdam(model, groups=[{"prefix": "5", "betas": (0.5, 0.99)}])
    frozen = model[0].bias.requires_grad_(False)
    before = frozen.clone()
    points: dict[str, list] = {"0.weight": [], "5.weight": []}
    with optimizer.averaged_parameters():
        pass  # nothing to average yet
    for _ in range(5):
        train(model, optimizer, [batch()])
        for name, seen in points.items():
            seen.append(optimizer.state[model.get_parameter(name)]["fast"].clone())
    own = {name: model.get_parameter(name).detach().clone() for name in points}
    weights = torch.arange(1.0, 6.0) ** 3
    with optimizer.averaged_parameters():
        for name, seen in points.items():
            mean = torch.tensordot(weights / weights.sum(), torch.stack(seen), 1)
            torch.testing.assert_close(model.get_parameter(name).detach(), mean)
        assert torch.equal(frozen, before)
        with pytest.raises(RuntimeError, match="inside averaged_parameters"):
            optimizer.step()
    assert all(torch.equal(model.get_parameter(name), value) for name, value in own.items())


def test_a_group_without_average_stays_as_it_is():
    model = net()
    optimizer = kfc.WhitenedAdam(model, groups=[{"prefix": "5", "betas": (0.0, 0.99)}])
    train(model, optimizer, [batch(), batch()])
    before = [p.detach().clone() for p in (model[5].weight, model[0].weight)]
    with optimizer.averaged_parameters():
        assert torch.equal(model[5].weight, before[0])
        assert not torch.equal(model[0].weight, before[1])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_continues_bit_for_bit(tmp_path, asynchronous):
    data = [batch() for _ in range(12)]
    options = {
        "weight_decay": 0.01,
        "schedule": kfc.Periods(2, 3),
        "parallel": kfc.Parallel(asynchronous=asynchronous, deterministic=asynchronous),
    }
    torch.manual_seed(0)
    whole = net()
    optimizer = kfc.WhitenedAdam(whole, **options)
    train(whole, optimizer, data[:7])
    torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "s")
    train(whole, optimizer, data[7:])
    saved = torch.load(tmp_path / "s", weights_only=True)
    resumed = net()
    resumed.load_state_dict(saved["model"])
    other = kfc.WhitenedAdam(resumed, **options)
    other.load_state_dict(saved["optimizer"])
    train(resumed, other, data[7:])
    assert_equal(state_of(resumed, other), state_of(whole, optimizer))
    optimizer.close()
    other.close()


def test_a_resumed_run_continues_bit_for_bit_where_the_loss_falls_fast():
    """The loss bound then depends on the trend of the loss, which is saved in full precision."""
    data = 45 * [batch()]
    torch.manual_seed(0)
    whole, resumed = net(), net()
    optimizer, other = kfc.WhitenedAdam(whole), kfc.WhitenedAdam(resumed)
    train(whole, optimizer, data[:35])
    resumed.load_state_dict(whole.state_dict())
    state = optimizer.state_dict()
    assert 0.04 < state["loss_bound"]["decrease"] < 0.08
    other.load_state_dict(copy.deepcopy(state))
    for model, each in ((whole, optimizer), (resumed, other)):
        train(model, each, data[35:])
    assert_equal(state_of(resumed, other), state_of(whole, optimizer))
    assert other.state_dict()["loss_bound"] == optimizer.state_dict()["loss_bound"]


def test_states_of_other_optimizers_are_refused():
    model = net()
    optimizer, other = kfc.WhitenedAdam(model), kfc.KFC(copy.deepcopy(model))
    with pytest.raises(ValueError, match="iterates"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="clip"):
        other.load_state_dict(optimizer.state_dict())
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="no version"):
        optimizer.load_state_dict(adam.state_dict())


def test_a_moment_of_another_shape_is_refused():
    model = net()
    optimizer = kfc.WhitenedAdam(model)
    train(model, optimizer, [batch()])
    before, state = state_of(model, optimizer), optimizer.state_dict()
    state["state"][0] = {**state["state"][0], "exp_avg_sq": torch.zeros(3)}
    with pytest.raises(ValueError, match="exp_avg_sq"):
        optimizer.load_state_dict(state)
    state["state"][0] = {**optimizer.state_dict()["state"][0], "step": torch.zeros(3)}
    with pytest.raises(ValueError, match="step"):
        optimizer.load_state_dict(state)
    assert_equal(state_of(model, optimizer), before)


# Training


def test_it_learns_the_digits_faster_than_adam():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(labels)
    losses = {}
    for name in ("whitened", "adam"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, 10),
        )
        optimizer = kfc.WhitenedAdam(model)
        if name == "adam":
            optimizer.close()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(model, optimizer, [(images[i::24], labels[i::24]) for i in range(24)] * 2)
        with torch.no_grad():
            losses[name] = F.cross_entropy(model(images), labels).item()
    assert losses["whitened"] < 0.1
    assert losses["whitened"] < losses["adam"] / 1.5


# Rotation of the outputs


def test_bases_are_orthogonal_and_refreshed_when_due():
    model = net().double()
    optimizer = kfc.WhitenedAdam(
        model, rotation_period=3, whitening=kfc.Whitening(max_factor_size=36)
    )
    seen = []
    for _ in range(7):
        x, y = batch()
        train(model, optimizer, [(x.double(), y)])
        seen.append(optimizer.state[model[0].weight]["basis"].clone())
        torch.testing.assert_close(seen[-1] @ seen[-1].mT, torch.eye(4).double().expand(1, 4, 4))
    changed = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert changed == [False, True, False, False, True, False]
    assert "refreshed every 3 steps" in optimizer.describe()
    assert "basis" not in optimizer.state[model[0].bias]
    assert "basis" not in optimizer.state[model[1].weight]


def test_many_outputs_are_not_rotated():
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = kfc.WhitenedAdam(model, whitening=kfc.Whitening(max_factor_size=4))
    train(model, optimizer, [(torch.randn(8, 3), torch.randint(3, (8,)))])
    assert "basis" not in optimizer.state[model[0].weight]
    assert optimizer.state[model[2].weight]["basis"].shape == (1, 3, 3)


def test_a_basis_of_another_shape_is_refused():
    model = net()
    optimizer = kfc.WhitenedAdam(model)
    train(model, optimizer, [batch()])
    state = optimizer.state_dict()
    state["state"][0] = {**state["state"][0], "basis": torch.zeros(1, 3, 3)}
    with pytest.raises(
        ValueError,
        match=r"basis must be .* of shape \(1, 4, 4\), got a tensor of shape \(1, 3, 3\)",
    ):
        optimizer.load_state_dict(state)


# Schedule-free averaging


def test_parameters_lie_between_the_average_and_the_last_point():
    """With β₁ = 0 they are the last point; with β₁ > 0 a share of each step comes later."""
    data = [batch() for _ in range(6)]
    ends = {}
    for beta in (0.0, 0.8):
        torch.manual_seed(0)
        model = net()
        optimizer = kfc.WhitenedAdam(model, betas=(beta, 0.99))
        train(model, optimizer, data)
        states = [optimizer.state[p]["fast"] for p in model.parameters()]
        distances = [(p - z).norm() for p, z in zip(model.parameters(), states, strict=True)]
        ends[beta] = torch.stack(distances).norm().item()
    assert ends[0.0] < 1e-6 < ends[0.8]


def test_a_frozen_parameter_keeps_its_place():
    """Its average does not pull it on while it has no gradient."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = kfc.WhitenedAdam(model)
    data = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(5)]
    train(model, optimizer, data[:3])
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    train(model, optimizer, data[3:])
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("updates", [-1.0, float("nan"), "3"])
def test_a_bad_count_of_updates_is_refused(updates):
    model = net()
    optimizer = kfc.WhitenedAdam(model)
    train(model, optimizer, [batch()])
    state = {**optimizer.state_dict(), "iterates": {"updates": updates}}
    with pytest.raises(ValueError, match="updates must be"):
        optimizer.load_state_dict(state)
