"""Likelihoods, compared with the Hessians of torch's losses."""

import math

import pytest
import torch
import torch.nn.functional as F

import kfc
from reference import output_hessian

pytestmark = pytest.mark.usefixtures("double")

CLASSES = {"categorical": kfc.Categorical, "bernoulli": kfc.Bernoulli, "gaussian": kfc.Gaussian}
SHAPES = {
    "categorical": [(3, 4), (2, 3, 2), (2, 3, 2, 2)],
    "bernoulli": [(3,), (3, 4), (2, 3, 2)],
    "gaussian": [(3,), (3, 4), (2, 3, 2)],
}
CASES = [
    (name, shape, reduction)
    for name, shapes in SHAPES.items()
    for shape in shapes
    for reduction in ("mean", "batchmean", "sum")
]


def stock_loss(name: str, reduction: str):
    def loss(outputs):
        kind = "sum" if reduction == "batchmean" else reduction
        if name == "categorical":
            targets = torch.zeros(outputs.shape[0], *outputs.shape[2:], dtype=torch.long)
            value = F.cross_entropy(outputs, targets, reduction=kind)
        elif name == "bernoulli":
            target = torch.zeros_like(outputs)
            value = F.binary_cross_entropy_with_logits(outputs, target, reduction=kind)
        else:
            value = F.mse_loss(outputs, torch.zeros_like(outputs), reduction=kind)
        return value / outputs.shape[0] if reduction == "batchmean" else value

    return loss


@pytest.mark.parametrize(("name", "shape", "reduction"), CASES)
def test_fisher_product_is_the_hessian_of_the_stock_loss(name, shape, reduction):
    outputs, vector = torch.randn(shape), torch.randn(shape)
    product = CLASSES[name](reduction).fisher_product(outputs, vector)
    hessian = output_hessian(stock_loss(name, reduction), outputs)
    torch.testing.assert_close(product.flatten(), hessian @ vector.flatten())


@pytest.mark.parametrize(("name", "shape", "reduction"), CASES)
def test_outer_products_of_columns_add_up_to_the_hessian(name, shape, reduction):
    outputs = torch.randn(shape)
    likelihood = CLASSES[name](reduction)
    columns = list(likelihood.derivative_columns(outputs))
    assert len(columns) == likelihood.columns_per_example(outputs)
    hessian = output_hessian(stock_loss(name, reduction), outputs)
    per_example = outputs[0].numel()
    for example in range(shape[0]):
        mine = torch.stack([c[example].flatten() for c in columns])
        inside = slice(example * per_example, (example + 1) * per_example)
        # Mean over examples of the derivatives' second moment is R: hence the factor N.
        torch.testing.assert_close(mine.T @ mine, shape[0] * hessian[inside, inside])


@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]
)
def test_draws_have_the_columns_second_moment(name, shape):
    """Draws and columns also scale alike with the reduction."""
    outputs = torch.randn(shape)
    likelihood = CLASSES[name]("mean")
    draw = likelihood.sample_derivative(outputs, torch.Generator().manual_seed(1))
    columns = torch.stack(list(likelihood.derivative_columns(outputs)))
    for reduction in ("batchmean", "sum"):
        other = CLASSES[name](reduction)
        factor = torch.stack(list(other.derivative_columns(outputs))).norm() / columns.norm()
        drawn = other.sample_derivative(outputs, torch.Generator().manual_seed(1))
        torch.testing.assert_close(drawn, factor * draw)
    exact = sum(c.flatten(0).outer(c.flatten(0)) for c in likelihood.derivative_columns(outputs))
    generator = torch.Generator().manual_seed(1)
    draws = 4000
    samples = torch.stack(
        [likelihood.sample_derivative(outputs, generator).flatten() for _ in range(draws)]
    )
    moment = samples.T @ samples / draws
    # A column holds all examples; only the blocks within an example count.
    per_example = outputs[0].numel()
    same = torch.block_diag(*[torch.ones(per_example, per_example)] * shape[0])
    spread = samples.square().amax() * 5 / math.sqrt(draws)
    assert ((moment - exact * same) * same).abs().max() < spread
    assert (samples.mean(0).abs() < samples.abs().amax() * 5 / math.sqrt(draws)).all()


def test_sampling_uses_only_its_generator():
    outputs = torch.randn(4, 5)
    before = torch.get_rng_state()
    draws = [
        kfc.Categorical().sample_derivative(outputs, torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_variance_scales_the_gaussian():
    outputs, vector = torch.randn(3, 2), torch.randn(3, 2)
    product = kfc.Gaussian("sum", variance=1.0).fisher_product(outputs, vector)
    torch.testing.assert_close(product, vector)


@pytest.mark.parametrize("name", CLASSES)
def test_nan_outputs_give_nan_derivatives_and_no_error(name):
    outputs = torch.full((2, 3), torch.nan)
    drawn = CLASSES[name]().sample_derivative(outputs, torch.Generator())
    assert drawn.isnan().all()


@pytest.mark.parametrize(
    ("name", "outputs", "error", "match"),
    [
        ("categorical", torch.zeros(4), ValueError, "shape"),
        ("categorical", torch.zeros(4, 1), ValueError, "bernoulli"),
        ("categorical", torch.zeros(0, 3), ValueError, "empty"),
        ("gaussian", torch.zeros(()), ValueError, "scalar"),
        ("bernoulli", torch.zeros(3, dtype=torch.long), TypeError, "dtype"),
    ],
)
def test_outputs_that_do_not_fit_raise(name, outputs, error, match):
    with pytest.raises(error, match=match):
        CLASSES[name]().validate(outputs)


def test_bad_arguments_raise():
    with pytest.raises(ValueError, match="reduction"):
        kfc.Categorical("average")
    with pytest.raises(ValueError, match="variance"):
        kfc.Gaussian(variance=0.0)


def test_half_precision_outputs_are_widened():
    outputs = torch.randn(4, 3, dtype=torch.bfloat16)
    drawn = kfc.Categorical().sample_derivative(outputs, torch.Generator())
    assert drawn.dtype == torch.float32


def test_repr():
    assert repr(kfc.Categorical()) == "Categorical(reduction='mean')"
    assert repr(kfc.Gaussian("sum")) == "Gaussian(reduction='sum', variance=0.5)"
