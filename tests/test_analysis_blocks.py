"""Tests of exact blocks and approximations against dense references, in float64."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import kfc
from kfc.analysis import APPROXIMATIONS, ExactBlock, LayerRecord, exact_block, record_layer
from kfc.analysis.blocks import UnitBlock
from kfc.analysis.independent import IndependentBlock
from kfc.analysis.krylov import (
    UnsolvableError,
    conjugate_gradients,
    operator_norm,
    ritz_values,
    top_eigenvalues,
)
from kfc.analysis.recording import LayerCall
from kfc.layers import layer_for
from reference import (
    activation_factor,
    cross_entropy,
    derivative_factor,
    exact_fisher,
    squared_error,
)
from test_layers import Locations
from test_patches import convolutions

pytestmark = pytest.mark.usefixtures("double")

NAMES = list(APPROXIMATIONS)


def in_our_order(layer: nn.Module) -> torch.Tensor:
    """Return the index of each dense coordinate in the flattened (weight, bias)."""
    geometry = layer_for(layer)
    index = torch.arange(float(sum(p.numel() for p in layer.parameters())))
    weight = index[: layer.weight.numel()].reshape(layer.weight.shape)
    parts = [geometry.weight_to_matrix(weight)]
    if layer.bias is not None:
        parts.insert(0, index[layer.weight.numel() :].reshape(geometry.groups, -1, 1))
    return torch.cat(parts, dim=2).mT.flatten().long()


def synthetic(module: nn.Module, inputs: torch.Tensor, draws: int = 2) -> LayerRecord:
    """Return a record with random derivatives."""
    derivatives = torch.randn(draws, *module(inputs).shape)
    call = LayerCall(inputs, derivatives)
    return LayerRecord("layer", layer_for(module), (call,), len(inputs))


def small_record(groups: int = 1, **options) -> LayerRecord:
    module = nn.Conv2d(2, 2, 2, groups=groups, padding=1, **options)
    return synthetic(module, torch.randn(4, 2, 3, 3) + 0.5)


# The exact block


@settings(max_examples=25)
@given(convolutions())
def test_exact_blocks_of_convolutions(case):
    layer, inputs = case
    model = nn.Sequential(layer, Locations(layer(inputs)))
    dense = exact_block(model, inputs, "0").to_dense()
    order = in_our_order(layer)
    expected = exact_fisher(model, inputs, cross_entropy())[order][:, order]
    assert_close(dense, expected, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_exact_blocks_inside_a_network(likelihood):
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 4),
    )
    inputs = torch.randn(5, 2, 4, 4)
    loss = {"gaussian": squared_error, "categorical": cross_entropy()}[likelihood]
    fisher = exact_fisher(model, inputs, loss)
    first = 3 * 2 * 9 + 3
    for name, part in (("0", slice(0, first)), ("4", slice(first, None))):
        dense = exact_block(model, inputs, name, likelihood=likelihood).to_dense()
        order = in_our_order(model.get_submodule(name))
        assert_close(dense, fisher[part, part][order][:, order], rtol=1e-9, atol=1e-12)


class TwoCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, inputs):
        return self.layer(self.layer(inputs).tanh())


def test_gradients_of_several_calls_are_added_before_squaring():
    model, inputs = TwoCalls(), torch.randn(6, 3)
    order = in_our_order(model.layer)
    expected = exact_fisher(model, inputs, cross_entropy())[order][:, order]
    assert_close(exact_block(model, inputs, "layer").to_dense(), expected)


def test_sampled_targets_give_the_exact_block_on_average():
    model, inputs = nn.Linear(3, 3), torch.randn(4, 3)
    exact = exact_block(model, inputs, "").to_dense()
    sampled = exact_block(model, inputs, "", samples=2_000).to_dense()
    assert (sampled - exact).norm() < 0.1 * exact.norm()
    again = exact_block(model, inputs, "", samples=2_000).to_dense()
    assert_close(sampled, again, rtol=0, atol=0)


@pytest.mark.parametrize("examples", [3, 30])
@pytest.mark.parametrize("max_gib", [1.0, 1e-7])
def test_exact_block_equals_its_dense_form(examples, max_gib):
    """There are fewer or more gradients than parameters, and they fit into memory or not."""
    module = nn.Conv1d(2, 3, 3, padding=1, groups=1)
    record = synthetic(module, torch.randn(examples, 2, 5))
    block, dense = ExactBlock(record, max_gib), ExactBlock(record).dense()
    assert (max_gib < 1e-3) == (not block.keeps_gradients())
    check_against_dense(block, dense)
    assert_close(block.diagonal().mT.flatten(), dense.diagonal())
    count = 2
    expected = torch.linalg.eigvalsh(dense).flip(0)
    assert_close(block.top_eigenvalues(count), expected[:count], rtol=1e-6, atol=0)
    if max_gib == 1.0:
        values, vectors = block.top_eigenvectors(count)
        assert_close(values, expected[:count])
        assert_close(block.product(vectors), values.reshape(-1, 1, 1, 1) * vectors)
        spectrum = block.spectrum()
        assert_close(spectrum, expected[: len(spectrum)], rtol=1e-9, atol=1e-10)


def test_large_dense_forms_raise_an_error():
    block = exact_block(nn.Linear(30, 20), torch.randn(2, 30), "")
    with pytest.raises(kfc.analysis.TooLargeError, match=r"620 rows and would take 0\.0 GiB"):
        block.to_dense(max_gib=1e-4)
    with pytest.raises(MemoryError, match="product, solve"):
        block.to_dense(max_gib=1e-4)


def test_model_and_random_state_do_not_change():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    inputs = torch.randn(5, 3)
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        exact_block(model, inputs, "0")
    model.eval()
    model[2].train()  # draws a mask
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    exact_block(model, inputs, "0")
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_checkpointed_layers_are_recorded_once():
    class Checkpointed(nn.Sequential):
        def forward(self, inputs):
            return self[2](checkpoint(lambda x: self[1](self[0](x)), inputs, use_reentrant=False))

    model, inputs = Checkpointed(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    plain = nn.Sequential(*model)
    for layer in ("0", "2"):
        dense = exact_block(model, inputs, layer).to_dense()
        assert_close(dense, exact_block(plain, inputs, layer).to_dense())


class Sequences(nn.Module):
    """Applies one layer to the frames of every example, batch first or sequence first."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.layer, self.first = nn.Linear(3, 4), first

    def forward(self, inputs):
        frames = inputs.transpose(0, 1) if self.first == "sequence" else inputs
        return self.layer(frames).tanh().sum(0 if self.first == "sequence" else 1)


@pytest.mark.parametrize("frames", [1, 3, 8])
def test_sequence_first_equals_batch_first(frames):
    inputs = torch.randn(4, frames, 3)
    batch, sequence = Sequences("batch"), Sequences("sequence")
    sequence.load_state_dict(batch.state_dict())
    expected = exact_block(batch, inputs, "layer").to_dense()
    assert_close(exact_block(sequence, inputs, "layer").to_dense(), expected)


def test_rows_without_an_example_raise_an_error():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, inputs):
            return inputs @ self.layer(torch.ones(5, 3)).T.exp().T

    with pytest.raises(ValueError, match="do not belong to one of the 4"):
        exact_block(Constant(), torch.randn(4, 5), "layer")
    with pytest.raises(ValueError, match="another number of examples"):
        exact_block(Sequences("batch"), torch.randn(4, 4, 3), "layer")


def test_singular_blocks_raise_an_error():
    record = synthetic(nn.Linear(6, 2), torch.randn(2, 6))
    vector = torch.randn(record.shape)
    units = record.shape[0], record.shape[1], 3, 3
    for block in (
        APPROXIMATIONS["diagonal"].build(synthetic(nn.Linear(6, 2), torch.zeros(2, 6))),
        UnitBlock(torch.zeros(units)),
    ):
        with pytest.raises(UnsolvableError, match="above 0"):
            block.solve(torch.randn(block.shape), 0.0)
    with pytest.raises(ValueError, match="damping must be"):
        ExactBlock(record).solve(vector, 0.0)


def test_wrong_arguments_raise_errors():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"no trained layer '1'.*'0', '2'"):
        exact_block(model, torch.randn(2, 3), "1")
    with pytest.raises(ValueError, match="samples must be a whole number"):
        record_layer(model, torch.randn(2, 3), "0", samples=0)
    with pytest.raises(ValueError, match="give samples="):
        record_layer(nn.Linear(2, 2000), torch.randn(2, 2), "")


# Approximations


def check_against_dense(block, dense):
    """Compare products, solutions, traces and spectra of a block with its dense form."""
    vector = torch.randn(3, *block.shape)
    flat = vector.mT.flatten(1)
    assert_close(block.product(vector).mT.flatten(1), flat @ dense, rtol=1e-8, atol=1e-9)
    assert_close(block.product(vector[0]), block.product(vector)[0], rtol=1e-8, atol=1e-9)
    damping = 0.3 + max(0.0, -2 * torch.linalg.eigvalsh(dense)[0].item())
    damped = dense + damping * torch.eye(block.size)
    solution = torch.linalg.solve(damped, flat.T).T
    assert_close(block.solve(vector, damping).mT.flatten(1), solution, rtol=1e-4, atol=1e-5)
    assert_close(block.trace(), dense.trace().item())
    assert_close(
        block.operator_norm(), torch.linalg.matrix_norm(dense, 2).item(), rtol=2e-2, atol=0
    )
    spectrum = block.spectrum()
    if spectrum is not None and len(spectrum) == block.size:
        assert_close(spectrum, torch.linalg.eigvalsh(dense).flip(0), rtol=1e-8, atol=1e-9)
        assert_close(block.smallest_eigenvalue(), spectrum[-1].item())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_approximations_equal_their_dense_forms(name, bias, groups):
    block = APPROXIMATIONS[name].build(small_record(groups, bias=bias))
    check_against_dense(block, block.to_dense())
    assert_close(block.to_dense(), block.to_dense().T)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", ["kfc", "autocovariance", "sua", "prong"])
def test_blocks_of_two_factors_are_kronecker_products(name, groups):
    block = APPROXIMATIONS[name].build(small_record(groups))
    expected = torch.block_diag(*map(torch.kron, *block.factors))
    assert_close(block.to_dense(), expected)


@pytest.mark.parametrize("groups", [1, 2])
def test_independent_block_equals_lemma_1(groups):
    """Lemma 1 is Σ_t Σ_t′ E[a_t a_t′ᵀ] ⊗ E[Ds_t Ds_t′ᵀ], here in a loop over pairs."""
    record = small_record(groups)
    examples, rows = slice(0, record.examples), record.rows_per_example
    activations = record.activation_rows(examples)  # (M, groups, T, n)
    derivatives = record.derivative_rows(examples)  # (draws, M, groups, T, I)
    total = 0
    for t, u in itertools.product(range(rows), repeat=2):
        first = torch.einsum("mgn,mhk->gnhk", activations[:, :, t], activations[:, :, u])
        second = torch.einsum("rmgi,rmhk->gihk", derivatives[..., t, :], derivatives[..., u, :])
        both = torch.einsum("gnhk,gihj->gnihkj", first, second) / record.examples**2
        total = total + both.reshape(record.size, record.size)
    assert_close(IndependentBlock(record).to_dense(), total)


def test_independent_block_is_exact_for_one_example():
    record = synthetic(nn.Conv2d(2, 3, 2), torch.randn(1, 2, 4, 4))
    assert_close(IndependentBlock(record).to_dense(), ExactBlock(record).to_dense())


@settings(max_examples=25)
@given(convolutions())
def test_kfc_has_the_factors_of_the_optimizer(case):
    layer, inputs = case
    output = layer(inputs)
    model = nn.Sequential(layer, Locations(output))
    block = APPROXIMATIONS["kfc"].build(record_layer(model, inputs, "0"))
    assert_close(block.factors.activation, activation_factor(layer, inputs), rtol=1e-9, atol=1e-10)
    expected = derivative_factor(model[1], output, cross_entropy(), layer.groups)
    assert_close(block.factors.derivative, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("groups", [1, 2])
def test_diagonal_and_unit_wise_blocks_are_parts_of_the_exact_block(groups):
    record = small_record(groups)
    dense = ExactBlock(record).to_dense()
    assert_close(APPROXIMATIONS["diagonal"].build(record).to_dense(), dense.diagonal().diag())
    # Coordinates are (group, column, output map).
    shape = (record.shape[0], record.shape[2], record.shape[1])
    group, _, unit = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    owner = (group * shape[2] + unit).flatten()
    same = owner.unsqueeze(0) == owner.unsqueeze(1)
    assert_close(APPROXIMATIONS["unit-wise"].build(record).to_dense(), dense * same)


def test_ekfac_is_the_diagonal_in_the_eigenbasis_of_kfc():
    record = small_record()
    block = APPROXIMATIONS["ekfac"].build(record)
    basis = torch.kron(block.bases.activation[0], block.bases.derivative[0])
    inside = basis.T @ ExactBlock(record).to_dense() @ basis
    assert_close(block.to_dense(), basis @ inside.diagonal().diag() @ basis.T)
    kfc_block = APPROXIMATIONS["kfc"].build(record).to_dense()
    exact = ExactBlock(record).to_dense()
    assert (block.to_dense() - exact).norm() <= (kfc_block - exact).norm() + 1e-12


# Theorem 1


def estimated_one_by_one(maps, size, kernel):
    """Return Theorem 1's Ω for a one-dimensional convolution with padding, by loops."""
    examples, channels, _ = maps.shape
    reach = kernel // 2
    offsets = range(-reach, reach + 1)
    mean = maps.mean((0, 2))
    rows = 1 + channels * kernel
    factor = torch.zeros(rows, rows)
    factor[0, 0] = size
    for (j, (a, d)), (k, (b, e)) in itertools.product(
        itertools.product(range(channels), enumerate(offsets)), repeat=2
    ):
        beta = size - max(d, e, 0) + min(d, e, 0)
        pairs = [(u, u + e - d) for u in range(size) if 0 <= u + e - d < size]
        total = sum(maps[:, j, u] @ maps[:, k, v] for u, v in pairs)
        value = beta * total / (examples * len(pairs)) if pairs else 0.0
        factor[1 + j * kernel + a, 1 + k * kernel + b] = value
        factor[0, 1 + j * kernel + a] = factor[1 + j * kernel + a, 0] = (size - abs(d)) * mean[j]
    return factor


@pytest.mark.parametrize("size", [2, 5])
def test_theorem_1_equals_plain_loops(size):
    maps = torch.randn(3, 2, size) + 1
    record = synthetic(nn.Conv1d(2, 2, 3, padding=1), maps)
    factor = APPROXIMATIONS["autocovariance"].build(record).factors.activation[0]
    assert_close(factor, estimated_one_by_one(maps, size, 3))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [2, 5])
def test_no_boundaries_equals_plain_loops(size, bias):
    """|T| (M Mᵀ + C), with the biased autocovariances C of maps of ``size`` pixels."""
    maps = torch.randn(3, 2, size) + 1
    module = nn.Conv1d(2, 2, 3, padding=1, bias=bias)
    block = APPROXIMATIONS["no-boundaries"].build(synthetic(module, maps))
    mean = maps.mean((0, 2))
    rows = [(j, d) for j in range(2) for d in (-1, 0, 1)]
    patch = torch.stack([mean[j] for j, _ in rows])
    covariance = torch.zeros(6, 6)
    for (a, (j, d)), (b, (k, e)) in itertools.product(enumerate(rows), repeat=2):
        pairs = [(u, u + e - d) for u in range(size) if 0 <= u + e - d < size]
        products = [(maps[:, j, u] - mean[j]) @ (maps[:, k, v] - mean[k]) for u, v in pairs]
        covariance[a, b] = sum(products) / (3 * size) if products else 0.0
    expected = patch.outer(patch) + covariance
    if bias:
        expected = torch.block_diag(torch.ones(1, 1), expected)
        expected[0, 1:] = expected[1:, 0] = patch
    assert_close(block.factors.activation[0], size * expected)


@settings(max_examples=40)
@given(convolutions())
def test_no_boundaries_is_positive_semi_definite(case):
    layer, inputs = case
    block = APPROXIMATIONS["no-boundaries"].build(synthetic(layer, inputs))
    assert block.is_positive()


@settings(max_examples=40)
@given(convolutions())
def test_theorem_1_of_constant_maps(case):
    """Constant maps are homogeneous, so that Theorem 1 equals Theorem 2 for any geometry."""
    layer, inputs = case
    constant = torch.randn(*inputs.shape[:2], *(1,) * (inputs.dim() - 2)).expand_as(inputs)
    record = synthetic(layer, constant)
    both = [APPROXIMATIONS[n].build(record).factors.activation for n in ("autocovariance", "kfc")]
    seen = record.layer.boundary_counts(constant, layer(constant))
    start = 0 if layer.bias is not None else 1
    offsets = torch.arange(1, len(seen)).repeat(layer.in_channels // layer.groups)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), offsets])[start:]
    assert_close(both[0] * (seen[offsets][:, offsets] > 0), both[1])


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
def test_theorem_1_distinguishes_directions(kind):
    """One channel is the other shifted by a pixel; a transposed kernel is read backwards."""
    module = kind(2, 1, 3, padding=1).double()
    noise = torch.randn(4000, 9)
    maps = torch.stack([noise[:, 1:], noise[:, :-1]], dim=1)
    record = synthetic(module, maps)
    first, second = (
        APPROXIMATIONS[n].build(record).factors.activation for n in ("autocovariance", "kfc")
    )
    assert (first - second).norm() < 0.03 * second.norm()
    backwards = first.clone()
    backwards[:, 1:, 1:] = first[:, 1:, 1:].reshape(1, 2, 3, 2, 3).flip(2, 4).reshape(1, 6, 6)
    assert (backwards - second).norm() > 0.3 * second.norm()


@pytest.mark.parametrize(
    "module",
    [
        nn.ConvTranspose2d(2, 3, (3, 2), stride=2, padding=1),
        nn.ConvTranspose1d(2, 2, 3, stride=1),
    ],
)
def test_theorem_1_of_transposed_convolutions(module):
    """Maps are constant, with zeros between their pixels."""
    module = module.double()
    dims = module.weight.dim() - 2
    constant = torch.randn(1, 2, *(1,) * dims).expand(3, 2, *(4,) * dims)
    record = synthetic(module, constant)
    both = [APPROXIMATIONS[n].build(record).factors.activation for n in ("autocovariance", "kfc")]
    assert_close(both[0], both[1])


def periodic_field(examples, channels, size, generator, width=2):
    """Return a Gaussian field on a torus, with the same distribution at every location."""
    noise = torch.randn(examples, channels, size, size, generator=generator)
    smooth = noise
    for shift in range(1, width + 1):
        smooth = smooth + 0.6**shift * (noise.roll(shift, 2) + noise.roll(shift, 3))
    mixing = torch.eye(channels) + 0.5
    return torch.einsum("nchw,cd->ndhw", smooth, mixing) + 0.7


def test_theorem_1_equals_theorem_2_in_expectation_on_homogeneous_maps():
    generator = torch.Generator().manual_seed(0)
    module = nn.Conv2d(2, 1, 3, padding=1)

    def difference(examples):
        maps = periodic_field(examples, 2, 5, generator)
        record = synthetic(module, maps)
        first, second = (
            APPROXIMATIONS[n].build(record).factors.activation for n in ("autocovariance", "kfc")
        )
        return ((first - second).norm() / second.norm()).item()

    few = sum(difference(30) for _ in range(10)) / 10
    many = difference(30 * 256)
    assert many < 0.01, "they do not agree in expectation"
    assert many < few / 5, "the difference does not decrease like that of a mean, by 16"
    # For maps that are not homogeneous, the difference remains for any number of examples.
    ramp = torch.linspace(0, 2, 5).reshape(1, 1, 5, 1)
    record = synthetic(module, periodic_field(30 * 64, 2, 5, generator) * ramp)
    first, second = (
        APPROXIMATIONS[n].build(record).factors.activation for n in ("autocovariance", "kfc")
    )
    assert (first - second).norm() > 0.05 * second.norm()


def test_theorem_1_may_be_indefinite_on_small_maps():
    generator = torch.Generator().manual_seed(1)
    indefinite = 0
    for _ in range(20):
        maps = periodic_field(2, 2, 3, generator)
        record = synthetic(nn.Conv2d(2, 1, 3, padding=1), maps)
        block = APPROXIMATIONS["autocovariance"].build(record)
        truly = torch.linalg.eigvalsh(block.factors.activation)[0, 0]
        indefinite += not block.is_positive()
        assert block.is_positive() == bool(
            truly > -1e-6 * torch.linalg.eigvalsh(block.to_dense())[-1]
        )
        for name in set(NAMES) - {"autocovariance"}:
            assert APPROXIMATIONS[name].build(record).is_positive(), name
    assert indefinite > 10


# Theorem 3 for one layer: natural gradients under affine changes of activations or derivatives


@pytest.mark.parametrize("name", NAMES)
@given(st.integers(1, 3), st.integers(1, 2), st.sampled_from(["zeros", "circular"]))
@settings(max_examples=8)
def test_invariance_under_affine_changes(name, channels, kernel, mode):
    """Activations become a B + c at every pixel, or Ds = Ds′ A; there is no damping."""
    padding = 0 if mode == "zeros" else kernel - 1
    module = nn.Conv1d(channels, 2, kernel, padding=padding, padding_mode=mode)
    inputs = torch.randn(60, channels, kernel + 2)
    record = synthetic(module, inputs)
    gradient = torch.randn(record.shape)
    for which in ("activations", "derivatives"):
        change = torch.randn(channels, channels) + 2 * torch.eye(channels)
        shift = torch.randn(channels)
        left = torch.randn(2, 2) + 2 * torch.eye(2)
        if which == "activations":
            changed = torch.einsum("ncl,cd->ndl", inputs, change) + shift.unsqueeze(-1)
            # (1, patch′) = (1, patch) S
            spread = torch.zeros(record.shape[2], record.shape[2])
            spread[0, 0] = 1
            spread[0, 1:] = shift.repeat_interleave(kernel)
            spread[1:, 1:] = torch.kron(change, torch.eye(kernel))
            call = LayerCall(changed, record.calls[0].derivatives)
            moved = gradient @ spread
        else:
            turned = torch.einsum("rnil,ik->rnkl", record.calls[0].derivatives, left)
            call = LayerCall(inputs, turned)
            moved = left.T @ gradient
        other = LayerRecord("layer", record.layer, (call,), 60)
        natural = _undamped(name, record, gradient)
        expected = _undamped(name, other, moved)
        # Since W = W′ Sᵀ, both steps give the same function if ΔW = ΔW′ Sᵀ; likewise ΔW = A ΔW′.
        back = expected @ spread.T if which == "activations" else left @ expected
        error = (back - natural).norm() / natural.norm()
        if which in APPROXIMATIONS[name].invariant:
            assert error < 1e-6, which
        elif channels > 1 and kernel > 1:
            assert error > 1e-4, which


def _undamped(name, record, vector):
    block = APPROXIMATIONS[name].build(record)
    flat = torch.linalg.solve(block.to_dense(), vector.mT.flatten())
    groups, rows, columns = block.shape
    return flat.reshape(groups, columns, rows).mT


# Krylov methods


def spd(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=generator)
    return root @ root.T / size


def lanczos(product, start, steps):
    """Return Ritz values and error bounds after extending the space twice."""
    *_, last = ritz_values(product, start, (steps // 2, steps))
    return last


def test_lanczos_equals_eigh():
    matrix = spd(40)
    values, errors = lanczos(lambda v: matrix @ v, torch.randn(40), 40)
    assert_close(values, torch.linalg.eigvalsh(matrix).flip(0), rtol=1e-8, atol=1e-9)
    assert errors.max() < 1e-8
    few, bounds = lanczos(lambda v: matrix @ v, torch.randn(40), 12)
    nearest = (few.unsqueeze(1) - values.unsqueeze(0)).abs().min(1).values
    assert (nearest <= bounds + 1e-10).all(), "an error is larger than its bound"
    top = top_eigenvalues(lambda v: matrix @ v, torch.randn(40), 5)
    assert_close(top, values[:5], rtol=1e-5, atol=0)


def test_lanczos_of_low_rank_and_of_zero_matrices():
    column = torch.randn(30, 2)
    values, _ = lanczos(lambda v: column @ (column.T @ v), torch.randn(30), 20)
    assert len(values) <= 4
    assert_close(values[:2], torch.linalg.eigvalsh(column.T @ column).flip(0))
    assert operator_norm(torch.zeros_like, torch.randn(5)) == 0


def test_operator_norm_includes_negative_eigenvalues():
    matrix = torch.diag(torch.tensor([1.0, -5.0, 2.0]))
    assert_close(operator_norm(lambda v: matrix @ v, torch.randn(3)), 5.0)


def test_conjugate_gradients_solve_or_raise():
    matrix, right = spd(30) + 0.01 * torch.eye(30), torch.randn(30)
    solution = conjugate_gradients(lambda v: matrix @ v, right, tolerance=1e-10)
    assert_close(solution, torch.linalg.solve(matrix, right), rtol=1e-6, atol=1e-7)
    with pytest.raises(UnsolvableError, match="larger damping"):
        conjugate_gradients(lambda v: matrix @ v, right, most=2)
