"""Tests of comparisons and correlations in ``kfc.analysis``."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import kfc.analysis as analysis
from kfc.analysis import errors
from kfc.analysis.correlations import Maps, autocorrelation, correlations
from kfc.analysis.krylov import UnsolvableError

pytestmark = pytest.mark.usefixtures("double")


def small_network():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4)
    )


# Comparisons


def dense_quality(record, name, gradient, damping):
    """Return the numbers of a ``Quality``, computed from dense matrices."""
    exact = analysis.ExactBlock(record).to_dense()
    other = analysis.APPROXIMATIONS[name].build(record).to_dense()
    flat, eye = gradient.mT.flatten(), torch.eye(len(exact))
    best = torch.linalg.solve(exact + damping * eye, flat)
    step = torch.linalg.solve(other + damping * eye, flat)
    length = step @ (exact + damping * eye) @ step
    return {
        "frobenius_error": ((other - exact).norm() / exact.norm()).item(),
        "operator_error": (
            torch.linalg.matrix_norm(other - exact, 2) / torch.linalg.matrix_norm(exact, 2)
        ).item(),
        "cosine": F.cosine_similarity(step, best, dim=0).item(),
        "decrease": (flat @ step / (length * (flat @ best)).sqrt()).item(),
        "trace_ratio": (other.trace() / exact.trace()).item(),
    }


@pytest.mark.parametrize("estimated", [False, True])
@pytest.mark.parametrize("max_gib", [1.0, 1e-7])
def test_qualities_equal_those_of_dense_matrices(monkeypatch, estimated, max_gib):
    if estimated:
        monkeypatch.setattr(errors, "DENSE_SIZE", 0)
        monkeypatch.setattr(errors, "DEFLATED", 4)
    model, inputs = small_network(), torch.randn(8, 2, 4, 4)
    targets = torch.randint(4, (8,))
    found = analysis.compare_approximations(
        model,
        inputs,
        loss=lambda outputs: F.cross_entropy(outputs, targets),
        damping=0.01,
        probes=400,
        max_gib=max_gib,
    )
    assert list(found) == ["0", "4"]
    F.cross_entropy(model(inputs), targets).backward()
    for layer, result in found.items():
        record = analysis.record_layer(model, inputs, layer)
        module = model.get_submodule(layer)
        gradient = record.layer.to_matrix({"bias": module.bias.grad, "weight": module.weight.grad})
        assert {*result.approximations, *result.left_out} == set(analysis.APPROXIMATIONS)
        large = {"0": {"iad", "iad-sud", "unit-wise"}, "4": {"unit-wise"}}[layer]
        assert set(result.left_out) == (large if max_gib < 1 else set())
        assert_close(result.trace, analysis.ExactBlock(record).to_dense().trace().item())
        for name, quality in result.approximations.items():
            expected = dense_quality(record, name, gradient, 0.01)
            tolerance = 4 * quality.probe_error + 1e-9
            assert abs(quality.frobenius_error - expected.pop("frobenius_error")) < tolerance
            assert (quality.probe_error > 0) == estimated
            assert quality.probe_error < 0.1 * max(quality.frobenius_error, 0.1)
            for measure, value in expected.items():
                assert_close(getattr(quality, measure), value, rtol=2e-2, atol=1e-5)
            assert quality.decrease <= 1 + 1e-9


@pytest.mark.parametrize("max_gib", [1.0, 1e-7])
def test_standard_errors_match_the_actual_errors(monkeypatch, max_gib):
    """With little memory, the exact block's norm is estimated from the same probes."""
    monkeypatch.setattr(errors, "DENSE_SIZE", 0)
    monkeypatch.setattr(errors, "DEFLATED", 4)
    model, inputs = small_network(), torch.randn(8, 2, 4, 4)
    record = analysis.record_layer(model, inputs, "0")
    names = ["kfc", "prong", "diagonal"]
    truths = {n: dense_quality(record, n, torch.ones(record.shape), 0.1) for n in names}
    scores = {name: [] for name in names}
    for seed in range(25):
        found = analysis.compare_approximations(
            model, inputs, ["0"], approximations=names, probes=24, max_gib=max_gib, seed=seed
        )["0"]
        for name, quality in found.approximations.items():
            error = quality.frobenius_error - truths[name]["frobenius_error"]
            scores[name].append(error / quality.probe_error)
    for name, values in scores.items():
        assert 0.5 < torch.tensor(values).square().mean().sqrt() < 1.7, name


@pytest.mark.parametrize("width", [3, 40])
def test_errors_of_a_layer_without_derivatives_are_nan(width):
    model = nn.Sequential(nn.Linear(20, width), nn.Linear(width, 3))
    model[1].weight.data.zero_()
    found = analysis.compare_approximations(model, torch.randn(6, 20), ["0"])["0"]
    assert not found.left_out
    assert all(math.isnan(q.frobenius_error) for q in found.approximations.values())


def test_exact_block_approximates_itself_without_error(monkeypatch):
    monkeypatch.setitem(
        analysis.APPROXIMATIONS,
        "exact",
        analysis.Approximation("exact", "", analysis.ExactBlock, frozenset()),
    )
    for dense_size in (0, 512):
        monkeypatch.setattr(errors, "DENSE_SIZE", dense_size)
        found = analysis.compare_approximations(
            small_network(), torch.randn(8, 2, 4, 4), ["0"], approximations=["exact"]
        )
        quality = found["0"].approximations["exact"]
        assert quality.frobenius_error < 1e-9
        assert quality.operator_error < 1e-9
        assert_close([quality.cosine, quality.decrease, quality.trace_ratio], [1.0, 1.0, 1.0])
        assert quality.positive


def test_kfc_is_exact_for_location_wise_gaussian_outputs():
    """With location-wise Gaussian outputs, derivatives are white and independent of activations."""
    model, inputs = nn.Conv2d(2, 3, 2), torch.randn(5, 2, 4, 4)
    found = analysis.compare_approximations(model, inputs, likelihood="gaussian")[""]
    for name in ("kfc", "ekfac", "iad"):
        assert found.approximations[name].frobenius_error < 1e-9, name
        assert_close(found.approximations[name].decrease, 1.0)
    assert found.approximations["diagonal"].frobenius_error > 0.1


def test_large_and_unsolvable_approximations_are_left_out(monkeypatch):
    monkeypatch.setattr(errors, "DENSE_SIZE", 0)
    model, inputs = small_network(), torch.randn(8, 2, 4, 4)
    found = analysis.compare_approximations(
        model, inputs, ["0"], approximations=["kfc", "unit-wise"], max_gib=8e-6
    )["0"]
    assert list(found.approximations) == ["kfc"]
    assert "more than 8e-06" in found.left_out["unit-wise"]

    def unsolvable(self, vector, damping, tolerance):
        raise UnsolvableError("give a larger damping")

    monkeypatch.setattr("kfc.analysis.independent.IndependentBlock.solve", unsolvable)
    found = analysis.compare_approximations(model, inputs, ["0"], approximations=["iad", "kfc"])
    assert list(found["0"].approximations) == ["kfc"]
    assert found["0"].left_out == {"iad": "give a larger damping"}


def test_comparisons_reject_wrong_arguments():
    model, inputs = small_network(), torch.randn(2, 2, 4, 4)
    for options, words in [
        ({"damping": 0.0}, "damping must be"),
        ({"approximations": ["kfcc"]}, "approximations must be one of"),
        ({"layers": ["1"]}, "no trained layer '1'"),
        ({"probes": 1}, "probes must be"),
    ]:
        with pytest.raises(ValueError, match=words):
            analysis.compare_approximations(model, inputs, **options)


# Correlations


def test_autocorrelations_equal_sums_over_pairs_of_locations():
    values = torch.randn(2, 3, 2, 4, 5)
    found = autocorrelation(Maps(values), reach=3)
    assert found.shape == (2, 7, 7)
    for m, d, e in itertools.product(range(2), range(-3, 4), range(-3, 4)):
        products = [
            (values[:, :, m, i, j] * values[:, :, m, i + d, j + e]).sum() / 3
            for i, j in itertools.product(range(4), range(5))
            if 0 <= i + d < 4 and 0 <= j + e < 5
        ]
        variance = values[:, :, m].square().sum() / 3 / 20
        expected = sum(products) / len(products) / variance
        assert_close(found[m, d + 3, e + 3], expected)


def test_reach_is_limited_by_the_size_of_maps():
    assert autocorrelation(Maps(torch.randn(1, 2, 3, 4)), reach=7).shape == (3, 7)


def test_correlations_of_a_layer():
    model, inputs = small_network(), torch.randn(6, 2, 4, 4)
    found = correlations(analysis.record_layer(model, inputs, "0", samples=3))
    assert found.derivative_offsets.shape == (3, 7, 7)
    assert found.activation_offsets.shape == (2, 7, 7)
    for offsets in (found.derivative_offsets, found.activation_offsets):
        assert_close(offsets[:, 3, 3], torch.ones(len(offsets)))
        assert_close(offsets, offsets.flip(1, 2))
    at_middle = inputs[:, :, 2, 2]
    moment = at_middle.T @ at_middle
    expected = moment / moment.diagonal().sqrt().outer(moment.diagonal().sqrt())
    assert_close(found.activation_maps, expected)
    linear = correlations(analysis.record_layer(model, inputs, "4"))
    assert linear.derivative_offsets is None
    assert linear.derivative_maps.shape == (4, 4)


def test_maps_of_zeros_have_zero_correlation():
    values = torch.randn(1, 4, 3, 4, 4)
    values[:, :, 1] = 0
    found = autocorrelation(Maps(values))
    assert torch.isfinite(found).all()
    assert (found[1] == 0).all()
