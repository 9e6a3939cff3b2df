"""SyncBatchNorm: several processes against one with plain BatchNorm on the whole batch (float64).

torch's own SyncBatchNorm refuses CPU tensors where there is a process group, and so does
DistributedDataParallel with it. So every rank here gives the class another forward, which does the
same by sums over ranks that can be differentiated backward and, as with torch's own, not forward.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

import kfc
from kfc.statistics import columns
from ranks import run_ranks
from test_distributed import (
    EXACT,
    KFC_OPTIONS,
    WHOLE,
    assert_same,
    batches,
    pieces,
    trained_by_kfc,
)


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, derivatives):
        return AllReduce.apply(derivatives)


def forward_on_cpu(self: nn.SyncBatchNorm, inputs: Tensor) -> Tensor:
    if not self.training:
        return _BatchNorm.forward(self, inputs)
    others = [0, *range(2, inputs.dim())]
    count = torch.tensor([inputs.numel() / inputs.shape[1]], dtype=inputs.dtype)
    sums = AllReduce.apply(torch.cat([inputs.sum(others), inputs.square().sum(others), count]))
    mean, square = (sums[:-1] / sums[-1]).chunk(2)
    variance, count = square - mean**2, sums[-1]
    with torch.no_grad():
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        self.num_batches_tracked += 1
    shape = (-1, *[1] * (inputs.dim() - 2))
    mean, variance, weight, bias = (
        values.reshape(shape) for values in (mean, variance, self.weight, self.bias)
    )
    return (inputs - mean) / (variance + self.eps).sqrt() * weight + bias


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.BatchNorm1d(6),
        nn.Tanh(),
        nn.Linear(6, 3),
    ).double()


def synchronised_network() -> nn.Module:
    """In the process of a rank, whose torch it changes."""
    nn.SyncBatchNorm.forward = forward_on_cpu
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda self, module: None
    return nn.SyncBatchNorm.convert_sync_batchnorm(network())


class MostLikely(kfc.fisher.likelihoods.Categorical):
    """Draws the likeliest class: what is drawn does not depend on who draws."""

    def term_sample(self, outputs, generator):
        return F.one_hot(outputs.argmax(1), outputs.shape[1]) - outputs.softmax(1)


def trained(model, run, part, options, steps=10):
    # Not often: the exact Fisher takes 36 backward passes, in each of which the ranks meet.
    result = trained_by_kfc(model, run, part, {"schedule": kfc.Periods(4, 3), **options}, steps)
    return result | {name: buffer.clone() for name, buffer in model.named_buffers()}


def trained_by_ranks(rank, size, options, uneven):
    model = synchronised_network()
    part = pieces(rank, size, uneven=uneven)
    return trained(model, DistributedDataParallel(model), part, options)


@pytest.mark.parametrize(
    ("size", "uneven", "options"),
    [
        (2, False, {}),
        (3, True, {}),
        (4, True, {"curvature": "kfc", "likelihood": MostLikely()}),
    ],
)
def test_ranks_equal_one_process_with_plain_batch_norm(size, uneven, options):
    alone = network()
    expected = trained(alone, alone, WHOLE, options)
    assert (expected["norms"] > KFC_OPTIONS["clip"].limit).any()  # so it did clip
    for found in run_ranks(trained_by_ranks, size, size, options, uneven):
        assert_same(found, expected)


SUM = kfc.Categorical(reduction="sum")


def products(model, images):
    """F v and vᵀ F v."""
    vector = {name: torch.sin(1 + p.detach()) for name, p in model.named_parameters()}
    result = kfc.fisher.vector_product(model, images, vector, likelihood=SUM)
    return result | {"form": kfc.fisher.quadratic_form(model, images, vector, likelihood=SUM)}


def derivative_factors(model, images, labels, **options):
    """Γ of a summed loss."""
    preconditioner = kfc.Preconditioner(model, curvature=EXACT, **options)
    try:
        loss = F.cross_entropy(model(images), labels, reduction="sum")
        # The gradients of the ranks differ, so they are not kept.
        torch.autograd.grad(loss, list(model.parameters()))
        preconditioner.step()
        return {name: factors.derivative for name, factors in preconditioner.factors.items()}
    finally:
        preconditioner.close()


def products_and_factors_by_ranks(rank, size):
    model = synchronised_network()
    images, labels = (each[pieces(rank, size, uneven=True)[0]] for each in batches(1)[0])
    buffers = [buffer.clone() for buffer in model.buffers()]
    parts = products(model, images)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert not any("forward" in vars(module) for module in model.modules())
    factors = derivative_factors(model, images, labels)
    with pytest.raises(ValueError, match=r"pass the ranks' group: parallel=kfc.Parallel\(group="):
        derivative_factors(model, images, labels, parallel=kfc.Parallel(group=None))
    columns.MAX_EXACT_COLUMNS = 35
    with pytest.raises(ValueError, match=r"the 36 columns .* of 3 ranks"):
        derivative_factors(model, images, labels)
    return parts, factors


def test_sums_over_uneven_ranks():
    model, (images, labels) = network(), batches(1)[0]
    found = run_ranks(products_and_factors_by_ranks, 3, 3)
    expected = products(model, images)
    assert_same({name: sum(parts[name] for parts, _ in found) for name in expected}, expected)
    # The loss is the mean over the ranks of their sums.
    expected = derivative_factors(model, images, labels)
    for _, factors in found:
        assert_same(factors, {name: factor / 3 for name, factor in expected.items()})


def test_without_a_group_it_is_batch_norm():
    results = []
    for model in network(), nn.SyncBatchNorm.convert_sync_batchnorm(network()):
        results.append(trained(model, model, WHOLE, {}, steps=3))
    assert_same(*results)
