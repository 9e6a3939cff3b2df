"""The table of public architectures, from its recorded results."""

import json

import models
import pytest
from torch import nn

import kfc

LEAST_MODELS = 40


def recorded() -> dict:
    return json.loads(models.RESULTS.read_text())


def test_the_document_shows_the_recorded_results():
    assert models.PAGE.read_text() == models.page(recorded())
    assert sum("error" not in each for each in recorded()["results"].values()) >= LEAST_MODELS


def test_the_line_of_a_model():
    line = (
        "98.5% of 1,250,000 trained weights have curvature; memory: factors 1.5 MiB, "
        "inverses 800 B; cost, in forward and backward passes (multiply-adds): statistics 0.5, "
        "inverses 1e+01, natural gradient 0.05; at most 0.2 per step in all; loss: Categorical"
    )
    found = models.understood(["something else", line])
    assert found["costs"] == {"statistics": 0.5, "inverses": 10, "natural gradient": 0.05}
    assert models.expected_cost(found["costs"]) == pytest.approx(1.2)
    assert models.expected_cost({**found["costs"], "inverses": 0.2}) == pytest.approx(1.11)
    result = {
        **found,
        "times": {"SGD": [1] * 6, "KFC": [9, 9, 9, 1.1, 1.1, 1.4], "WhitenedAdam": [1.5] * 6},
        "failures": {},
        "warnings": ["a | b\nc", "another"],
    }
    assert models.row("timm/x", result) == (
        "| `timm/x` | 1.25 M | 98.5% | 1.5 MiB | 800 B | 1.20 | 6 | 1.10 / 1.20 | 1.50 / 1.50 "
        "| a b c |"
    )


def test_reasons_are_given_for_notable_shares_without_curvature():
    reasons = {"Strange overrides forward": 0.1234, "no layer class for Stage": 0.01}
    assert models.remarks({"without": reasons}) == "12.3%: Strange overrides forward"
    assert models.remarks({"without": {"no layer class for Stage": 0.01}}) == ""


def test_reasons_are_those_of_the_optimizer():
    model = nn.Sequential(nn.Linear(4, 6), nn.LSTM(6, 2, bias=False))
    found = models.without_curvature(kfc.KFC(model))
    assert found == {"no layer class for LSTM": round(64 / 94, 4)}


def test_failures_are_listed():
    result = {
        **models.understood([]),
        "times": {"SGD": [1.0]},
        "failures": {"KFC": "ValueError: why"},
        "warnings": [],
    }
    line = models.row("a/b", result)
    assert line == "| `a/b` |  |  |  |  |  | 1 | fails | fails | KFC: ValueError: why |"
    failed = models.row("a/b", {"error": "takes longer than 300 s"})
    assert failed.endswith("| not measured | not measured | takes longer than 300 s |")


def test_models_have_names_and_are_many():
    assert len(models.ARCHITECTURES) >= LEAST_MODELS
    assert {name.split("/")[0] for name in models.ARCHITECTURES} == {
        "timm",
        "torchvision",
        "transformers",
    }
