"""The loss bound of steps whose gradients were clipped between the backward pass and the step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.testing import assert_close

import kfc
from ranks import run_ranks

# Large enough for the loss bound to shorten every step.
LONG = {"lr": 100.0, "momentum": 0.0, "clip": kfc.FisherClip(None, loss_bound=0.25)}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def data(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 6, generator=generator, dtype=torch.get_default_dtype())
    return x, torch.randint(3, (12,), generator=generator)


def no_change(parameters) -> None:
    pass


def norm(parameters) -> None:
    clip_grad_norm_(parameters, 0.01)


def head_only(parameters) -> None:
    clip_grad_norm_(list(parameters)[2:], 0.01)


def values(parameters) -> None:
    clip_grad_value_(parameters, 1e-6)


def decrease_over_loss(clip, scaled: bool = False, optimizer=None, model=None) -> float:
    """Return the decrease of the loss that the step predicts to first order, over the loss."""
    model = model or network()
    optimizer = optimizer or kfc.KFC(model, **LONG)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    x, y = data()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(loss).backward()
    if scaled:
        scaler.unscale_(optimizer)
    gradients = [p.grad.clone() for p in model.parameters()]
    clip(model.parameters())
    scaler.step(optimizer)
    pairs = zip(gradients, before, model.parameters(), strict=True)
    return sum((g * (b - p.detach())).sum() for g, b, p in pairs).item() / loss.item()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("clip", [no_change, norm])
def test_the_bound_holds_for_the_loss_itself(clip, scaled, double):
    """The excess of cross entropy with one class each is the loss."""
    assert decrease_over_loss(clip, scaled) == pytest.approx(0.25, rel=1e-6)


def test_gradients_that_are_clipped_in_part_keep_the_whole_excess(double):
    """The decrease that the gradients of step() predict is then at most that of the loss."""
    model = network()
    optimizer = kfc.KFC(model, **LONG)
    assert decrease_over_loss(head_only, model=model, optimizer=optimizer) > 0.25
    assert optimizer.engine.members.rescaling.factor() == 1


@pytest.mark.parametrize("steps", [1, 4])
def test_whitened_adam_does_not_lengthen_steps_because_of_small_gradients(steps, double):
    """Steps of Adam do not depend on the scale of gradients; nor does then the bound."""
    found = []
    for limit in (None, 1e-3):
        model = network()
        optimizer = kfc.WhitenedAdam(model, eps=1e-12)
        factors = []
        for step in range(steps):
            x, y = data(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if limit is not None:
                # The same factor in all steps, which Adam does not notice
                for parameter in model.parameters():
                    parameter.grad.mul_(limit)
            optimizer.step()
            factors.append(optimizer.diagnostics["loss_bound_factor"])
        found.append([*model.parameters(), torch.tensor(factors)])
    assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_other_changes_are_not_taken_for_a_factor(double):
    model = network()
    optimizer = kfc.KFC(model, **LONG)
    rescaling = optimizer.engine.members.rescaling
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    assert rescaling.factor() == 1
    values(model.parameters())
    assert rescaling.factor() == 1
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    assert_close(rescaling.factor(), torch.tensor(0.5))
    model[0].weight.grad = None
    assert_close(rescaling.factor(), torch.tensor(0.5))
    model[2].bias.grad = model[2].bias.grad * 0.1  # another tensor
    assert rescaling.factor() == 1


def test_closing_and_garbage_collection_remove_the_hooks():
    model = network()
    optimizer = kfc.KFC(model)
    assert any(p._post_accumulate_grad_hooks for p in model.parameters())
    optimizer.close()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    optimizer = kfc.KFC(model)
    del optimizer
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def clipped_rank(rank: int) -> float:
    model = network()
    run = DistributedDataParallel(model)
    optimizer = kfc.KFC(run, **LONG)
    loss_of = [F.cross_entropy(model(x), y) for x, y in map(data, (0, 1))]
    total = torch.stack(loss_of).mean()
    gradients = torch.autograd.grad(total, list(model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    x, y = data(rank)
    F.cross_entropy(run(x), y).backward()
    clip_grad_norm_(run.parameters(), 0.01)
    optimizer.step()
    pairs = zip(gradients, before, model.parameters(), strict=True)
    return sum((g * (b - p.detach())).sum() for g, b, p in pairs).item() / total.item()


def test_ranks_see_the_factor_of_their_averaged_gradients():
    found = run_ranks(clipped_rank, 2, dtype=torch.float64)
    assert found == [pytest.approx(0.25, rel=1e-6)] * 2
