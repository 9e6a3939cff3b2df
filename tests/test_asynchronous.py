"""Test asynchronous inverses: when they are applied, their values, and errors."""

import io
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc
from kfc.curvature.kfc import KroneckerCurvature
from kfc.schedule import Periods, Stretch

OPTIONS = {
    "lr": 0.05,
    "damping": 1e-2,
    "schedule": Periods(1, 4),
    "averaging_timescale": 3,
    "seed": 5,
}


def network() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)]
    return nn.Sequential(*layers).double()


def train(optimizer, first=1, last=12):
    """Train from step ``first`` to ``last``, yielding after each step."""
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


def make(asynchronous=True, curvature="kfc", **options) -> kfc.KFC:
    """Return an optimizer; the options are those of ``kfc.Parallel``."""
    parallel = kfc.Parallel(asynchronous=asynchronous, **options)
    return kfc.KFC(network(), **OPTIONS, curvature=curvature, parallel=parallel)


def trained(**options):
    """Return the parameters after training, and the staleness after each step."""
    optimizer = make(**options)
    ages = [optimizer.diagnostics["staleness"] for _ in train(optimizer)]
    optimizer.close()
    return parameters(optimizer), ages


def all_equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def held_thread(monkeypatch):
    """An event that the thread waits for before it computes an inverse."""
    event = threading.Event()
    plain = KroneckerCurvature.invert

    def waiting(*args):
        if threading.current_thread().name.startswith("kfc-inverses"):
            assert event.wait(20)
        return plain(*args)

    monkeypatch.setattr(KroneckerCurvature, "invert", waiting)
    yield event
    event.set()


@pytest.mark.parametrize("curvature", ["kfc", "ekfac", kfc.Kronecker(inverse="eigen")])
def test_without_staleness_the_thread_changes_nothing(curvature):
    in_the_step, ages = trained(asynchronous=False, curvature=curvature)
    in_the_thread, same_ages = trained(max_staleness=0, curvature=curvature)
    assert all_equal(in_the_step, in_the_thread)
    assert ages == same_ages == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_deterministic_inverses_are_applied_at_fixed_steps():
    found = [trained(max_staleness=2, deterministic=True) for _ in range(2)]
    (parameters_of_one, ages), (parameters_of_other, _) = found
    # Due at steps 4 and 8, applied at 6 and 10.
    assert ages == [0, 1, 2, 3, 4, 2, 3, 4, 5, 2, 3, 4]
    assert all_equal(parameters_of_one, parameters_of_other)
    assert not all_equal(parameters_of_one, trained(asynchronous=False)[0])


def test_by_default_inverses_are_at_most_one_period_late():
    _, ages = trained(deterministic=True)
    # Due at 4 and 8, applied at 8 and 12: no refresh is left out.
    assert ages == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 4]
    optimizer = kfc.KFC(
        network(),
        **{**OPTIONS, "schedule": Periods(1, Stretch(20))},
        parallel=kfc.Parallel(asynchronous=True, deterministic=True),
    )
    # The period in force counts, not its limit.
    assert max(optimizer.diagnostics["staleness"] for _ in train(optimizer)) <= 2
    optimizer.close()


def test_inverses_from_before_an_estimate_are_not_applied(held_thread):
    optimizer = make(max_staleness=2)
    steps = train(optimizer)
    for _ in range(4):
        next(steps)
    held_thread.set()
    optimizer.estimate_factors([torch.randn(8, 2, 6, 6, dtype=torch.float64)])
    for _ in range(2):
        next(steps)
    assert optimizer.diagnostics["staleness"] == 1  # computed at step 5 from the estimate
    optimizer.close()


def test_inverses_are_applied_when_they_are_ready(held_thread):
    optimizer = make(max_staleness=100)
    for step in train(optimizer):
        age = optimizer.diagnostics["staleness"]
        if step == 6:
            assert age == 5  # those due at step 4 are still being computed
            held_thread.set()
            optimizer.state_dict()  # waits for the thread
        if step == 7:
            assert age == 3
    optimizer.close()


def test_a_step_waits_for_inverses_at_the_staleness_limit(held_thread):
    optimizer = make(max_staleness=2)
    late = threading.Timer(0.3, held_thread.set)
    for step in train(optimizer, last=6):
        if step == 5:
            late.start()
            before = time.perf_counter()
    assert optimizer.diagnostics["staleness"] == 2
    assert time.perf_counter() - before >= 0.25
    optimizer.close()


def test_errors_of_the_thread_are_raised_by_step(monkeypatch):
    # Otherwise the error may be raised in the step that is due, if the thread is fast.
    optimizer = make(max_staleness=1, deterministic=True)
    steps = train(optimizer)
    for _ in range(3):
        next(steps)

    def failing(*args):
        raise ZeroDivisionError("in the thread")

    monkeypatch.setattr(KroneckerCurvature, "invert", failing)
    next(steps)
    optimizer.state_dict()  # does not raise the error
    before = parameters(optimizer)
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        next(steps)
    assert all_equal(before, parameters(optimizer))
    optimizer.close()


def test_a_resumed_run_continues_bit_for_bit():
    whole, resumed = (make(max_staleness=3, deterministic=True) for _ in range(2))
    for step in train(whole):
        if step == 5:  # while those due at step 4 are being computed
            state, model_state = whole.state_dict(), whole.model.state_dict()
            state, model_state = (
                torch.load(_saved(part), weights_only=True) for part in (state, model_state)
            )
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


def test_a_state_dict_waits_for_the_thread(held_thread):
    optimizer = make(max_staleness=100)
    for _ in train(optimizer, last=5):
        pass
    threading.Timer(0.2, held_thread.set).start()
    optimizer.state_dict()
    assert held_thread.is_set()
    optimizer.close()


def test_close_ends_the_thread():
    before = threading.active_count()
    optimizer = make()
    for _ in train(optimizer, last=4):
        pass
    assert threading.active_count() == before + 1
    optimizer.close()
    assert threading.active_count() == before


def test_the_thread_uses_one_core_and_other_threads_keep_theirs(monkeypatch):
    cores = {}
    plain = KroneckerCurvature.invert

    def recording(*args):
        cores[threading.current_thread().name.startswith("kfc-inverses")] = torch.get_num_threads()
        return plain(*args)

    monkeypatch.setattr(KroneckerCurvature, "invert", recording)
    torch.set_num_threads(2)
    try:
        optimizer = make(max_staleness=0)
        for _ in train(optimizer, last=4):
            pass
        assert cores == {False: 2, True: 1}
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
        ({"asynchronous": True, "max_staleness": -1}, "max_staleness must be a whole number"),
        ({"max_staleness": 2}, "no effect without asynchronous=True"),
        ({"deterministic": True}, "no effect without asynchronous=True"),
        ({"placement": "everywhere"}, "placement must be one of"),
        ({"consistency_period": 0}, "consistency_period must be a whole number"),
        ({"group": "all"}, "group must be a torch.distributed process group"),
        ({"group": None, "placement": "shared"}, "no effect with group=None"),
        ({"group": None, "consistency_period": 5}, "no effect with group=None"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        kfc.Parallel(**options)
