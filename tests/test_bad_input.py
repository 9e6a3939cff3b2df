"""Mistakes get errors that say what is wrong and what to do."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc


def test_a_model_without_parameters():
    with pytest.raises(ValueError, match="no parameters"):
        kfc.KFC(nn.ReLU())
    with pytest.raises(TypeError, match=r"nn\.Module"):
        kfc.KFC([torch.zeros(1)])


def test_lazy_modules():
    model = nn.Sequential(nn.LazyConv2d(3, 2))
    with pytest.raises(ValueError, match=r"0\.weight.*lazy.*run one batch"):
        kfc.KFC(model)
    model(torch.randn(1, 1, 4, 4))
    kfc.KFC(model)


def test_complex_parameters():
    with pytest.raises(ValueError, match="complex"):
        kfc.KFC(nn.Linear(2, 2, dtype=torch.complex64))


def test_frozen_parameters_that_are_not_real():
    """As in models with quantised weights; the other layers are trained."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    model[0].register_parameter("codes", codes)
    model[1].scale = nn.Parameter(torch.zeros(2, dtype=torch.complex64), requires_grad=False)
    optimizer = kfc.KFC(model)
    F.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
    optimizer.step()
    assert set(optimizer.factors) == {"0", "1"}


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_empty_layers(sizes):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.empty = nn.Linear(4, 4), nn.Linear(*sizes)

        def forward(self, x):
            return self.layer(x) + self.empty(x[:, : sizes[0]]).sum()

    model = Both()
    optimizer = kfc.KFC(model)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 4)), torch.randint(4, (8,))).backward()
        optimizer.step()
    assert set(optimizer.factors) == {"layer"}


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(2, 3), (0, 2)),
        (nn.Conv2d(16, 3, 5, padding=2), (0, 16, 6, 6)),
        (nn.Conv1d(1, 3, 2), (0, 1, 6)),
        (nn.ConvTranspose2d(2, 3, 3), (0, 2, 6, 6)),
        (nn.LayerNorm(4), (0, 4)),
    ],
)
def test_an_empty_batch(layer, shape):
    model = nn.Sequential(layer, nn.Flatten())
    optimizer = kfc.KFC(model)
    with pytest.raises(ValueError, match="batch is empty"):
        model(torch.zeros(shape))
    assert optimizer.diagnostics["step"] == 0


def test_an_output_that_is_not_a_tensor():
    class Pair(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x)}

    model = nn.Sequential(Pair(2, 3))
    optimizer = kfc.KFC(model)
    with pytest.raises(TypeError, match=r"dict, not a tensor.*output="):
        model(torch.randn(2, 2))
    optimizer.close()
    optimizer = kfc.KFC(model, output=lambda out: out)
    with pytest.raises(TypeError, match="output= returned a dict"):
        model(torch.randn(2, 2))
    optimizer.close()
    optimizer = kfc.KFC(model, output=lambda out: out["logits"])
    F.cross_entropy(model(torch.randn(2, 2))["logits"], torch.tensor([0, 2])).backward()
    optimizer.step()


def test_an_output_whose_shape_does_not_fit():
    model = nn.Linear(2, 1)
    optimizer = kfc.KFC(model, likelihood="categorical")
    with pytest.raises(ValueError, match=r"\(4, 1\).*bernoulli"):
        model(torch.randn(4, 2))
    optimizer.close()


def test_the_exact_fisher_refuses_many_columns():
    model = nn.Conv2d(1, 40, 1)
    preconditioner = kfc.Preconditioner(model, curvature=kfc.Kronecker(fisher="exact"))
    loss = F.cross_entropy(model(torch.randn(2, 1, 10, 10)), torch.randint(40, (2, 10, 10)))
    with pytest.raises(ValueError, match=r'4000 columns.*fisher="sampled"'):
        loss.backward()
    preconditioner.close()


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    optimizer = kfc.KFC(model)
    F.cross_entropy(model(torch.randint(5, (4, 2))), torch.randint(2, (4,))).backward()
    with pytest.raises(ValueError, match=r"0\.weight.*sparse=False"):
        optimizer.step()


def test_adding_a_param_group():
    optimizer = kfc.KFC(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="groups="):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_estimate_factors_refuses_what_it_cannot_use():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"pass the loss.*or likelihood="):
        kfc.KFC(model).estimate_factors([torch.randn(4, 2)])
    optimizer = kfc.KFC(model, likelihood="categorical")
    good, bad = torch.randn(4, 2), torch.full((4, 2), math.nan)
    optimizer.estimate_factors([good])
    before = optimizer.factors["0"].activation.clone()
    with pytest.raises(ValueError, match="batch 1 "):
        optimizer.estimate_factors([good, bad])
    with pytest.raises(ValueError, match="no batches"):
        optimizer.estimate_factors([])
    assert torch.equal(optimizer.factors["0"].activation, before)
    assert torch.isfinite(model[1].running_mean).all()
    assert model[1].num_batches_tracked == 0
    model.eval()
    with pytest.raises(RuntimeError, match=r"model\.train\(\)"):
        optimizer.estimate_factors([good])
    model.train()
    empirical = kfc.Preconditioner(model, curvature=kfc.Kronecker(fisher="empirical"))
    with pytest.raises(ValueError, match="empirical"):
        empirical.estimate_factors([good])


def test_non_finite_factors_without_an_earlier_inverse():
    model = nn.Linear(2, 3)
    optimizer = kfc.KFC(model, likelihood="categorical")
    optimizer.estimate_factors(iter([torch.randn(4, 2)]))
    optimizer.factors[""].activation.fill_(math.nan)
    F.cross_entropy(model(torch.randn(4, 2)), torch.randint(3, (4,))).backward()
    with pytest.raises(RuntimeError, match="no earlier inverse"):
        optimizer.step()
