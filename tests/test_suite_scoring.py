"""The scores of `kfc compare suite`, against small cases computed by hand."""

import math

import pytest

from kfc.lab.suite.halving import RUNGS, rank, stage, winner
from kfc.lab.suite.methods import METHODS
from kfc.lab.suite.scoring import (
    bounded_ratios,
    geometric_mean,
    median_time,
    of_method,
    profile,
    profile_steps,
    ratios_to_best,
    score,
)
from kfc.lab.suite.search import COSINE, LINEAR, POINTS, SCHEDULES, Setting, settings_of
from kfc.lab.suite.trial import Outcome

INF = math.inf
TIMES = {
    "one": {"A": 10.0, "B": 20.0, "C": INF},
    "two": {"A": 30.0, "B": 15.0, "C": 60.0},
    "three": {"A": INF, "B": 8.0, "C": 2.0},
    "four": {"A": INF, "B": INF, "C": INF},
}


# Scores


def test_ratios_are_to_the_fastest_method():
    assert ratios_to_best(TIMES) == {
        "one": {"A": 1, "B": 2, "C": INF},
        "two": {"A": 2, "B": 1, "C": 4},
        "three": {"A": INF, "B": 4, "C": 1},
        "four": {"A": INF, "B": INF, "C": INF},
    }


def test_the_profile_is_the_fraction_of_workloads_within_a_factor():
    ratios = of_method(ratios_to_best(TIMES), "B")  # 2, 1, 4, ∞
    assert [profile(ratios, tau) for tau in (1, 1.99, 2, 3.99, 4, 1e9)] == [
        *(1 / 4, 1 / 4, 2 / 4, 2 / 4, 3 / 4, 3 / 4)
    ]
    assert profile_steps(ratios) == ([1, 2, 4], [1 / 4, 2 / 4, 3 / 4])
    assert profile_steps([INF]) == ([1, 4], [0, 0])


def test_the_score_is_the_normalised_integral_of_the_profile():
    ratios = ratios_to_best(TIMES)
    # A: 1/4 from 1 to 2, 2/4 from 2 to 4. B: the same. C: 1/4 from 1 to 4.
    assert score(of_method(ratios, "A")) == pytest.approx((1 / 4 + 2 * 2 / 4) / 3)
    assert score(of_method(ratios, "B")) == pytest.approx((1 / 4 + 2 * 2 / 4) / 3)
    assert score(of_method(ratios, "C")) == pytest.approx(1 / 4)
    assert score([1, 1, 1]) == 1
    assert score([4, 5, INF]) == 0


@pytest.mark.parametrize("ratios", [[1, 1.7, 2.5, INF], [3.2, 1, 1], [1.01, 3.99, 4, 17]])
def test_the_score_equals_a_sum_over_the_steps_of_the_profile(ratios):
    taus, fractions = profile_steps(ratios)
    pieces = zip(taus[:-1], taus[1:], fractions[:-1], strict=True)
    area = sum((right - left) * fraction for left, right, fraction in pieces)
    assert score(ratios) == pytest.approx(area / 3)


def test_geometric_means():
    assert geometric_mean([1, 4]) == pytest.approx(2)
    assert geometric_mean([2, 2, 2]) == pytest.approx(2)
    assert geometric_mean([1, INF]) == INF


def test_targets_that_were_not_reached_count_as_the_longest_run_in_bounds():
    limits = {"one": 30.0, "two": 60.0, "three": 16.0, "four": 7.0}
    assert bounded_ratios(TIMES, limits) == {
        "one": {"A": 1, "B": 2, "C": 3},  # the limit
        "two": {"A": 2, "B": 1, "C": 4},
        "three": {"A": 4, "B": 4, "C": 1},  # four times the fastest
    }


def test_the_median_over_seeds_is_infinite_if_most_seeds_miss_the_target():
    assert median_time([3.0, 1.0, 2.0]) == 2
    assert median_time([3.0, INF, 2.0]) == 3
    assert median_time([INF, INF, 2.0]) == INF
    assert median_time([2.0, INF]) == INF


# Successive halving


def outcome(*values, end="", limit=120.0, message=""):
    """A run with an evaluation every twelfth of the limit."""
    step = limit / 12
    curve = [(step * (index + 1), index, value) for index, value in enumerate(values)]
    return Outcome(curve, step * len(values), len(values), 1.0, 1.0, end, message)


def test_trials_train_to_the_first_rung_before_any_is_dropped():
    outcomes = [outcome(5), outcome(), outcome(7), outcome(8)]
    assert stage(outcomes, 120) == ([0, 1, 2, 3], RUNGS[0] * 120)


def test_the_better_half_continues_after_each_rung():
    outcomes = [outcome(5), outcome(9), outcome(7), outcome(8), outcome(6)]
    assert stage(outcomes, 120) == ([0, 2, 4], RUNGS[1] * 120)
    outcomes[0], outcomes[2], outcomes[4] = outcome(5, 4, 3), outcome(7, 6, 2), outcome(6, 6, 6)
    assert stage(outcomes, 120) == ([0, 2], 120)
    assert winner(outcomes, 120) == 2


def test_of_an_odd_number_the_larger_half_continues_and_ties_keep_the_order():
    assert stage([outcome(5), outcome(5), outcome(5)], 120)[0] == [0, 1]


def test_what_happens_later_does_not_change_an_earlier_decision():
    dropped = outcome(9, end="dropped")
    before = [outcome(5), dropped, outcome(7), outcome(8, end="dropped"), outcome(6)]
    after = [outcome(5, 5, 5, 5, 60), dropped, outcome(7, 6, 6), before[3], outcome(6, 7, 7)]
    assert stage(before, 120)[0] == [0, 2, 4]
    assert stage(after, 120)[0] == [0, 2]
    # A target that is reached after a rung does not count at the rung.
    late = outcome(6, 6, 6, 6, 1, end="target")
    assert rank(late, 10) == (INF, 6)
    assert rank(late, 50) == (50, 1)


def test_reaching_the_target_comes_first_and_divergence_last():
    outcomes = [outcome(3), outcome(1, end="diverged"), outcome(2, end="target"), outcome(9)]
    assert stage(outcomes, 120)[0] == [0, 2]
    assert winner(outcomes, 120) == 2


def test_two_trials_have_no_rungs():
    assert stage([outcome()], 120) == ([0], 120)
    assert stage([outcome(1), outcome(2)], 120) == ([0, 1], 120)


# The search space


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_same_points(name):
    method = METHODS[name]
    untuned, *settings = settings_of(method, 1 + len(POINTS))
    assert untuned == Setting()
    assert len(set(map(str, settings))) == len(settings)
    rates = {setting.arguments[method.scaled] for setting in settings}
    assert {round(rate / method.scale, 1) for rate in rates} == {0.3, 1, 3}
    assert {setting.arguments["weight_decay"] for setting in settings} == {0, method.decay}
    if not method.adapts:
        assert {setting.schedule for setting in settings} == set(SCHEDULES)
        assert len(settings_of(method, 5)) == 5


def test_schedules_fall_to_zero():
    linear, cosine = Setting({}, LINEAR), Setting({}, COSINE)
    assert [linear.factor(used) for used in (0, 0.25, 0.5, 0.9)] == [1, 0.5, 0, 0]
    assert cosine.factor(0) == 1
    assert cosine.factor(0.5) == pytest.approx(0.5)
    assert cosine.factor(1) == cosine.factor(2) == 0
    assert Setting().factor(0.99) == 1
