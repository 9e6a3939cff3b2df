"""Training that has diverged is reported once, with the names of parameters."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc
from kfc.optimizers.divergence import FAR_ABOVE, PATIENCE

METHODS = {
    "kfc": lambda model: kfc.KFC(model, lr=0.0, seed=0),
    "whitened": lambda model: kfc.WhitenedAdam(model, lr=0.0),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def train(model, optimizer, steps, factor=1.0):
    """Return the messages of all warnings."""
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            images = torch.randn(8, 4, generator=generator)
            labels = torch.randint(3, (8,), generator=generator)
            optimizer.zero_grad()
            (factor * F.cross_entropy(model(images), labels)).backward()
            optimizer.step()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("method", METHODS)
def test_ten_skipped_steps_in_a_row(method):
    model = network()
    optimizer = METHODS[method](model)
    train(model, optimizer, 2)
    said = train(model, optimizer, PATIENCE - 1, math.nan)
    assert len(said) == 1  # of the first skipped step
    assert "the gradients of all parameters are not finite: '0.weight', '0.bias'" in said[0]
    assert "batch" not in said[0]
    assert optimizer.divergence is None
    said = train(model, optimizer, 5, math.nan)
    assert len(said) == 1
    assert "training has diverged: the last 10 steps were skipped; the gradients of" in said[0]
    assert "the largest entries of parameters are " in said[0]
    assert optimizer.divergence.startswith("the last 14 steps were skipped; ")
    assert optimizer.diagnostics["skipped_in_a_row"] == 14
    assert optimizer.diagnostics["skipped_steps"] == 14
    assert train(model, optimizer, 1) == []
    assert optimizer.divergence is None
    assert optimizer.diagnostics["skipped_in_a_row"] == 0
    assert optimizer.diagnostics["skipped_steps"] == 14


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_far_above_its_start(method):
    model = network()
    optimizer = METHODS[method](model)
    train(model, optimizer, 12)
    with torch.no_grad():
        model[2].weight.mul_(10_000 * FAR_ABOVE)
    assert train(model, optimizer, PATIENCE - 1) == []
    assert optimizer.divergence is None
    said = train(model, optimizer, 2)
    assert len(said) == 1
    assert (
        "training has diverged: the loss on the last 10 batches was more than 1000 times" in said[0]
    )
    assert "in '2.weight'" in said[0]
    assert "'2.weight'" in optimizer.divergence
    with torch.no_grad():
        model[2].weight.div_(10_000 * FAR_ABOVE)
    assert train(model, optimizer, 1) == []
    assert optimizer.divergence is None


def test_single_outliers_are_no_divergence():
    model = network()
    optimizer = METHODS["kfc"](model)
    train(model, optimizer, 12)
    for _ in range(3):
        with torch.no_grad():
            model[2].weight.mul_(10_000 * FAR_ABOVE)
        train(model, optimizer, PATIENCE - 1)
        with torch.no_grad():
            model[2].weight.div_(10_000 * FAR_ABOVE)
        train(model, optimizer, 1)
    assert optimizer.divergence is None


@pytest.mark.parametrize("method", ["kfc", "whitened"])
def test_the_parameter_with_bad_gradients_is_named(method):
    model = network()
    optimizer = METHODS[method](model)
    train(model, optimizer, 2)
    model[0].bias.register_hook(lambda gradient: gradient * math.nan)
    said = train(model, optimizer, 1)
    assert len(said) == 1
    assert "step 3 was skipped: the gradients of '0.bias' are not finite." in said[0]


def test_a_resumed_run_continues_to_count():
    model = network()
    optimizer = METHODS["kfc"](model)
    train(model, optimizer, 12)
    train(model, optimizer, PATIENCE - 1, math.nan)
    other = METHODS["kfc"](model)
    other.load_state_dict(optimizer.state_dict())
    optimizer.close()
    said = train(model, other, 1, math.nan)
    assert any("training has diverged" in message for message in said)


def test_kfac_reports_a_loss_far_above_its_start():
    model = network()
    fixed = kfc.Adaptation(lr=1e-12, momentum=0.0, model_damping=1.0, factor_damping=1.0)
    optimizer = kfc.KFAC(model, adaptation=fixed, seed=0)
    images, labels = torch.randn(8, 4), torch.randint(3, (8,))
    for step in range(12 + PATIENCE):
        if step == 12:
            with torch.no_grad():
                model[2].weight.mul_(10_000 * FAR_ABOVE)
        assert optimizer.divergence is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step(lambda: F.cross_entropy(model(images), labels))
    assert "'2.weight'" in optimizer.divergence
