"""Ranks that differ in model, options, state or passes: an error on all ranks says so."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kfc
from kfc.distributed.ranks import CollectiveError
from ranks import run_ranks

WHOLE = kfc.Kronecker(fraction=1)


def network(width=6, layers=2):
    torch.manual_seed(3)
    hidden = [m for _ in range(layers - 1) for m in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), *hidden, nn.Linear(width, 3))


def batch(index=0):
    generator = torch.Generator().manual_seed(index)
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def differentiate(model, index=0):
    images, labels = batch(index)
    F.cross_entropy(model(images), labels).backward()


def step(model, optimizer, index=0):
    optimizer.zero_grad()
    differentiate(model, index)
    optimizer.step()


def message_of(run, *args):
    """Return the message of the error on this rank; all ranks are in step again afterwards."""
    try:
        run(*args)
    except CollectiveError as error:
        return str(error)
    return "no error"


# At construction

CONSTRUCTED = {
    "curvature": lambda one: kfc.KFC(network(), curvature="ekfac" if one else "kfc"),
    "damping": lambda one: kfc.KFC(network(), damping=0.02 if one else 0.01),
    "schedule": lambda one: kfc.KFC(network(), schedule=kfc.Periods(2 if one else 3, 6)),
    "lr": lambda one: kfc.KFC(network(), groups=[{"prefix": "0", "lr": 0.2 if one else 0.1}]),
    "clip": lambda one: kfc.KFC(network(), clip=0.1 if one else 0.2),
    "width": lambda one: kfc.KFC(network(width=7 if one else 6)),
    "layers": lambda one: kfc.WhitenedAdam(network(layers=4 if one else 3)),
    "frozen": lambda one: kfc.KFC(network().requires_grad_(not one)),
    "optimizer": lambda one: (kfc.WhitenedAdam if one else kfc.KFC)(network()),
    "adaptation": lambda one: kfc.KFAC(
        network(), adaptation=kfc.Adaptation(lr=0.2 if one else 0.1)
    ),
    "preconditioner": lambda one: kfc.Preconditioner(network(), damping=0.2 if one else 0.1),
    "seed": lambda one: kfc.KFC(network(), seed=int(one)),  # rank 0's is used
    "nothing": lambda one: kfc.KFAC(network()),
}


def construct_all(rank):
    return {name: message_of(make, rank == 1) for name, make in CONSTRUCTED.items()}


def test_other_models_and_options_are_refused_at_construction():
    first, second = run_ranks(construct_all, 2)
    assert first == second
    expected = {
        "curvature": r"curvature is EKFAC\(.*\) on rank 1, and Kronecker\(.*\) on rank 0",
        "damping": r"param group 0 is lr=.*damping=0.02 on rank 1, and .*damping=0.01 on rank 0",
        "schedule": r"schedule is Periods\(statistics=2.* on rank 1, and .*statistics=3",
        "lr": r"param group 1 is lr=0.2.* on rank 1, and lr=0.1.* on rank 0",
        "clip": r"clip is FisherClip\(limit=0.1.* on rank 1, and .*limit=0.2",
        "width": r"parameter '0.weight' is \(7, 4\) torch.float32 on rank 1, and \(6, 4\)",
        "layers": r"parameter '8.weight' is .* on rank 1, and missing on rank 0",
        "frozen": r"parameter '0.weight' is \(6, 4\) torch.float32 frozen on rank 1",
        "optimizer": r"optimizer is WhitenedAdam on rank 1, and KFC on rank 0",
        "adaptation": r"adaptation is Adaptation\(lr=0.2.* on rank 1, and Adaptation\(lr=0.1",
        "preconditioner": r"damping is 0.2 on rank 1, and 0.1 on rank 0",
        "seed": "no error",
        "nothing": "no error",
    }
    for name, pattern in expected.items():
        assert re.search(pattern, first[name]), first[name]


# In a step


def another_rate(model, optimizer, one):
    """A scheduler on one rank only."""
    if one:
        optimizer.param_groups[0]["lr"] *= 0.5
    step(model, optimizer, 9)


def evaluation_mode(model, optimizer, one):
    model.train(not one)
    step(model, optimizer, 9)


def extra_pass(model, optimizer, one):
    optimizer.zero_grad()
    for _ in range(2 if one else 1):
        differentiate(model, 9)
    optimizer.step()


def one_rank_loads(model, optimizer, one):
    """A state that is its own makes no other difference."""
    if one:
        optimizer.load_state_dict(optimizer.state_dict())
    step(model, optimizer, 9)


def other_state(model, optimizer, one):
    """One rank loads a state in which a factor differs, the other the state itself."""
    state = copy.deepcopy(optimizer.state_dict())
    if one:
        state["curvature"]["curvature"]["layers"]["0"]["running"][0] *= 2
    optimizer.load_state_dict(state)
    step(model, optimizer, 9)


def another_step(model, optimizer, one):
    state = copy.deepcopy(optimizer.state_dict())
    state["curvature"]["steps"] += int(one)
    optimizer.load_state_dict(state)
    step(model, optimizer, 9)


def frozen_layer(model, optimizer, one):
    model[0].requires_grad_(not one)
    step(model, optimizer, 9)


IN_A_STEP = {
    another_rate: "param group 0 is lr=",
    evaluation_mode: "forward and backward passes since the last step is 0 on rank 1, and 1 on|"
    "rank 1: step.. without a forward pass in training mode",
    extra_pass: "the number of forward and backward passes since the last step is 2 on rank 1",
    one_rank_loads: r"the state that was loaded is \d+ on rank 1, and 0 on rank 0",
    other_state: r"the state that was loaded is \d+ on rank 1, and \d+ on rank 0",
    another_step: "step is .* on rank 1, and .* on rank 0",
}

METHODS = {
    "replayed": lambda model: kfc.KFC(model, schedule=kfc.Periods(3, 3), seed=0),
    "whole": lambda model: kfc.KFC(model, schedule=kfc.Periods(3, 3), curvature=WHOLE, seed=0),
    "placed": lambda model: kfc.KFC(model, seed=0, parallel=kfc.Parallel(placement="gradients")),
    "whitened": lambda model: kfc.WhitenedAdam(model),
}


def disagree_in_steps(rank, method):
    """Return the message of every case, at a step with and without statistics."""
    found = {}
    for case in IN_A_STEP:
        for steps in (1, 2):
            model = network()
            optimizer = METHODS[method](model)
            for index in range(steps):
                step(model, optimizer, index)
            before = [p.detach().clone() for p in model.parameters()]
            found[case.__name__, steps] = message_of(case, model, optimizer, rank == 1)
            unchanged = all(map(torch.equal, before, model.parameters()))
            if found[case.__name__, steps] != "no error" and not unchanged:
                found[case.__name__, steps] = "the parameters have changed"
            optimizer.close()
    return found


@pytest.mark.parametrize("method", METHODS)
def test_ranks_that_do_something_else_raise_an_error_before_anything_changes(method):
    first, second = run_ranks(disagree_in_steps, 2, method)
    assert first == second
    patterns = {case.__name__: pattern for case, pattern in IN_A_STEP.items()}
    for (case, steps), message in first.items():
        assert re.search(patterns[case], message), (case, steps, message)


def sends_little(rank, case):
    """Without a clip, a step in which nothing is due sends nothing that could tell."""
    model = network()
    optimizer = kfc.KFC(model, seed=0, clip=None, schedule=kfc.Periods(4, 4))
    step(model, optimizer)

    def steps():
        case(model, optimizer, rank == 1)
        for index in range(6):
            step(model, optimizer, index)

    return message_of(steps)


@pytest.mark.parametrize("case", [another_rate, one_rank_loads])
def test_ranks_find_out_in_the_next_step_that_sends_something(case):
    first, second = run_ranks(sends_little, 2, case)
    assert first == second
    assert re.search(IN_A_STEP[case], first), first


def wrapped(rank, size):
    """Train with DistributedDataParallel; rank 1 is in evaluation mode from the second step on."""
    found = []
    for late in (0, 1):
        run = DistributedDataParallel(network())
        optimizer = kfc.KFC(run, seed=0)
        for index in range(late):
            step(run, optimizer, index)
        run.train(rank == 0)
        found.append(message_of(step, run, optimizer))
        optimizer.close()
    return found


def test_one_rank_in_evaluation_mode_under_ddp():
    first, second = run_ranks(wrapped, 2, 2)
    assert first == second
    for message in first:
        assert re.search("passes since the last step is 0 on rank 1|rank 1: step", message), message


def kfac_step(rank, late):
    model = network()
    optimizer = kfc.KFAC(model, seed=0)

    def closure(index):
        images, labels = batch(index)
        return lambda: F.cross_entropy(model(images), labels)

    for index in range(late):
        optimizer.step(closure(index))
    if rank == 1:
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)
    return message_of(optimizer.step, closure(9))


def test_kfac_compares_what_was_loaded():
    first, second = run_ranks(kfac_step, 2, 1)
    assert first == second
    assert "the state that was loaded" in first


def many_ranks(rank, size):
    return message_of(lambda: kfc.KFC(network(), damping=0.02 if rank == 2 else 0.01))


def test_the_rank_that_differs_is_named_among_three():
    messages = run_ranks(many_ranks, 3, 3)
    assert len(set(messages)) == 1
    assert "damping=0.02 on rank 2, and" in messages[0]
    assert "rank 1" not in messages[0]


def forward_only(rank, size):
    """An additional forward pass without a backward pass makes no difference."""
    model = network()
    optimizer = kfc.KFC(model, curvature=WHOLE, seed=0)
    for index in range(3):
        if rank == 1:
            model(batch(7)[0])
        step(model, optimizer, index)
    return [p.tolist() for p in model.parameters()], optimizer.diagnostics["ranks"]["sent"]


def test_a_forward_pass_alone_is_no_difference():
    (first, _), (second, sent) = run_ranks(forward_only, 2, 2)
    assert first == second
    assert sent["checks"] > 0


def messages_of_steps(rank, size):
    """Return how many messages a step sends in which nothing is due."""
    model = network()
    optimizer = kfc.KFC(model, schedule=kfc.Periods(100, 100), seed=0, clip=kfc.FisherClip(None))
    step(model, optimizer)
    before = dict(optimizer.diagnostics["ranks"]["sent"])
    for index in range(5):
        step(model, optimizer, index)
    after = optimizer.diagnostics["ranks"]["sent"]
    return {name: after[name] - before.get(name, 0) for name in after}


def test_steps_without_statistics_send_one_small_message():
    """The excess of the loss, which they need anyway, and with it what ranks compare."""
    for sent in run_ranks(messages_of_steps, 2, 2):
        assert {name: size for name, size in sent.items() if size} == {"checks": 5 * 2 * 4 * 8}
