"""What several ranks must agree on, and what they say when they do not."""

import math
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kfc
from kfc.distributed.workers import WorkerError
from ranks import run_ranks
from test_distributed import KFC_OPTIONS, assert_same, batches, network, pieces, remains

PLACEMENTS = ("shared", "replicated", "gradients")


def step(optimizer, run, images, labels, weight=1.0):
    optimizer.zero_grad()
    (weight * F.cross_entropy(run(images), labels)).backward()
    return optimizer.step()


# Traffic


def traffic_by_placement(rank, size):
    found = {}
    for placement in PLACEMENTS:
        for curvature in ("kfc", "ekfac"):
            run = DistributedDataParallel(network())
            options = {**KFC_OPTIONS, "inverse_placement": placement, "curvature": curvature}
            optimizer = kfc.KFC(run, **options)
            where, weight = pieces(rank, size)
            sent = []
            for images, labels in batches(4):
                expected = optimizer.diagnostics["ranks"]["expected"]
                step(optimizer, run, images[where], labels[where], weight)
                sent.append((expected, optimizer.diagnostics["ranks"]["sent"]))
            found[placement, curvature] = sent
            optimizer.close()
    return found


def test_traffic_is_what_was_predicted():
    for found in run_ranks(traffic_by_placement, 2, 2):
        for (placement, _), sent in found.items():
            total = dict.fromkeys(("statistics", "inverses", "natural gradients"), 0)
            for index, (expected, so_far) in enumerate(sent, start=1):
                if index in (1, 2, 4):  # statistics_period=2
                    total["statistics"] += expected["statistics"]
                if index in (1, 3):  # inverse_period=3
                    total["inverses"] += expected["inverses"]
                total["natural gradients"] += expected["natural gradients"]
                assert {about: so_far.get(about, 0) for about in total} == total
            if placement == "replicated":
                assert total["inverses"] == total["natural gradients"] == 0
    # By hand: Ω and Γ of the convolutions and the linear layer, blocks of the normalisation; a
    # weight and a flag for each of them, the number of examples, and a flag for each rank.
    triangles = [19, 4, 18, 18, 2, 2, 17, 3, *4 * [2]]
    numbers = sum(n * (n + 1) // 2 for n in triangles) + 2 * 7 + 1 + 2
    assert sent[0][0]["statistics"] > 0
    (expected, _), *_ = found["shared", "kfc"]
    assert expected["statistics"] == 8 * numbers


# Targets


def drawn_targets(rank, size):
    seen = []

    class Spy(kfc.Categorical):
        def term_sample(self, outputs, generator):
            drawn = super().term_sample(outputs, generator)
            seen.append(drawn.argmax(1))
            return drawn

    torch.manual_seed(0)
    model = nn.Linear(3, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    run = DistributedDataParallel(model)
    optimizer = kfc.KFC(run, likelihood=Spy(), lr=1e-9, seed=rank, fisher_clip=None)
    for _ in range(2):
        step(optimizer, run, torch.ones(50, 3), torch.zeros(50, dtype=torch.long))
    return torch.stack(seen), optimizer.state_dict()["preconditioner"]["generator"]


def test_ranks_draw_different_targets_with_generators_that_stay_alike():
    (first, state), (second, other_state) = run_ranks(drawn_targets, 2, 2)
    # Of uniform draws from ten classes, a tenth agree.
    for one, other in [(first, second), (first[:1], first[1:])]:
        assert (one == other).double().mean() < 0.3
    assert state["seed"] == other_state["seed"]
    assert torch.equal(state["state"], other_state["state"])


# Bits


def bits_in_single_precision(rank, size):
    results = {}
    for placement in PLACEMENTS:
        run = DistributedDataParallel(network().float())
        options = {**KFC_OPTIONS, "fisher": "sampled", "inverse_placement": placement}
        optimizer = kfc.KFC(run, **options, consistency_period=1)
        where, weight = pieces(rank, size)
        for images, labels in batches():
            step(optimizer, run, images[where].float(), labels[where], weight)
        results[placement] = remains(optimizer)
    return results


def differing_inverse(rank, size):
    """A bit of the second convolution's factor is another one on rank 1."""
    run = DistributedDataParallel(network())
    optimizer = kfc.KFC(run, **KFC_OPTIONS, consistency_period=4)
    for index, (images, labels) in enumerate(batches(6), start=1):
        if index == 4 and rank == 1:
            optimizer.factors["3"].activation[0, 0, 0] *= 1 + 1e-15
        try:
            step(optimizer, run, images, labels)
        except WorkerError as error:
            return index, str(error)
    return None


def unequal_gradients(rank, size):
    """The model runs by itself, not in its wrapper."""
    model = network()
    optimizer = kfc.KFC(model, **KFC_OPTIONS)
    where, _ = pieces(rank, size)
    images, labels = batches(1)[0]
    with pytest.raises(WorkerError, match=r"gradient of '0.weight' on rank 1.*Distributed"):
        step(optimizer, model, images[where], labels[where])
    return True


def missing_gradients(rank, size):
    model = network()
    optimizer = kfc.KFC(model, **KFC_OPTIONS)
    images, labels = batches(1)[0]
    F.cross_entropy(model(images), labels).backward()
    if rank == 1:
        model[3].weight.grad = None
    with pytest.raises(WorkerError, match=r"gradient of '3.weight' on rank 1"):
        optimizer.step()
    return True


def another_checkpoint(rank, size):
    """Rank 1 goes on from other parameters."""
    run = DistributedDataParallel(network())
    optimizer = kfc.KFC(run, **KFC_OPTIONS)
    images, labels = batches(1)[0]
    step(optimizer, run, images, labels)
    optimizer.load_state_dict(optimizer.state_dict())
    if rank == 1:
        run.module[7].bias.data.mul_(2)
    with pytest.raises(WorkerError, match=r"parameter '7.bias' on rank 1"):
        step(optimizer, run, images, labels)
    return True


def unequal_parameters(rank, size):
    torch.manual_seed(rank)
    model = nn.Linear(72, 3).double()
    optimizer = kfc.KFC(model, **KFC_OPTIONS)
    images, labels = batches(1)[0]
    with pytest.raises(WorkerError, match=r"parameter 'weight' on rank 1.*same seed"):
        step(optimizer, model, images.flatten(1), labels)
    return True


def apart(rank, size):
    """Two models, each trained by one process for itself, in a group that is for something else."""
    torch.manual_seed(rank)
    model = nn.Linear(72, 3).double()
    optimizer = kfc.KFC(model, **KFC_OPTIONS, process_group=None)
    for images, labels in batches(2):
        step(optimizer, model, images.flatten(1)[rank:], labels[rank:])
    return optimizer.diagnostics["ranks"]


def agreements(rank, size):
    return {
        "bits": bits_in_single_precision(rank, size),
        "differing": differing_inverse(rank, size),
        "gradients": unequal_gradients(rank, size),
        "missing": missing_gradients(rank, size),
        "checkpoint": another_checkpoint(rank, size),
        "parameters": unequal_parameters(rank, size),
        "apart": apart(rank, size),
    }


def test_ranks_stay_identical_and_say_where_they_do_not():
    first, second = run_ranks(agreements, 2, 2)
    for placement, results in first["bits"].items():
        others = second["bits"][placement]
        assert all(torch.equal(value, others[name]) for name, value in results.items())
    assert first["differing"] == second["differing"]
    index, message = first["differing"]
    assert index == 4
    assert "statistic 0 of layer '3' on rank 1 is not what it is on rank 0" in message
    assert first["apart"] is None


# Faults


def nan_on_rank_one(rank, size):
    run = DistributedDataParallel(network())
    optimizer = kfc.KFC(run, **KFC_OPTIONS)
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index, (images, labels) in enumerate(batches(3)):
            if index == 1:
                before = [p.detach().clone() for p in run.parameters()]
            weight = math.nan if index == 1 and rank == 1 else 1.0
            step(optimizer, run, images, labels, weight)
            if index == 1:
                unchanged = all(map(torch.equal, before, run.parameters()))
        said += [str(w.message) for w in caught]
        skipped = optimizer.diagnostics["skipped_steps"]
        try:
            for images, labels in batches(20):
                step(optimizer, run, images, labels, math.nan if rank == 1 else 1.0)
        except FloatingPointError as error:
            said.append(str(error))
    return unchanged, skipped, said


def nan_loss_of_kfac(rank, size):
    """Of outputs that are finite."""
    run = DistributedDataParallel(network())
    optimizer = kfc.KFAC(run, model_damping=1.0)
    images, labels = batches(1)[0]
    weight = math.nan if rank == 1 else 1.0
    try:
        optimizer.step(lambda: weight * F.cross_entropy(run(images), labels))
    except FloatingPointError as error:
        return str(error)


def nan_inputs_of_kfac(rank, size):
    run = DistributedDataParallel(network())
    optimizer = kfc.KFAC(run, model_damping=1.0)
    images, labels = batches(1)[0]
    images = images * (math.nan if rank == 1 else 1.0)
    try:
        optimizer.step(lambda: F.cross_entropy(run(images), labels))
    except FloatingPointError as error:
        return str(error)


def bad_estimate(rank, size):
    optimizer = kfc.KFC(DistributedDataParallel(network()), **KFC_OPTIONS)
    inputs = [images for images, _ in batches(3 - rank)]
    if rank == 1:
        inputs[1] = inputs[1] * math.nan
    try:
        optimizer.estimate_factors(inputs)
    except ValueError as error:
        return str(error)


def sharded(rank, size):
    """FSDP2 before and after the optimizer is made, tensor parallelism, and FSDP."""
    # Here, so that the other tests' ranks need not wait for these imports.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    refusals = []
    mesh = init_device_mesh("cpu", (size,))
    before = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), mesh=mesh)
    parallel = parallelize_module(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), mesh, {"1": ColwiseParallel()}
    )
    wrapped = FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"))
    for model in (before, parallel, wrapped):
        try:
            kfc.KFC(model)
        except ValueError as error:
            refusals.append(str(error))
    after = nn.Linear(4, 3)
    optimizer = kfc.KFC(after)
    fully_shard(after, mesh=mesh)
    after(torch.ones(2, 4)).sum().backward()
    try:
        optimizer.step()
    except ValueError as error:
        refusals.append(str(error))
    return refusals


def test_parameters_that_are_spread_over_ranks_are_refused():
    for refusals in run_ranks(sharded, 2, 2):
        assert len(refusals) == 4
        for message in refusals:
            assert "DistributedDataParallel" in message
        assert "'0.weight' is a DTensor" in refusals[0]
        assert "'1.weight' is a DTensor" in refusals[1]


def joined(rank, size):
    run = DistributedDataParallel(network())
    optimizer = kfc.KFC(run, **KFC_OPTIONS)
    images, labels = batches(1)[0]
    with pytest.raises(RuntimeError, match="same number of batches"), run.join():
        step(optimizer, run, images, labels)
    return True


def faults(rank, size):
    return {
        "nan": nan_on_rank_one(rank, size),
        "kfac": nan_inputs_of_kfac(rank, size) + nan_loss_of_kfac(rank, size),
        "estimate": bad_estimate(rank, size),
    }


def test_what_is_not_finite_on_one_rank_is_skipped_by_all_and_named():
    for found in run_ranks(faults, 2, 2):
        unchanged, skipped, (warning, error) = found["nan"]
        assert unchanged
        assert skipped == 1
        assert "step 2 was skipped: rank 1 gave" in warning
        assert "skipped 10 times: rank 1 gave something that is not finite" in error
        assert found["kfac"].count("not finite on rank 1") == 2
        assert found["estimate"] == "batch 1 of rank 1 gave statistics that are not finite"


def too_early(rank, size):
    """The optimizer is made before there is a process group."""
    group = dist.group.WORLD
    with patch.object(dist, "is_initialized", return_value=False):
        model = network()
        optimizer = kfc.KFC(model, **KFC_OPTIONS)
    run = DistributedDataParallel(model, process_group=group)
    images, labels = batches(1)[0]
    with pytest.raises(RuntimeError, match="initialised after the optimizer was made"):
        step(optimizer, run, images, labels)
    return joined(rank, size)


def test_what_ranks_cannot_train_by_is_refused():
    assert run_ranks(too_early, 2, 2) == [True, True]


# What is not the same on all ranks, and may be


class Skipping(nn.Module):
    """A layer that only batches with a positive first number run through."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.always = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, inputs):
        hidden = self.always(inputs).tanh()
        if inputs[0, 0] > 0:
            hidden = hidden + self.sometimes(hidden).tanh()
        return self.last(hidden)


def skipped_layers(rank, size):
    """On rank 1 the middle layer never runs: its factors are rank 0's."""
    model = Skipping().double()
    run = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = kfc.KFC(run, **{**KFC_OPTIONS, "fisher_clip": None})
    inputs, labels = skipping_batch(rank)
    for _ in range(2):
        step(optimizer, run, inputs, labels)
    return remains(optimizer)


def skipping_batch(rank):
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    inputs[0, 0] = 1.0 if rank == 0 else -1.0
    return inputs, torch.arange(6) % 3


def freezing(rank, size, worker):
    """Layers, and parts of them, come to be frozen; also while their inverses are in the making."""
    run = DistributedDataParallel(network(), find_unused_parameters=True)
    options = {**KFC_OPTIONS, "inverse_placement": "shared", "statistics_period": 1}
    optimizer = kfc.KFC(run, **options, inverse_worker=worker, max_staleness=1)
    for index, (images, labels) in enumerate(batches(8)):
        run.module[0].bias.requires_grad_(index < 3)
        run.module[3].requires_grad_(index < 2 or index > 5)
        step(optimizer, run, images, labels)
    return remains(optimizer)


def traffic_of_unused_layers(rank, size):
    """Bytes of statistics in a step in which none are due, but a layer has never run."""
    model = Skipping().double()
    run = DistributedDataParallel(model, find_unused_parameters=True)
    options = {**KFC_OPTIONS, "fisher_clip": None, "statistics_period": 100}
    optimizer = kfc.KFC(run, **options)
    inputs, labels = skipping_batch(1)
    sent = []
    for _ in range(2):
        step(optimizer, run, inputs, labels)
        sent.append(optimizer.diagnostics["ranks"]["sent"]["statistics"])
    return sent


def periods_within_a_budget(rank, size):
    run = DistributedDataParallel(network())
    optimizer = kfc.KFC(run, lr=0.01, overhead=0.5)
    for images, labels in batches(8):
        step(optimizer, run, images, labels)
    return optimizer.diagnostics["periods"]


def inverses_beside_training(rank, size, staleness):
    run = DistributedDataParallel(network())
    worker = {"inverse_worker": "thread", "max_staleness": staleness}
    optimizer = kfc.KFC(run, **KFC_OPTIONS, **worker, inverse_placement="shared")
    where, weight = pieces(rank, size)
    for images, labels in batches():
        step(optimizer, run, images[where], labels[where], weight)
    return remains(optimizer)


def in_the_step(rank, size):
    run = DistributedDataParallel(network())
    optimizer = kfc.KFC(run, **KFC_OPTIONS)
    where, weight = pieces(rank, size)
    for images, labels in batches():
        step(optimizer, run, images[where], labels[where], weight)
    return remains(optimizer)


def differences(rank, size):
    return {
        "skipped layers": skipped_layers(rank, size),
        "periods": periods_within_a_budget(rank, size),
        "at once": inverses_beside_training(rank, size, 0),
        "late": inverses_beside_training(rank, size, 2),
        "in the step": in_the_step(rank, size),
        "freezing": freezing(rank, size, None),
        "freezing beside": freezing(rank, size, "thread"),
        "unused": traffic_of_unused_layers(rank, size),
    }


def test_ranks_need_not_do_the_same_at_the_same_time():
    first, second = run_ranks(differences, 2, 2)
    for name in ("skipped layers", "at once", "late", "freezing", "freezing beside"):
        assert all(map(torch.equal, first[name].values(), second[name].values())), name
    assert first["periods"] == second["periods"]
    assert first["unused"][0] == first["unused"][1]
    assert_same(first["at once"], first["in the step"])
    late, at_once = first["late"]["0.weight"], first["at once"]["0.weight"]
    assert not torch.equal(late, at_once)
    alone = kfc.KFC(Skipping().double(), **{**KFC_OPTIONS, "fisher_clip": None})
    inputs, labels = skipping_batch(0)
    step(alone, alone.model, inputs, labels)
    found = first["skipped layers"]["sometimes activation"]
    # Of the first step; the second, whose parameters differ, has a twentieth.
    assert torch.allclose(found, alone.factors["sometimes"].activation, atol=0.1)


# Checkpoints


def save_after_four_steps(rank, size, placement):
    run = DistributedDataParallel(network())
    optimizer = kfc.KFC(run, **KFC_OPTIONS, inverse_placement=placement)
    where, weight = pieces(rank, size)
    for images, labels in batches(4):
        step(optimizer, run, images[where], labels[where], weight)
    return run.module.state_dict(), optimizer.state_dict()


def resume(rank, size, model_state, state):
    model = network()
    model.load_state_dict(model_state)
    run = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = kfc.KFC(run, **KFC_OPTIONS)
    optimizer.load_state_dict(state)
    loaded = optimizer.state_dict()
    where, weight = pieces(rank, size)
    for images, labels in batches()[4:]:
        step(optimizer, run, images[where], labels[where], weight)
    return loaded, remains(optimizer)


@pytest.mark.parametrize("placement", ["shared", "gradients"])
def test_a_checkpoint_of_two_ranks_is_one_for_any_number(placement):
    (saved, _) = run_ranks(save_after_four_steps, 2, 2, placement)
    alone, after = resume(0, 1, *saved)
    for loaded, result in run_ranks(resume, 4, 4, *saved):
        for name, entry in saved[1]["preconditioner"]["curvature"]["layers"].items():
            for number_of_ranks in (alone, loaded):
                found = number_of_ranks["preconditioner"]["curvature"]["layers"][name]
                assert all(map(torch.equal, found["running"], entry["running"]))
                assert found["inverse"].keys() == entry["inverse"].keys()
        assert_same(result, after)
