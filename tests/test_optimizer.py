"""`KFC` as a torch optimizer: groups, schedulers, averaging, clipping, precision, bad batches."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from machine import peak_bytes
from torch import nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

import kfc
from kfc._helpers import all_finite
from kfc.optimizers.clipping import NormClip
from reference import small_batch as batch
from reference import small_net as net


def train(model, optimizer, steps: int = 3, data=None):
    for k in range(steps):
        x, y = data[k] if data else batch()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss


def values(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def plain_parameters(optimizer) -> set[str]:
    """Return the names of the parameters that follow the plain gradient, by ``describe``."""
    return {line.split()[0] for line in optimizer.describe().splitlines() if "plain grad" in line}


def parameters_without_block(optimizer) -> set[str]:
    """Return the names of the parameters without a Fisher block, by ``describe``."""
    return {line.split()[0] for line in optimizer.describe().splitlines() if " gradient " in line}


def saved_layers(optimizer) -> dict:
    """Return what the state dict says about each layer."""
    return optimizer.state_dict()["curvature"]["curvature"]["layers"]


# Groups, schedulers, closures


def test_groups_by_module_and_parameter_name():
    model = net()
    optimizer = kfc.KFC(
        model,
        lr=0.1,
        weight_decay=0.01,
        groups=[
            {"prefix": "5.bias", "lr": 0.0},
            {"prefix": ["*.bias", "1"], "weight_decay": 0.0},
            {"prefix": "0", "damping": 0.5, "momentum": 0.5},
        ],
    )
    by_name = {n: g for g in optimizer.param_groups for n in g["param_names"]}
    assert by_name["5.weight"]["weight_decay"] == 0.01
    assert by_name["0.bias"]["weight_decay"] == 0.0
    assert by_name["1.weight"]["weight_decay"] == 0.0
    assert by_name["0.weight"]["damping"] == 0.5
    assert by_name["0.weight"]["momentum"] == 0.5
    bias = model[5].bias.detach().clone()
    train(model, optimizer)
    assert torch.equal(model[5].bias, bias)
    assert optimizer.diagnostics["layers"]["0"]["damping"] == pytest.approx(0.51)


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([{"prefix": "conv9"}], "conv9"),
        ([{"lr": 0.1}], "prefix"),
        ([{"prefix": "0", "rate": 0.1}], "rate"),
        ([{"prefix": "0", "lr": -1.0}], "lr"),
        ([{"prefix": "0"}, {"prefix": "0.bias"}], "0.bias"),
    ],
)
def test_bad_groups_are_refused_and_leave_no_hooks(groups, match):
    model = net()
    with pytest.raises(ValueError, match=match):
        kfc.KFC(model, groups=groups)
    assert not any(m._forward_hooks for m in model.modules())


def test_a_damping_without_effect_is_refused():
    with pytest.raises(ValueError, match=r"damping, which has no effect on \['scale'\]"):
        kfc.KFC(Mixed(), groups=[{"prefix": "scale", "damping": 0.1}])
    kfc.KFC(Mixed(), groups=[{"prefix": ["scale", "head"], "damping": 0.1}])


class Mixed(nn.Module):
    """A model with parameters of every treatment."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4, max_norm=100.0)
        self.scale = nn.Parameter(torch.ones(4))
        self.norm = nn.LayerNorm(4)
        self.normed = weight_norm(nn.Linear(4, 4))
        self.spectral = spectral_norm(nn.Linear(4, 4))
        self.old_spectral = old_spectral_norm(nn.Linear(4, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens)) * self.scale
        x = self.old_spectral(self.spectral(self.normed(x)))
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.head(x.mean(1))


def test_other_parameters_follow_the_plain_gradient_in_their_own_group():
    model = Mixed()
    others = ["embedding", "scale", "normed", "spectral", "old_spectral"]
    groups = [{"prefix": others, "treatment": "plain"}]
    optimizer = kfc.KFC(model, 0.5, fallback_lr=0.25, momentum=0.0, clip=None, groups=groups)
    plain = plain_parameters(optimizer)
    assert {n for n in plain if "." not in n} == {"scale"}
    assert {n.split(".")[0] for n in plain} == set(others)
    groups = {g["treatment"]: g for g in optimizer.param_groups}
    assert set(groups["plain"]["param_names"]) == set(plain)
    assert groups["plain"]["lr"] == 0.25
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    tokens, y = torch.randint(7, (5, 3)), torch.randint(3, (5,))
    for rate in (0.25, 0.125):
        before = dict(zip(dict(model.named_parameters()), values(model), strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), y).backward()
        optimizer.step()
        scheduler.step()
        for name, p in model.named_parameters():
            if name in plain:
                torch.testing.assert_close(p.detach(), before[name] - rate * p.grad)
            assert p.grad.abs().sum() == 0 or not torch.equal(p.detach(), before[name])
    text = optimizer.describe()
    assert "parametrised" in text
    assert "Embedding with max_norm=100.0" in text


def test_describe_names_every_parameter(capsys):
    model = net()
    model[0].requires_grad_(False)
    optimizer = kfc.KFC(model, curvature=kfc.Kronecker(max_factor_size=30))
    text = optimizer.describe()
    assert capsys.readouterr().out.strip() == text
    rows = {line.split()[0]: line for line in text.splitlines()}
    assert "frozen" in rows["0.weight"]
    assert "channel blocks" in rows["1.weight"]
    assert "4x2x2" in rows["1.weight"]
    assert "37, 3x3" in rows["5.weight"]
    assert "activation factor wider than 30: diagonal only" in rows["5.weight"]
    assert set(rows) >= {name for name, _ in model.named_parameters()}
    huge = nn.Sequential(*[nn.Linear(8000, 8000, device="meta") for _ in range(2)])
    assert "GiB" in kfc.KFC(huge, curvature=kfc.Kronecker(inverse_error=None)).describe()


@pytest.mark.parametrize("first", ["embedding", "head"])
def test_describe_names_both_users_of_a_tied_weight(first):
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    embedding.scale_grad_by_freq = True
    head.weight = embedding.weight
    modules = {"embedding": embedding, "head": head}
    model = nn.ModuleDict({first: modules.pop(first), **modules})
    described = kfc.KFC(model).describe()
    row = next(line for line in described.splitlines() if line.startswith(f"{first}.weight"))
    assert "'embedding'" in row
    assert "'head'" in row
    assert "share a parameter" in row


def test_blocks_and_factors_are_separate():
    model = net()
    optimizer = kfc.KFC(model)
    train(model, optimizer, 1)
    assert set(optimizer.factors) == {"0", "5"}
    assert set(optimizer.blocks) == {"1"}
    assert optimizer.blocks["1"].shape == (4, 2, 2)


def test_outputs_without_a_graph_give_no_statistics():
    model = nn.Linear(3, 2)
    preconditioner = kfc.Preconditioner(model, output=lambda out: out.detach())
    model(torch.randn(4, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="there are no statistics yet"):
        preconditioner.step()
    assert preconditioner.factors == {}


def test_the_learning_rate_of_a_group_overrides_the_fallback_rate():
    optimizer = kfc.KFC(Mixed(), fallback_lr=0.25, groups=[{"prefix": "embedding", "lr": 0.75}])
    by_name = {n: g["lr"] for g in optimizer.param_groups for n in g["param_names"]}
    assert by_name["embedding.weight"] == 0.75
    assert by_name["scale"] == 0.25


def test_a_subclass_with_its_own_forward_is_not_mistaken_for_its_base():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight - self.weight.mean(), self.bias)

    class Renamed(nn.Linear):
        pass

    model = nn.Sequential(Standardised(1, 2, 3), nn.Flatten(), Renamed(32, 3))
    optimizer = kfc.KFC(model)
    train(model, optimizer)
    assert set(optimizer.factors) == {"2"}
    assert "Standardised overrides forward" in optimizer.describe()
    patched = nn.Sequential(nn.Linear(3, 3))
    patched[0].forward = lambda x: x
    assert "0.weight" in parameters_without_block(kfc.KFC(patched))


def test_a_new_layer_type_needs_one_class_and_one_registration():
    class Transposed(nn.Module):
        """A linear layer that stores its weight as (inputs, outputs)."""

        def __init__(self, inputs, outputs):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs)
            self.bias = nn.Parameter(torch.zeros(outputs))

        def forward(self, x):
            return x @ self.weight + self.bias

    class TransposedLayer(kfc.layers.LinearLayer):
        def weight_to_matrix(self, weight):
            return weight.T.unsqueeze(0)

        def weight_from_matrix(self, matrix):
            return matrix.squeeze(0).T

    @kfc.layers.layer_for.register
    def _(module: Transposed) -> kfc.layers.Layer:
        return TransposedLayer(module)

    mine, stock = nn.Sequential(Transposed(5, 3)), nn.Sequential(nn.Linear(5, 3))
    with torch.no_grad():
        stock[0].weight.copy_(mine[0].weight.T)
        stock[0].bias.copy_(mine[0].bias)
    data = [(torch.randn(8, 5), torch.randint(3, (8,))) for _ in range(3)]
    for model in (mine, stock):
        train(model, kfc.KFC(model, seed=0), data=data)
    torch.testing.assert_close(mine[0].weight.T, stock[0].weight)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 1)]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_sets_the_step_length(name):
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    optimizer = kfc.KFC(model, lr=1e-2, momentum=0.9, clip=None)
    twin = copy.deepcopy(model)
    plain = kfc.Preconditioner(twin, seed=torch.initial_seed())
    scheduler = SCHEDULERS[name](optimizer)
    velocity = [torch.zeros_like(p) for p in twin.parameters()]
    for _ in range(4):
        x, y = batch()
        rate, momentum = (optimizer.param_groups[0][key] for key in ("lr", "momentum"))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
        twin.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        plain.step()
        with torch.no_grad():
            for p, v in zip(twin.parameters(), velocity, strict=True):
                v.mul_(momentum).sub_(rate * p.grad)
                p.add_(v)
        torch.testing.assert_close(values(model), values(twin))


def test_closure_and_step_hooks():
    model, (x, y) = net(), batch()
    optimizer = kfc.KFC(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(10)]
    assert losses[-1] < losses[0]
    assert calls == ["before", "after"] * 10


def test_preconditioner_works_with_any_optimizer():
    mine = net()
    other = copy.deepcopy(mine)
    data = [batch() for _ in range(4)]
    train(mine, kfc.KFC(mine, lr=0.01, momentum=0.9, clip=None, seed=5), 4, data)
    preconditioner = kfc.Preconditioner(other, seed=5)
    sgd = torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.9)
    for x, y in data:
        sgd.zero_grad()
        F.cross_entropy(other(x), y).backward()
        preconditioner.step()
        sgd.step()
    torch.testing.assert_close(values(mine), values(other))
    assert preconditioner.diagnostics["step"] == 4


def test_preconditioner_leaves_frozen_parameters_and_bad_batches_alone():
    model, (x, y) = net(), batch()
    preconditioner = kfc.Preconditioner(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    for frozen in ([], [model[5].bias], [model[0].weight, model[0].bias]):
        for p in frozen:
            p.requires_grad_(False)
        sgd.zero_grad(set_to_none=False)  # frozen parameters keep gradients of zero
        F.cross_entropy(model(x), y).backward()
        assert preconditioner.step()
        sgd.step()
    before = values(model)
    sgd.zero_grad()
    F.cross_entropy(model(x * math.nan), y).backward()
    with pytest.warns(UserWarning, match="skipped"):
        assert not preconditioner.step()
    sgd.step()
    for a, b in zip(before, values(model), strict=True):
        assert torch.equal(a, b)
    embedding = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    preconditioner = kfc.Preconditioner(embedding)
    F.cross_entropy(embedding(torch.randint(5, (4, 2))), torch.randint(2, (4,))).backward()
    with pytest.raises(ValueError, match="sparse=False"):
        preconditioner.step()


def test_step_inside_autocast_is_as_precise_as_outside():
    results = []
    for inside in (False, True):
        torch.manual_seed(0)
        model, (x, y) = net(), batch()
        optimizer = kfc.KFC(model, seed=1)
        F.cross_entropy(model(x), y).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            optimizer.step()
        results.append(values(model))
    torch.testing.assert_close(*results)


def test_training_continues_after_a_change_of_dtype():
    model = net()
    optimizer = kfc.KFC(model, schedule=kfc.Periods(statistics=1))
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    model.double()
    optimizer.zero_grad()
    x, y = batch()
    F.cross_entropy(model(x.double()), y).backward()
    optimizer.step()
    assert optimizer.factors["0"].activation.dtype == torch.float64
    other = net().double()
    resumed = kfc.KFC(other)
    resumed.load_state_dict(state)
    F.cross_entropy(other(x.double()), y).backward()
    resumed.step()


def test_missing_gradients_leave_parameters_alone():
    model, (x, y) = net(), batch()
    optimizer = kfc.KFC(model, averaging_timescale=3)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    model[0].weight.grad = model[0].bias.grad = model[5].bias.grad = None
    before = values(model)
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, values(model), strict=True)]
    assert moved == [False, False, True, True, True, False]


def test_a_step_without_a_forward_pass_is_an_error():
    model = net()
    optimizer = kfc.KFC(model)
    with pytest.raises(RuntimeError, match="before any forward pass in training mode"):
        optimizer.step()
    x, y = batch()
    model.eval()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"model\.train\(\)"):
        optimizer.step()
    model.train()
    train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="since the last one"):
        optimizer.step()


# Averages


def test_averages_are_swapped_in_and_out():
    model = net()
    optimizer = kfc.KFC(model, averaging_timescale=2.0)
    with optimizer.averaged_parameters():
        pass
    zeta, average = math.exp(-0.5), values(model)
    for _ in range(4):
        train(model, optimizer, 1)
        average = [zeta * a + (1 - zeta) * p for a, p in zip(average, values(model), strict=True)]
    own = values(model)

    def evaluate_and_fail():
        with optimizer.averaged_parameters():
            with optimizer.averaged_parameters():
                torch.testing.assert_close(values(model), average)
            torch.testing.assert_close(values(model), average)
            with pytest.raises(RuntimeError, match="averaged_parameters"):
                optimizer.step()
            raise KeyError("on purpose")

    with pytest.raises(KeyError):
        evaluate_and_fail()
    for a, b in zip(values(model), own, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: kfc.KFC(model, averaging_timescale=2.0),
        lambda model: kfc.KFAC(model, averaging_timescale=2.0),
        kfc.WhitenedAdam,
    ],
    ids=["KFC", "KFAC", "WhitenedAdam"],
)
def test_steps_inside_averaged_parameters_are_refused_before_the_closure_runs(make):
    model, calls = net(), []
    optimizer = make(model)
    with (
        optimizer.averaged_parameters(),
        pytest.raises(RuntimeError, match="averaged_parameters"),
    ):
        optimizer.step(lambda: calls.append("called"))
    assert not calls


def test_parameters_frozen_since_keep_their_averages():
    model = net()
    optimizer = kfc.KFC(model, averaging_timescale=2.0)
    train(model, optimizer, 3)
    model[0].requires_grad_(False)
    train(model, optimizer, 1)
    own = model[0].weight.detach().clone()
    with optimizer.averaged_parameters():
        assert not torch.equal(model[0].weight, own)
        near = model[0].weight.detach().clone()
    train(model, optimizer, 20)
    with optimizer.averaged_parameters():
        assert (model[0].weight - own).norm() < 0.01 * (near - own).norm()


def test_averages_of_half_precision_parameters_are_wide():
    model = net().bfloat16()
    optimizer = kfc.KFC(model, averaging_timescale=1000.0)
    data = [(batch()[0].bfloat16(), batch()[1]) for _ in range(3)]
    train(model, optimizer, 3, data)
    assert {s["average"].dtype for s in optimizer.state.values()} == {torch.float32}
    with optimizer.averaged_parameters():
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_no_averages_without_a_timescale():
    optimizer = kfc.KFC(net())
    with (
        pytest.raises(RuntimeError, match="averaging_timescale"),
        optimizer.averaged_parameters(),
    ):
        pass


# Clipping


def test_clip_scales_the_update_to_the_limit():
    model, (x, y) = net(), batch()
    twin = copy.deepcopy(model)
    before = values(model)
    updates = []
    for m, clip in ((model, None), (twin, 1e-3)):
        optimizer = kfc.KFC(m, lr=0.1, momentum=0.0, clip=clip, weight_decay=0.1, seed=0)
        F.cross_entropy(m(x), y).backward()
        optimizer.step()
        updates.append([a - b for a, b in zip(values(m), before, strict=True)])
    diagnostics = optimizer.diagnostics
    factor = diagnostics["clip_factor"]
    assert factor == pytest.approx((1e-3 / diagnostics["fisher_norm"]) ** 0.5)
    torch.testing.assert_close(updates[1], [factor * u for u in updates[0]], rtol=1e-3, atol=1e-5)


def test_clip_uses_the_first_quarter_of_every_batched_argument():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = nn.Linear(3, 2), []

        def forward(self, x, table, *, extra):
            self.seen.append((len(x), len(table), len(extra["shift"])))
            return self.layer(x + extra["shift"]) + table.sum()

    model = Two()
    optimizer = kfc.KFC(model)
    extra = {"shift": torch.randn(9, 3), "name": "kept"}
    outputs = model(torch.randn(9, 3), torch.randn(4), extra=extra)
    F.cross_entropy(outputs, torch.randint(2, (9,))).backward()
    optimizer.step()
    assert model.seen == [(9, 4, 9), (3, 4, 3)]


def test_the_norm_of_a_summed_loss_is_that_of_the_whole_batch():
    """All quarters of the batch are equal, so that the first is enough."""
    norms = []
    for fraction in (0.25, 1):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = kfc.KFC(
            model,
            likelihood=kfc.Categorical("sum"),
            clip=kfc.FisherClip(fraction=fraction),
            seed=0,
            lr=1e-4,
        )
        x, y = torch.randn(2, 3).repeat(4, 1), torch.zeros(8, dtype=torch.long)
        F.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
        norms.append(optimizer.diagnostics["fisher_norm"])
    assert norms[0] == pytest.approx(norms[1])


def test_an_argument_that_is_not_a_batch_is_explained():
    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x) @ mask

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Masked(3, 4)

        def forward(self, x, mask):
            return self.inner(x, mask)

    model = Outer()
    x, mask, y = torch.randn(4, 3), torch.eye(4), torch.randint(4, (4,))
    optimizer = kfc.KFC(model)
    F.cross_entropy(model(x, mask), y).backward()
    with pytest.raises(RuntimeError, match=r"clip=kfc\.FisherClip\(fraction=1\)"):
        optimizer.step()
    whole = kfc.KFC(model, clip=kfc.FisherClip(fraction=1))
    F.cross_entropy(model(x, mask), y).backward()
    whole.step()


def test_batch_norm_clips_on_at_least_two_examples():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = kfc.KFC(model)
    F.cross_entropy(model(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()
    assert optimizer.diagnostics["clip_evaluations"] == 1


def test_clip_period_is_the_number_of_steps_between_evaluations():
    model = net()
    optimizer = kfc.KFC(model, clip=kfc.FisherClip(period=3))
    counts = []
    for _ in range(7):
        train(model, optimizer, 1)
        counts.append(optimizer.diagnostics["clip_evaluations"])
    assert counts == [1, 1, 1, 2, 2, 2, 3]


def test_adaptive_clip_never_exceeds_the_limit():
    """The ratio of exact norm to estimate drifts; every update above the limit must be clipped."""
    clip, limit = NormClip(kfc.FisherClip(0.3)), 0.3
    generator = torch.Generator().manual_seed(0)
    crossings = unneeded = 0
    for k in range(2000):
        noise = float(torch.rand((), generator=generator))
        ratio = 1.5 + math.sin(k / 300)
        estimate = (0.5 if k % 700 < 100 else 0.02) * (0.5 + noise)
        exact = ratio * estimate * (0.9 + 0.2 * noise)
        if clip.is_due():
            factor = clip.shorten(torch.tensor(estimate), torch.tensor(exact))
            assert factor == pytest.approx(min(1.0, (limit / exact) ** 0.5))
        else:
            factor = float(clip.guard(torch.tensor(estimate)))
            unneeded += factor < 1 and exact < limit
        crossings += exact > limit
        assert factor**2 * exact <= limit * (1 + 1e-6)
    assert crossings > 100
    counts = clip.state_dict()
    assert counts["evaluations"] < 700
    assert 0 < counts["guards"] < 60
    assert unneeded < 40


# Precision and bad batches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inverse", ["factored", "eigen"])
def test_half_precision_parameters(dtype, inverse):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).to(dtype)
    optimizer = kfc.KFC(model, curvature=kfc.Kronecker(inverse=inverse))
    data = [(x.to(dtype), y) for x, y in [batch()] * 10]
    first = train(model, optimizer, 1, data)
    last = train(model, optimizer, 10, data)
    assert last < first
    assert {f.activation.dtype for f in optimizer.factors.values()} == {torch.float32}
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("fisher", ["sampled", "empirical"])
def test_bfloat16_autocast(fisher):
    model, (x, y) = net(), batch()
    optimizer = kfc.KFC(model, curvature=kfc.Kronecker(fisher=fisher))
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    factors = optimizer.factors["0"]
    assert factors.activation.dtype == factors.derivative.dtype == torch.float32


def scaled_run(fisher: str, enabled: bool, unscale: bool):
    torch.manual_seed(0)
    model = net().double()
    optimizer = kfc.KFC(model, curvature=kfc.Kronecker(fisher=fisher))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
    for _ in range(3):
        x, y = batch()
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x.double()), y)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return values(model)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fisher", ["sampled", "empirical"])
def test_grad_scaler_changes_nothing(fisher, unscale):
    plain = scaled_run(fisher, False, False)
    torch.testing.assert_close(scaled_run(fisher, True, unscale), plain)


def test_grad_scaler_overflow_skips_the_step_quietly():
    model = net()
    optimizer = kfc.KFC(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    before = values(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, y = batch()
        scaler.scale(1e6 * F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.diagnostics["skipped_steps"] == 1
    assert scaler.get_scale() < 1e38
    for a, b in zip(before, values(model), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fisher", ["sampled", "exact", "empirical"])
@pytest.mark.parametrize(
    "periods", [(1, 1), (100, 1), (100, 100)], ids=["all due", "inverses due", "nothing due"]
)
def test_a_bad_batch_changes_nothing(bad, fisher, periods):
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = kfc.KFC(
        model,
        curvature=kfc.Kronecker(fisher=fisher),
        schedule=kfc.Periods(*periods),
        averaging_timescale=5,
    )
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    before = values(model)
    x, y = batch()
    x[3, 0, 2, 2] = bad
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, 2, [(x, y), (x, y)])
    assert len([w for w in caught if "skipped" in str(w.message)]) == 1
    assert optimizer.diagnostics["skipped_steps"] == 2
    assert optimizer.diagnostics["step"] == 2
    for a, b in zip(before, values(model), strict=True):
        assert torch.equal(a, b)
    after = optimizer.state_dict()
    for part in ("state", "clip"):
        torch.testing.assert_close(after[part], state[part])
    for name, layer in after["curvature"]["curvature"]["layers"].items():
        saved = state["curvature"]["curvature"]["layers"][name]
        torch.testing.assert_close(layer["running"], saved["running"], rtol=0, atol=0)
        torch.testing.assert_close(layer["inverse"], saved["inverse"], rtol=0, atol=0)
    train(model, optimizer, 2)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.usefixtures("asynchronous")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_bad_batch_changes_nothing_when_nothing_is_due(bad, clip, momentum):
    """The host does not wait to see it, so the step counts; the device takes a step of zero."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = kfc.KFC(
        model, lr=1e-4, schedule=kfc.Periods(100, 100), clip=clip, momentum=momentum
    )
    # At this rate, and on one batch, ν is computed at steps 1, 3 and 7.
    train(model, optimizer, 3, [batch()] * 3)
    before, state = values(model), copy.deepcopy(optimizer.state_dict()["state"])
    x, y = batch()
    x[3, 0, 2, 2] = bad
    train(model, optimizer, 2, [(x, y), (x, y)])
    with pytest.warns(UserWarning, match="2 of the last steps were skipped"):
        skipped = optimizer.diagnostics["skipped_steps"]
    assert skipped == 2
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
    train(model, optimizer, 2)
    assert optimizer.diagnostics["skipped_steps"] == 2
    assert not any(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("lr", [1e-4, 0.3])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 1e-2}, {"momentum": 0.0}])
def test_numbers_and_scalars_on_the_device_give_the_same_steps(lr, options, request):
    """The host computes with numbers where it need not wait for them."""

    def trained():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3))
        groups = [{"prefix": "3", "lr": lr / 2}]
        optimizer = kfc.KFC(model, lr, groups=groups, schedule=kfc.Periods(3, 5), **options)
        train(model, optimizer, 12, [batch() for _ in range(12)])
        return values(model), optimizer.step_diagnostics

    parameters, diagnostics = trained()
    request.getfixturevalue("asynchronous")
    on_device, diagnostics_on_device = trained()
    torch.testing.assert_close(on_device, parameters, rtol=1e-9, atol=1e-12)
    assert diagnostics_on_device == pytest.approx(diagnostics, rel=1e-9)
    # Both the clip and the loss bound shorten steps at the large rate, and none at the small one.
    assert (diagnostics["clip_guards"] + diagnostics["loss_bounds"] > 0) == (lr == 0.3)


class Waits(TorchDispatchMode):
    """Counts the operations that make the host wait for the device."""

    OPERATIONS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in self.OPERATIONS
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("asynchronous")
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_with_nothing_due_waits_for_nothing_and_allocates_once(scaled, monkeypatch):
    model = nn.Sequential(nn.Flatten(), *(nn.Linear(36, 36) for _ in range(40)), nn.Linear(36, 3))
    optimizer = kfc.KFC(
        model, lr=1e-4, weight_decay=1e-3, schedule=kfc.Periods(99, 99), averaging_timescale=5
    )
    # At this rate, and on one batch, ν is computed at steps 1, 3, 7 and 15.
    train(model, optimizer, 8, [batch()] * 8)
    evaluations = optimizer.diagnostics["clip_evaluations"]
    peaks = []
    for _ in range(2):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if scaled:
            optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.ones(())
        with Waits() as waits, monkeypatch.context() as without_lists:
            without_lists.setattr(torch.Tensor, "tolist", None)
            peaks.append(peak_bytes(optimizer.step))
        assert waits.count == 0
    assert optimizer.diagnostics["clip_evaluations"] == evaluations
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert model_bytes <= max(peaks) < 1.25 * model_bytes


def test_the_guard_accepts_an_estimate_below_zero():
    """Rounding may cause one, for a gradient in the null space of undamped factors."""
    clip = NormClip(kfc.FisherClip(0.3))
    assert clip.is_due()
    clip.shorten(torch.tensor(0.01), torch.tensor(0.01))
    assert not clip.is_due()
    assert float(clip.guard(torch.tensor(-1e-9))) == 1
    assert float(clip.guard(torch.tensor(0.0))) == 1


@pytest.mark.usefixtures("asynchronous")
def test_averages_stay_if_only_the_device_knows_that_a_step_is_bad():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    optimizer = kfc.KFC(model, schedule=kfc.Periods(99, 99), clip=None, averaging_timescale=3)
    train(model, optimizer, 3)
    before = [optimizer.state[p]["average"].clone() for p in model.parameters()]
    x, y = batch()
    train(model, optimizer, 1, [(x * math.nan, y)])
    after = [optimizer.state[p]["average"] for p in model.parameters()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    train(model, optimizer, 1)
    assert not torch.equal(optimizer.state[model[1].weight]["average"], before[0])


def test_natural_gradients_may_exceed_the_range_of_half_precision():
    """The learning rate brings the update back into range."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False)).half()
    optimizer = kfc.KFC(model, lr=1e-6, damping=1e-6, schedule=kfc.Periods(50, 50))
    x, y = (torch.randn(16, 4) * 1e-2).half(), torch.randint(3, (16,))
    for k in range(6):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if k == 4:
            model[0].weight.grad.mul_(20000)
        optimizer.step()
    assert torch.isfinite(model[0].weight).all()
    assert optimizer.diagnostics["skipped_steps"] == 0


def test_steps_are_not_skipped_for_a_half_precision_parameter_without_a_layer():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(400))
            self.last = nn.Linear(400, 3)

        def forward(self, x):
            return self.last(x * self.scale)

    model = Scaled().half()
    optimizer = kfc.KFC(model, lr=1e-5, momentum=0, schedule=kfc.Periods(50, 50))
    x, y = torch.randn(8, 400).half(), torch.randint(3, (8,))
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model.scale.grad.add_(30)
        optimizer.step()
    assert optimizer.diagnostics["skipped_steps"] == 0


def test_momentum_is_the_same_whether_or_not_the_host_checks_the_step():
    results = []
    for statistics_period in (1, 99):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()
        optimizer = kfc.KFC(model, clip=None, schedule=kfc.Periods(statistics_period, 99))
        x, y = batch()
        data = [(x.double(), y)] * 6
        train(model, optimizer, 6, data)
        results.append(values(model))
    torch.testing.assert_close(*results, rtol=1e-14, atol=0)


@pytest.mark.usefixtures("asynchronous")
def test_an_error_within_a_step_does_not_mark_the_next_step_as_bad():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    optimizer = kfc.KFC(model, schedule=kfc.Periods(99, 99), clip=None)
    train(model, optimizer, 2)
    x, y = batch()
    optimizer.zero_grad()
    F.cross_entropy(model(x * math.nan), y).backward()
    group = optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], None
    with pytest.raises(TypeError):
        optimizer.step()
    group["lr"] = rate
    before = values(model)
    train(model, optimizer, 1)
    assert not torch.equal(before[0], values(model)[0])
    assert optimizer.diagnostics["skipped_steps"] == 0


def test_an_overflow_is_skipped_quietly_when_the_clip_is_due():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    optimizer = kfc.KFC(model, schedule=kfc.Periods(99, 99), clip=kfc.FisherClip(period=1))
    train(model, optimizer, 2)
    x, y = batch()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    model[1].weight.grad[0, 0] = math.inf
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.ones(())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        assert optimizer.diagnostics["skipped_steps"] == 1


def test_factors_from_a_data_set_still_need_a_batch_for_the_clip():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    optimizer = kfc.KFC(model)
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.estimate_factors([x])
    with pytest.raises(RuntimeError, match="the clip needs the batch"):
        optimizer.step()


def test_a_bad_first_batch_is_skipped_too():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    optimizer = kfc.KFC(model)
    x, y = batch()
    with pytest.warns(UserWarning, match="step 1 was skipped"):
        train(model, optimizer, 1, [(x * math.nan, y)])
    assert optimizer.factors == {}
    train(model, optimizer, 2)
    assert optimizer.diagnostics["step"] == 2


def test_a_non_finite_factor_is_refused_and_recovers():
    model = net()
    optimizer = kfc.KFC(model, schedule=kfc.Periods(2, 1))
    train(model, optimizer, 2)
    optimizer.factors["0"].activation.fill_(math.nan)
    inverse = saved_layers(optimizer)["0"]["inverse"]
    with pytest.warns(UserWarning, match="layer '0'"):
        train(model, optimizer, 1)
    kept = saved_layers(optimizer)["0"]["inverse"]
    assert all(torch.equal(kept[key], tensor) for key, tensor in inverse.items())
    assert all(torch.isfinite(p).all() for p in model.parameters())
    train(model, optimizer, 1)
    assert torch.isfinite(optimizer.factors["0"].activation).all()
    new = saved_layers(optimizer)["0"]["inverse"]
    assert not torch.equal(new["activation"], inverse["activation"])


def everything(model, optimizer) -> list:
    """Return parameters, factors and inverses with their age."""
    layers = saved_layers(optimizer).values()
    curvature = [(layer["running"], layer["inverse"], layer["damping"]) for layer in layers]
    return [values(model), curvature, optimizer.diagnostics["staleness"]]


class Exploding(nn.Linear):
    """Gives outputs that are not finite, while broken, in the clip's forward pass only."""

    broken = False

    def forward(self, x):
        out = super().forward(x)
        return out * math.nan if self.broken and len(x) < 8 else out


@pytest.mark.parametrize("curvature", [kfc.Kronecker(fisher="exact"), kfc.EKFAC(fisher="exact")])
@pytest.mark.parametrize("inverse_period", [1, 3])
def test_a_non_finite_norm_skips_the_step_as_if_there_had_been_no_batch(curvature, inverse_period):
    """Parameters, factors, inverses and their age stay, and so does what the next step does."""
    data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
    found = []
    for sees_bad_batch in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), Exploding(3, 2))
        optimizer = kfc.KFC(
            model,
            curvature=curvature,
            schedule=kfc.Periods(1, inverse_period),
            clip=kfc.FisherClip(period=1),
        )
        train(model, optimizer, 2, data)
        if sees_bad_batch:
            model[1].broken = True
            with pytest.warns(UserWarning, match="skipped"):
                train(model, optimizer, 1, data[3:])
            model[1].broken = False
        assert optimizer.diagnostics["skipped_steps"] == sees_bad_batch
        states = [everything(model, optimizer)]
        train(model, optimizer, 1, data[2:])
        found.append([*states, everything(model, optimizer)])
    torch.testing.assert_close(*found, rtol=0, atol=0)


# Learning


def test_it_learns_the_digits_faster_than_sgd():
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:1024, None] / 16
    y = torch.tensor(digits.target)[:1024]
    losses = {}
    for name in ("kfc", "sgd"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )
        optimizer = (
            kfc.KFC(model, lr=0.01)
            if name == "kfc"
            else torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
        )
        for _ in range(3):
            train(model, optimizer, 8, list(zip(x.split(128), y.split(128), strict=True)))
        losses[name] = F.cross_entropy(model(x), y).item()
    assert losses["kfc"] < losses["sgd"] / 2


def test_values_of_several_dtypes_are_checked_together():
    wide = torch.tensor(1e300, dtype=torch.float64)
    fine = [wide, torch.tensor(1.0), torch.tensor(2.0).bfloat16()]
    assert all_finite(fine)
    assert all_finite(fine[:1])
    assert all_finite([])
    for bad in (float("nan"), float("inf")):
        assert not all_finite([*fine, torch.tensor(bad).half()])
        assert not all_finite([torch.tensor(1.0), torch.tensor(bad)])
