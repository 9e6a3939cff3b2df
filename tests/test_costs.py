"""Counted costs of curvature, and what they postpone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import kfc
from kfc.optimizers.allowance import EARLY, INVERSES, NORM_SHARE, NORMS, STATISTICS, Allowance
from kfc.optimizers.costs import MOVING, Costs
from kfc.statistics.operations import operation
from resuming import assert_resumes


def network(width=8):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 4, 3), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * 36, 5))


def batch(examples=128):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(examples, 3, 8, 8, generator=generator)
    return images, torch.randint(5, (examples,), generator=generator)


def train(model, optimizer, steps, examples=128):
    images, labels = batch(examples)
    for _ in steps:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def test_the_passes_are_counted_as_torch_counts_them():
    torch.manual_seed(0)
    layers = [nn.Conv2d(16, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 4, 3), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(4 * 36, 5))
    images, labels = torch.randn(128, 16, 8, 8), batch()[1]
    images.requires_grad_()  # so that the first layer has all three products
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(images), labels).backward()
    optimizer = kfc.KFC(model, curvature=kfc.Kronecker(fraction=1), seed=0)
    costs = []
    optimizer.engine.allowance.set_costs = costs.append
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    # Two operations for each multiply-add; the bias is an input of a factor too.
    assert 2 * costs[0].plain == pytest.approx(counter.get_total_flops(), rel=0.05)


class Mixed(nn.Module):
    """Layers with factors, and all else that passes may consist of."""

    def __init__(self):
        super().__init__()
        self.input = nn.Linear(128, 128)
        self.frozen = nn.Linear(128, 128).requires_grad_(False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(128, 128))
        self.output = nn.Linear(128, 5)

    def forward(self, x):
        x = self.normed(self.frozen(self.input(x)))
        x = F.scaled_dot_product_attention(x, x, x) + x @ x.mT @ x + torch.bmm(x, x.mT).bmm(x)
        return self.output(x).mean(1)


def test_operations_without_factors_are_counted_as_torch_counts_them():
    torch.manual_seed(0)
    model, inputs, labels = Mixed(), torch.randn(16, 10, 128), torch.randint(5, (16,))
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(inputs.requires_grad_()), labels).backward()
    optimizer = kfc.KFC(model, clip=None, seed=0)
    costs = []
    optimizer.engine.allowance.set_costs = costs.append
    for parameter in model.parameters():
        parameter.grad = None
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    others = optimizer.engine.allowance.others
    own = sum(16 * 10 * layer.weight.numel() for layer in (model.input, model.output))
    assert others == pytest.approx(counter.get_total_flops() / 2 / (3 * own) - 1, rel=0.02)
    assert costs[0].plain == pytest.approx(3 * own * (1 + others), rel=0.05)


def test_recurrent_layers_are_counted():
    model = nn.LSTM(20, 30, num_layers=2, batch_first=True)
    with Count() as mode:
        model(torch.randn(4, 7, 20))
        model(nn.utils.rnn.pack_sequence([torch.randn(7, 20), torch.randn(3, 20)]))
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert mode.counts == [28 * weights, 10 * weights]


class Count(TorchFunctionMode):
    """Counts the multiply-adds of functions."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        done = operation(func, args, kwargs or {}, output)
        self.counts += [done.multiply_adds] if done else []
        return output


def test_layers_without_many_inputs_move_entries():
    """Their passes take longer than their multiply-adds; a depthwise convolution has few."""
    found = {}
    for groups in (1, 64):
        model = nn.Sequential(nn.Conv2d(64, 64, 3, groups=groups), nn.Flatten(), nn.Linear(2304, 5))
        optimizer = kfc.KFC(model, clip=None, seed=0)
        costs = []
        optimizer.engine.allowance.set_costs = costs.append
        F.cross_entropy(model(torch.randn(16, 64, 8, 8)), torch.arange(16) % 5).backward()
        optimizer.step()
        found[groups] = costs[0].plain
    rows = 3 * 16 * 36 * 64
    assert found[1] - found[64] == pytest.approx(rows * (64 * 9 + 1 - MOVING))


def test_a_part_of_the_batch_is_cheaper_and_stands_for_the_same_step():
    found = {}
    for fraction in (0.25, 1):
        model = network()
        optimizer = kfc.KFC(model, curvature=kfc.Kronecker(fraction=fraction), seed=0)
        train(model, optimizer, range(1), examples=256)
        found[fraction] = optimizer.engine.allowance.costs
    assert found[0.25].inverses == pytest.approx(found[1].inverses)
    assert found[0.25].statistics < 0.6 * found[1].statistics


def refreshes(allowance, steps):
    """Return the steps at which statistics are refreshed if they are due in every step."""
    done = []
    for step in range(steps):
        refreshed = allowance.allows(STATISTICS)
        if step == 0:
            allowance.set_costs(COSTS)
        allowance.end_step(step + 1, refreshed, allowance.allows(INVERSES), False)
        done += [step] if refreshed else []
    return done


# Refreshes of both kinds cost one pass together, and a natural gradient a twentieth.
COSTS = Costs(plain=10.0, statistics=6.0, inverses=4.0, natural_gradient=0.5)


def test_curvature_stays_within_the_overhead_which_is_larger_at_the_start():
    done = refreshes(Allowance(0.2), 1000)
    for steps in (25, 100, 1000):
        allowed = 0.15 * sum(1 + EARLY / step for step in range(1, steps + 1))
        count = sum(step < steps for step in done)
        assert allowed - 2 <= count <= allowed + 1
    assert sum(step < 25 for step in done) > 1.3 * sum(900 <= step < 925 for step in done)


def test_costly_natural_gradients_leave_a_part_of_the_overhead_to_refreshes(caplog):
    allowance = Allowance(0.2)
    allowance.set_costs(COSTS)
    assert not caplog.records
    for overhead, expected in ((0.2, 0.15), (0.06, 0.018), (0.04, 0.012)):
        allowance = Allowance(overhead)
        allowance.set_costs(COSTS)
        for step in range(10**6, 10**6 + 100):  # long after the start
            allowance.end_step(step, False, False, False)
        per_step = allowance.state_dict()["balances"][0] / 100
        assert min(expected, 0.05) == pytest.approx(per_step, rel=1e-3)  # five passes are saved
    (record,) = caplog.records
    assert "0.05 of a forward and backward pass" in record.message
    assert "overhead of 0.04" in record.message


def test_without_an_overhead_nothing_is_postponed():
    assert len(refreshes(Allowance(None), 50)) == 50


def test_exact_norms_have_an_allowance_of_their_own():
    costs = COSTS._replace(norms=5.0)  # half a pass
    allowance = Allowance(0.2, norm_rate=0.02)
    allowance.set_costs(costs)
    done = []
    for step in range(1, 1001):
        done.append(allowance.allows(NORMS))
        allowance.end_step(step, False, False, done[-1])
    assert done[0]
    for steps in (25, 100, 1000):
        allowed = NORM_SHARE * 0.2 * sum(1 + EARLY / step for step in range(1, steps + 1)) / 0.5
        assert allowed - 1 <= sum(done[:steps]) <= allowed + 1
    # Norms at the lowest rate are paid for by refreshes.
    assert allowance.rate() == pytest.approx(0.2 - 0.05 - 0.02 * 0.5)


def test_the_overhead_postpones_exact_norms_unless_their_period_is_fixed():
    found = {}
    for name, clip, overhead in (
        ("needed", kfc.FisherClip(1e-6), None),
        ("affordable", kfc.FisherClip(1e-6), 0.2),
        ("fixed", kfc.FisherClip(1e-6, period=1), 0.2),
    ):
        model = network()
        schedule = kfc.Periods(overhead=overhead)
        optimizer = kfc.KFC(model, seed=0, clip=clip, schedule=schedule)
        train(model, optimizer, range(40))
        found[name] = optimizer.diagnostics["clip_evaluations"]
    assert (found["needed"], found["fixed"]) == (40, 40)
    allowed = NORM_SHARE * 0.2 * sum(1 + EARLY / step for step in range(1, 41))
    # Five convolutions instead of three, on a quarter of the examples
    assert found["affordable"] == pytest.approx(allowed / (5 / 12), abs=1.5)


def test_updates_whose_norm_is_not_affordable_are_shortened_by_the_estimate():
    model = network()
    model = model.double()
    optimizer = kfc.KFC(model, seed=0, clip=1e-6)
    images, labels = batch()
    lengths = []
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(images.double()), labels).backward()
        optimizer.step()
        diagnostics = optimizer.diagnostics
        lengths.append((diagnostics["clip_evaluations"], diagnostics["clip_factor"]))
    computed = [0, *(count for count, _ in lengths)]
    postponed = [k for k in range(20) if computed[k + 1] == computed[k]]
    assert 5 < len(postponed) < 19
    for k in postponed:  # about as much as those before and after, whose norm is exact
        assert 0.5 < lengths[k][1] / lengths[k - 1][1] < 2


def test_an_expensive_refresh_is_still_made_now_and_then():
    allowance = Allowance(0.1)
    allowance.set_costs(Costs(1.0, 10.0, 30.0, 0.0))
    assert allowance.allows(STATISTICS)
    done = []
    for step in range(1000):
        refreshed = allowance.allows(STATISTICS)
        allowance.end_step(step + 1, refreshed, refreshed, False)
        done += [step] if refreshed else []
    assert len(done) == 3  # in the first step, and every 400 steps


def test_cheap_refreshes_follow_their_periods():
    model = network()
    optimizer = kfc.KFC(model, seed=0, schedule=kfc.Periods(1, 1, overhead=1000.0))
    train(model, optimizer, range(12))
    assert all(optimizer.engine.allowance.allows(kind) for kind in (STATISTICS, INVERSES))


def test_the_overhead_postpones_refreshes_of_a_model():
    counts = {}
    for overhead in (None, 0.05):
        model = network()
        schedule = kfc.Periods(1, 1, overhead=overhead)
        optimizer = kfc.KFC(model, seed=0, schedule=schedule, clip=kfc.FisherClip(None))
        calls = []
        model[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        train(model, optimizer, range(40))
        counts[overhead] = len(calls) - 40
    assert counts[None] == 40
    assert 1 < counts[0.05] < 30


def test_a_run_with_an_overhead_resumes_bit_for_bit():
    def new():
        model = network()
        return model, kfc.KFC(model, seed=0, schedule=kfc.Periods(1, 1, overhead=0.05))

    assert_resumes(new, train, range(17), range(9))


def test_damaged_states_are_refused():
    model = network()
    optimizer = kfc.KFC(model, seed=0)
    train(model, optimizer, range(2))
    for damage in ({"costs": [1.0]}, {"balances": []}, {"balances": [1.0, "x"]}, {"others": -1.0}):
        state = copy.deepcopy(optimizer.state_dict())
        state["curvature"]["allowance"] |= damage
        with pytest.raises(ValueError, match="allowance state"):
            optimizer.load_state_dict(state)


def test_the_description_contains_the_costs():
    model = network()
    optimizer = kfc.KFC(model, seed=0)
    assert "unknown before the first step" in optimizer.describe()
    train(model, optimizer, range(1))
    text = optimizer.describe()
    assert "statistics" in text
    assert "at most 0.2 per step in all" in text


@pytest.mark.parametrize("examples", [20, 256])
def test_the_description_counts_beforehand_what_a_step_counts(examples):
    """Also if the whole batch is used for statistics, because it is small."""
    model = nn.Sequential(network(), nn.BatchNorm1d(5), nn.Dropout(0.5))
    optimizer = kfc.KFC(model, seed=0)
    before = [t.clone() for t in model.state_dict().values()]
    random_state = torch.get_rng_state()
    beforehand = optimizer.describe(batch(examples)[0])
    assert_close(list(model.state_dict().values()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    train(model, optimizer, range(1), examples=examples)
    costs = [text for text in optimizer.describe().splitlines() if text.startswith("cost")]
    assert costs[0] in beforehand


def wide_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(700, 300), nn.ReLU(), nn.Linear(300, 20), nn.ReLU())


def ranks_of_inverses(overhead, examples):
    """Return whether each factor's inverse is exact, and the columns that it has."""
    model = nn.Sequential(*wide_network(), nn.Linear(20, 5))
    optimizer = kfc.KFC(model, seed=0, schedule=kfc.Periods(overhead=overhead))
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(examples, 700, generator=generator)
    labels = torch.randint(5, (examples,), generator=generator)
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    layers = optimizer.engine.curvature.layers
    found = {}
    for name in ("0", "2"):
        for side in ("activation", "derivative"):
            inverse = getattr(layers[name].state.inverse, side)
            found[name, side] = (inverse.has_low_rank, inverse.matrix.shape[-1])
    return found, optimizer


def test_inverses_are_exact_where_that_is_cheap():
    every, _ = ranks_of_inverses(overhead=0.2, examples=40_000)
    assert not any(is_cheap for is_cheap, _ in every.values())
    without_limit, _ = ranks_of_inverses(overhead=None, examples=64)
    assert not any(is_cheap for is_cheap, _ in without_limit.values())
    # 20 outputs have an exact inverse at any rate, and the costliest factor has none.
    few, _ = ranks_of_inverses(overhead=0.2, examples=4000)
    assert few["0", "activation"][0]
    assert not few["2", "activation"][0]
    assert not few["2", "derivative"][0]


def test_the_overhead_limits_the_ranks_of_small_batches():
    tight, optimizer = ranks_of_inverses(overhead=0.2, examples=128)
    loose, _ = ranks_of_inverses(overhead=2.0, examples=128)
    assert tight["0", "activation"][0]
    assert tight["0", "activation"][1] < loose["0", "activation"][1]
    columns = optimizer.state_dict()["curvature"]["allowance"]["columns"]
    assert tight["0", "activation"][1] <= 1 + columns["0"][0]
    expected = optimizer.describe(torch.randn(128, 700))
    assert "natural gradient" in expected


@pytest.mark.parametrize("columns", [{"0": [1]}, {"0": [-1, 0]}, {"0": ["a", 1]}, [1]])
def test_damaged_limits_of_ranks_are_refused(columns):
    _, optimizer = ranks_of_inverses(overhead=0.2, examples=64)
    state = copy.deepcopy(optimizer.state_dict())
    state["curvature"]["allowance"]["columns"] = columns
    with pytest.raises(ValueError, match="columns"):
        optimizer.load_state_dict(state)
