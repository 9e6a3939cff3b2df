"""Damaged state dicts: each is loaded completely, or refused without any change."""

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc
from nested import first_difference

MUTATIONS = 90

WITH_THREAD = kfc.Parallel(asynchronous=True, deterministic=True, max_staleness=2)

METHODS = {
    "kfc": lambda model: kfc.KFC(model, averaging_timescale=3, schedule=kfc.Periods(1, 2), seed=1),
    "ekfac": lambda model: kfc.KFC(model, curvature="ekfac", fallback_lr=0.1, seed=1),
    "eigen": lambda model: kfc.KFC(
        model, curvature=kfc.Kronecker(inverse="eigen"), schedule=kfc.Budget(0.5), seed=1
    ),
    "thread": lambda model: kfc.KFC(
        model, schedule=kfc.Periods(1, 3), parallel=WITH_THREAD, clip=None, seed=1
    ),
    "kfac": lambda model: kfc.KFAC(model, averaging_timescale=3, seed=1),
    "whitened": lambda model: kfc.WhitenedAdam(model, rotation_period=2),
    "preconditioner": lambda model: kfc.Preconditioner(model, seed=1),
}


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    )


class Run:
    """A model, its optimizer, and batches that are always the same."""

    def __init__(self, make, seed=0):
        self.model = network()
        self.optimizer = make(self.model)
        self.generator = torch.Generator().manual_seed(seed)

    def train(self, steps):
        for _ in range(steps):
            images = torch.randn(6, 1, 4, 4, generator=self.generator)
            labels = torch.randint(3, (6,), generator=self.generator)
            if isinstance(self.optimizer, kfc.KFAC):
                self.optimizer.step(lambda: F.cross_entropy(self.model(images), labels))  # noqa: B023
                continue
            self.model.zero_grad()
            F.cross_entropy(self.model(images), labels).backward()
            self.optimizer.step()
            if isinstance(self.optimizer, kfc.Preconditioner):
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter -= 0.01 * parameter.grad
        return self

    def everything(self):
        """Return copies of all that the next steps depend on."""
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "batches": self.generator.get_state(),
            }
        )

    def return_to(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["batches"])


def are_identical(one, other):
    return first_difference(one, other) is None


def places(value, path=()):
    """Yield the path of every entry of nested containers, also of the containers."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, (dict, list, tuple)):
            yield from places(inner, (*path, key))


OTHERS = [
    *(None, [], {}, "x", "", b"x", (), -1, 0, 3, 10**30, True, 1.5, -0.5, 1e300),
    *(math.nan, math.inf, -math.inf, [None], {"x": 1}, object, torch.ones(2), torch.tensor(3)),
    *(
        torch.tensor(math.nan),
        torch.zeros(2, 3, 4),
        torch.tensor([True]),
        torch.ones(1, device="meta"),
    ),
]


def other_tensor(tensor, chance):
    """Return a tensor that differs from another in one respect."""
    changed = tensor.clone(memory_format=torch.contiguous_format)
    if tensor.numel() and tensor.is_floating_point():
        flat = changed.view(-1)
        flat[chance.randrange(len(flat))] = chance.choice([math.nan, math.inf, -math.inf, -1e30])
    return chance.choice(
        [
            changed,
            tensor.to(torch.complex64),
            tensor.to(torch.int32),
            tensor.to(torch.bool),
            tensor.double(),
            tensor.to_sparse() if tensor.dim() else tensor,
            tensor.unsqueeze(0),
            tensor.flatten()[:-1],
            tensor.mT.contiguous() if tensor.dim() > 1 else tensor.repeat(2),
            torch.zeros_like(tensor),
            tensor.double().requires_grad_(),
            tensor.to("meta"),
            nn.Parameter(tensor.double()),
            torch.empty(0),
        ]
    )


def mutated(state, chance):
    """Return a state with one change, the path of the change, and its name."""
    state = copy.deepcopy(state)
    path = chance.choice(list(places(state)))
    container = state
    for key in path[:-1]:
        if isinstance(container, tuple):
            return mutated(state, chance)
        container = container[key]
    key = path[-1]
    if isinstance(container, tuple):
        return mutated(state, chance)
    kind = chance.choice(["remove", "add", "replace", "replace", "tensor", "tensor", "swap"])
    if kind == "remove":
        del container[key]
    elif kind == "add" and isinstance(container, dict):
        container[chance.choice(["extra", 17, "weight", ("a",)])] = chance.choice(OTHERS)
    elif kind == "add":
        container.append(chance.choice(OTHERS))
    elif kind == "swap":
        keys = list(container) if isinstance(container, dict) else range(len(container))
        other = chance.choice(list(keys))
        container[key], container[other] = container[other], container[key]
    elif kind == "tensor" and isinstance(container[key], torch.Tensor):
        container[key] = other_tensor(container[key], chance)
    else:
        container[key] = chance.choice(OTHERS)
    return state, path, kind


def names(path, kind):
    """Return words of which a message has to contain one: parts of the path of a change."""
    words = [str(key).removesuffix("s") for key in path]
    words += [word.replace("_", " ") for word in words]
    # An entry that is too many, or in the wrong place, is named itself.
    return words + (["extra", "17", "weight", "a"] if kind in ("add", "swap") else [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
def test_a_damaged_state_is_loaded_completely_or_not_at_all(method):
    chance = random.Random(method)
    source = Run(METHODS[method], seed=1).train(4).everything()["optimizer"]
    run, twin = (Run(METHODS[method]).train(2) for _ in range(2))
    start, outcomes = run.everything(), {"loaded": 0, "refused": 0}
    for _ in range(MUTATIONS):
        state, path, kind = mutated(source, chance)
        try:
            run.optimizer.load_state_dict(state)
        except ValueError as error:
            outcomes["refused"] += 1
            message = str(error)
            assert any(word in message for word in names(path, kind)), (path, kind, message)
            assert are_identical(run.everything(), start), (path, kind, message)
            continue
        outcomes["loaded"] += 1
        # An impossible dimension is found when the model runs.
        if path[-1] != "axis":
            trains_on(run, path, kind)
        run.return_to(start)
    assert min(outcomes.values()) > MUTATIONS / 20, outcomes
    for each in (run, twin):
        each.train(3)
    assert all(map(torch.equal, run.model.parameters(), twin.model.parameters()))
    for each in (run, twin):
        each.optimizer.close()


def trains_on(run, path, kind):
    """Train two steps; options may have been changed to those with which training diverges."""
    try:
        run.train(2)
    except (FloatingPointError, OverflowError):
        assert path[0] in ("param_groups", "dampings")
        return
    except Exception as error:
        raise AssertionError(f"{path} ({kind}) failed in a later step: {error!r}") from error
    if path[0] != "param_groups":
        assert all(torch.isfinite(p).all() for p in run.model.parameters()), (path, kind)
    run.optimizer.load_state_dict(run.optimizer.state_dict())


@pytest.mark.parametrize("method", METHODS)
def test_unharmed_states_continue_bit_for_bit(method):
    if method == "eigen":
        pytest.skip("its periods depend on the clock")
    whole = Run(METHODS[method]).train(4)
    state = whole.everything()
    whole.train(3)
    resumed = Run(METHODS[method], seed=9).train(1)
    resumed.return_to(state)
    resumed.train(3)
    assert are_identical(whole.everything(), resumed.everything())
    for each in (whole, resumed):
        each.optimizer.close()


def refused(path, value, method="kfc"):
    """Return the message with which a state with another value at a path is refused."""
    run = Run(METHODS[method]).train(3)
    state = run.everything()["optimizer"]
    container = state
    for key in path[:-1]:
        container = container[key]
    container[path[-1]] = value
    with pytest.raises(ValueError, match=r"must|invalid|version") as raised:
        run.optimizer.load_state_dict(state)
    run.optimizer.close()
    return str(raised.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("state", 0, "momentum_buffer"),
            None,
            "0.weight: momentum_buffer must be a dense tensor of floating-point numbers of shape "
            "(2, 1, 3, 3), got None",
        ),
        (
            ("state", 0, "average"),
            torch.full((2, 1, 3, 3), math.nan),
            "0.weight: average must be finite, but 18 of 18 entries are not",
        ),
        (
            ("curvature", "curvature", "layers", "4", "running", 0),
            torch.ones(1, 9, 9).to_sparse(),
            "running[0] of layer '4' must be a dense tensor of floating-point numbers, got a "
            "tensor of shape (1, 9, 9), torch.float32, torch.sparse_coo",
        ),
        (
            ("curvature", "curvature", "layers", "4", "running", 0),
            torch.ones(1, 9, 9).tril(),
            "running[0] of layer '4' must be symmetric, but entries differ from the transposed "
            "ones by up to 1",
        ),
        (
            ("curvature", "curvature", "layers", "4", "inverse", "forms"),
            torch.tensor([1, 7]),
            "the inverse of layer '4' is invalid: forms must be among [0, 1, 2, 3], got [1, 7]",
        ),
        (
            ("curvature", "steps"),
            -3,
            "the state's steps must be a whole number of at least 0, got -3",
        ),
        (
            ("param_groups", 0, "lr"),
            math.nan,
            "param group 0: lr must be a finite number, at least 0; got nan",
        ),
        (("version",), 99, "the state dict has version 99: it was saved by a different"),
    ],
)
def test_messages_say_what_was_expected_and_found(path, value, message):
    assert message in refused(path, value)


def test_missing_momentum_is_noticed():
    run = Run(METHODS["kfc"]).train(2)
    state = run.optimizer.state_dict()
    del state["state"][1]["momentum_buffer"]
    with pytest.raises(ValueError, match=r"0\.bias: momentum_buffer: missing"):
        run.optimizer.load_state_dict(state)


def test_state_in_another_precision_is_converted():
    run, twin = (Run(METHODS["kfc"]).train(2) for _ in range(2))
    state = run.optimizer.state_dict()
    for own in state["state"].values():
        for part, value in own.items():
            own[part] = value.double()
    run.optimizer.load_state_dict(state)
    for each in (run, twin):
        each.train(2)
    assert all(map(torch.equal, run.model.parameters(), twin.model.parameters()))


def test_statistics_of_a_frozen_layer_are_kept_and_checked():
    run = Run(METHODS["kfc"]).train(2)
    run.model[4].requires_grad_(False)
    state = run.optimizer.state_dict()
    other = Run(METHODS["kfc"])
    other.model[4].requires_grad_(False)
    other.optimizer.load_state_dict(state)
    other.model[4].requires_grad_(True)
    kept = other.optimizer.factors["4"]
    assert all(map(torch.equal, kept, run.optimizer.factors["4"]))
    other.train(2)
    state["curvature"]["curvature"]["layers"]["4"]["running"][0] = torch.eye(3).unsqueeze(0)
    with pytest.raises(ValueError, match=r"4: .*\(1, 3, 3\)"):
        other.optimizer.load_state_dict(state)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "preconditioner"])
@pytest.mark.parametrize("roles", [{"weight"}, {"bias"}, {"weight", "bias"}])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_is_loaded_after_a_layer_was_frozen(method, roles, steps):
    """Also into an optimizer that has never seen the layer trained."""

    def freeze(run):
        for role in roles:
            run.model[4].get_parameter(role).requires_grad_(False)

    one = Run(METHODS[method])
    one.train(2)
    freeze(one)
    one.train(steps)
    state = copy.deepcopy(one.optimizer.state_dict())
    other = Run(METHODS[method])
    freeze(other)
    other.optimizer.load_state_dict(state)
    other.model.load_state_dict(one.model.state_dict())
    other.train(1)
    assert all(p.isfinite().all() for p in other.model.parameters())


@pytest.mark.usefixtures("asynchronous")
def test_a_state_saved_after_a_skipped_step_is_loaded():
    """In that step, the estimate of the clip is not a number."""
    run = Run(lambda model: kfc.KFC(model, schedule=kfc.Periods(10, 10), seed=0))
    run.train(32)
    run.model.zero_grad()
    F.cross_entropy(run.model(torch.randn(6, 1, 4, 4)), torch.randint(3, (6,))).backward()
    run.model[4].weight.grad[0, 0] = math.nan
    run.optimizer.step()
    with pytest.warns(UserWarning, match="skipped"):
        state = run.optimizer.state_dict()
    other = Run(lambda model: kfc.KFC(model, schedule=kfc.Periods(10, 10), seed=0))
    other.optimizer.load_state_dict(state)
