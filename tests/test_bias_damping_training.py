"""Train with different dampings of bias and weight: steps, checkpoints, threads and ranks."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import kfc
from approximations import CURVATURES, approximation
from kfc.curvature.damping import Damping
from ranks import run_ranks
from test_bias_damping import bias_groups, flat
from test_kronecker import DOUBLE

pytestmark = pytest.mark.usefixtures("double")


def bias_step(decay: float, bias_decay: float, inverse: str) -> float:
    """Return the norm of the first step of the last layer's bias, which starts at zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 10))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    optimizer = kfc.KFC(
        model,
        lr=1.0,
        momentum=0.0,
        clip=None,
        groups=[
            {"prefix": "2.weight", "weight_decay": decay},
            {"prefix": "2.bias", "weight_decay": bias_decay},
        ],
        curvature=kfc.Kronecker(fisher="exact", inverse=inverse),
    )
    inputs, labels = 0.2 * torch.randn(200, 6), torch.randint(4, (200,))
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    damping = optimizer.diagnostics["layers"]["2"]
    assert damping["damping"] == decay + 1e-3
    assert damping["bias_damping"] == bias_decay + 1e-3
    return model[2].bias.norm().item()


@pytest.mark.parametrize(("inverse", "factor"), [("eigen", 0.95), ("factored", 0.7)])
def test_the_bias_of_a_decayed_last_layer_takes_the_step_of_its_own_decay(inverse, factor):
    """λ = 1 on the weight of the last layer and 0 on its bias, as in cuda-convnet."""
    own = bias_step(1.0, 0.0, inverse)
    free = bias_step(0.0, 0.0, inverse)
    shared = bias_step(1.0, 1.0, inverse)
    assert shared < free / 5  # what a shared damping does to the bias
    assert factor * free < own < 1.4 * free


def network() -> nn.Sequential:
    torch.manual_seed(1)
    conv, norm = nn.Conv2d(2, 4, 3, dtype=DOUBLE), nn.GroupNorm(2, 4, dtype=DOUBLE)
    return nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3, dtype=DOUBLE))


def optimizer_of(curvature, *, asynchronous=False, inverse="factored", period=4) -> kfc.KFC:
    return kfc.KFC(
        network(),
        lr=0.05,
        groups=bias_groups(0.3, 0.01, decay=0.2),
        seed=5,
        curvature=approximation(curvature, inverse=inverse),
        schedule=kfc.Periods(1, period),
        parallel=kfc.Parallel(asynchronous=asynchronous, deterministic=asynchronous),
    )


def train(optimizer, first, last, model=None, part=slice(None)) -> None:
    """Train from step ``first`` to ``last`` on a part of each batch.

    Args:
        model: the model to run, if it is not that of the optimizer.
    """
    generator = torch.Generator().manual_seed(3)
    for step in range(1, last + 1):
        images = torch.randn(8, 2, 6, 6, generator=generator, dtype=DOUBLE)
        labels = torch.randint(3, (8,), generator=generator)
        if step >= first:
            optimizer.zero_grad()
            F.cross_entropy((model or optimizer.model)(images[part]), labels[part]).backward()
            optimizer.step()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("inverse", ["factored", "eigen"])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_checkpoints_contain_both_dampings(curvature, inverse, asynchronous):
    """Saved while asynchronous inverses are being computed, and continued bit for bit."""
    options = {"asynchronous": asynchronous, "inverse": inverse}
    whole, first, second = (optimizer_of(curvature, **options) for _ in range(3))
    train(whole, 1, 12)
    train(first, 1, 6)
    file = io.BytesIO()
    torch.save({"optimizer": first.state_dict(), "model": first.model.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    layers = saved["optimizer"]["curvature"]["curvature"]["layers"]
    assert {tuple(layer["damping"].items()) for layer in layers.values()} == {
        (("weight", 0.3), ("bias", 0.01))
    }
    second.model.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    assert second.diagnostics["layers"] == first.diagnostics["layers"]
    train(second, 7, 12)
    for optimizer in (whole, first, second):
        optimizer.close()
    assert torch.equal(flat(whole.model), flat(second.model))


@pytest.mark.parametrize("curvature", CURVATURES)
def test_asynchronous_inverses_have_both_dampings(curvature):
    """Inverses that are applied at the step at which they were begun are those of that step."""
    results = []
    for parallel in (None, kfc.Parallel(asynchronous=True, max_staleness=0)):
        optimizer = kfc.KFC(
            network(),
            lr=0.05,
            groups=bias_groups(),
            seed=5,
            curvature=curvature,
            schedule=kfc.Periods(1, 2),
            parallel=parallel,
        )
        train(optimizer, 1, 7)
        optimizer.close()
        results.append(flat(optimizer.model))
    assert_close(*results, rtol=1e-10, atol=1e-12)


RANKED = [
    (name, kind, parallel)
    for name, kind in (("kfc", "factored"), ("kfc", "eigen"), ("ekfac", "eigen"))
    for parallel in (
        {"placement": "shared"},
        {"placement": "gradients"},
        {"placement": "shared", "asynchronous": True, "max_staleness": 1},
    )
]


def trained_in_parts(rank: int | None) -> list[torch.Tensor]:
    """Return what each case of ``RANKED`` trains, on half of each batch or in one process."""
    results = []
    for name, kind, parallel in RANKED:
        given = model = network()
        options = dict(parallel)
        if rank is None:
            del options["placement"]
        else:
            given = DistributedDataParallel(model)
        optimizer = kfc.KFC(
            given,
            lr=0.05,
            groups=bias_groups(0.3, 0.01, decay=0.2),
            clip=kfc.FisherClip(0.3, fraction=1),
            curvature=approximation(name, inverse=kind, fisher="exact"),
            schedule=kfc.Periods(1, 2),
            parallel=kfc.Parallel(**options, deterministic="asynchronous" in options),
        )
        # Factors of full rank, without which EKFAC's eigenbasis is not unique.
        data = torch.randn(2, 64, 2, 6, 6, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
        labels = torch.arange(64) % 3
        batches = [(images, labels) for images in (data if rank is None else data[rank : rank + 1])]
        optimizer.estimate_factors(batches, lambda out, batch: F.cross_entropy(out, batch[1]))
        part = slice(None) if rank is None else slice(4 * rank, 4 * rank + 4)
        train(optimizer, 1, 6, given, part)
        optimizer.close()
        results.append(flat(model))
    return results


def test_two_ranks_damp_biases_as_one_process_does():
    expected = trained_in_parts(None)
    for results in run_ranks(trained_in_parts, 2, timeout=120):
        for found, value in zip(results, expected, strict=True):
            assert_close(found, value, rtol=1e-9, atol=1e-10)


def test_a_state_with_one_damping_is_refused():
    optimizer = optimizer_of("kfc")
    train(optimizer, 1, 1)
    state = optimizer.state_dict()
    state["curvature"]["curvature"]["layers"]["0"]["damping"] = 0.3
    with pytest.raises(ValueError, match="damping of layer '0' must be a dict, got float"):
        optimizer.load_state_dict(state)


def test_other_dampings_of_one_block_are_those_of_a_new_inverse():
    optimizer = optimizer_of("kfc", inverse="eigen", period=1)
    train(optimizer, 1, 1)
    layer = optimizer.engine.curvature.layers["4"]
    for damping in (Damping(0.6, 0.02), Damping(0.3, 0.3), Damping(0.1, 4.0)):
        fresh = layer.invert(layer.state.running, damping)
        gradient = torch.randn(1, 3, 65)
        assert_close(layer.redamped(damping).apply(gradient), fresh.apply(gradient))


def test_a_bias_without_a_group_of_its_own_shares_the_damping_of_its_weight():
    optimizer = kfc.KFC(network(), groups=[{"prefix": "4", "weight_decay": 1.0}], damping=0.25)
    train(optimizer, 1, 1)
    layers = optimizer.diagnostics["layers"]
    assert layers["4"]["damping"] == layers["4"]["bias_damping"] == 1.25
    assert layers["0"]["damping"] == layers["0"]["bias_damping"] == 0.25
