"""Several processes, each with its part of the batch, against one with all of it (float64)."""


import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import kfc
from ranks import run_ranks

STEPS = 10


def network() -> nn.Sequential:
    """Convolutions of several kinds, a normalisation that sees one example, a plain parameter."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, groups=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.PReLU(),
        nn.Linear(16, 3),
    ).double()


def batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of 12 examples."""
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(12, 2, 6, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (12,), generator=generator),
        )
        for _ in range(steps)
    ]


def split(length: int, size: int, *, uneven: bool) -> list[slice]:
    """Where each rank's part lies; uneven: 1, 2, ... and the rest."""
    if not uneven:
        width = length // size
        return [slice(r * width, (r + 1) * width) for r in range(size)]
    ends = [sum(range(1, r + 2)) for r in range(size - 1)]
    return [slice(a, b) for a, b in zip([0, *ends], [*ends, length], strict=True)]


KFC_OPTIONS = {
    "lr": 0.05,
    "weight_decay": 1e-3,
    "damping": 1e-2,
    "fisher": "exact",
    "fisher_clip": 0.01,
    "clip_fraction": 1,
    "averaging_timescale": 4,
    "statistics_period": 2,
    "inverse_period": 3,
}


def trained_by_kfc(model, run, options, part, weight, whole_loss=F.cross_entropy):
    """All that is left of ten steps of KFC.

    Args:
        run: what is called in place of the model.
        part: of each batch, this rank's.
        weight: of its loss.
    """
    optimizer = kfc.KFC(model, **{**KFC_OPTIONS, **options})
    norms = []
    for images, labels in batches():
        optimizer.zero_grad()
        (weight * whole_loss(run(images[part]), labels[part])).backward()
        optimizer.step()
        norms.append(optimizer.step_diagnostics["fisher_norm"])
    return remains(optimizer, norms)


def remains(optimizer, norms):
    inner = optimizer.model
    result = {name: p.detach().clone() for name, p in inner.named_parameters()}
    with optimizer.averaged_parameters():
        result |= {f"averaged {n}": p.detach().clone() for n, p in inner.named_parameters()}
    for name, factors in optimizer.factors.items():
        result |= {
            f"{name} activation": factors.activation,
            f"{name} derivative": factors.derivative,
        }
    result["norms"] = torch.tensor(norms, dtype=torch.float64)
    optimizer.close()
    return result


def distributed_kfc(rank, size, options, uneven=False, wrapped=True):
    model = network()
    ddp = DistributedDataParallel(model)
    where = split(12, size, uneven=uneven)[rank]
    weight = size * (where.stop - where.start) / 12
    return trained_by_kfc(ddp if wrapped else model, ddp, options, where, weight)


def alone_kfc(options):
    model = network()
    return trained_by_kfc(model, model, options, slice(None), 1.0)


def assert_same(found, expected, tolerance=1e-10):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("size", "uneven", "wrapped"), [(2, False, True), (3, True, False), (4, True, True)]
)
def test_ranks_equal_one_process_with_the_whole_batch(size, uneven, wrapped):
    expected = alone_kfc({})
    found = run_ranks(distributed_kfc, size, size, {}, uneven, wrapped)
    assert (expected["norms"][1:] > KFC_OPTIONS["fisher_clip"]).any()  # so it did clip
    for result in found:
        assert_same(result, expected)
        assert all(torch.equal(result[name], found[0][name]) for name in result)
