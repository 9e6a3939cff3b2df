"""When statistics and inverses are due: stretching periods, and periods from a budget."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import kfc
from kfc.curvature.kfc import KroneckerCurvature
from kfc.layers import LinearLayer
from kfc.schedule import LONGEST_PERIOD, MEASURED_STEPS, Seconds, periods_within


def test_stretch_starts_at_one_and_ends_at_its_limit():
    stretch = kfc.Stretch(10)
    due = [k for k in range(1, 1001) if k == 1 or k % stretch.at(k) == 0]
    gaps = [b - a for a, b in pairwise(due)]
    assert due[:23] == list(range(1, 24))
    assert max(gaps) == 10
    assert all(gap <= max(1, k / 12) for k, gap in zip(due[1:], gaps, strict=True) if k > 24)
    assert gaps[-5:] == [10] * 5


def test_a_doubling_period_has_few_due_steps_on_the_way_to_a_high_limit():
    stretch = kfc.Stretch(50, pace=3, doubling=True)
    due = [k for k in range(1, 401) if k == 1 or k % stretch.at(k) == 0]
    early = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160]
    assert due == [*early, 200, 250, 300, 350, 400]


parts = st.floats(0, 10, allow_subnormal=False)
costs = st.builds(Seconds, st.floats(0.1, 10), parts, parts, parts)
periods = st.none() | st.integers(1, 50) | st.builds(kfc.Stretch, st.integers(1, 50))


# Refreshes that take no time do not keep a budget that the rest of the step exceeds.
work = st.floats(1e-6, 10)
costs_of_work = st.builds(Seconds, st.floats(0.1, 10), parts, work, work)


@given(costs_of_work, st.floats(0.01, 3), periods, st.booleans())
def test_periods_keep_within_the_overhead(seconds, overhead, given_period, of_statistics):
    given_statistics = given_period if of_statistics else None
    given_inverse = None if of_statistics else given_period
    found = periods_within(seconds, kfc.Budget(overhead, given_statistics, given_inverse))
    pairs = [(found.statistics, given_statistics), (found.inverse, given_inverse)]
    for period, fixed in pairs:
        assert period == fixed if fixed is not None else 1 <= period <= LONGEST_PERIOD
    chosen = [period for period, fixed in pairs if fixed is None]
    if LONGEST_PERIOD not in chosen:
        assert seconds.overhead(found.statistics, found.inverse) <= overhead * (1 + 1e-9)


@given(costs, st.floats(0.01, 3))
def test_no_shorter_pair_of_periods_is_within_the_overhead(seconds, overhead):
    """Try all pairs in which inverses are refreshed no more often than statistics."""
    found = periods_within(seconds, kfc.Budget(overhead))
    first, second = found.statistics, found.inverse
    if LONGEST_PERIOD in (first, second):
        return
    shorter = [
        (a, b)
        for a in range(1, first + second)
        for b in range(a, first + second - a)
        if seconds.overhead(a, b) <= overhead * (1 - 1e-9)
    ]
    # Each was rounded up to a whole number.
    assert all(first + second - (a + b) <= 2 for a, b in shorter)


class Clock:
    """A clock that advances only in the functions that a test chooses."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time

    def advance_in(self, owner, name: str, seconds: float, monkeypatch) -> None:
        real = getattr(owner, name)

        def slow(*args, **kwargs):
            self.time += seconds
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, slow)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """A plain step of 8 seconds, statistics of 4, inverses of 2 (for 2 layers), a clip of 8."""
    clock = Clock()
    monkeypatch.setattr(kfc.schedule, "perf_counter", clock)
    clock.advance_in(nn.Tanh, "forward", 8.0, monkeypatch)
    clock.advance_in(LinearLayer, "activation_moment", 1.0, monkeypatch)
    clock.advance_in(LinearLayer, "derivative_rows", 1.0, monkeypatch)
    clock.advance_in(KroneckerCurvature, "invert", 1.0, monkeypatch)
    return clock


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def train(model, optimizer, steps: int, micro_batches: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
        optimizer.step()


@pytest.mark.parametrize("fisher", ["sampled", "empirical"])
def test_the_parts_of_the_first_steps_are_measured(clock, fisher):
    model = network()
    optimizer = kfc.KFC(
        model, schedule=kfc.Budget(0.25), clip=None, curvature=kfc.Kronecker(fisher=fisher)
    )
    train(model, optimizer, MEASURED_STEPS - 1)
    measuring = optimizer.diagnostics["periods"]
    assert (measuring["statistics"], measuring["inverse"]) == (1, 1)
    assert measuring["expected_overhead"] is None
    train(model, optimizer, 1)
    found = optimizer.diagnostics["periods"]
    seconds = {"plain": 8.0, "every_step": 0.0, "statistics": 4.0, "inverses": 2.0}
    assert found["measured_seconds"] == seconds
    # (4 + 2) / 3 = 2 = 0.25 * 8
    assert (found["statistics"], found["inverse"]) == (3, 3)
    assert found["expected_overhead"] == pytest.approx(0.25)
    start = clock.time
    train(model, optimizer, 30)
    assert clock.time - start == pytest.approx(30 * 8 * 1.25)


@pytest.mark.usefixtures("clock")
def test_the_clip_counts_at_its_lowest_rate():
    """Its forward pass of 8 seconds, in every sixteenth step, leaves 3 = 0.4375 * 8 - 8 / 16."""
    model = network()
    optimizer = kfc.KFC(model, lr=1e-4, schedule=kfc.Budget(0.4375))
    train(model, optimizer, MEASURED_STEPS)
    found = optimizer.diagnostics["periods"]
    assert found["measured_seconds"]["every_step"] == pytest.approx(0.5)
    assert (found["statistics"], found["inverse"]) == (2, 2)


def test_micro_batches_count_as_one_step(clock):
    model = network()
    optimizer = kfc.KFC(model, schedule=kfc.Budget(0.25), clip=None)
    train(model, optimizer, MEASURED_STEPS, micro_batches=2)
    seconds = optimizer.diagnostics["periods"]["measured_seconds"]
    assert (seconds["plain"], seconds["statistics"], seconds["inverses"]) == (16.0, 8.0, 2.0)


@pytest.mark.usefixtures("clock")
def test_given_periods_are_kept():
    model = network()
    schedule = kfc.Budget(0.25, statistics=kfc.Stretch(4))
    optimizer = kfc.KFC(model, schedule=schedule, clip=None)
    train(model, optimizer, MEASURED_STEPS)
    found = optimizer.diagnostics["periods"]
    assert (found["statistics"], found["inverse"]) == (1, 2)
    assert found["expected_overhead"] == pytest.approx((4 / 4 + 2 / 2) / 8)
    optimizer.close()
    other = kfc.KFC(model, schedule=kfc.Budget(0.25, statistics=4), clip=None)
    train(model, other, MEASURED_STEPS)
    found = other.diagnostics["periods"]
    assert (found["statistics"], found["inverse"]) == (4, 2)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("after", [2, MEASURED_STEPS + 1])
def test_a_resumed_run_keeps_its_periods(after):
    model = network()
    optimizer = kfc.KFC(model, schedule=kfc.Budget(0.1), clip=None)
    train(model, optimizer, after)
    state = copy.deepcopy(optimizer.state_dict())
    resumed = kfc.KFC(model, schedule=kfc.Budget(0.1), clip=None)
    resumed.load_state_dict(state)
    assert resumed.diagnostics["periods"] == optimizer.diagnostics["periods"]
    optimizer.close()
    train(model, resumed, MEASURED_STEPS - min(after, MEASURED_STEPS))
    assert resumed.diagnostics["periods"]["statistics"] == 8
    another = kfc.KFC(model, schedule=kfc.Budget(0.2), clip=None)
    another.load_state_dict(state)
    assert another.diagnostics["periods"]["statistics"] == 1
    for key, value in (
        ("seconds", [3.0]),
        ("seconds", [8.0, -1.0, 4.0, 2.0]),
        ("seconds", "fast"),
        ("samples", {"lunch": []}),
        ("samples", None),
    ):
        broken = copy.deepcopy(optimizer.state_dict())
        broken["curvature"]["budget"][key] = value
        if after > MEASURED_STEPS:
            with pytest.raises(ValueError, match="budget state"):
                another.load_state_dict(broken)


def test_a_budget_on_a_real_clock():
    model = network()
    optimizer = kfc.KFC(model, schedule=kfc.Budget(1000.0))
    train(model, optimizer, MEASURED_STEPS + 2)
    found = optimizer.diagnostics["periods"]
    assert all(seconds > 0 for seconds in found["measured_seconds"].values())
    assert 1 <= found["statistics"] <= found["inverse"] <= LONGEST_PERIOD


@pytest.mark.usefixtures("clock")
def test_a_budget_that_cannot_be_kept_gives_a_warning():
    model = network()
    optimizer = kfc.KFC(model, schedule=kfc.Budget(1e-3), clip=None)
    train(model, optimizer, MEASURED_STEPS - 1)
    with pytest.warns(UserWarning, match="an overhead of 0.001 cannot be kept"):
        train(model, optimizer, 1)
    assert optimizer.diagnostics["periods"]["statistics"] == LONGEST_PERIOD
