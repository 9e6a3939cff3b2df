"""The decay of the factors: per update of the statistics, and the paper's choice."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import kfc
from kfc.lab.components import RunComponents
from kfc.lab.config import make_config
from kfc.lab.data import load


@pytest.mark.parametrize("method", [kfc.KFC, kfc.KFAC])
@pytest.mark.parametrize("curvature", [kfc.Kronecker, kfc.SUA, kfc.EKFAC, kfc.Diagonal])
def test_the_decay_of_averaging_follows_from_its_timescale(method, curvature):
    optimizer = method(
        nn.Linear(2, 2), averaging_timescale=8.0, curvature=curvature(factor_decay="averaging")
    )
    assert optimizer.engine.curvature.options == curvature(factor_decay=math.exp(-1 / 8))


@pytest.mark.parametrize("method", [kfc.KFC, kfc.KFAC, kfc.Preconditioner])
def test_the_decay_of_averaging_needs_a_timescale(method):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"pass a number as factor_decay, or averaging_timescale="):
        method(model, curvature=kfc.Kronecker(factor_decay="averaging"))
    assert not model._forward_hooks
    if method is not kfc.Preconditioner:
        with pytest.raises(ValueError, match="averaging_timescale must be"):
            method(
                model,
                averaging_timescale=-1.0,
                curvature=kfc.Kronecker(factor_decay="averaging"),
            )


@pytest.mark.parametrize("value", ["paper", "0.5", None, math.nan])
def test_other_words_are_not_a_decay(value):
    with pytest.raises(ValueError, match="factor_decay must be"):
        kfc.Kronecker(factor_decay=value)


def test_the_decay_is_per_update_of_the_statistics():
    """Not per step: with T_s = 2, the factors change at steps 1, 2 and 4 by the same ξ."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    optimizer = kfc.KFC(
        model,
        averaging_timescale=4.0,
        curvature=kfc.Kronecker(factor_decay="averaging"),
        schedule=kfc.Periods(2, 2),
        likelihood="categorical",
    )
    expected, decay = None, math.exp(-1 / 4)
    for step in range(1, 5):
        x = torch.randn(8, 3)
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.randint(2, (8,))).backward()
        optimizer.step()
        if step == 1:
            expected = x.T @ x / 8
        elif step % 2 == 0:
            expected = decay * expected + (1 - decay) * x.T @ x / 8
        assert_close(optimizer.factors[""].activation, expected)


def test_the_lab_takes_the_timescale_of_its_own_averages():
    settings = {"factor_decay": "averaging", "averaging_examples": 1280, "batch_size": 128}
    config = make_config(data="digits", threads=1, **settings)
    options = RunComponents(config, load("digits")).optimizer.engine.curvature.options
    assert options.factor_decay == pytest.approx(math.exp(-1 / 10))
