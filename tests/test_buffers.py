"""A skipped step leaves the model's buffers, such as running statistics, as they were before it."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import kfc
from kfc.statistics.buffers import SMALL, BufferGuard
from ranks import run_ranks

# The statistics and inverses of the steps after the first; if none are due, only the device knows
# that a batch is bad.
KNOWN_TO = {"host": kfc.Periods(1, 1), "device": kfc.Periods(100, 100)}

pytestmark = pytest.mark.filterwarnings("ignore:.*skipped:UserWarning")


class Buffers(nn.Module):
    """Buffers of many kinds, changed in many ways, by the mean of the input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("temporary", torch.zeros(2), persistent=False)
        self.register_buffer("data_changed", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("large", torch.zeros(2, SMALL))
        self.register_buffer("large_data_changed", torch.zeros(SMALL + 1))
        self.register_buffer("large_replaced", torch.zeros(SMALL + 1))
        self.register_buffer("transposed", torch.zeros(3, 2).t())
        self.register_buffer("has_run", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("absent", None)
        self.register_buffer("table", torch.arange(3.0 * SMALL))
        self.register_buffer("small_table", torch.arange(5).expand(3, 5))
        self.register_buffer("infinite", torch.full((4, 4), -math.inf).triu(1))

    def forward(self, x):
        if self.training:
            mean = x.detach().mean()
            self.counter += 1
            self.replaced = 0.9 * self.replaced + mean
            self.temporary.mul_(0.9).add_(mean)
            self.data_changed.data.add_(mean)
            self.large.lerp_(mean.expand(2, SMALL), 0.1)
            self.large_data_changed.data.add_(mean)
            self.large_replaced = self.large_replaced + mean
            self.transposed += mean
            self.has_run.logical_not_()
        return x


def network(*more):
    convolution = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh()]
    return nn.Sequential(Buffers(), *convolution, *more, nn.Flatten(), nn.Linear(64, 3))


def batch(size=8, bad=None):
    x, y = torch.randn(size, 1, 6, 6), torch.randint(3, (size,))
    if bad is not None:
        x[1, 0, 2, 3] = bad
    return x, y


def train(model, optimizer, *batches):
    """Take one step on some micro-batches."""
    model.zero_grad()
    for x, y in batches:
        (F.cross_entropy(model(x), y) / len(batches)).backward()
    return optimizer.step()


def values(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(model, before):
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)


def assert_changed(model, before, names):
    now = dict(model.named_buffers())
    assert {name for name in before if not torch.equal(before[name], now[name])} == set(names)


CHANGING = [
    *("counter", "replaced", "temporary", "data_changed", "large", "large_data_changed"),
    *("large_replaced", "transposed", "has_run"),
]
ALL_CHANGING = [
    *(f"0.{name}" for name in CHANGING),
    *(f"2.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("known_to", KNOWN_TO)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_skipped_step_restores_buffers_and_others_do_not(bad, known_to, clip):
    model = network()
    optimizer = kfc.KFC(model, lr=1e-4, clip=clip, schedule=KNOWN_TO[known_to])
    for skipped in (False, False, True, True, False):
        before, constant = values(model), model[0].table._version
        train(model, optimizer, batch(bad=bad if skipped else None))
        if skipped:
            assert_same(model, before)
        else:
            assert_changed(model, before, ALL_CHANGING)
        assert model[0].table._version == constant
    assert optimizer.diagnostics["skipped_steps"] == 2
    assert all(torch.isfinite(model[2].running_mean))


def test_the_very_first_step():
    model = network()
    optimizer, before = kfc.KFC(model, likelihood="categorical"), values(model)
    train(model, optimizer, batch(bad=math.nan))
    assert_same(model, before)


def test_good_steps_give_the_buffers_that_the_model_would_have_without_the_optimizer():
    model = network()
    alone = copy.deepcopy(model)
    optimizer = kfc.KFC(model, lr=0.0, momentum=0.0, schedule=KNOWN_TO["device"])
    for _ in range(5):
        x, y = batch()
        train(model, optimizer, (x, y))
        alone(x)
    assert_same(model, values(alone))


@pytest.mark.parametrize("known_to", KNOWN_TO)
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_any_micro_batch_may_be_bad(known_to, bad):
    model = network()
    optimizer = kfc.KFC(model, lr=1e-4, schedule=KNOWN_TO[known_to])
    train(model, optimizer, batch(), batch(4), batch(5))
    before = values(model)
    train(model, optimizer, *(batch(bad=math.nan if i == bad else None) for i in range(3)))
    assert_same(model, before)
    assert optimizer.diagnostics["skipped_steps"] == 1


class Checkpointed(nn.Module):
    """Batch normalisation that runs again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.BatchNorm2d(4), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("known_to", KNOWN_TO)
def test_checkpointing_runs_normalisation_again_in_the_backward_pass(known_to):
    model = network(Checkpointed())
    optimizer = kfc.KFC(model, lr=1e-4, schedule=KNOWN_TO[known_to])
    train(model, optimizer, batch(), batch())
    before = values(model)
    train(model, optimizer, batch(bad=math.nan), batch())
    assert_same(model, before)


def test_preconditioner():
    model = network()
    preconditioner = kfc.Preconditioner(model)
    assert train(model, preconditioner, batch())
    before = values(model)
    assert not train(model, preconditioner, batch(bad=math.nan))
    assert_same(model, before)


def test_kfac_steps_that_are_skipped_or_fail(monkeypatch):
    model = network()
    model[0].small_table = model[0].small_table.clone()
    optimizer = kfc.KFAC(model)

    def step(bad=None):
        x, y = batch(bad=bad)
        return optimizer.step(lambda: F.cross_entropy(model(x), y))

    step()
    before = values(model)
    step()
    assert_changed(model, before, ALL_CHANGING)
    before = values(model)
    with pytest.raises(FloatingPointError):
        step(math.nan)
    assert_same(model, before)
    monkeypatch.setattr(optimizer._proposals, "propose", lambda *args, **kwargs: None)
    step()
    assert optimizer.diagnostics["skipped_steps"] == 1
    assert_same(model, before)


@pytest.mark.parametrize("known_to", KNOWN_TO)
def test_overflow_of_a_grad_scaler(known_to):
    model = network()
    optimizer = kfc.KFC(model, lr=1e-4, schedule=KNOWN_TO[known_to])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for factor in (1.0, 1e38, 1.0):
        before = values(model)
        x, y = batch()
        optimizer.zero_grad()
        scaler.scale(factor * F.cross_entropy(model(x), y)).backward()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*skipped")
            scaler.step(optimizer)
        scaler.update()
        if factor == 1:
            assert_changed(model, before, ALL_CHANGING)
        else:
            assert_same(model, before)
    assert optimizer.diagnostics["skipped_steps"] == 1


class Identity(torch.autograd.Function):
    """The identity, whose tangents are multiplied by a factor."""

    tangent_factor = 1.0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, derivative):
        return derivative

    @staticmethod
    def jvp(ctx, tangent):
        return Identity.tangent_factor * tangent


class IdentityLayer(nn.Module):
    def forward(self, x):
        return Identity.apply(x)


def test_a_fisher_norm_that_is_not_finite(monkeypatch):
    model = network(IdentityLayer())
    optimizer = kfc.KFC(model, clip=kfc.FisherClip(0.3, period=1))
    train(model, optimizer, batch())
    before = values(model)
    monkeypatch.setattr(Identity, "tangent_factor", math.nan)
    train(model, optimizer, batch())
    assert optimizer.diagnostics["skipped_steps"] == 1
    assert_same(model, before)


# Passes without a step


@pytest.mark.parametrize("known_to", KNOWN_TO)
def test_buffers_loaded_after_an_unused_pass_stay(known_to):
    model = network()
    optimizer = kfc.KFC(model, lr=1e-4, schedule=KNOWN_TO[known_to])
    train(model, optimizer, batch())
    model(batch()[0])
    loaded = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    del loaded["0.small_table"]
    model.load_state_dict(loaded, strict=False)
    buffers = {name: loaded[name] for name in values(model) if name in loaded}
    train(model, optimizer, batch(bad=math.nan))
    now = model.state_dict()
    torch.testing.assert_close({name: now[name] for name in buffers}, buffers, rtol=0, atol=0)


@pytest.mark.parametrize("known_to", KNOWN_TO)
def test_a_pass_that_fails(known_to):
    class Fails(nn.Module):
        fails = False

        def forward(self, x):
            if self.fails:
                raise RuntimeError("out of memory")
            return x

    failing = Fails()
    model = network(failing)
    optimizer = kfc.KFC(model, lr=1e-4, schedule=KNOWN_TO[known_to])
    train(model, optimizer, batch())
    before = values(model)
    failing.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        model(batch(bad=math.nan)[0])
    failing.fails = False
    train(model, optimizer, batch(bad=math.nan))
    assert_same(model, before)
    train(model, optimizer, batch())
    assert_changed(model, before, ALL_CHANGING)


def test_passes_in_evaluation_mode_and_without_gradients():
    model = network()
    optimizer = kfc.KFC(model, lr=1e-4, schedule=KNOWN_TO["device"])
    train(model, optimizer, batch())
    with torch.no_grad():
        model(batch()[0])  # as torch.optim.swa_utils.update_bn does
    before = values(model)
    model.eval()
    model(batch(bad=math.nan)[0])
    assert_same(model, before)
    model.train()
    train(model, optimizer, batch(bad=math.nan))
    assert_same(model, before)


# Buffers that are special


class Cache(nn.Module):
    """Buffers that depend on the input: a table that grows, and the last batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(4))
        self.register_buffer("last", torch.zeros(8, 1, 6, 6))
        self.register_buffer("average", None)

    def forward(self, x):
        if len(x) > len(self.table):
            self.table = torch.zeros(len(x))
        self.last = x
        if self.average is None:
            self.average = x.mean()
        return x


@pytest.mark.parametrize("known_to", KNOWN_TO)
def test_caches(known_to):
    cache = Cache()
    model = nn.Sequential(cache, *network())
    options = {"likelihood": "categorical", "schedule": KNOWN_TO[known_to]}
    optimizer = kfc.KFC(model, lr=1e-4, **options)
    train(model, optimizer, batch(4, bad=math.nan))
    assert cache.average is None
    train(model, optimizer, batch())
    before = cache.last.clone()
    x, y = batch(bad=math.nan)
    own = x.clone()
    train(model, optimizer, (x, y))
    torch.testing.assert_close(cache.last, before, rtol=0, atol=0)
    torch.testing.assert_close(x, own, rtol=0, atol=0, equal_nan=True)
    train(model, optimizer, batch(9, bad=math.nan))
    assert cache.table.shape == (9,)


@pytest.mark.parametrize("known_to", KNOWN_TO)
def test_a_normalisation_layer_that_runs_or_is_unfrozen_late(known_to):
    class Branches(nn.ModuleList):
        chosen = 0

        def forward(self, x):
            return self[self.chosen](x)

    branches = Branches([nn.Identity(), nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4)])
    model = network(branches)
    branches[2].requires_grad_(False).eval()
    optimizer = kfc.KFC(model, lr=1e-4, schedule=KNOWN_TO[known_to])
    for branches.chosen in (0, 1, 2):
        if branches.chosen == 2:
            branches[2].train()
        train(model, optimizer, *([batch()] if branches.chosen == 0 else []), batch(bad=None))
        before = values(model)
        train(model, optimizer, batch(bad=math.nan))
        assert_same(model, before)


@pytest.mark.parametrize("known_to", KNOWN_TO)
def test_spectral_norm_and_shared_buffers(known_to):
    model = network()
    model[1] = nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 4, 3))
    model[4].register_buffer("shared", model[2].running_mean)
    optimizer = kfc.KFC(model, lr=1e-4, clip=None, fallback_lr=1e-4, schedule=KNOWN_TO[known_to])
    for skipped in (False, True):
        before = values(model)
        train(model, optimizer, batch(bad=math.nan if skipped else None))
    assert_same(model, before)
    assert model[4].shared is model[2].running_mean


def test_tensors_of_functional_call_are_not_put_into_the_model():
    model = network()
    optimizer = kfc.KFC(model, lr=1e-4)
    train(model, optimizer, batch())
    before, own = values(model), dict(model.named_buffers())
    other = {name: torch.zeros_like(value) for name, value in before.items()}
    x, y = batch(bad=math.nan)
    F.cross_entropy(torch.func.functional_call(model, other, (x,)), y).backward()
    optimizer.step()
    assert optimizer.diagnostics["skipped_steps"] == 1
    assert_same(model, before)
    assert all(buffer is own[name] for name, buffer in model.named_buffers())


# Cost


class Operations(TorchDispatchMode):
    """Records the operations that make the host wait, and the sizes of copies."""

    WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    def __init__(self):
        super().__init__()
        self.waits, self.copied = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.waits += function in self.WAITS
        if function is torch.ops.aten._foreach_copy_.default:
            self.copied += [tensor.numel() for tensor in args[0]]
        return function(*args, **(kwargs or {}))


def test_estimate_factors_takes_no_copies():
    model = network()
    optimizer, before = kfc.KFC(model), values(model)
    model[0].small_table = model[0].small_table.clone()
    with Operations() as operations:
        optimizer.estimate_factors([batch()] * 2, lambda out, item: F.cross_entropy(out, item[1]))
    assert not operations.copied
    assert_same(model, before)
    with Operations() as operations:
        train(model, optimizer, batch())
    assert model[0].table.numel() in operations.copied


def test_large_constant_buffers_are_copied_only_in_searches():
    model = network()
    guard = BufferGuard(model)
    copied = []
    for _ in range(9):
        with Operations() as operations:
            guard.before_pass(may_wait=True, is_unused=True)
        copied.append(model[0].table.numel() in operations.copied)
        assert SMALL + 1 in operations.copied  # .data_changed
        model(batch()[0])
        guard.after_pass()
        guard.end_step(None)
        guard.forget()
    assert copied == [step in (1, 2, 4, 8) for step in range(1, 10)]


def test_a_large_buffer_that_begins_to_change():
    """The change itself cannot be undone without a copy, but later ones can."""
    module = nn.Module()
    module.register_buffer("table", torch.zeros(SMALL + 1))
    guard = BufferGuard(module)

    def run(change):
        guard.before_pass(may_wait=False, is_unused=True)
        change()
        guard.after_pass()
        guard.undo_step()
        guard.forget()
        return float(module.table[0])

    assert run(lambda: None) == 0
    assert run(lambda: module.table.add_(1)) == 1
    assert run(lambda: module.table.add_(1)) == 1


@pytest.mark.usefixtures("asynchronous")
def test_the_host_does_not_wait_when_nothing_is_due(monkeypatch):
    model = network()
    optimizer = kfc.KFC(model, lr=1e-4, clip=None, schedule=KNOWN_TO["device"])
    train(model, optimizer, batch())
    with Operations() as operations, monkeypatch.context() as without_lists:
        without_lists.setattr(torch.Tensor, "tolist", None)
        train(model, optimizer, batch(bad=math.nan))
    assert operations.waits == 0
    assert optimizer.diagnostics["skipped_steps"] == 1


# Ranks


def rank_with_a_bad_batch(rank, known_to, bad_rank):
    """Return the buffers before and after a step that is skipped, and after another."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    model = DistributedDataParallel(inner)
    optimizer = kfc.KFC(model, lr=1e-4, schedule=KNOWN_TO[known_to])
    torch.manual_seed(1 + rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, optimizer, batch(), batch())
        before = values(inner)
        train(model, optimizer, batch(bad=math.nan if rank == bad_rank else None), batch())
        skipped, after = optimizer.diagnostics["skipped_steps"], values(inner)
        train(model, optimizer, batch(), batch())
    return skipped, before, after, values(inner)


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("known_to", KNOWN_TO)
def test_ranks(known_to, bad_rank):
    ranks = run_ranks(rank_with_a_bad_batch, 2, known_to, bad_rank)
    _, before_of_rank_0, *_ = ranks[0]
    for skipped, _, after, later in ranks:
        assert skipped == 1
        # Every pass begins with the buffers of rank 0.
        torch.testing.assert_close(after, before_of_rank_0, rtol=0, atol=0)
        assert all(torch.isfinite(buffer).all() for buffer in later.values())
