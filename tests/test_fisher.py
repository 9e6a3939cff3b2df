"""F v and vᵀ F v, compared with explicit Jacobians, double backward and Hessians of losses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import kfc
from kfc.fisher.calls import call_of
from kfc.fisher.products import products_of_call
from reference import (
    binary_cross_entropy,
    cross_entropy,
    exact_fisher,
    function_of_parameters,
    squared_error,
)

pytestmark = pytest.mark.usefixtures("double")


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.LocalResponseNorm(3),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(4, 3, 2),
        nn.Softplus(),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def random_vector(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(p) for name, p in model.named_parameters()}


def flat(vector) -> torch.Tensor:
    values = vector.values() if isinstance(vector, dict) else vector
    return torch.cat([v.flatten() for v in values])


@pytest.mark.parametrize(
    ("likelihood", "loss"),
    [
        ("categorical", cross_entropy()),
        (kfc.Categorical("sum"), cross_entropy("sum")),
        ("bernoulli", binary_cross_entropy),
        ("gaussian", squared_error),
    ],
)
def test_products_of_a_conv_net_against_the_explicit_jacobian(likelihood, loss):
    model, inputs = conv_net(), torch.randn(4, 2, 5, 5)
    vector = random_vector(model)
    dense = exact_fisher(model, inputs, loss)
    product = kfc.fisher.vector_product(model, inputs, vector, likelihood=likelihood)
    assert list(product) == list(vector)
    torch.testing.assert_close(flat(product), dense @ flat(vector))
    form = kfc.fisher.quadratic_form(model, inputs, vector, likelihood=likelihood)
    torch.testing.assert_close(form, flat(vector) @ dense @ flat(vector))


@pytest.mark.parametrize("inplace", [False, True])
def test_products_of_several_vectors_share_what_does_not_depend_on_them(inplace):
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same"),
        nn.ReLU(inplace=inplace),  # may change the outputs of the convolution
        nn.Conv2d(4, 3, 2, bias=False),
        nn.Flatten(),
        nn.Linear(48, 3),
    )
    inputs, vectors = torch.randn(4, 2, 5, 5), [random_vector(model) for _ in range(3)]
    dense = exact_fisher(model, inputs, cross_entropy())
    found, examples = products_of_call(
        model, call_of(model, inputs), vectors, {"": kfc.Categorical()}, None
    )
    matrix = torch.stack([flat(vector) for vector in vectors])
    torch.testing.assert_close(found, matrix @ dense @ matrix.mT)
    assert examples == 4


def test_products_against_double_backward():
    """Compute Jv as the derivative of Jᵀu in u, without forward mode."""
    model, inputs = conv_net(), torch.randn(4, 2, 5, 5)
    vector = random_vector(model)
    model.eval()
    outputs = model(inputs)
    parameters = list(model.parameters())
    probe = torch.zeros_like(outputs, requires_grad=True)
    pulled = torch.autograd.grad(outputs, parameters, probe, create_graph=True)
    change = torch.autograd.grad(pulled, probe, list(vector.values()))[0]
    p = outputs.softmax(1).detach()
    r_change = (p * change - p * (p * change).sum(1, keepdim=True)) / len(inputs)
    expected = torch.autograd.grad(model(inputs), parameters, r_change)
    got = kfc.fisher.vector_product(model, inputs, list(vector.values()))
    assert isinstance(got, list)
    torch.testing.assert_close(got, list(expected))


@pytest.mark.parametrize(
    ("likelihood", "loss"),
    [
        ("categorical", lambda out: F.cross_entropy(out, torch.tensor([0, 2, 1]))),
        ("bernoulli", lambda out: F.binary_cross_entropy_with_logits(out, torch.ones(3, 3))),
        ("gaussian", lambda out: F.mse_loss(out, torch.ones(3, 3))),
        (
            kfc.Categorical("batchmean"),
            lambda out: F.cross_entropy(out, torch.tensor([0, 2, 1]), reduction="sum") / 3,
        ),
    ],
)
def test_products_of_a_linear_model_are_those_of_the_hessian(likelihood, loss):
    model, inputs = nn.Linear(4, 3), torch.randn(3, 4)
    vector = random_vector(model)
    outputs = function_of_parameters(model, inputs)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    hessian = torch.autograd.functional.hessian(lambda t: loss(outputs(t)), theta)
    product = kfc.fisher.vector_product(model, inputs, vector, likelihood=likelihood)
    torch.testing.assert_close(flat(product), hessian @ flat(vector))


def test_segmentation_counts_every_location():
    model, inputs = nn.Conv2d(2, 3, 1), torch.randn(3, 2, 2, 2)
    vector = random_vector(model)
    dense = exact_fisher(model, inputs, cross_entropy())
    form = kfc.fisher.quadratic_form(model, inputs, vector)
    torch.testing.assert_close(form, flat(vector) @ dense @ flat(vector))


def test_products_use_one_dropout_mask_and_change_nothing():
    model = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.BatchNorm1d(20), nn.Linear(20, 3))
    inputs = torch.randn(8, 6)
    vector = random_vector(model)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    before = torch.get_rng_state()
    first = kfc.fisher.vector_product(model, inputs, vector)
    second = kfc.fisher.vector_product(model, inputs, vector)
    form = kfc.fisher.quadratic_form(model, inputs, vector)
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(form, flat(first) @ flat(vector))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])
    assert all(p.grad is None for p in model.parameters())


def test_a_subset_of_parameters_and_frozen_ones():
    model, inputs = conv_net(), torch.randn(4, 2, 5, 5)
    model[0].requires_grad_(False)
    whole = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    part = {"0.weight": torch.randn_like(model[0].weight), "8.bias": torch.randn(3)}
    dense = exact_fisher(model, inputs, cross_entropy())
    product = kfc.fisher.vector_product(model, inputs, part)
    assert list(product) == list(part)
    expected = dense @ flat({**whole, **part})
    position = 0
    for name, p in model.named_parameters():
        if name in part:
            segment = expected[position : position + p.numel()].reshape(p.shape)
            torch.testing.assert_close(product[name], segment)
        position += p.numel()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(
        kfc.fisher.vector_product(model, inputs, [torch.ones_like(p) for p in trained])
    ) == len(trained)


def test_the_product_of_an_unused_parameter_is_zero():
    class Unused(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.spare = nn.Parameter(torch.ones(3))

    model = Unused()
    product = kfc.fisher.vector_product(model, torch.randn(3, 2), random_vector(model))
    assert torch.equal(product["spare"], torch.zeros(3))
    only = {"spare": torch.ones(3)}
    assert kfc.fisher.quadratic_form(model, torch.randn(3, 2), only) == 0


def test_tuple_and_dict_inputs_and_an_output_function():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x, shift):
            return {"logits": self.layer(x + shift)}

    model, x, shift = Two(), torch.randn(4, 2), torch.randn(4, 2)
    vector = random_vector(model)
    plain = kfc.fisher.quadratic_form(
        model.layer, x + shift, {n.removeprefix("layer."): v for n, v in vector.items()}
    )
    for inputs in ((x, shift), {"x": x, "shift": shift}):
        form = kfc.fisher.quadratic_form(model, inputs, vector, output=lambda out: out["logits"])
        torch.testing.assert_close(form, plain)
    with pytest.raises(TypeError, match="output="):
        kfc.fisher.quadratic_form(model, (x, shift), vector)


def test_attention_runs_on_its_math_kernel():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    inputs = torch.randn(2, 3, 8)
    vector = random_vector(model)
    form = kfc.fisher.quadratic_form(model, inputs, vector, likelihood="gaussian")
    dense = exact_fisher(model, inputs, squared_error)
    torch.testing.assert_close(form, flat(vector) @ dense @ flat(vector))


def test_attention_in_evaluation_mode():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    inputs = torch.randn(2, 3, 8)
    vector = random_vector(model)
    form = kfc.fisher.quadratic_form(model, inputs, vector, likelihood="gaussian")
    product = kfc.fisher.vector_product(model, inputs, vector, likelihood="gaussian")
    torch.testing.assert_close(form, flat(product) @ flat(vector))
    assert torch.backends.mha.get_fastpath_enabled()


def test_checkpointed_models():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model, inputs = Checkpointed(), torch.randn(4, 3)
    vector = random_vector(model)
    plain = {name.removeprefix("inner."): v for name, v in vector.items()}
    torch.testing.assert_close(
        kfc.fisher.quadratic_form(model, inputs, vector),
        kfc.fisher.quadratic_form(model.inner, inputs, plain),
    )
    with pytest.raises(RuntimeError, match="turn checkpointing off"):
        kfc.fisher.vector_product(model, inputs, vector)


@pytest.mark.parametrize(
    ("vector", "match"),
    [
        ({"nothing": torch.zeros(1)}, "does not have"),
        ({"weight": torch.zeros(1)}, "shape"),
        ([torch.zeros(1)], "1 tensors"),
    ],
)
def test_vectors_that_do_not_fit_the_model_raise(vector, match):
    with pytest.raises(ValueError, match=match):
        kfc.fisher.vector_product(nn.Linear(2, 3), torch.randn(2, 2), vector)


def test_products_leave_an_attached_optimizer_alone():
    inputs = torch.randn(4, 2)

    def factors(product: bool):
        torch.manual_seed(0)
        model = nn.Linear(2, 3)
        optimizer = kfc.KFC(model, seed=1)
        if product:
            kfc.fisher.vector_product(model, 10 * inputs, random_vector(model))
        F.cross_entropy(model(inputs), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
        (pair,) = optimizer.factors.values()
        return pair.activation, pair.derivative

    torch.testing.assert_close(factors(product=True), factors(product=False))
