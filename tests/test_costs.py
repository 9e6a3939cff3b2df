"""Counted costs of curvature, and what they postpone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import kfc
from kfc.optimizers.costs import EARLY, Allowance, Costs
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
    model = network()
    images, labels = batch()
    images.requires_grad_()  # so that the first layer has all three products
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(images), labels).backward()
    optimizer = kfc.KFC(model, curvature=kfc.Kronecker(fraction=1), seed=0)
    costs = []
    optimizer.engine.allowance.set_costs = costs.append
    train(model, optimizer, range(1))
    # Two operations for each multiply-add; the bias is an input of a factor too.
    assert 2 * costs[0].plain == pytest.approx(counter.get_total_flops(), rel=0.05)


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
        refreshed = allowance.allows(0)
        if step == 0:
            allowance.set_costs(COSTS)
        allowance.end_step(step + 1, refreshed, allowance.allows(1))
        done += [step] if refreshed else []
    return done


COSTS = Costs(plain=10.0, statistics=6.0, inverses=4.0, natural_gradient=1.0)  # one pass in all


def test_refreshes_stay_within_the_overhead_which_is_larger_at_the_start():
    done = refreshes(Allowance(0.1), 1000)
    assert done[:3] == [0, 1, 2]
    for steps in (25, 100, 1000):
        allowed = 0.1 * sum(1 + EARLY / step for step in range(1, steps + 1))
        count = sum(0 < step < steps for step in done)
        assert allowed - 2 <= count <= allowed


def test_without_an_overhead_nothing_is_postponed():
    assert len(refreshes(Allowance(None), 50)) == 50


def test_an_expensive_refresh_is_still_made_now_and_then():
    allowance = Allowance(0.1)
    allowance.set_costs(Costs(1.0, 10.0, 30.0, 0.0))
    done = []
    for step in range(1000):
        refreshed = allowance.allows(0)
        allowance.end_step(step + 1, refreshed, refreshed)
        done += [step] if refreshed else []
    assert len(done) == 2  # every 400 steps


def test_cheap_refreshes_follow_their_periods():
    model = network()
    optimizer = kfc.KFC(model, seed=0, schedule=kfc.Periods(1, 1, overhead=1000.0))
    train(model, optimizer, range(12))
    assert all(optimizer.engine.allowance.allows(kind) for kind in (0, 1))


def test_the_overhead_postpones_refreshes_of_a_model():
    counts = {}
    for overhead in (None, 0.02):
        model = network()
        schedule = kfc.Periods(1, 1, overhead=overhead)
        optimizer = kfc.KFC(model, seed=0, schedule=schedule, clip=kfc.FisherClip(None))
        calls = []
        model[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        train(model, optimizer, range(40))
        counts[overhead] = len(calls) - 40
    assert counts[None] == 40
    assert 2 < counts[0.02] < 30


def test_a_run_with_an_overhead_resumes_bit_for_bit():
    def new():
        model = network()
        return model, kfc.KFC(model, seed=0, schedule=kfc.Periods(1, 1, overhead=0.05))

    assert_resumes(new, train, range(17), range(9))


def test_damaged_states_are_refused():
    model = network()
    optimizer = kfc.KFC(model, seed=0)
    train(model, optimizer, range(2))
    for damage in ({"costs": [1.0]}, {"balances": []}, {"balances": [1.0, "x"]}):
        state = copy.deepcopy(optimizer.state_dict())
        state["curvature"]["allowance"] |= damage
        with pytest.raises(ValueError, match="allowance state"):
            optimizer.load_state_dict(state)


def test_the_description_contains_the_costs():
    model = network()
    optimizer = kfc.KFC(model, seed=0)
    assert "counted in the first step" in optimizer.describe()
    train(model, optimizer, range(1))
    text = optimizer.describe()
    assert "statistics" in text
    assert "refreshes within 0.25 per step" in text
