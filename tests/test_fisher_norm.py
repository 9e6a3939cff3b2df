"""ν, the exact Fisher norm of an update: which examples it covers, and in which precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc

REDUCTIONS = ("mean", "batchmean", "sum")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def make(model: nn.Module, **options) -> kfc.KFC:
    """Return an optimizer whose update is v itself: without momentum or a limit within reach.

    Its factors depend on the batch alone, not on how targets are drawn.
    """
    fraction = options.pop("fraction", 0.25)
    clip = kfc.FisherClip(1e9, fraction=fraction, period=1)
    return kfc.KFC(
        model, momentum=0.0, clip=clip, curvature=kfc.Kronecker(fisher="exact"), **options
    )


def norm_of_a_step(reduction: str, fraction: float, parts: int) -> float:
    """Return ν of one step on a batch of 32 examples, in micro-batches."""
    torch.manual_seed(0)
    model, x, y = net(), torch.randn(32, 4), torch.randint(3, (32,))
    optimizer = make(model, fraction=fraction, likelihood=kfc.Categorical(reduction))
    for inputs, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
        loss = F.cross_entropy(model(inputs), labels, reduction="sum")
        (loss if reduction == "sum" else loss / 32).backward()
    optimizer.step()
    return optimizer.diagnostics["fisher_norm"]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("fraction", [1, 0.25])
@pytest.mark.parametrize("parts", [2, 8])
def test_micro_batches_have_the_norm_of_the_whole_batch(reduction, fraction, parts):
    whole = norm_of_a_step(reduction, fraction, 1)
    assert norm_of_a_step(reduction, fraction, parts) == pytest.approx(whole, rel=1e-12, abs=0)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_norm_covers_a_quarter_of_all_micro_batches(reduction):
    """Of 16 micro-batches of 2 examples, the first 8 examples."""
    model, likelihood = net(), kfc.Categorical(reduction)
    optimizer = make(model, likelihood=likelihood)
    x, y = torch.randn(32, 4), torch.randint(3, (32,))
    for inputs, labels in zip(x.chunk(16), y.chunk(16), strict=True):
        loss = F.cross_entropy(model(inputs), labels, reduction="sum")
        (loss if reduction == "sum" else loss / 32).backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    update = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    model.load_state_dict(before)
    expected = kfc.fisher.quadratic_form(model, x[:8], update, likelihood=likelihood)
    # A loss summed over 32 examples has four times the norm of one summed over 8.
    expected = expected * (4 if reduction == "sum" else 1)
    found = optimizer.diagnostics["fisher_norm"]
    assert found == pytest.approx(expected.item(), rel=1e-9, abs=0)


class Flattening(nn.Module):
    """Gives outputs (B·L, C) for inputs (B, L, features), so that no argument can be cut."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x).flatten(0, 1)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_norm_of_a_batch_that_cannot_be_cut_is_that_of_all_of_it(reduction):
    norms = []
    for fraction in (1, 0.25):
        torch.manual_seed(0)
        model, x, y = Flattening(), torch.randn(8, 5, 4), torch.randint(3, (40,))
        optimizer = make(model, fraction=fraction, likelihood=kfc.Categorical(reduction))
        loss = F.cross_entropy(model(x), y, reduction="sum")
        (loss if reduction == "sum" else loss / 40).backward()
        optimizer.step()
        norms.append(optimizer.diagnostics["fisher_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-12, abs=0)


def autocast_norm(*, forward: bool, step: bool) -> float:
    """Return ν of one step, with the forward pass or the step inside autocast."""
    torch.manual_seed(0)
    model, x, y = net(), torch.randn(32, 4), torch.randint(3, (32,))
    optimizer = make(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=forward):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=step):
        optimizer.step()
    return optimizer.diagnostics["fisher_norm"]


@pytest.mark.parametrize("forward", [False, True])
def test_the_norm_has_the_precision_of_the_forward_pass(forward):
    """Whether or not the step runs inside autocast."""
    outside, inside = (autocast_norm(forward=forward, step=step) for step in (False, True))
    assert outside == inside
    assert outside != autocast_norm(forward=not forward, step=False)
