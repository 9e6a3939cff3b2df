"""Tests of comparisons, assumptions and correlations in ``kfc.analysis``."""

import itertools
import math
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import kfc.analysis as analysis
from kfc.analysis import comparison
from kfc.analysis.assumptions import Bootstrap, spatial_correlation
from kfc.analysis.correlations import Maps, autocorrelation, correlations, cross_map_moments
from kfc.analysis.krylov import UnsolvableError
from kfc.analysis.recording import LayerCall, LayerRecord
from kfc.layers import layer_for

pytestmark = pytest.mark.usefixtures("double")


def small_network():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4)
    )


def record_of(inputs, derivatives, module=None):
    """Return a record with inputs (M, J, *T) and derivatives (draws, M, I, *T)."""
    dims = inputs.dim() - 2
    kinds = {1: nn.Conv1d, 2: nn.Conv2d}
    module = module or kinds[dims](inputs.shape[1], derivatives.shape[2], 3, padding=1)
    call = LayerCall(inputs, derivatives)
    return LayerRecord("layer", layer_for(module), (call,), len(inputs))


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
        monkeypatch.setattr(comparison, "DENSE_SIZE", 0)
        monkeypatch.setattr(comparison, "DEFLATED", 4)
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
        assert set(result.left_out) == ({"iad", "unit-wise"} if max_gib < 1 else set())
        assert_close(result.trace, analysis.ExactBlock(record).to_dense().trace().item())
        for name, quality in result.approximations.items():
            expected = dense_quality(record, name, gradient, 0.01)
            tolerance = 4 * quality.frobenius_uncertainty + 1e-9
            assert abs(quality.frobenius_error - expected.pop("frobenius_error")) < tolerance
            assert (quality.frobenius_uncertainty > 0) == estimated
            assert quality.frobenius_uncertainty < 0.1 * max(quality.frobenius_error, 0.1)
            for measure, value in expected.items():
                assert_close(getattr(quality, measure), value, rtol=2e-2, atol=1e-5)
            assert quality.decrease <= 1 + 1e-9


@pytest.mark.parametrize("max_gib", [1.0, 1e-7])
def test_standard_errors_match_the_actual_errors(monkeypatch, max_gib):
    """With little memory, the exact block's norm is estimated from the same probes."""
    monkeypatch.setattr(comparison, "DENSE_SIZE", 0)
    monkeypatch.setattr(comparison, "DEFLATED", 4)
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
            scores[name].append(error / quality.frobenius_uncertainty)
    for name, values in scores.items():
        assert 0.5 < torch.tensor(values).square().mean().sqrt() < 1.7, name


@pytest.mark.parametrize("width", [3, 40])
def test_errors_of_a_layer_without_derivatives_are_nan(width):
    model = nn.Sequential(nn.Linear(20, width), nn.Linear(width, 3))
    model[1].weight.data.zero_()
    found = analysis.compare_approximations(model, torch.randn(6, 20), ["0"])["0"]
    assert not found.left_out
    assert all(math.isnan(q.frobenius_error) for q in found.approximations.values())
    record = analysis.record_layer(model, torch.randn(6, 20), "0", samples=2)
    assert analysis.assumptions(record)["WD"].verdict == "unknown"


def test_exact_block_approximates_itself_without_error(monkeypatch):
    monkeypatch.setitem(
        analysis.APPROXIMATIONS,
        "exact",
        analysis.Approximation("exact", "", analysis.ExactBlock, frozenset()),
    )
    for dense_size in (0, 512):
        monkeypatch.setattr(comparison, "DENSE_SIZE", dense_size)
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
    monkeypatch.setattr(comparison, "DENSE_SIZE", 0)
    model, inputs = small_network(), torch.randn(8, 2, 4, 4)
    found = analysis.compare_approximations(
        model, inputs, ["0"], approximations=["kfc", "unit-wise"], max_gib=8e-6
    )["0"]
    assert list(found.approximations) == ["kfc"]
    assert "more than 8e-06" in found.left_out["unit-wise"]

    def unsolvable(self, vector, damping, tolerance):
        raise UnsolvableError("give a larger damping")

    monkeypatch.setattr("kfc.analysis.exact.IndependentBlock.solve", unsolvable)
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
    assert (cross_map_moments(Maps(values))[:, 1] == 0).all()


# Assumptions


def white(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def smooth(noise):
    """Return sums of neighbours along the last dimension, whose correlation is one half."""
    return noise + noise.roll(1, -1)


def test_whiteness_uses_an_even_selection_of_many_maps(monkeypatch):
    module = import_module("kfc.analysis.assumptions")  # not the function of the same name
    monkeypatch.setattr(module, "MOST_MAPS", 4)
    inputs, derivatives = white(20, 1, 4, 4), smooth(white(1, 20, 9, 4, 4, seed=1))
    some = analysis.assumptions(record_of(inputs, derivatives[:, :, [0, 3, 6]]))["WD"]
    assert analysis.assumptions(record_of(inputs, derivatives))["WD"] == some


def test_derivatives_of_zero_give_unknown_verdicts():
    found = analysis.assumptions(record_of(white(20, 1, 4, 4), torch.zeros(1, 20, 3, 4, 4)))
    assert found["SUD"].verdict == "unknown"
    assert math.isnan(found["WD"].measures["spread of the maps' variances"].value)


def test_assumptions_hold_for_white_noise():
    """Derivatives are white, and independent of white activations."""
    record = record_of(white(300, 3, 8, 8), white(1, 300, 4, 8, 8, seed=1))
    found = analysis.assumptions(record)
    assert list(found) == ["IAD", "SH", "SUD", "SUA", "WD"]
    for name, assumption in found.items():
        assert assumption.verdict == "holds", name
        for estimate in assumption.measures.values():
            assert estimate.low <= estimate.high
            assert abs(estimate.value) < 0.1


def test_each_assumption_can_fail_alone():
    inputs, derivatives = white(300, 3, 8, 8), white(1, 300, 4, 8, 8, seed=1)
    strength = white(300, 1, 1, 1, seed=2).mul(0.5).exp()
    ramp = torch.linspace(0.2, 2, 8)
    mixed = torch.einsum("rmihw,ij->rmjhw", derivatives, torch.ones(4, 4) + torch.eye(4))
    scaled = derivatives * torch.tensor([0.1, 0.5, 1.0, 3.0]).reshape(4, 1, 1)
    cases = {
        "IAD": record_of(inputs * strength, derivatives * strength),
        "SH": record_of(inputs, derivatives * ramp),
        "SUD": record_of(inputs, smooth(derivatives)),
        "SUA": record_of(smooth(inputs), derivatives),
        "WD": record_of(inputs, mixed),
    }
    for name, record in cases.items():
        found = analysis.assumptions(record)
        assert found[name].verdict == "fails" or name in ("SUD", "SUA"), name
        others = {"IAD", "SH", "SUD", "SUA", "WD"} - {name}
        assert all(found[other].verdict == "holds" for other in others), (name, found)
    spread = analysis.assumptions(record_of(inputs, scaled))["WD"].measures
    assert spread["spread of the maps' variances"].value > 1
    assert spread["correlation of distinct maps"].value < 0.1


@pytest.mark.parametrize("mean", [0.0, 5.0])
def test_spatial_correlations_have_the_right_size(mean):
    """The correlation is 0.5 along one axis and 0 along the other; centring removes the mean."""
    maps = Maps(smooth(white(1, 400, 3, 9, 9)) + mean).centred()
    measures = spatial_correlation(maps, 3, Bootstrap(100, 0))
    near = measures["neighbouring locations"]
    assert abs(near.value - 0.25) < 0.02
    assert near.low < near.value < near.high
    assert near.high - near.low < 0.05


@pytest.mark.parametrize("examples", [60, 240])
def test_intervals_cover_the_true_value_about_as_often_as_stated(examples):
    covered, values = 0, []
    for seed in range(60):
        maps = Maps(smooth(white(1, examples, 2, 1, 12, seed=seed)))
        near = spatial_correlation(maps, 1, Bootstrap(200, 0))["neighbouring locations"]
        covered += near.low <= 0.5 <= near.high
        values.append(near.value)
    assert 51 <= covered <= 60
    assert abs(sum(values) / len(values) - 0.5) < 0.01


def test_estimates_are_corrected_for_chance_correlations():
    """With few examples, uncorrelated maps have a mean magnitude of 0.12 by chance."""
    maps = Maps(white(1, 12, 2, 2, 2))
    plain = autocorrelation(maps, reach=1).abs().flatten(1)[:, [1, 3, 5, 7]].mean().item()
    near = spatial_correlation(maps, 1, Bootstrap(400, 0))["neighbouring locations"]
    assert near.value < 0.7 * plain
    assert near.low == 0


def test_spread_over_locations_is_unbiased():
    """With few examples, half of the uncorrected spread would be due to chance."""
    truth = torch.linspace(0.5, 1.5, 10)
    spreads = []
    for seed in range(20):
        derivatives = white(1, 60, 3, 10, seed=seed) * truth.sqrt()
        found = analysis.assumptions(record_of(white(60, 2, 10, seed=99), derivatives))
        spreads.append(found["SH"].measures["second moments of derivatives"].value)
    expected = (truth.std(correction=0) / truth.mean()).item()
    assert abs(sum(spreads) / len(spreads) - expected) < 0.03


def test_spread_over_locations_ignores_the_scale_of_examples():
    """The scales of examples differ widely, as those of images and their derivatives do."""
    truth = torch.linspace(0.65, 1.35, 10)
    expected = (truth.std(correction=0) / truth.mean()).item()
    strengths = white(256, seed=5).mul(2).exp()
    noiseless = truth.sqrt() * strengths.sqrt().reshape(1, 256, 1, 1)
    inputs = white(256, 2, 10, seed=98)
    found = analysis.assumptions(record_of(inputs, noiseless.expand(1, 256, 2, 10)))["SH"]
    assert_close(found.measures["second moments of derivatives"].value, expected)
    values = []
    for seed in range(20):
        strengths = white(256, seed=seed).mul(1.5).exp().sqrt().reshape(1, 256, 1, 1)
        noisy = white(1, 256, 6, 10, seed=seed + 50) * strengths * truth.sqrt()
        found = analysis.assumptions(record_of(inputs, noisy))["SH"]
        values.append(found.measures["second moments of derivatives"].value)
    assert abs(sum(values) / len(values) - expected) < 0.05


def test_assumptions_need_two_examples_and_give_possible_values():
    record = record_of(white(2, 2, 4), white(1, 2, 3, 4, seed=1))
    for assumption in analysis.assumptions(record).values():
        for estimate in assumption.measures.values():
            assert (
                not estimate.value > 1
                or "spread" in str(assumption.measures)
                or (assumption.name == "SH")
            )
    assert abs(analysis.assumptions(record)["IAD"].deciding.value) <= 1
    with pytest.raises(ValueError, match="at least two examples"):
        analysis.assumptions(record_of(white(1, 2, 4), white(1, 1, 3, 4)))


def test_inputs_and_outputs_may_have_different_locations():
    """Cases are a kernel as large as the map, one output map, and tokens of a linear layer."""
    whole = nn.Conv2d(2, 1, 4)
    record = record_of(white(30, 2, 4, 4), white(1, 30, 1, 1, 1, seed=1), whole)
    assert list(analysis.assumptions(record)) == ["IAD", "SH", "SUA"]
    found = correlations(record)
    assert found.derivative_offsets is None
    assert found.activation_offsets.shape == (2, 7, 7)

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, inputs):
            return self.layer(inputs).tanh().sum(1)

    model, tokens = Tokens(), smooth(white(200, 3, 6)).transpose(1, 2)
    record = analysis.record_layer(model, tokens, "layer")
    found = analysis.assumptions(record)
    assert list(found) == ["IAD", "SH", "SUD", "SUA", "WD"]
    assert abs(found["SUA"].deciding.value - 0.5) < 0.05
    assert correlations(record).activation_offsets.shape == (3, 11)


def test_frames_count_as_draws_of_their_example():
    """Repeating each frame adds no information: the interval stays as wide."""
    inputs, derivatives = white(40, 2, 6), white(1, 40, 3, 6, seed=1)
    once = analysis.assumptions(record_of(inputs, derivatives))["SUD"].deciding
    twice = record_of(inputs, derivatives)
    call = LayerCall(
        inputs.repeat_interleave(2, 0),
        derivatives.repeat_interleave(2, 1),
    )
    twice = LayerRecord("layer", twice.layer, (call,), 40)
    again = analysis.assumptions(twice)["SUD"].deciding
    assert_close([again.value, again.low, again.high], [once.value, once.low, once.high])


def test_layers_without_locations_have_fewer_assumptions():
    record = analysis.record_layer(small_network(), torch.randn(6, 2, 4, 4), "4", samples=2)
    assert list(analysis.assumptions(record, resamples=20)) == ["IAD", "WD"]
