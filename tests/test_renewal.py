"""Inverses beside training: when they are taken up, what they are, and what goes wrong."""

import io
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc
from kfc.layers import LinearHandler

OPTIONS = {
    "lr": 0.05,
    "damping": 1e-2,
    "statistics_period": 1,
    "inverse_period": 4,
    "averaging_timescale": 3,
    "seed": 5,
}


def network() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)]
    return nn.Sequential(*layers).double()


def train(optimizer, first=1, last=12):
    """Steps of a training that can be cut anywhere; yields after each."""
    generator = torch.Generator().manual_seed(3)
    for step in range(1, last + 1):
        images = torch.randn(8, 2, 6, 6, generator=generator, dtype=torch.float64)
        labels = torch.randint(3, (8,), generator=generator)
        if step < first:
            continue
        optimizer.zero_grad()
        F.cross_entropy(optimizer.model(images), labels).backward()
        optimizer.step()
        yield step


def parameters(optimizer):
    return [p.detach().clone() for p in optimizer.model.parameters()]


def trained(**options):
    optimizer = kfc.KFC(network(), **OPTIONS, **options)
    ages = [optimizer.diagnostics["staleness"] for _ in train(optimizer)]
    optimizer.close()
    return parameters(optimizer), ages


def all_equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def held_thread(monkeypatch):
    """Inversions by the thread wait until the event is set."""
    event = threading.Event()
    plain = LinearHandler.invert

    def waiting(*args):
        if threading.current_thread().name.startswith("kfc-inverses"):
            assert event.wait(20)
        return plain(*args)

    monkeypatch.setattr(LinearHandler, "invert", waiting)
    yield event
    event.set()


@pytest.mark.parametrize("options", [{}, {"curvature": "ekfac"}, {"inverse": "eigen"}])
def test_without_staleness_the_worker_changes_nothing(options):
    in_the_step, ages = trained(**options)
    beside, same_ages = trained(inverse_worker="thread", max_staleness=0, **options)
    assert all_equal(in_the_step, beside)
    assert ages == same_ages == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_deterministic_inverses_are_taken_up_at_fixed_steps():
    found = [trained(inverse_worker="thread", max_staleness=2, deterministic=True)] * 2
    (parameters_of_one, ages), (parameters_of_other, _) = found
    # Due at steps 4 and 8, in use from 6 and 10 on.
    assert ages == [0, 1, 2, 3, 4, 2, 3, 4, 5, 2, 3, 4]
    assert all_equal(parameters_of_one, parameters_of_other)
    assert not all_equal(parameters_of_one, trained()[0])


def test_by_default_inverses_are_as_late_as_two_renewals_lie_apart():
    _, ages = trained(inverse_worker="thread", deterministic=True)
    # Due at 4 and 8, in use from 8 and 12 on: no renewal is left out.
    assert ages == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 4]
    optimizer = kfc.KFC(
        network(),
        **{**OPTIONS, "inverse_period": None},
        inverse_worker="thread",
        deterministic=True,
    )
    # A period that stretches from 1 on is no reason to wait for its limit.
    assert max(optimizer.diagnostics["staleness"] for _ in train(optimizer)) <= 2
    optimizer.close()


def test_inverses_of_before_an_estimate_are_not_taken_up(held_thread):
    optimizer = kfc.KFC(network(), **OPTIONS, inverse_worker="thread", max_staleness=2)
    steps = train(optimizer)
    for _ in range(4):
        next(steps)
    held_thread.set()
    optimizer.estimate_factors([torch.randn(8, 2, 6, 6, dtype=torch.float64)])
    for _ in range(2):
        next(steps)
    assert optimizer.diagnostics["staleness"] == 5  # still those of the first step
    optimizer.close()


def test_inverses_are_taken_up_when_they_are_ready(held_thread):
    optimizer = kfc.KFC(network(), **OPTIONS, inverse_worker="thread", max_staleness=100)
    for step in train(optimizer):
        age = optimizer.diagnostics["staleness"]
        if step == 6:
            assert age == 5  # those due at step 4 are still in the making
            held_thread.set()
            optimizer.preconditioner.renewal._job.share.result(20)
        if step == 7:
            assert age == 3
    optimizer.close()


def test_a_step_waits_for_inverses_that_are_too_late(held_thread):
    optimizer = kfc.KFC(network(), **OPTIONS, inverse_worker="thread", max_staleness=2)
    late = threading.Timer(0.3, held_thread.set)
    for step in train(optimizer, last=6):
        if step == 5:
            late.start()
            before = time.perf_counter()
    assert optimizer.diagnostics["staleness"] == 2
    assert time.perf_counter() - before >= 0.25
    optimizer.close()


def test_errors_of_the_worker_surface_in_step(monkeypatch):
    optimizer = kfc.KFC(network(), **OPTIONS, inverse_worker="thread", max_staleness=1)
    steps = train(optimizer)
    for _ in range(3):
        next(steps)

    def failing(*args):
        raise ZeroDivisionError("in the thread")

    monkeypatch.setattr(LinearHandler, "invert", failing)
    next(steps)
    optimizer.state_dict()  # has what the thread worked on, and says nothing of how it went
    before = parameters(optimizer)
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        next(steps)
    assert all_equal(before, parameters(optimizer))
    optimizer.close()


def test_a_resumed_run_goes_on_as_if_nothing_had_happened():
    options = {**OPTIONS, "inverse_worker": "thread", "max_staleness": 3, "deterministic": True}
    whole = kfc.KFC(network(), **options)
    for step in train(whole):
        if step == 5:  # while those due at step 4 are in the making
            state, model_state = whole.state_dict(), whole.model.state_dict()
            state, model_state = (
                torch.load(_saved(part), weights_only=True) for part in (state, model_state)
            )
    resumed = kfc.KFC(network(), **options)
    resumed.model.load_state_dict(model_state)
    resumed.load_state_dict(state)
    assert [resumed.diagnostics["staleness"] for _ in train(resumed, first=6)][:2] == [5, 3]
    assert all_equal(parameters(whole), parameters(resumed))
    whole.close()
    resumed.close()


def _saved(content):
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


def test_a_state_dict_waits_for_the_worker(held_thread):
    optimizer = kfc.KFC(network(), **OPTIONS, inverse_worker="thread", max_staleness=100)
    for _ in train(optimizer, last=5):
        pass
    threading.Timer(0.2, held_thread.set).start()
    optimizer.state_dict()
    assert held_thread.is_set()
    optimizer.close()


def test_close_ends_the_thread():
    before = threading.active_count()
    optimizer = kfc.KFC(network(), **OPTIONS, inverse_worker="thread")
    for _ in train(optimizer, last=4):
        pass
    assert threading.active_count() == before + 1
    optimizer.close()
    assert threading.active_count() == before


def test_the_thread_keeps_to_one_core_and_leaves_the_rest_of_the_process_alone():
    torch.set_num_threads(2)
    try:
        optimizer = kfc.KFC(network(), **OPTIONS, inverse_worker="thread")
        seen = optimizer.preconditioner.renewal._thread.submit(torch.get_num_threads).result()
        assert seen == 1
        assert torch.get_num_threads() == 2
        later = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [2]
        optimizer.close()
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inverse_worker": "process"}, "inverse_worker must be one of"),
        ({"inverse_worker": "thread", "max_staleness": -1}, "max_staleness must be a whole number"),
        ({"inverse_placement": "everywhere"}, "inverse_placement must be one of"),
        ({"consistency_period": 0}, "consistency_period must be a whole number"),
        ({"process_group": "all"}, "process_group must be a torch.distributed group"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        kfc.KFC(network(), **options)
