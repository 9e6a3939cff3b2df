"""Attacks inside of one process: damaged files, mutated states, exceptions in passes and hooks."""

import copy
import os
import shutil
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

import kfc
from chaos import FoundFault
from commands import kfc_here
from kfc.lab.comparison.settings import make_comparison, read_specification, write_specification
from kfc.lab.config import make_config
from kfc.lab.data import load
from kfc.lab.disk import RunError
from kfc.lab.runs import read_record
from kfc.lab.training import Trainer
from test_kill import assert_same_run

torch.set_num_threads(1)
os.environ["COLUMNS"] = "200"


# Damaged files


@cache
def interrupted_run(folder):
    """Return the folder of a run as a kill leaves it, and that of the same run when continued."""
    path, whole = folder / "interrupted", folder / "continued"
    for each in (path, whole):
        shutil.rmtree(each, ignore_errors=True)
    settings = {"data": "digits", "batch_size": 128, "epochs": 3, "threads": 1}
    config = make_config(**settings, evaluation_period=0.6, log_period=1)
    trainer = Trainer.start(path, config, load("digits"), name="run")
    while trainer.update < 27:
        trainer.advance(1e-9)
    trainer.close()
    shutil.copytree(path, whole)
    if kfc_here("train", "--resume", whole).returncode != 0:
        raise FoundFault("an undamaged run cannot be resumed")
    return path, whole


def contents(path):
    """Return the files of a folder, except for the lock."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".lock"}


def flip_bit(draws, path):
    content = bytearray(path.read_bytes())
    if content:
        content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
    path.write_bytes(bytes(content))


def truncate(draws, path):
    if draws.random() < 0.1:
        path.unlink()
        return
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(draws.choice([0, size - 1, draws.randrange(size + 1)]) if size else 0)


def attack_run(damage, draws, scratch):
    """Damage one file of a run, then resume it, or read it."""
    original, whole = interrupted_run(scratch.parent)
    path = shutil.copytree(original, scratch / "run")
    file = path / draws.choice(sorted(os.listdir(path)))
    damage(draws, file)
    before = contents(path)
    if draws.random() < 0.3:
        return read_damaged(path, original), 1
    done = kfc_here("train", "--resume", path)
    if done.returncode == 0:
        try:
            assert_same_run(path, whole)
        except AssertionError as error:
            raise FoundFault(f"{file.name}: resumed with another result: {error}") from error
        older = "is used instead" in done.stdout
        return ("an older checkpoint, " if older else "") + "resumed bit for bit", 1
    if done.returncode not in (1, 2) or "Error: " not in done.stdout:
        raise FoundFault(f"{file.name}: exit code {done.returncode}: {done.stdout[-2000:]}")
    if contents(path) != before:
        raise FoundFault(f"{file.name}: the run was refused, and its folder changed")
    return "refused with a sentence", 1


def read_damaged(path, original):
    """Read a damaged run as reports do; what is read has to be true."""
    done = kfc_here("report", path, "-o", path.with_name("page.html"))
    try:
        found, expected = read_record(path), read_record(original)
    except RunError:
        if done.returncode != 1 or "Error: " not in done.stdout:
            raise FoundFault(f"the report of a damaged run: {done.stdout[-2000:]}") from None
        return "refused with a sentence"
    same = (found.config, found.environment, found.name, found.data_digest) == (
        *(expected.config, expected.environment, expected.name, expected.data_digest),
    )
    rows = ("evaluations", "progress")
    same = same and all(
        getattr(found, name) == getattr(expected, name)[: len(getattr(found, name))]
        for name in rows
    )
    if done.returncode != 0 or not same:
        raise FoundFault(f"the report is wrong or failed: {done.stdout[-2000:]}")
    return "read, and true"


def attack_comparison(draws, scratch):
    """Damage the definition of a comparison."""
    methods = {"SGD": {"optimizer": "sgd", "lr": [0.1, 0.01]}, "KFC": {"optimizer": "kfc"}}
    comparison = make_comparison(
        {"title": "chaos", "settings": {"data": "digits", "epochs": 2}, "methods": methods}
    )
    write_specification(scratch / "runs", comparison)
    draws.choice([flip_bit, truncate])(draws, scratch / "runs" / "comparison.json")
    try:
        found = read_specification(scratch / "runs")
    except RunError:
        return "refused with a sentence", 1
    if found.candidates() != comparison.candidates() or found.title != comparison.title:
        raise FoundFault("a damaged definition was read")
    return "read, and true", 1


# States of optimizers

METHODS = {
    "KFC": lambda model: kfc.KFC(model, lr=0.01, averaging_timescale=5),
    "KFC ekfac": lambda model: kfc.KFC(model, lr=0.01, curvature="ekfac"),
    "KFAC": kfc.KFAC,
    "WhitenedAdam": kfc.WhitenedAdam,
    "Preconditioner": kfc.Preconditioner,
}


def make_model(bombs=False):
    torch.manual_seed(0)
    parts = [
        *(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 6), nn.LayerNorm(6)),
        *(nn.Tanh(), nn.Linear(6, 3)),
    ]
    return nn.Sequential(
        *(part for each in parts for part in ([each, Bomb()] if bombs else [each]))
    )


def batch(number):
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(8, 1, 4, 4, generator=generator)
    return images, torch.randint(3, (8,), generator=generator)


def take_step(model, optimizer, number, inside=lambda: None):
    """Make one step, with a closure if the number is odd; ``inside`` is called after the loss."""
    images, labels = batch(number)

    def loss():
        model.zero_grad()
        value = F.cross_entropy(model(images), labels)
        inside()
        return value

    def differentiated():
        value = loss()
        value.backward()
        return value

    if isinstance(optimizer, kfc.KFAC):
        optimizer.step(loss)
    elif number % 2 and isinstance(optimizer, torch.optim.Optimizer):
        optimizer.step(differentiated)
    else:
        differentiated()
        optimizer.step()
    if isinstance(optimizer, kfc.Preconditioner):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad


def trained(name, steps, bombs=False):
    model = make_model(bombs)
    optimizer = METHODS[name](model)
    for number in range(steps):
        take_step(model, optimizer, number)
    return model, optimizer


@cache
def source(name):
    """Return a state to mutate."""
    return copy.deepcopy(trained(name, 4)[1].state_dict())


def leaves(value, path=()):
    """Return every entry of nested dicts and lists, by path; also the dicts and lists."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, (list, tuple)) else items
    found = {path: value} if path else {}
    for key, inner in items:
        found |= leaves(inner, (*path, key))
    return found


def same(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one.double(), other.double())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if {type(one), type(other)} == {int, float}:  # a whole number where a state has another one
        return float(one) == float(other)
    return type(one) is type(other) and (one == other or one != one)


@cache
def kept_paths(name):
    """Return the paths whose values a state has again after it was loaded."""
    _, optimizer = trained(name, 2)
    optimizer.load_state_dict(copy.deepcopy(source(name)))
    after = leaves(optimizer.state_dict())
    return [
        path
        for path, value in leaves(source(name)).items()
        if not isinstance(value, (dict, list, tuple)) and path in after and same(value, after[path])
    ]


WRONG = (None, "text", -1, 0.5, float("nan"), float("inf"), 10**30, [], {}, True, torch.zeros(2, 2))


def mutate(draws, state):
    """Change one entry of a state; return a description."""
    entries = leaves(state)
    paths = [path for path in entries if not isinstance(entries.get(path[:-1]), tuple)]
    path = draws.choice(paths)
    value = entries[path]
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    kind = draws.choice(["delete", "replace", "replace", "tensor", "tensor", "tensor", "add"])
    if kind == "delete" and isinstance(inner, dict):
        del inner[path[-1]]
    elif kind == "add" and isinstance(value, dict):
        value[draws.choice(["unknown", 7])] = 0
    elif kind == "tensor" and isinstance(value, torch.Tensor) and value.numel():
        inner[path[-1]], kind = mutated_tensor(draws, value)
    else:
        inner[path[-1]], kind = draws.choice(WRONG), "replace"
    return f"{kind} of {'/'.join(map(str, path))}"


def mutated_tensor(draws, value):
    """Return a tensor of another shape, type or layout, or with an entry that is not finite."""
    kind = draws.choice(["nan", "inf", "shape", "flat", "double", "complex", "whole", "empty"])
    bad = value.clone(memory_format=torch.contiguous_format)
    if kind in ("nan", "inf") and value.is_floating_point():
        bad.view(-1)[draws.randrange(value.numel())] = float(kind)
        return bad, kind
    changed = {
        "shape": lambda: torch.cat([value.reshape(-1), value.reshape(-1)]),
        "flat": lambda: value.reshape(-1, 1, 1),
        "double": lambda: value.double(),
        "complex": lambda: value.to(torch.complex64),
        "whole": lambda: value.to(torch.int64),
        "empty": lambda: value.reshape(-1)[:0],
    }
    kind = kind if kind in changed else "shape"
    return changed[kind](), kind


def attack_state(draws, scratch):
    """Load a mutated state: wholly, or not at all; then training goes on."""
    name = draws.choice(list(METHODS))
    state = copy.deepcopy(source(name))
    what = f"{name}: {mutate(draws, state)}"
    model, optimizer = trained(name, 2)
    before = copy.deepcopy(optimizer.state_dict())
    given = copy.deepcopy(state)
    try:
        optimizer.load_state_dict(state)
    except (ValueError, TypeError) as error:
        if not str(error):
            raise FoundFault(f"{what}: an error without a message") from error
        if not same(optimizer.state_dict(), before):
            raise FoundFault(f"{what}: refused, but half loaded") from error
        outcome = "refused, nothing loaded"
    except Exception as error:
        raise FoundFault(f"{what}: {type(error).__name__}: {error}") from error
    else:
        after = leaves(optimizer.state_dict())
        for expected in (given, source(name)):
            entries = leaves(expected)
            # An entry may be missing in both: a state without inverses is whole, for example.
            if all(same(after.get(p), entries.get(p)) for p in kept_paths(name)):
                break
        else:
            raise FoundFault(f"{what}: half loaded")
        outcome = "loaded wholly"
    try:
        for number in range(4, 8):
            take_step(model, optimizer, number)
    except Exception as error:
        raise FoundFault(f"{what}: {outcome}; a later step: {error!r}") from error
    if not all(p.isfinite().all() for p in model.parameters()):
        raise FoundFault(f"{what}: {outcome}; the parameters are not finite")
    return outcome, 1


# Exceptions


class BombError(Exception):
    pass


class Blow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise BombError("backward")


class Bomb(nn.Module):
    """Does nothing, unless it is armed to fail in the forward or backward pass."""

    def __init__(self):
        super().__init__()
        self.armed = ""

    def forward(self, x):
        armed, self.armed = self.armed, ""
        if armed == "forward":
            raise BombError("forward")
        return Blow.apply(x) if armed == "backward" else x


def explode(*_):
    raise BombError("hook")


def arm(draws, model, optimizer):
    """Let something fail in the next step; return what, a function, and how to undo it."""
    bombs = [module for module in model if isinstance(module, Bomb)]
    layers = [module for module in model if isinstance(module, (nn.Conv2d, nn.Linear))]
    kinds = ["forward", "backward", "loss", "forward hook", "backward hook", "gradient hook"]
    has_hooks = isinstance(optimizer, torch.optim.Optimizer)
    kind = draws.choice([*kinds, "step"] if has_hooks else kinds)
    if kind in ("forward", "backward"):
        draws.choice(bombs).armed = kind
        return kind, lambda: None, None
    if kind == "loss":
        return kind, explode, None
    layer = draws.choice(layers)
    if kind == "forward hook":
        return kind, lambda: None, layer.register_forward_hook(explode)
    if kind == "backward hook":
        return kind, lambda: None, layer.register_full_backward_hook(explode)
    if kind == "gradient hook":
        return kind, lambda: None, layer.weight.register_hook(explode)
    return kind, lambda: None, optimizer.register_step_pre_hook(explode)


def attack_step(draws, scratch):
    """Let a step fail; the next ones are those of a run in which it did not happen."""
    name = draws.choice(list(METHODS))
    model, optimizer = trained(name, 0, bombs=True)
    twin, expected = trained(name, 0, bombs=True)
    failing = draws.randrange(1, 12)
    for number in range(14):
        if number == failing:
            kind, inside, handle = arm(draws, model, optimizer)
            try:
                take_step(model, optimizer, number, inside)
            except BombError:
                pass
            else:
                raise FoundFault(f"{name}: the exception in {kind} was swallowed")
            if handle is not None:
                handle.remove()
            for bomb in model:
                if isinstance(bomb, Bomb):
                    bomb.armed = ""
            model.zero_grad()
            continue
        take_step(model, optimizer, number)
        take_step(twin, expected, number)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            if not torch.equal(one, other):
                raise FoundFault(
                    f"{name}: an exception in {kind if number > failing else ''} at step {failing} "
                    f"changes step {number}"
                )
    return "as if it had not happened", 1


ATTACKS = {
    "bit flip": (350, lambda draws, scratch: attack_run(flip_bit, draws, scratch)),
    "truncation": (80, lambda draws, scratch: attack_run(truncate, draws, scratch)),
    "damaged comparison": (40, attack_comparison),
    "mutated state": (350, attack_state),
    "exception": (80, attack_step),
}
