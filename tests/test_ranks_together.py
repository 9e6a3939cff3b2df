"""What ranks must agree on, and the errors if they do not."""

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
from kfc.distributed.ranks import CollectiveError
from ranks import run_ranks
from test_distributed import (
    EXACT,
    KFC_OPTIONS,
    assert_same,
    batches,
    network,
    on,
    pieces,
    remains,
)

PLACEMENTS = ("shared", "replicated", "gradients")


def step(optimizer, run, images, labels, weight=1.0):
    optimizer.zero_grad()
    (weight * F.cross_entropy(run(images), labels)).backward()
    return optimizer.step()


# Traffic


def traffic_by_placement(rank, size):
    found = {}
    for placement in PLACEMENTS:
        for name, curvature in (("kfc", EXACT), ("ekfac", kfc.EKFAC(fisher="exact"))):
            run = DistributedDataParallel(network())
            optimizer = kfc.KFC(run, **KFC_OPTIONS | {"curvature": curvature}, **on(placement))
            where, weight = pieces(rank, size)
            sent = []
            for images, labels in batches(4):
                expected = optimizer.diagnostics["ranks"]["expected"]
                step(optimizer, run, images[where], labels[where], weight)
                sent.append((expected, optimizer.diagnostics["ranks"]["sent"]))
            found[placement, name] = sent
            optimizer.close()
    return found


def test_traffic_is_what_was_predicted():
    for found in run_ranks(traffic_by_placement, 2, 2):
        for (placement, _), sent in found.items():
            total = dict.fromkeys(("statistics", "inverses", "natural gradients"), 0)
            for index, (expected, so_far) in enumerate(sent, start=1):
                if index in (1, 2, 4):  # the period of statistics is 2
                    total["statistics"] += expected["statistics"]
                if index in (1, 3):  # the period of inverses is 3
                    total["inverses"] += expected["inverses"]
                total["natural gradients"] += expected["natural gradients"]
                assert {about: so_far.get(about, 0) for about in total} == total
            if placement == "replicated":
                assert total["inverses"] == total["natural gradients"] == 0
    # Computed by hand: Ω and Γ of the convolutions and the linear layer, blocks of the
    # normalisation; a weight and a flag for each, the number of examples, a flag for each rank.
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
    every_step = kfc.Periods(1, 1)
    optimizer = kfc.KFC(run, likelihood=Spy(), lr=1e-9, seed=rank, clip=None, schedule=every_step)
    for _ in range(2):
        step(optimizer, run, torch.ones(50, 3), torch.zeros(50, dtype=torch.long))
    return torch.stack(seen), optimizer.state_dict()["curvature"]["generator"]


def test_ranks_draw_different_targets_with_generators_in_the_same_state():
    (first, state), (second, other_state) = run_ranks(drawn_targets, 2, 2)
    # A tenth of uniform draws from ten classes agree.
    for one, other in [(first, second), (first[:1], first[1:])]:
        assert (one == other).double().mean() < 0.3
    assert state["seed"] == other_state["seed"]
    assert torch.equal(state["state"], other_state["state"])


# Bits


def bits_in_single_precision(rank, size):
    results = {}
    for placement in PLACEMENTS:
        run = DistributedDataParallel(network().float())
        parallel = kfc.Parallel(placement=placement, consistency_period=1)
        optimizer = kfc.KFC(run, **KFC_OPTIONS | {"curvature": "kfc"}, parallel=parallel)
        where, weight = pieces(rank, size)
        for images, labels in batches():
            step(optimizer, run, images[where].float(), labels[where], weight)
        results[placement] = remains(optimizer)
    return results


def differing_inverse(rank, size):
    """Change the last bit of a factor of the second convolution on rank 1."""
    run = DistributedDataParallel(network())
    optimizer = kfc.KFC(run, **KFC_OPTIONS, parallel=kfc.Parallel(consistency_period=4))
    for index, (images, labels) in enumerate(batches(6), start=1):
        if index == 4 and rank == 1:
            optimizer.factors["3"].activation[0, 0, 0] *= 1 + 1e-15
        try:
            step(optimizer, run, images, labels)
        except CollectiveError as error:
            return index, str(error)
    return None


def independent_outputs(rank, size):
    """Train with binary cross-entropy; in the first step, rank 1 has no targets."""
    run = DistributedDataParallel(network())
    optimizer = kfc.WhitenedAdam(run, rotation_period=2)
    where, _ = pieces(rank, size)
    for index, (images, labels) in enumerate(batches(3)):
        optimizer.zero_grad()
        outputs = run(images[where])
        targets = F.one_hot(labels[where], outputs.shape[1]).to(outputs)
        weight = 0.0 if index == 0 and rank == 1 else 1.0
        (weight * F.binary_cross_entropy_with_logits(outputs, targets)).backward()
        optimizer.step()
    rotated = [name for name, p in run.module.named_parameters() if "basis" in optimizer.state[p]]
    return rotated, [p.tolist() for p in run.parameters()]


def test_ranks_agree_on_the_layer_of_independent_outputs():
    one, two = run_ranks(independent_outputs, 2, 2)
    assert one == two
    weights = [name for name, parameter in network().named_parameters() if parameter.dim() > 1]
    assert one[0] == weights[:-1]


def unequal_gradients(rank, size):
    """Run the model without DistributedDataParallel."""
    model = network()
    optimizer = kfc.KFC(model, **KFC_OPTIONS)
    where, _ = pieces(rank, size)
    images, labels = batches(1)[0]
    with pytest.raises(CollectiveError, match=r"gradient of '0.weight' on rank 1.*Distributed"):
        step(optimizer, model, images[where], labels[where])
    return True


def missing_gradients(rank, size):
    model = network()
    optimizer = kfc.KFC(model, **KFC_OPTIONS)
    images, labels = batches(1)[0]
    F.cross_entropy(model(images), labels).backward()
    if rank == 1:
        model[3].weight.grad = None
    with pytest.raises(CollectiveError, match=r"gradient of '3.weight' on rank 1"):
        optimizer.step()
    return True


def another_checkpoint(rank, size):
    """Resume on rank 1 with other parameters."""
    run = DistributedDataParallel(network())
    optimizer = kfc.KFC(run, **KFC_OPTIONS)
    images, labels = batches(1)[0]
    step(optimizer, run, images, labels)
    optimizer.load_state_dict(optimizer.state_dict())
    if rank == 1:
        run.module[7].bias.data.mul_(2)
    with pytest.raises(CollectiveError, match=r"parameter '7.bias' on rank 1"):
        step(optimizer, run, images, labels)
    return True


def unequal_parameters(rank, size):
    torch.manual_seed(rank)
    model = nn.Linear(72, 3).double()
    optimizer = kfc.KFC(model, **KFC_OPTIONS)
    images, labels = batches(1)[0]
    with pytest.raises(CollectiveError, match=r"parameter 'weight' on rank 1.*same seed"):
        step(optimizer, model, images.flatten(1), labels)
    return True


def apart(rank, size):
    """Train two models independently, in spite of the process group."""
    torch.manual_seed(rank)
    model = nn.Linear(72, 3).double()
    optimizer = kfc.KFC(model, **KFC_OPTIONS, parallel=kfc.Parallel(group=None))
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


def test_ranks_stay_identical_or_raise_an_error_that_names_the_difference():
    first, second = run_ranks(agreements, 2, 2)
    for placement, results in first["bits"].items():
        others = second["bits"][placement]
        assert all(torch.equal(value, others[name]) for name, value in results.items())
    assert first["differing"] == second["differing"]
    index, message = first["differing"]
    assert index == 4
    assert "statistic 0 of layer '3' on rank 1 differs from rank 0's" in message
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
    """Make the loss NaN although the outputs are finite."""
    run = DistributedDataParallel(network())
    optimizer = kfc.KFAC(run, adaptation=kfc.Adaptation(model_damping=1.0))
    images, labels = batches(1)[0]
    weight = math.nan if rank == 1 else 1.0
    try:
        optimizer.step(lambda: weight * F.cross_entropy(run(images), labels))
    except FloatingPointError as error:
        return str(error)


def nan_inputs_of_kfac(rank, size):
    run = DistributedDataParallel(network())
    optimizer = kfc.KFAC(run, adaptation=kfc.Adaptation(model_damping=1.0))
    images, labels = batches(1)[0]
    images = images * (math.nan if rank == 1 else 1.0)
    try:
        optimizer.step(lambda: F.cross_entropy(run(images), labels))
    except FloatingPointError as error:
        return str(error)


def bad_estimate(rank, size):
    optimizer = kfc.KFC(DistributedDataParallel(network()), **KFC_OPTIONS)
    data = batches(3 - rank)
    if rank == 1:
        data[1] = data[1][0] * math.nan, data[1][1]
    try:
        optimizer.estimate_factors(data, lambda out, batch: F.cross_entropy(out, batch[1]))
    except ValueError as error:
        return str(error)


def sharded(rank, size):
    """Use FSDP2 before and after the optimizer is created, tensor parallelism, and FSDP."""
    # Imported here, because it takes long.
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


def test_sharded_parameters_are_refused():
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
        assert "skipped 10 times: rank 1 gave values that are not finite" in error
        assert found["kfac"].count("not finite on rank 1") == 2
        assert found["estimate"] == "batch 1 on rank 1 gave statistics that are not finite"


def too_early(rank, size):
    """Create the optimizer before there is a process group."""
    group = dist.group.WORLD
    with patch.object(dist, "is_initialized", return_value=False):
        model = network()
        optimizer = kfc.KFC(model, **KFC_OPTIONS)
    run = DistributedDataParallel(model, process_group=group)
    images, labels = batches(1)[0]
    with pytest.raises(RuntimeError, match="initialised after the optimizer"):
        step(optimizer, run, images, labels)
    return joined(rank, size)


def test_unsupported_uses_are_refused():
    assert run_ranks(too_early, 2, 2) == [True, True]


# Permitted differences between ranks


class Skipping(nn.Module):
    """A network with a layer that only runs if the batch's first number is positive."""

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
    """Never run the middle layer on rank 1, where its factors are those of rank 0."""
    model = Skipping().double()
    run = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = kfc.KFC(run, **KFC_OPTIONS | {"clip": None})
    inputs, labels = skipping_batch(rank)
    for _ in range(2):
        step(optimizer, run, inputs, labels)
    return remains(optimizer)


def skipping_batch(rank):
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    inputs[0, 0] = 1.0 if rank == 0 else -1.0
    return inputs, torch.arange(6) % 3


def freezing(rank, size, parallel):
    """Freeze layers and parts of them, also while their inverses are being computed."""
    run = DistributedDataParallel(network(), find_unused_parameters=True)
    options = KFC_OPTIONS | {"schedule": kfc.Periods(1, 3)}
    optimizer = kfc.KFC(run, **options, parallel=parallel)
    for index, (images, labels) in enumerate(batches(8)):
        run.module[0].bias.requires_grad_(index < 3)
        run.module[3].requires_grad_(index < 2 or index > 5)
        step(optimizer, run, images, labels)
    return remains(optimizer)


def traffic_of_unused_layers(rank, size):
    """Return the bytes of statistics in a step where none are due, but a layer never ran."""
    model = Skipping().double()
    run = DistributedDataParallel(model, find_unused_parameters=True)
    options = KFC_OPTIONS | {"clip": None, "schedule": kfc.Periods(100, 3)}
    optimizer = kfc.KFC(run, **options)
    inputs, labels = skipping_batch(1)
    sent = []
    for _ in range(2):
        step(optimizer, run, inputs, labels)
        sent.append(optimizer.diagnostics["ranks"]["sent"]["statistics"])
    return sent


def in_thread(staleness):
    return kfc.Parallel(placement="shared", asynchronous=True, max_staleness=staleness)


def periods_within_a_budget(rank, size):
    run = DistributedDataParallel(network())
    optimizer = kfc.KFC(run, lr=0.01, schedule=kfc.Budget(0.5))
    for images, labels in batches(8):
        step(optimizer, run, images, labels)
    return optimizer.diagnostics["periods"]


def asynchronous_inverses(rank, size, staleness):
    run = DistributedDataParallel(network())
    optimizer = kfc.KFC(run, **KFC_OPTIONS, parallel=in_thread(staleness))
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
        "at once": asynchronous_inverses(rank, size, 0),
        "late": asynchronous_inverses(rank, size, 2),
        "in the step": in_the_step(rank, size),
        "freezing": freezing(rank, size, kfc.Parallel(placement="shared")),
        "freezing asynchronously": freezing(rank, size, in_thread(1)),
        "unused": traffic_of_unused_layers(rank, size),
    }


def test_ranks_may_differ_in_what_runs_and_when():
    first, second = run_ranks(differences, 2, 2)
    for name in ("skipped layers", "at once", "late", "freezing", "freezing asynchronously"):
        assert all(map(torch.equal, first[name].values(), second[name].values())), name
    assert first["periods"] == second["periods"]
    assert first["unused"][0] == first["unused"][1]
    assert_same(first["at once"], first["in the step"])
    late, at_once = first["late"]["0.weight"], first["at once"]["0.weight"]
    assert not torch.equal(late, at_once)
    alone = kfc.KFC(Skipping().double(), **KFC_OPTIONS | {"clip": None})
    inputs, labels = skipping_batch(0)
    step(alone, alone.model, inputs, labels)
    found = first["skipped layers"]["sometimes activation"]
    # The factor of the first step; that of the second has a weight of a twentieth.
    assert torch.allclose(found, alone.factors["sometimes"].activation, atol=0.1)


# Checkpoints


def save_after_four_steps(rank, size, placement):
    run = DistributedDataParallel(network())
    optimizer = kfc.KFC(run, **KFC_OPTIONS, **on(placement))
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
def test_a_checkpoint_of_two_ranks_loads_on_any_number(placement):
    (saved, _) = run_ranks(save_after_four_steps, 2, 2, placement)
    alone, after = resume(0, 1, *saved)
    for loaded, result in run_ranks(resume, 4, 4, *saved):
        for name, entry in saved[1]["curvature"]["curvature"]["layers"].items():
            for number_of_ranks in (alone, loaded):
                found = number_of_ranks["curvature"]["curvature"]["layers"][name]
                assert all(map(torch.equal, found["running"], entry["running"]))
                assert found["inverse"].keys() == entry["inverse"].keys()
        assert_same(result, after)
