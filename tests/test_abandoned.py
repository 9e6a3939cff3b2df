"""Passes and steps that are abandoned or interrupted do not affect later steps."""

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc
from nested import first_difference

STEPS = 7


class UserError(Exception):
    """An error of the user."""


class Interrupt(BaseException):
    """What Ctrl-C raises."""


class Trap(nn.Module):
    """Passes its input on, and raises an error when it is told to."""

    def __init__(self):
        super().__init__()
        self.forward_error = self.backward_error = None
        self.calls_left = 0

    def arm(self, error, *, backward=False, after=0):
        """Raise an error in a forward pass, after so many others, or in a backward pass."""
        self.calls_left = after
        self.forward_error, self.backward_error = (None, error) if backward else (error, None)

    def disarm(self):
        self.forward_error = self.backward_error = None

    def forward(self, x):
        if self.forward_error is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                error, self.forward_error = self.forward_error, None
                raise error("in the forward pass")
        if x.requires_grad and self.backward_error is not None:
            error, self.backward_error = self.backward_error, None

            def fail(_):
                raise error("in the backward pass")

            x = x * 1
            x.register_hook(fail)
        return x


class Network(nn.Module):
    """A small network with a trap behind its first layer."""

    def __init__(self, *, functional=False, returns_dict=False):
        super().__init__()
        torch.manual_seed(4)
        self.functional, self.returns_dict = functional, returns_dict
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.trap = Trap()
        self.head = nn.Linear(48, 3)

    def forward(self, x):
        if self.functional:
            x = F.conv2d(x, self.conv.weight, self.conv.bias, padding=1)
        else:
            x = self.conv(x)
        x = self.trap(self.norm(x).tanh())
        x = self.head(x.flatten(1))
        return {"logits": x, "other": x.detach()} if self.returns_dict else x


def periods(statistics=2, inverse=3):
    return kfc.Periods(statistics, inverse)


KINDS = {
    "replayed": lambda m: kfc.KFC(m, schedule=periods(), seed=1),
    "whole": lambda m: kfc.KFC(
        m, schedule=periods(), seed=1, curvature=kfc.Kronecker(fraction=1), averaging_timescale=3
    ),
    "exact": lambda m: kfc.KFC(m, schedule=periods(), curvature=kfc.EKFAC(fisher="exact")),
    "empirical": lambda m: kfc.KFC(m, curvature=kfc.Kronecker(fisher="empirical")),
    "thread": lambda m: kfc.KFC(
        m,
        schedule=periods(1, 3),
        seed=1,
        parallel=kfc.Parallel(asynchronous=True, deterministic=True, max_staleness=1),
    ),
    "without clip": lambda m: kfc.KFC(m, schedule=periods(), seed=1, clip=None),
    "postponed": lambda m: kfc.KFC(m, schedule=kfc.Periods(1, 1, overhead=0.1), seed=1),
    "in evaluation": lambda m: kfc.KFC(
        m.eval(), schedule=periods(), seed=1, curvature=kfc.Kronecker(gather_in_eval=True)
    ),
    "kfac": lambda m: kfc.KFAC(m, schedule=periods(), seed=1),
    "whitened": lambda m: kfc.WhitenedAdam(m, rotation_period=2),
    "preconditioner": lambda m: kfc.Preconditioner(m, schedule=periods(), seed=1),
}


class Run:
    """A model that is trained on batches which are the same in every run."""

    def __init__(self, kind, examples=72, parts=1, **options):
        self.model = Network(**options)
        output = {"output": lambda out: out["logits"]} if options.get("returns_dict") else {}
        self.optimizer = KINDS[kind](self.model) if not output else kfc.KFC(self.model, **output)
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (
                torch.randn(examples, 1, 4, 4, generator=generator),
                torch.randint(3, (examples,), generator=generator),
            )
            for _ in range(STEPS)
        ]
        self.parts = parts

    def loss(self, images, labels):
        outputs = self.model(images)
        return F.cross_entropy(outputs["logits"] if isinstance(outputs, dict) else outputs, labels)

    def differentiate(self, batch):
        for images, labels in zip(*(each.chunk(self.parts) for each in batch), strict=True):
            (self.loss(images, labels) / self.parts).backward()

    def zero_grad(self):
        if isinstance(self.optimizer, kfc.Preconditioner):
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad()

    def step(self, batch, *, closure=False):
        """Make one step, in any of the ways in which users write it."""
        if isinstance(self.optimizer, kfc.KFAC):
            self.optimizer.step(lambda: self.loss(*batch))
            return
        self.zero_grad()
        if closure and not isinstance(self.optimizer, kfc.Preconditioner):

            def evaluate():
                self.differentiate(batch)
                return torch.tensor(1.0)

            self.optimizer.step(evaluate)
            return
        self.differentiate(batch)
        self.optimizer.step()
        if isinstance(self.optimizer, kfc.Preconditioner):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter -= 0.01 * parameter.grad

    def result(self):
        self.optimizer.close()
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        return copy.deepcopy({"parameters": parameters, "state": self.optimizer.state_dict()})


def assert_identical(one, other):
    assert first_difference(one, other) is None


def undisturbed(kind, *, closure=False, **options):
    run = Run(kind, **options)
    for batch in run.batches:
        run.step(batch, closure=closure)
    return run.result()


# Batches that are abandoned


def outlier(examples):
    generator = torch.Generator().manual_seed(5)
    images = 1e4 * torch.randn(examples, 1, 4, 4, generator=generator)
    return images, torch.randint(3, (examples,), generator=generator)


def forward_only(run, examples):
    run.loss(*outlier(examples))
    run.zero_grad()


def forward_of_nan(run, examples):
    images, labels = outlier(examples)
    loss = run.loss(images * math.nan, labels)
    assert not loss.isfinite()
    run.zero_grad()


def backward_too(run, examples):
    run.loss(*outlier(examples)).backward()
    run.zero_grad()


def backward_and_gradients_of_the_model(run, examples):
    run.loss(*outlier(examples)).backward()
    run.model.zero_grad()


ABANDONED = [forward_only, forward_of_nan, backward_too, backward_and_gradients_of_the_model]


@pytest.mark.parametrize("abandon", ABANDONED)
@pytest.mark.parametrize("kind", KINDS)
def test_an_abandoned_batch_does_not_matter(kind, abandon):
    run = Run(kind)
    for index, batch in enumerate(run.batches):
        if index != 3:
            abandon(run, examples=72 if index % 2 else 5)
        run.step(batch)
    assert_identical(run.result(), undisturbed(kind))


@pytest.mark.parametrize("abandon", ABANDONED)
@pytest.mark.parametrize("options", [{"functional": True}, {"returns_dict": True}, {"parts": 3}])
def test_an_abandoned_batch_does_not_matter_to_other_uses(options, abandon):
    run = Run("replayed", **options)
    for batch in run.batches:
        abandon(run, examples=5)
        run.step(batch)
    assert_identical(run.result(), undisturbed("replayed", **options))


def test_gradients_may_be_reset_between_forward_and_backward():
    """As many loops do it."""
    run = Run("whole")
    for batch in run.batches:
        loss = run.loss(*batch)
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
    assert_identical(run.result(), undisturbed("whole"))


def test_the_factors_are_those_of_the_batch_that_is_used():
    """The trace of a factor was 13 million times as large after an abandoned batch of 1e4."""
    traces = {}
    for abandons in (False, True):
        run = Run("without clip")
        run.step(run.batches[0])
        if abandons:
            forward_only(run, examples=72)
        run.step(run.batches[1])
        traces[abandons] = run.optimizer.factors["conv"].activation.trace().item()
        run.optimizer.close()
    assert traces[True] == traces[False]


# Errors


def attempt(run, batch, chance, error, closure):
    """Try a step in which the trap raises an error somewhere; return whether it did."""
    where = chance.choice(["forward", "backward", "step"])
    run.model.trap.arm(error, backward=where == "backward", after=chance.randrange(1, 4))
    if where == "forward":
        run.model.trap.arm(error, after=0)
    try:
        run.step(batch, closure=closure)
    except (UserError, Interrupt):
        return True
    except RuntimeError as raised:
        if not isinstance(raised.__cause__, UserError):
            raise
        return True
    finally:
        run.model.trap.disarm()
    return False


@pytest.mark.parametrize("error", [UserError, Interrupt])
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_after_an_error_are_as_if_it_had_not_happened(kind, closure, error):
    chance, errors = random.Random(f"{kind} {closure} {error.__name__}"), 0
    run = Run(kind)
    for batch in run.batches:
        for _ in range(5):
            failed = attempt(run, batch, chance, error, closure)
            errors += failed
            if not failed:
                break
        else:
            run.step(batch, closure=closure)
    assert errors > STEPS
    assert_identical(run.result(), undisturbed(kind, closure=closure))


@pytest.mark.parametrize("error", [UserError, Interrupt])
@pytest.mark.parametrize(
    "options", [{"functional": True}, {"returns_dict": True}, {"parts": 3}], ids=str
)
def test_errors_in_other_uses(options, error):
    chance = random.Random(str(options))
    run = Run("replayed", **options)
    for batch in run.batches:
        for _ in range(5):
            if not attempt(run, batch, chance, error, closure=False):
                break
        else:
            run.step(batch)
    assert not torch.overrides._get_current_function_mode_stack()
    assert_identical(run.result(), undisturbed("replayed", **options))


class HookError:
    """A hook of the user that raises an error once."""

    def __init__(self):
        self.is_armed = False

    def __call__(self, *_):
        if self.is_armed:
            self.is_armed = False
            raise UserError("in a hook")


@pytest.mark.parametrize("place", ["before", "after", "layer", "parameter", "output"])
@pytest.mark.parametrize("kind", ["replayed", "whole", "empirical", "kfac", "whitened"])
def test_errors_in_hooks_of_the_user(kind, place):
    def add_hook(run, hook):
        model = run.model
        if place == "before":
            model.register_forward_pre_hook(hook)
        elif place == "after":
            model.register_forward_hook(hook)
        elif place == "layer":
            model.head.register_full_backward_hook(hook)
        elif place == "parameter":
            model.conv.weight.register_hook(hook)
        else:
            model.register_forward_hook(
                lambda module, args, output: (
                    output.register_hook(hook) and None if output.requires_grad else None
                )
            )

    results = []
    for fails in (False, True):
        run, hook = Run(kind), HookError()
        add_hook(run, hook)
        for batch in run.batches:
            if fails:
                hook.is_armed = True
                with pytest.raises(UserError):
                    run.step(batch)
                hook.is_armed = False
            run.step(batch)
        results.append(run.result())
    assert_identical(*results)


def test_an_error_in_a_step_restores_buffers():
    run = Run("replayed")
    run.step(run.batches[0])
    before = copy.deepcopy(dict(run.model.named_buffers()))
    run.zero_grad()
    run.differentiate(run.batches[1])
    run.model.trap.arm(UserError)
    with pytest.raises(UserError):
        run.optimizer.step()
    assert_identical(before, dict(run.model.named_buffers()))
    run.optimizer.close()


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("kind", ["replayed", "whole", "exact", "preconditioner"])
def test_a_skipped_step_changes_nothing_that_later_steps_depend_on(kind):
    results = []
    for skips in (False, True):
        run = Run(kind)
        for batch in run.batches:
            if skips:
                images, labels = outlier(5)
                run.zero_grad()
                (math.nan * run.loss(images, labels)).backward()
                run.optimizer.step()
            run.step(batch)
        results.append(run.result())
    assert_identical(*map(_without_counts, results))


def _without_counts(result):
    state = result["state"]
    curvature = state if "steps" in state else state["curvature"]
    del curvature["skipped_steps"]
    return result


def test_an_interrupted_pass_leaves_its_mode():
    run = Run("replayed", functional=True)
    run.model.trap.arm(Interrupt)
    with pytest.raises(Interrupt):
        run.loss(*run.batches[0])
    with torch.device("cpu"):  # a mode of the user, entered since
        run.step(run.batches[0])
    run.step(run.batches[1])
    # What is left has no effect.
    assert len(torch.overrides._get_current_function_mode_stack()) <= 1
    run.optimizer.close()
