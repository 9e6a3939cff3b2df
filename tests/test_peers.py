"""Comparisons with independent implementations that use the same definitions."""

import pytest
import torch
from torch import nn

import kfc

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double")]

LOSSES = {
    "categorical": nn.CrossEntropyLoss,
    "bernoulli": nn.BCEWithLogitsLoss,
    "gaussian": nn.MSELoss,
}


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 4)
    )


def targets(name: str) -> torch.Tensor:
    return torch.randint(4, (5,)) if name == "categorical" else torch.rand(5, 4).round()


@pytest.mark.parametrize("name", LOSSES)
def test_exact_fisher_against_curvlinops(name):
    curvlinops = pytest.importorskip("curvlinops")
    model, inputs = conv_net(), torch.randn(5, 2, 6, 6)
    operator = curvlinops.GGNLinearOperator(
        model, LOSSES[name](), list(model.parameters()), [(inputs, targets(name))]
    )
    vector = [torch.randn_like(p) for p in model.parameters()]
    product = kfc.fisher.vector_product(model, inputs, vector, likelihood=name)
    torch.testing.assert_close(list(operator @ vector), product)


@pytest.mark.parametrize("name", LOSSES)
def test_kronecker_blocks_against_curvlinops(name):
    """Ω ⊗ Γ with exact targets is K-FAC's "expand" approximation, type 2."""
    curvlinops = pytest.importorskip("curvlinops")
    model, inputs = conv_net(), torch.randn(5, 2, 6, 6)
    operator = curvlinops.KFACLinearOperator(
        model,
        LOSSES[name](),
        list(model.parameters()),
        [(inputs, targets(name))],
        fisher_type="type-2",
        kfac_approx="expand",
        separate_weight_and_bias=False,
    )
    preconditioner = kfc.Preconditioner(
        model, curvature=kfc.Kronecker(fisher="exact"), likelihood=name
    )
    preconditioner.estimate_factors([inputs])
    vector = [torch.randn_like(p) for p in model.parameters()]
    theirs = list(operator @ vector)
    for position, layer in ((0, "0"), (2, "3")):
        factors = preconditioner.factors[layer]
        weight, bias = vector[position : position + 2]
        matrix = torch.cat([bias[:, None], weight.flatten(1)], dim=1)
        mine = factors.derivative @ matrix @ factors.activation
        torch.testing.assert_close(mine[:, 1:].reshape(weight.shape), theirs[position])
        torch.testing.assert_close(mine[:, 0], theirs[position + 1])
