"""Test which rank computes which inverse, and how much is sent."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from approximations import approximation
from kfc.distributed.inverses import layer_size
from kfc.distributed.placement import EVERYWHERE, LayerSize, assign, place
from kfc.layers import find_layers


def largest_load(costs, owners, ranks):
    loads = [0.0] * ranks
    for name, owner in owners.items():
        loads[owner] += costs[name]
    return max(loads)


@given(
    st.lists(st.floats(0, 1000), min_size=1, max_size=8).map(
        lambda values: {f"layer {i}": value for i, value in enumerate(values)}
    ),
    st.integers(1, 3),
)
def test_the_largest_load_is_at_most_four_thirds_of_the_best_possible(costs, ranks):
    owners = assign(costs, ranks)
    assert owners.keys() == costs.keys()
    best = min(
        largest_load(costs, dict(zip(costs, chosen, strict=True)), ranks)
        for chosen in product(range(ranks), repeat=len(costs))
    )
    assert largest_load(costs, owners, ranks) <= 4 / 3 * best * (1 + 1e-12)


def test_equal_costs_are_assigned_in_a_fixed_order():
    costs = dict.fromkeys("abcdef", 1.0)
    assert assign(costs, 3) == {"a": 0, "b": 1, "c": 2, "d": 0, "e": 1, "f": 2}


def sizes(*layers: nn.Module, kind: str = "factored", curvature: str = "kfc", **more):
    options = approximation(curvature, inverse=kind, **more)
    found = find_layers(nn.Sequential(*layers)).layers
    return {name: layer_size(options.for_layer(layer)) for name, layer in found.items()}


def test_sizes_count_triangles_bases_and_gradients():
    linear = sizes(nn.Linear(6, 4))["0"]
    assert linear == LayerSize((7**3 + 4**3) / 3, 4 * (28 + 10 + 2), 4 * 28, can_be_kept=True)
    eigen = sizes(nn.Linear(6, 4), kind="eigen")["0"]
    assert eigen.operations == 9 * (7**3 + 4**3)
    # The last two are the damping, and the ratio of those of bias and weight.
    assert eigen.inverse_bytes == 4 * (49 + 16 + 28 + 2)
    grouped = sizes(nn.Conv2d(4, 6, 3, groups=2).double())["0"]
    assert grouped.inverse_bytes == 8 * (2 * 19 * 20 // 2 + 2 * 3 * 4 // 2 + 2)
    assert not sizes(nn.Linear(6, 4), curvature="ekfac")["0"].can_be_kept


def test_auto_sends_large_inverses_and_keeps_wide_ones():
    of_layers = sizes(
        nn.Linear(20, 20),  # not worth a message
        nn.Linear(1000, 1000),  # an inverse is less than twenty gradients
        nn.Linear(4096, 10),  # twenty gradients are less than an inverse
        inverse_error=None,
    )
    placed = place(of_layers, 2, "auto", period=20)
    assert placed["0"] == EVERYWHERE
    assert placed["1"].owner is not None
    assert not placed["1"].kept
    assert placed["2"].kept
    assert placed["1"].owner != placed["2"].owner


def test_an_inverse_of_low_rank_is_sent_rather_than_twenty_gradients():
    (placed,) = place(sizes(nn.Linear(4096, 10)), 2, "auto", period=20).values()
    assert placed.owner is not None
    assert not placed.kept


@pytest.mark.parametrize("kind", ["auto", "shared", "gradients", "replicated"])
def test_one_process_computes_all_inverses(kind):
    assert place(sizes(nn.Linear(2000, 2000)), 1, kind, period=20) == {"0": EVERYWHERE}


def test_measured_inverses_are_shared_rather_than_kept():
    placed = place(sizes(nn.Linear(4096, 10), curvature="ekfac"), 2, "gradients", period=20)
    assert not placed["0"].kept
    assert placed["0"].owner is not None


def test_sizes_depend_on_the_trained_parameters():
    layer = nn.Linear(6, 4)
    layer.bias.requires_grad_(False)
    assert sizes(layer)["0"].gradient_bytes == torch.float32.itemsize * 24
