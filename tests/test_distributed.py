"""Ranks that share each batch do what one process with the whole batch does (float64)."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kfc
from ranks import run_ranks

STEPS = 10
# For scenarios that differ from those in one respect only.
FEW = 4


def network() -> nn.Sequential:
    """Return a network of several kinds of layers; its normalisation does not mix examples."""
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
    """Return the same batches of 12 examples on every call."""
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(12, 2, 6, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (12,), generator=generator),
        )
        for _ in range(steps)
    ]


def split(length: int, size: int, *, uneven: bool) -> list[slice]:
    """Return each rank's part of a batch; if uneven, of 1, 2, ... examples and the rest."""
    if not uneven:
        width = length // size
        return [slice(r * width, (r + 1) * width) for r in range(size)]
    ends = [sum(range(1, r + 2)) for r in range(size - 1)]
    return [slice(a, b) for a, b in zip([0, *ends], [*ends, length], strict=True)]


KFC_OPTIONS = {
    "lr": 0.05,
    "weight_decay": 1e-3,
    "damping": 1e-2,
    "clip": kfc.FisherClip(0.01, fraction=1, loss_bound=0.02),
    "averaging_timescale": 4,
    "curvature": kfc.Kronecker(fisher="exact"),
    "schedule": kfc.Periods(2, 3),
}


def pieces(rank: int, size: int, *, uneven: bool = False) -> tuple[slice, float]:
    """Return a rank's part of a batch and the weight of its loss.

    The mean of the weighted losses over ranks is the loss on the whole batch.
    """
    where = split(12, size, uneven=uneven)[rank]
    return where, size * (where.stop - where.start) / 12


WHOLE = slice(None), 1.0


def remains(optimizer, **more):
    """Return all that training has changed."""
    model = optimizer.model
    result = {name: p.detach().clone() for name, p in model.named_parameters()}
    result |= {f"{name} Ω": factor for name, factor in optimizer.activation_factors.items()}
    for name, factors in optimizer.factors.items():
        result |= {f"{name} {key}": value for key, value in factors._asdict().items()}
    result |= {f"block {name}": block for name, block in optimizer.blocks.items()}
    optimizer.close()
    return {**result, **{n: torch.tensor(v, dtype=torch.float64) for n, v in more.items()}}


def trained_by_kfc(given, run, part, options, steps=STEPS):
    """
    Args:
        given: the model that the optimizer is given.
        run: the model that is run.
    """
    (where, weight) = part
    optimizer = kfc.KFC(given, **{**KFC_OPTIONS, **options})
    norms, bounds = [], []
    for images, labels in batches(steps):
        optimizer.zero_grad()
        (weight * F.cross_entropy(run(images[where]), labels[where])).backward()
        optimizer.step()
        last = optimizer.step_diagnostics
        norms.append(last["fisher_norm"])
        bounds.append(last["loss_bound_factor"])
    assert min(bounds) < 1
    with optimizer.averaged_parameters():
        averages = {f"averaged {n}": p.tolist() for n, p in optimizer.model.named_parameters()}
    return remains(optimizer, norms=norms, bounds=bounds, **averages)


EXACT = kfc.Kronecker(fisher="exact")
ADAPTATION = kfc.Adaptation(initial_model_damping=1.0, factor_damping_period=3)


def trained_by_kfac(given, run, part, options, steps=STEPS):
    (where, weight) = part
    optimizer = kfc.KFAC(given, adaptation=ADAPTATION, **{"curvature": EXACT, **options})
    chosen = []
    for images, labels in batches(steps):
        optimizer.step(lambda x=images, y=labels: weight * F.cross_entropy(run(x[where]), y[where]))
        last = optimizer.step_diagnostics
        chosen.append([last["lr"], last["momentum"], last["model_damping"], last["factor_damping"]])
    return remains(optimizer, chosen=chosen)


def trained_by_sgd(given, run, part, options, steps=STEPS):
    (where, weight) = part
    preconditioner = kfc.Preconditioner(given, damping=0.1, curvature=EXACT, **options)
    optimizer = torch.optim.SGD(run.parameters(), lr=0.05)
    for images, labels in batches(steps):
        optimizer.zero_grad()
        (weight * F.cross_entropy(run(images[where]), labels[where])).backward()
        assert preconditioner.step()
        optimizer.step()
    return remains(preconditioner)


def backward_in_two_passes(run, images, labels, weight):
    """Run a rank's part in two passes, the first of which only accumulates gradients."""
    waits = run.no_sync() if isinstance(run, DistributedDataParallel) else nullcontext()
    with waits:
        (weight / 2 * F.cross_entropy(run(images[::2]), labels[::2])).backward()
    (weight / 2 * F.cross_entropy(run(images[1::2]), labels[1::2])).backward()


def trained_in_micro_batches(given, run, part, options, steps=STEPS):
    (where, weight) = part
    optimizer = kfc.KFC(given, **{**KFC_OPTIONS, "clip": None, **options})
    for images, labels in batches(steps):
        optimizer.zero_grad()
        backward_in_two_passes(run, images[where], labels[where], weight)
        optimizer.step()
    return remains(optimizer)


def trained_by_whitened_adam(given, run, part, options, steps=STEPS):
    (where, weight) = part
    options = {"schedule": kfc.Periods(2, 3), **options}
    # The sum of the last layer's gradients over classes is a rounding error, which a small eps
    # would not suppress.
    optimizer = kfc.WhitenedAdam(given, eps=1e-6, weight_decay=0.1, rotation_period=2, **options)
    for images, labels in batches(steps):
        optimizer.zero_grad()
        backward_in_two_passes(run, images[where], labels[where], weight)
        optimizer.step()
    with optimizer.averaged_parameters():
        averages = {f"averaged {n}": p.tolist() for n, p in optimizer.model.named_parameters()}
    return remains(optimizer, **averages)


class HalvedSum(kfc.Categorical):
    """Likelihood of the mean over two ranks of their summed losses."""

    def __init__(self):
        super().__init__(reduction="sum")

    def term_weight(self, outputs, examples=None):
        return 0.5


def trained_on_sums(given, run, part, options, steps=STEPS):
    (where, _) = part
    two_ranks = isinstance(run, DistributedDataParallel)
    likelihood = kfc.Categorical(reduction="sum") if two_ranks else HalvedSum()
    optimizer = kfc.KFC(given, **{**KFC_OPTIONS, "likelihood": likelihood, **options})
    for images, labels in batches(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(run(images[where]), labels[where], reduction="sum")
        (loss if two_ranks else loss / 2).backward()
        optimizer.step()
    return remains(optimizer)


def trained_after_estimate(given, run, part, options, steps=STEPS):
    """Estimate the factors from a data set, which is split between ranks too, before training.

    The factors then have full rank, without which EKFAC's eigenbasis is not unique.
    """
    (where, weight) = part
    optimizer = kfc.KFC(given, **{**KFC_OPTIONS, **options})
    data = [(images[where], labels[where]) for images, labels in batches(3)]
    optimizer.estimate_factors(data, lambda out, batch: F.cross_entropy(out, batch[1]))
    estimated = {f"estimated {n}": f.activation.tolist() for n, f in optimizer.factors.items()}
    for images, labels in batches(steps):
        optimizer.zero_grad()
        (weight * F.cross_entropy(run(images[where]), labels[where])).backward()
        optimizer.step()
    return remains(optimizer, **estimated)


def on(placement):
    return {"parallel": kfc.Parallel(placement=placement)}


# What two ranks must do as one process does: by name, the function and its options.
SCENARIOS = {
    "replicated": (trained_by_kfc, on("replicated")),
    "auto": (trained_by_kfc, on("auto")),
    **{
        f"{placement} {name}".rstrip(): (trained_by_kfc, {**on(placement), "curvature": curvature})
        for placement in ("shared", "gradients")
        for name, curvature in {
            "": EXACT,
            "eigen": kfc.Kronecker(fisher="exact", inverse="eigen"),
            "sua": kfc.SUA(fisher="exact"),
            "prong": kfc.PRONG(fisher="exact"),
            "diagonal": kfc.Diagonal(fisher="exact"),
        }.items()
    },
    "wide factors": (
        trained_by_kfc,
        {**on("shared"), "curvature": kfc.Kronecker(fisher="exact", max_factor_size=10)},
    ),
    "empirical": (
        trained_by_kfc,
        {**on("shared"), "curvature": kfc.Kronecker(fisher="empirical")},
    ),
    "kfac": (trained_by_kfac, on("shared")),
    "kfac gradients": (trained_by_kfac, on("gradients")),
    "kfac eigen": (
        trained_by_kfac,
        {**on("gradients"), "curvature": kfc.Kronecker(fisher="exact", inverse="eigen")},
    ),
    "preconditioner": (trained_by_sgd, on("gradients")),
    "micro-batches": (trained_in_micro_batches, {}),
    "sums": (trained_on_sums, {}),
    "estimate": (trained_after_estimate, on("shared")),
    "whitened": (trained_by_whitened_adam, on("auto")),
    **{
        f"whitened {placement}": (trained_by_whitened_adam, on(placement))
        for placement in ("replicated", "shared", "gradients")
    },
    "whitened, wide factors": (
        trained_by_whitened_adam,
        {**on("gradients"), "whitening": kfc.Whitening(max_factor_size=10)},
    ),
    **{
        f"whitened, blocks, {placement}": (
            trained_by_whitened_adam,
            {**on(placement), "whitening": kfc.Whitening(block_size=9)},
        )
        for placement in ("replicated", "shared", "gradients")
    },
    **{
        f"ekfac {placement}": (
            trained_after_estimate,
            {**on(placement), "curvature": kfc.EKFAC(fisher="exact")},
        )
        for placement in ("shared", "gradients")
    },
}

# Scenarios of ten steps.
ALL_STEPS = ("shared", "replicated", "gradients", "auto", "kfac", "whitened")


def steps_of(name):
    return STEPS if name in ALL_STEPS else FEW


def all_scenarios(rank, size):
    results = {}
    for name, (train, options) in SCENARIOS.items():
        model = network()
        wrapper = DistributedDataParallel(model)
        part = pieces(rank, size)
        results[name] = train(wrapper, wrapper, part, options, steps_of(name))
    return results


def test_two_ranks_do_what_one_process_does():
    found = run_ranks(all_scenarios, 2, 2, timeout=120)
    for name, (train, options) in SCENARIOS.items():
        model = network()
        expected = train(model, model, WHOLE, options, steps_of(name))
        first, second = (results[name] for results in found)
        assert_same(first, expected, name)
        assert all(torch.equal(first[key], second[key]) for key in first), name


def uneven_kfc(rank, size, wrapped):
    model = network()
    wrapper = DistributedDataParallel(model)
    part = pieces(rank, size, uneven=True)
    return trained_by_kfc(wrapper if wrapped else model, wrapper, part, {})


@pytest.mark.parametrize(("size", "wrapped"), [(3, False), (4, True)])
def test_more_ranks_with_uneven_parts_do_what_one_process_does(size, wrapped):
    model = network()
    expected = trained_by_kfc(model, model, WHOLE, {})
    assert (expected["norms"] > KFC_OPTIONS["clip"].limit).any(), "some updates are clipped"
    for result in run_ranks(uneven_kfc, size, size, wrapped):
        assert_same(result, expected)


def assert_same(found, expected, what="", tolerance=1e-10):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = (found[name] - value).abs() / value.abs().clamp_min(1)
        assert difference.max() <= tolerance, f"{what}: {name} differs by {difference.max()}"
