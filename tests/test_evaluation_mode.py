"""Training under ``model.eval()``, as in fine-tuning with frozen batch normalisation."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc

KRONECKER = kfc.Kronecker(gather_in_eval=True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def train(model, optimizer, steps: int = 6, examples: int = 12):
    torch.manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(examples, 1, 6, 6), torch.randint(3, (examples,))
        if isinstance(optimizer, kfc.KFAC):
            optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
            continue
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("examples", [12, 96])
@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        (kfc.KFC, "curvature", kfc.Kronecker),
        (kfc.KFC, "curvature", kfc.EKFAC),
        (kfc.KFAC, "curvature", kfc.Kronecker),
        (kfc.WhitenedAdam, "whitening", kfc.Whitening),
    ],
)
def test_training_in_evaluation_mode_is_training_with_frozen_normalisation(
    kind, option, value, examples
):
    frozen, expected = network().eval(), network().train()
    expected[1].eval()
    buffers = {name: b.clone() for name, b in frozen.named_buffers()}
    optimizer = kind(frozen, **{option: value(gather_in_eval=True)})
    reference = kind(expected, **{option: value()})
    found = train(frozen, optimizer, examples=examples)
    for own, other in zip(found, train(expected, reference, examples=examples), strict=True):
        assert torch.equal(own, other)
    assert all(torch.equal(b, buffers[name]) for name, b in frozen.named_buffers())


def test_factors_can_be_estimated_in_evaluation_mode():
    frozen, expected = network().eval(), network().train()
    expected[1].eval()
    batches, loss = [torch.randn(12, 1, 6, 6)], lambda out, x: F.cross_entropy(out, labels)
    labels = torch.arange(12) % 3
    optimizers = [kfc.KFC(frozen, curvature=KRONECKER, seed=0), kfc.KFC(expected, seed=0)]
    for optimizer in optimizers:
        optimizer.estimate_factors(batches, loss)
    for name, factors in optimizers[0].factors.items():
        for own, other in zip(factors, optimizers[1].factors[name], strict=True):
            assert torch.equal(own, other)


def test_without_the_option_the_error_names_it():
    model = network().eval()
    optimizer = kfc.KFC(model)
    F.cross_entropy(model(torch.randn(12, 1, 6, 6)), torch.arange(12) % 3).backward()
    with pytest.raises(RuntimeError, match=r"gather_in_eval=True"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"gather_in_eval=True"):
        optimizer.estimate_factors([torch.randn(12, 1, 6, 6)])
