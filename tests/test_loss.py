"""The curvature has the scale of the loss that the user minimises, whatever weights its terms.

ν = vᵀFv of an update is compared with vᵀHv, H the Hessian of the same loss of a linear model by
double backward, where the loss is that of an exponential family; in float64.
"""

import copy
import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import kfc
from kfc.fisher.fit import Fit
from kfc.fisher.loss import Loss
from kfc.fisher.reading import excess_of_categories, read_categorical, read_classes

# Computes the loss from the outputs for a part of the batch.
LossOf = Callable[[Tensor, slice], Tensor]

N = 24


def batch(*shape: int) -> Tensor:
    return torch.randn(N, 6, *shape, generator=torch.Generator().manual_seed(0)).double()


class Linear(nn.Module):
    """A linear model with outputs (N, C, ...), or (N, ..., C)."""

    def __init__(self, classes: int, dims: int = 0, *, last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d)
        self.layer = kinds[dims](6, classes, *([1] if dims else [])).double()
        self.last = last

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs)
        return outputs.movedim(1, -1) if self.last else outputs


def parts_of(count: int) -> list[slice]:
    return [slice(k * N // count, (k + 1) * N // count) for k in range(count)]


def norm_ratio(
    model: nn.Module, inputs: Tensor, loss_of: LossOf, parts: int = 1, **options: object
) -> tuple[float, str]:
    """Return our vᵀFv over the true one for the first update v, and how the loss is described."""
    clip = kfc.FisherClip(1e12, fraction=1, loss_bound=None)
    optimizer = kfc.KFC(model, lr=0.1, momentum=0, clip=clip, **options)
    before = [p.detach().clone() for p in model.parameters()]
    for part in parts_of(parts):
        loss_of(model(inputs[part]), part).backward()
    optimizer.step()
    norm, described = optimizer.diagnostics["fisher_norm"], optimizer.describe()
    optimizer.close()
    update = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
    with torch.no_grad():
        for p, b in zip(model.parameters(), before, strict=True):
            p.copy_(b)
    return norm / curvature_along(model, inputs, loss_of, parts, update), described.split("\n")[-1]


def curvature_along(
    model: nn.Module, inputs: Tensor, loss_of: LossOf, parts: int, vector: list[Tensor]
) -> float:
    """Return vᵀHv of the sum of the losses of all parts."""
    loss = sum(loss_of(model(inputs[part]), part) for part in parts_of(parts))
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    slope = sum((g * v).sum() for g, v in zip(gradients, vector, strict=True))
    products = torch.autograd.grad(slope, list(model.parameters()))
    return float(sum((p * v).sum() for p, v in zip(products, vector, strict=True)))


def class_targets(classes: int, shape: tuple[int, ...], padding: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(classes, (N, *shape), generator=generator)
    padded = torch.rand(N, *shape, generator=generator) < padding
    padded[:: N // 6] = False  # no part of the batch is padding alone
    return torch.where(padded, -100, targets)


@settings(max_examples=60, deadline=None)
@given(
    classes=st.sampled_from([2, 3, 5, 10]),
    dims=st.sampled_from([0, 1, 2]),
    weighted=st.booleans(),
    padding=st.sampled_from([0.0, 0.5, 0.9]),
    reduction=st.sampled_from(["mean", "sum"]),
    factor=st.sampled_from([0.1, 1.0, 10.0]),
    parts=st.sampled_from([1, 3]),
    last=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
)
def test_cross_entropy(classes, dims, weighted, padding, reduction, factor, parts, last, smoothing):
    shape = (3,) * dims
    targets = class_targets(classes, shape, padding)
    weight = torch.linspace(0.4, 2.0, classes).double() if weighted else None
    last = last and dims > 0
    # A few terms, or class weights as well, do not tell how targets were smoothed.
    smooths = classes > 3 and padding < 0.9 and not weighted
    options = {"weight": weight, "label_smoothing": smoothing if smooths else 0.0}

    def loss_of(outputs, part):
        logits = outputs.movedim(-1, 1) if last else outputs
        return factor * F.cross_entropy(logits, targets[part], reduction=reduction, **options)

    model = Linear(classes, dims, last=last)
    ratio, described = norm_ratio(model, batch(*shape), loss_of, parts)
    assert ratio == pytest.approx(1, rel=1e-6)
    assert "Categorical" in described
    assert "read from the loss" in described


@settings(max_examples=40, deadline=None)
@given(
    dims=st.sampled_from([0, 1]),
    weighting=st.sampled_from(["none", "labels", "positive", "both"]),
    reduction=st.sampled_from(["mean", "sum", "labels"]),
    factor=st.sampled_from([0.1, 1.0, 10.0]),
    parts=st.sampled_from([1, 3]),
)
def test_binary_cross_entropy(dims, weighting, reduction, factor, parts):
    shape = (3,) * dims
    targets = (torch.rand(N, 5, *shape, generator=torch.Generator().manual_seed(3)) < 0.4).double()
    values = torch.linspace(0.4, 2.0, 5).double().reshape(5, *[1] * dims)
    weight = values if weighting in ("labels", "both") else None
    positive = 5 * values if weighting in ("positive", "both") else None

    def loss_of(outputs, part):
        terms = F.binary_cross_entropy_with_logits(
            outputs, targets[part], weight=weight, pos_weight=positive, reduction="none"
        )
        total = {"mean": terms.mean(), "sum": terms.sum(), "labels": terms.sum(1).mean()}
        return factor * total[reduction]

    ratio, described = norm_ratio(Linear(5, dims), batch(*shape), loss_of, parts)
    assert ratio == pytest.approx(1, rel=1e-7)
    assert "Bernoulli" in described


def test_weights_of_single_elements_need_a_given_likelihood():
    """Different weights of all elements look like targets between 0 and 1."""
    targets = torch.rand(N, 5).round().double()
    weight = torch.rand(N, 5).double() + 0.3

    def loss_of(outputs, part):
        return F.binary_cross_entropy_with_logits(outputs, targets[part], weight=weight[part])

    ratio, _ = norm_ratio(Linear(5), batch(), loss_of, likelihood="bernoulli")
    assert ratio == pytest.approx(1, rel=1e-7)
    with pytest.warns(UserWarning, match='pass likelihood="gaussian", "bernoulli"'):
        norm_ratio(Linear(5), batch(), loss_of)


@pytest.mark.parametrize(("factor", "parts"), [*itertools.product([0.1, 1.0, 10.0], [1, 3])])
def test_label_smoothing_and_mixed_classes_are_read(factor, parts):
    targets = class_targets(6, ())

    def smoothed(outputs, part):
        return factor * F.cross_entropy(outputs, targets[part], label_smoothing=0.1)

    def mixed(outputs, part):
        one, other = (F.cross_entropy(outputs, t[part]) for t in (targets, targets.flip(0)))
        return factor * (0.7 * one + 0.3 * other)

    for loss_of in (smoothed, mixed):
        ratio, described = norm_ratio(Linear(6), batch(), loss_of, parts)
        assert ratio == pytest.approx(1, rel=1e-6)
        assert "read from the loss" in described


def soft_targets(classes: int) -> Tensor:
    return torch.randn(N, classes, generator=torch.Generator().manual_seed(5)).double().softmax(1)


@pytest.mark.parametrize("reduction", ["mean", "batchmean", "sum"])
def test_soft_targets_follow_the_reduction(reduction):
    targets = soft_targets(6)

    def loss_of(outputs, part):
        total = F.cross_entropy(outputs, targets[part], reduction="sum")
        return total if reduction == "sum" else total / N

    likelihood = kfc.Categorical(reduction)
    for parts in (1, 3):
        ratio, described = norm_ratio(Linear(6), batch(), loss_of, parts, likelihood=likelihood)
        assert ratio == pytest.approx(1, rel=1e-7)
        assert "as given by the reduction" in described


def grey_targets(*, with_black: bool) -> Tensor:
    grey = 0.1 + 0.8 * torch.rand(N, 5, generator=torch.Generator().manual_seed(5)).double()
    return torch.where(grey < 0.3, 0, grey) if with_black else grey


# The lines of the second table of docs/losses.md: the loss, the likelihood, and the ratio.
APPROXIMATED = {
    "soft targets": (
        lambda z, part: F.cross_entropy(z, soft_targets(5)[part]),
        "auto",
        1,
    ),
    "soft targets, a small factor": (
        lambda z, part: 0.1 * F.cross_entropy(z, soft_targets(5)[part]),
        "auto",
        10,
    ),
    "soft targets, a given factor": (
        lambda z, part: 0.1 * F.cross_entropy(z, soft_targets(5)[part]),
        kfc.Categorical(weight=0.1),
        1,
    ),
    "grey targets": (
        lambda z, part: F.binary_cross_entropy_with_logits(z, grey_targets(with_black=False)[part]),
        "bernoulli",
        1,
    ),
    "grey and black targets, a large factor": (
        lambda z, part: (
            7 * F.binary_cross_entropy_with_logits(z, grey_targets(with_black=True)[part])
        ),
        "bernoulli",
        1,
    ),
    "grey and black targets, a small factor": (
        lambda z, part: (
            0.1 * F.binary_cross_entropy_with_logits(z, grey_targets(with_black=True)[part])
        ),
        "bernoulli",
        1,
    ),
    "squared error, sum": (
        lambda z, part: F.mse_loss(z, soft_targets(5)[part], reduction="sum"),
        "gaussian",
        1 / (5 * N),
    ),
    "squared error, given sum": (
        lambda z, part: F.mse_loss(z, soft_targets(5)[part], reduction="sum"),
        kfc.Gaussian("sum"),
        1,
    ),
    "squared error, given factor": (
        lambda z, part: 3 * F.mse_loss(z, soft_targets(5)[part]),
        kfc.Gaussian(weight=3.0),
        1,
    ),
}


@pytest.mark.parametrize("name", APPROXIMATED)
def test_what_cannot_be_read_follows_the_reduction(name):
    loss_of, likelihood, expected = APPROXIMATED[name]
    ratio, _ = norm_ratio(Linear(5), batch(), loss_of, likelihood=likelihood)
    assert ratio == pytest.approx(expected, rel=1e-6)


def test_label_smoothing_with_class_weights_is_approximated():
    targets, weight = class_targets(5, ()), torch.linspace(0.2, 2.0, 5).double()

    def loss_of(outputs, part):
        return F.cross_entropy(outputs, targets[part], weight=weight, label_smoothing=0.1)

    with pytest.warns(UserWarning, match="because targets are mixtures of classes"):
        ratio, described = norm_ratio(Linear(5), batch(), loss_of)
    assert 0.5 < ratio < 2
    assert "as given by the reduction" in described


@pytest.mark.parametrize("factor", [0.1, 1.0, 10.0])
def test_smoothed_targets_of_two_classes(factor):
    targets = class_targets(2, ())
    binary = 0.05 + 0.9 * BINARY

    def two_classes(outputs, part):
        return factor * F.cross_entropy(outputs, targets[part], label_smoothing=0.1)

    def labels(outputs, part):
        return factor * F.binary_cross_entropy_with_logits(outputs, binary[part])

    for classes, loss_of in ((2, two_classes), (5, labels)):
        likelihood = "auto" if classes == 2 else "bernoulli"
        ratio, described = norm_ratio(Linear(classes), batch(), loss_of, likelihood=likelihood)
        assert ratio == pytest.approx(1, rel=1e-6)
        assert "read from the loss" in described


def test_soft_targets_with_larger_weights_are_noticed():
    """No target allows a derivative larger than its weight."""
    targets = soft_targets(6)

    def loss_of(outputs, part):
        return 10 * F.cross_entropy(outputs, targets[part])

    with pytest.warns(UserWarning, match=r"at least 0\.\d+, not 0\.0417, which its reduction says"):
        ratio, _ = norm_ratio(Linear(6), batch(), loss_of)
    assert 0.5 < ratio <= 1 + 1e-7


@pytest.mark.parametrize("parts", [1, 3])
def test_squared_errors_follow_the_reduction(parts):
    targets = torch.randn(N, 5).double()
    ratio, _ = norm_ratio(
        Linear(5),
        batch(),
        lambda outputs, part: F.mse_loss(outputs, targets[part]) / parts,
        parts,
        likelihood="gaussian",
    )
    assert ratio == pytest.approx(1, rel=1e-7)


def test_log_probabilities():
    class LogProbabilities(Linear):
        def forward(self, inputs):
            return super().forward(inputs).log_softmax(1)

    targets = class_targets(5, ())
    ratio, described = norm_ratio(
        LogProbabilities(5), batch(), lambda outputs, part: 3 * F.nll_loss(outputs, targets[part])
    )
    assert ratio == pytest.approx(1, rel=1e-7)
    assert "log-probabilities" in described


def exact_factor(model: nn.Module, inputs: Tensor, weights: Tensor) -> Tensor:
    """Return Γ = Σ over terms and classes of N c p (e - p)(e - p)ᵀ / (N |T|), by enumeration."""
    outputs = model(inputs).detach().flatten(2) if inputs.dim() > 2 else model(inputs).detach()
    outputs = outputs.reshape(N, outputs.shape[1], -1)
    total = torch.zeros(outputs.shape[1], outputs.shape[1]).double()
    for n, t in itertools.product(range(N), range(outputs.shape[2])):
        p = outputs[n, :, t].softmax(0)
        total += weights[n, t] * (p.diag() - p.outer(p)) * N
    return total / (N * outputs.shape[2])


@settings(max_examples=25, deadline=None)
@given(
    classes=st.sampled_from([2, 3, 5]),
    dims=st.sampled_from([0, 1, 2]),
    weighted=st.booleans(),
    padding=st.sampled_from([0.0, 0.5, 0.9]),
    reduction=st.sampled_from(["mean", "sum"]),
    factor=st.sampled_from([0.1, 1.0, 10.0]),
    parts=st.sampled_from([1, 3]),
)
def test_the_derivative_factor_has_the_weights_of_the_terms(
    classes, dims, weighted, padding, reduction, factor, parts
):
    shape = (2,) * dims
    inputs, targets = batch(*shape), class_targets(classes, shape, padding)
    weight = (
        torch.linspace(0.4, 2.0, classes).double() if weighted else torch.ones(classes).double()
    )
    model = Linear(classes, dims)
    optimizer = kfc.KFC(model, curvature=kfc.Kronecker(fisher="exact"))
    weights = []
    for part in parts_of(parts):
        own, flat = targets[part], targets[part].flatten(1) if dims else targets[part][:, None]
        loss = F.cross_entropy(model(inputs[part]), own, weight=weight, reduction=reduction)
        (factor * loss).backward()
        terms = torch.where(flat >= 0, weight[flat.clamp_min(0)], 0)
        weights.append(factor * (terms if reduction == "sum" else terms / terms.sum()))
    optimizer.step()
    optimizer.close()
    expected = exact_factor(Linear(classes, dims), inputs, torch.cat(weights))
    assert_close(optimizer.factors["layer"].derivative, expected)


# Several outputs


class Heads(nn.Module):
    """A trunk with a class head and a box head, or an auxiliary class head."""

    def __init__(self, other: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk = nn.Linear(6, 4).double()
        self.main = nn.Linear(4, 5).double()
        self.other = nn.Linear(4, other).double()

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(inputs)
        return {"main": self.main(hidden), "other": self.other(hidden)}


def gauss_newton_along(
    model: nn.Module, inputs: Tensor, loss_of: Callable[[dict[str, Tensor]], Tensor]
) -> Callable[[list[Tensor]], float]:
    """Return v ↦ vᵀJᵀHJv, with the Hessian H of the loss in all outputs together."""
    parameters = dict(model.named_parameters())
    outputs = {name: value.detach() for name, value in model(inputs).items()}

    def along(vector: list[Tensor]) -> float:
        tangents = dict(zip(parameters, vector, strict=True))
        _, change = torch.func.jvp(
            lambda p: torch.func.functional_call(model, p, inputs), (parameters,), (tangents,)
        )
        change = {name: value.detach() for name, value in change.items()}
        leaves = {name: value.clone().requires_grad_() for name, value in outputs.items()}
        gradients = torch.autograd.grad(loss_of(leaves), list(leaves.values()), create_graph=True)
        pairs = zip(gradients, change.values(), strict=True)
        slope = sum((gradient * change).sum() for gradient, change in pairs)
        products = torch.autograd.grad(slope, list(leaves.values()))
        return float(sum((p * c).sum() for p, c in zip(products, change.values(), strict=True)))

    return along


def check_heads(model, loss_of, likelihood):
    inputs = batch()
    along = gauss_newton_along(model, inputs, loss_of)
    clip = kfc.FisherClip(1e12, fraction=1, loss_bound=None)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = kfc.KFC(
        model, lr=0.1, momentum=0, clip=clip, likelihood=likelihood, output=lambda out: out
    )
    loss_of(model(inputs)).backward()
    optimizer.step()
    optimizer.close()
    update = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
    with torch.no_grad():
        for p, b in zip(model.parameters(), before, strict=True):
            p.copy_(b)
    assert optimizer.diagnostics["fisher_norm"] == pytest.approx(along(update), rel=1e-7)
    return optimizer


def test_an_auxiliary_class_head():
    """As Inception's: the weight is read from the loss, not from the likelihood."""
    targets = class_targets(5, ())

    def loss_of(outputs):
        main, other = (F.cross_entropy(outputs[name], targets) for name in ("main", "other"))
        return main + 0.3 * other

    check_heads(Heads(5), loss_of, {"main": "auto", "other": kfc.Categorical(weight=0.7)})


def test_a_class_head_and_a_box_head():
    targets, boxes = class_targets(5, ()), torch.randn(N, 4).double()

    def loss_of(outputs):
        classes = F.cross_entropy(outputs["main"], targets)
        return classes + 0.5 * F.mse_loss(outputs["other"], boxes)

    check_heads(Heads(4), loss_of, {"main": "auto", "other": kfc.Gaussian(weight=0.5)})


def test_the_factor_of_a_shared_layer_is_the_sum_over_heads():
    targets, inputs = class_targets(5, ()), batch()
    factors = {}
    for main, other in ((1.0, 0.0), (0.0, 0.3), (1.0, 0.3)):
        model = Heads(5)
        optimizer = kfc.KFC(
            model,
            likelihood={"main": kfc.Categorical(), "other": kfc.Categorical()},
            output=lambda out: out,
            curvature=kfc.Kronecker(fisher="exact"),
        )
        outputs = model(inputs)
        losses = (F.cross_entropy(outputs[name], targets) for name in ("main", "other"))
        sum(w * loss for w, loss in zip((main, other), losses, strict=True)).backward()
        optimizer.step()
        factors[main, other] = optimizer.factors["trunk"].derivative
        optimizer.close()
    assert_close(factors[1.0, 0.3], factors[1.0, 0.0] + factors[0.0, 0.3])


def test_heads_are_checked():
    model = Heads(5)
    with pytest.raises(ValueError, match="the same reduction"):
        kfc.KFC(model, likelihood={"main": "categorical", "other": kfc.Gaussian("sum")})
    optimizer = kfc.KFC(model, likelihood={"main": "auto", "third": "auto"})
    with pytest.raises(ValueError, match=r"no outputs \['third'\]; it has \['main', 'other'\]"):
        model(batch())
    optimizer.close()
    optimizer = kfc.KFC(model.trunk, likelihood={"main": "auto"})
    with pytest.raises(TypeError, match="must return a dict with these names"):
        model.trunk(batch())
    optimizer.close()


def test_a_model_that_computes_its_own_loss():
    """As those of Hugging Face: ``model(**batch).loss``, with the logits shifted in the loss."""

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.embedding = nn.Embedding(7, 6).double()
            self.head = nn.Linear(6, 7).double()

        def forward(self, tokens, labels):
            logits = self.head(self.embedding(tokens))
            shifted = logits[:, :-1].flatten(0, 1)
            return {"loss": F.cross_entropy(shifted, labels[:, 1:].flatten()), "logits": logits}

    tokens = torch.randint(7, (N, 5), generator=torch.Generator().manual_seed(1))
    model = Language()
    model.embedding.requires_grad_(False)
    optimizer = kfc.KFC(
        model,
        lr=0.1,
        momentum=0,
        clip=kfc.FisherClip(1e12, fraction=1, loss_bound=None),
        output=lambda out: out["logits"],
    )
    before = [p.detach().clone() for p in model.head.parameters()]
    model(tokens, labels=tokens)["loss"].backward()
    optimizer.step()
    optimizer.close()
    update = [p.detach() - b for p, b in zip(model.head.parameters(), before, strict=True)]
    with torch.no_grad():
        for p, b in zip(model.head.parameters(), before, strict=True):
            p.copy_(b)
    hidden = model.embedding(tokens)
    expected = curvature_along(
        model.head,
        hidden,
        lambda out, part: F.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()),
        1,
        update,
    )
    assert optimizer.diagnostics["fisher_norm"] == pytest.approx(expected, rel=1e-7)


def derivative_factors(model: nn.Module, steps: int, loss_of, **options) -> list[dict]:
    """Return Γ of every layer after each step, without averaging."""
    curvature = kfc.Kronecker(fisher="exact", factor_decay=0.0)
    optimizer = kfc.KFC(model, lr=0.0, curvature=curvature, schedule=kfc.Periods(1, 1), **options)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step)
        optimizer.step()
        found.append({name: factors.derivative for name, factors in optimizer.factors.items()})
    optimizer.close()
    return found


@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_the_factor_of_a_head_that_cannot_be_read(factor):
    """In the first step only a factor of the whole loss is not known yet."""
    targets, boxes = class_targets(5, ()), torch.randn(N, 4).double()

    def loss_of(model, step):
        outputs = model(batch())
        classes = F.cross_entropy(outputs["main"], targets)
        (factor * (classes + 0.5 * F.mse_loss(outputs["other"], boxes))).backward()

    likelihood = {"main": "categorical", "other": kfc.Gaussian(weight=0.5)}
    found = derivative_factors(Heads(4), 3, loss_of, likelihood=likelihood, output=lambda out: out)
    expected = factor * 0.5 * 2 / 4 * torch.eye(4).double()
    assert_close(found[0]["other"], expected / factor)
    for later in found[1:]:
        assert_close(later["other"], expected)


def test_an_output_that_the_loss_does_not_use():
    targets = class_targets(5, ())

    def loss_of(model, step):
        F.cross_entropy(model(batch())["main"], targets).backward()

    names = ("main", "other")
    found = derivative_factors(
        Heads(5),
        2,
        loss_of,
        likelihood=dict.fromkeys(names, "categorical"),
        output=lambda out: out,
    )
    assert "main" in found[1]


def test_zero_grad_forgets_the_backward_pass():
    def loss_of(discarded):
        def step_loss(model, step):
            if discarded:
                F.cross_entropy(model(batch()), CLASSES).backward()
                for parameter in model.parameters():
                    parameter.grad = None
                optimizers[-1].zero_grad()
            F.cross_entropy(model(batch()), CLASSES).backward()

        return step_loss

    results, optimizers = [], []
    for discarded in (False, True):
        model = Linear(5)
        optimizers.append(
            kfc.KFC(model, curvature=kfc.Kronecker(fisher="exact"), clip=None, lr=0.0)
        )
        loss_of(discarded)(model, 0)
        optimizers[-1].step()
        results.append(optimizers[-1].factors["layer"].derivative)
    assert_close(*results)


@pytest.mark.parametrize("count", [3, 20])
def test_many_forward_passes_before_one_backward(count):
    def loss_of(model, step):
        outputs = [model(batch()) for _ in range(count if step else 1)]
        sum(F.cross_entropy(z, CLASSES) / len(outputs) for z in outputs).backward()

    one, many = derivative_factors(Linear(5), 2, loss_of)
    assert_close(many["layer"], one["layer"])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", [kfc.Categorical, kfc.Bernoulli, kfc.Gaussian])
def test_the_scale_does_not_depend_on_how_many_passes_precede_a_backward(kind, reduction):
    """Only weights that are read from the loss, or summed, contain the number of examples."""
    passes, ones = 6, F.one_hot(CLASSES, 5).double()
    losses = {
        kfc.Categorical: lambda z: F.cross_entropy(z, CLASSES, reduction=reduction),
        kfc.Bernoulli: lambda z: F.binary_cross_entropy_with_logits(z, ones, reduction=reduction),
        kfc.Gaussian: lambda z: F.mse_loss(z, ones, reduction=reduction),
    }

    def loss(outputs):
        return losses[kind](outputs) / (passes if reduction == "mean" else 1)

    def separate(model, step):
        for _ in range(passes):
            loss(model(batch())).backward()

    def together(model, step):
        sum(map(loss, [model(batch()) for _ in range(passes)])).backward()

    found = [
        derivative_factors(Linear(5), 2, loss_of, likelihood=kind(reduction))
        for loss_of in (separate, together)
    ]
    assert_close(found[1], found[0])


def test_batches_of_mixtures_keep_what_others_have_told():
    soft = soft_targets(5)

    def loss_of(kinds):
        def step_loss(model, step):
            (0.1 * F.cross_entropy(model(batch()), kinds[step])).backward()

        return step_loss

    hard_first = derivative_factors(Linear(5), 3, loss_of([CLASSES, soft, CLASSES]))
    for later in hard_first[1:]:
        assert_close(later["layer"], hard_first[0]["layer"])
    soft_first = derivative_factors(Linear(5), 3, loss_of([soft, CLASSES, soft]))
    for later in soft_first[1:]:
        assert_close(later["layer"], hard_first[0]["layer"])


@pytest.mark.parametrize("elements", [10, 100])
def test_many_elements_do_not_agree_by_chance(elements):
    """Neither squared errors nor grey targets are taken for targets of 0 or 1."""
    model = nn.Linear(6, elements).double()
    inputs = torch.randn(256, 6).double()
    targets = torch.rand(256, elements).double()
    optimizer = kfc.KFC(model)
    loss = F.mse_loss(model(inputs), targets)
    with pytest.warns(UserWarning, match='pass likelihood="gaussian"'):
        loss.backward()
    optimizer.close()
    assert "Gaussian" in optimizer.describe()
    optimizer = kfc.KFC(model, likelihood="bernoulli")
    F.binary_cross_entropy_with_logits(model(inputs), targets).backward()
    optimizer.close()
    assert "as given by the reduction" in optimizer.describe()


def test_a_first_batch_without_a_loss():
    """All targets are ignored, so that nothing tells the likelihood."""
    model = Linear(5)
    optimizer = kfc.KFC(model)
    for targets in (torch.full_like(CLASSES, -100), CLASSES):
        optimizer.zero_grad()
        F.cross_entropy(model(batch()), targets, reduction="sum").backward()
        optimizer.step()
    optimizer.close()
    assert "Categorical" in optimizer.describe()


def test_outputs_of_an_object_that_is_no_pytree():
    class Output:
        def __init__(self, logits):
            self.logits = logits

    class Model(Linear):
        def forward(self, inputs):
            return Output(super().forward(inputs))

    model = Model(5)
    optimizer = kfc.KFC(model, output=lambda out: out.logits)
    F.cross_entropy(model(batch()).logits, CLASSES).backward()
    optimizer.step()
    optimizer.close()
    assert "read from the loss" in optimizer.describe()


# What does not fit


def probabilities(function: Callable[[Tensor], Tensor]) -> nn.Module:
    class Probabilities(Linear):
        def forward(self, inputs):
            return function(super().forward(inputs))

    return Probabilities(5)


BINARY = (torch.rand(N, 5, generator=torch.Generator().manual_seed(3)) < 0.4).double()
CLASSES = class_targets(5, ())

MISMATCHES = {
    "softmax in the model": (
        probabilities(lambda z: z.softmax(1)),
        lambda out: F.nll_loss(out.log(), CLASSES),
        "auto",
        "outputs are probabilities; return logits",
    ),
    "BCELoss": (
        probabilities(torch.sigmoid),
        lambda out: F.binary_cross_entropy(out, BINARY),
        "bernoulli",
        "outputs are probabilities; return logits",
    ),
    "binary loss, categorical likelihood": (
        Linear(5),
        lambda out: F.binary_cross_entropy_with_logits(out, BINARY),
        "categorical",
        'pass likelihood="bernoulli"',
    ),
    "class loss, binary likelihood": (
        Linear(5),
        lambda out: F.cross_entropy(out, CLASSES),
        "bernoulli",
        'pass likelihood="categorical"',
    ),
    "class loss, gaussian likelihood": (
        Linear(5),
        lambda out: F.cross_entropy(out, CLASSES),
        "gaussian",
        'pass likelihood="categorical"',
    ),
    "classes in the last dimension": (
        Linear(5, 1, last=True),
        lambda out: F.cross_entropy(out.movedim(-1, 1), class_targets(5, (3,))),
        "categorical",
        r"pass likelihood=kfc.Categorical\(axis=-1\)",
    ),
    "smooth L1": (
        Linear(5),
        lambda out: F.smooth_l1_loss(out, 5 * BINARY - 2.5),
        "gaussian",
        "absolute or Huber errors",
    ),
    "temperature": (
        Linear(5),
        lambda out: F.cross_entropy(out / 0.5, CLASSES),
        "auto",
        "softmax of the outputs divided by 0.5",
    ),
    "logits shifted per class": (
        Linear(5),
        lambda out: F.cross_entropy(out + torch.arange(5).double(), CLASSES),
        "auto",
        "which its reduction says",
    ),
    "some of the classes": (
        Linear(7),
        lambda out: F.cross_entropy(out[:, :5], CLASSES),
        "categorical",
        "the loss ignores them; select the classes",
    ),
    "margin loss": (
        Linear(5),
        lambda out: F.multi_margin_loss(3 * out, CLASSES),
        "auto",
        "the loss ignores them; select the classes",
    ),
    "squared error": (
        Linear(5),
        lambda out: F.mse_loss(out, BINARY),
        "auto",
        'pass likelihood="gaussian"',
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_loss_that_does_not_fit_is_noticed(name):
    model, loss_of, likelihood, advice = MISMATCHES[name]
    inputs = batch(*([3] if "last dimension" in name else []))
    optimizer = kfc.KFC(model, likelihood=likelihood)
    with pytest.warns(UserWarning, match=advice):
        loss_of(model(inputs)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        loss_of(model(inputs)).backward()
    optimizer.close()
    strict = kfc.KFC(model, likelihood=likelihood, strict=True)
    with pytest.raises(ValueError, match=advice):
        loss_of(model(inputs)).backward()
    strict.close()


def small_logits_loss(name: str, logits: Tensor) -> Tensor:
    classes = logits.shape[1]
    labels = torch.randint(classes, (len(logits),))
    if name == "smoothing with sample weights":
        losses = F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")
        return (torch.rand(len(logits)) * losses).mean()
    if name == "smoothing and mixup":
        mixed = 0.7 * F.one_hot(labels, classes) + 0.3 * F.one_hot(labels.flip(0), classes)
        return F.cross_entropy(logits, 0.9 * mixed + 0.1 / classes)
    if name == "smoothing":
        return F.cross_entropy(logits, labels, label_smoothing=0.1)
    return F.cross_entropy(logits / float(name), labels)


@pytest.mark.parametrize("classes", [4, 10, 100])
@pytest.mark.parametrize("size", [0.05, 0.1, 0.3])
@pytest.mark.parametrize(
    "name", ["smoothing", "smoothing with sample weights", "smoothing and mixup", "0.5", "0.9", "2"]
)
def test_smoothing_of_small_logits_is_no_temperature(name, size, classes):
    """Both derivatives are almost linear in small logits."""
    logits = size * torch.randn(128, classes)
    derivative = derivative_of(lambda z: small_logits_loss(name, z), logits)
    advice = Fit(logits, derivative).mismatch(kfc.Categorical())
    expected = f"divided by {name}" if name[0].isdigit() else ""
    assert (expected in advice) if expected else not advice


def test_equal_outputs_do_not_decide():
    """Squared errors of outputs that are all zero look like binary cross-entropy."""
    model = Linear(5)
    nn.init.zeros_(model.layer.weight)
    nn.init.zeros_(model.layer.bias)
    optimizer = kfc.KFC(model, clip=None)
    for expected in ("Bernoulli", "Gaussian"):
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            F.mse_loss(model(batch()), BINARY).backward()
        optimizer.step()
        assert expected in optimizer.describe()
    optimizer.close()


def test_a_new_choice_fits_although_an_earlier_one_did_not():
    examined = Loss(None, strict=False)
    steps = [(torch.zeros(N, 5), torch.rand(N, 5), False), (torch.randn(N, 5), BINARY, True)]
    for outputs, targets, fits in steps:
        loss = partial(F.binary_cross_entropy_with_logits, target=targets.float())
        with nullcontext() if fits else pytest.warns(UserWarning, match="taken for a mean squared"):
            examined.examine(outputs, derivative_of(loss, outputs), 1)
        assert examined.tells_excess == fits


UNNOTICED = {
    "distillation with a temperature": lambda z: F.cross_entropy(z / 2, soft_targets(5)),
    "focal loss": lambda z: (
        (1 - z.softmax(1).gather(1, CLASSES[:, None])).square()
        * F.cross_entropy(z, CLASSES, reduction="none")[:, None]
    ).mean(),
}


@pytest.mark.parametrize("name", UNNOTICED)
def test_what_is_not_noticed(name):
    """As docs/losses.md says."""
    model = Linear(5)
    optimizer = kfc.KFC(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        UNNOTICED[name](model(batch())).backward()
    optimizer.close()
    assert "Categorical" in optimizer.describe()


def test_a_gradient_penalty_is_taken_for_mixed_targets():
    """In the same backward pass it makes F too large; a strong one is noticed."""
    factors = []
    for penalty in (0.0, 1.0, 30.0):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
        optimizer = kfc.KFC(model, clip=None, curvature=kfc.Kronecker(fisher="exact"))
        inputs = batch().requires_grad_()
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, CLASSES)
        (slope,) = torch.autograd.grad(outputs.logsumexp(1).sum(), inputs, create_graph=True)
        strong = pytest.warns(UserWarning, match="which its reduction says")
        with strong if penalty > 1 else nullcontext():
            (loss + penalty * slope.square().mean()).backward()
        optimizer.step()
        optimizer.close()
        factors.append(optimizer.factors["2"].derivative.trace())
    assert factors[0] < factors[1] < 1.05 * factors[0]
    assert factors[2] > 1.01 * factors[0]


def test_label_smoothing_in_bfloat16():
    """Rounding may hide the smoothing, so that weights are too small by at most that."""
    model = Linear(10).to(torch.bfloat16)
    optimizer = kfc.KFC(model, clip=None, curvature=kfc.Kronecker(fisher="exact"))
    targets = class_targets(10, ())
    outputs = model(batch().to(torch.bfloat16)).float()
    F.cross_entropy(outputs, targets, label_smoothing=0.1).backward()
    optimizer.step()
    optimizer.close()
    expected = exact_factor(Linear(10), batch(), torch.full((N, 1), 1 / N).double()).trace()
    assert 0.85 < float(optimizer.factors["layer"].derivative.double().trace() / expected) < 1.05


def test_label_smoothing_of_equal_predictions():
    """They look like targets of one class with a smaller weight, until predictions differ."""
    model = Linear(5)
    nn.init.zeros_(model.layer.weight)
    nn.init.zeros_(model.layer.bias)

    def loss_of(outputs, part):
        return F.cross_entropy(outputs, CLASSES[part], label_smoothing=0.1)

    assert norm_ratio(model, batch(), loss_of)[0] == pytest.approx(0.9)
    assert norm_ratio(Linear(5), batch(), loss_of)[0] == pytest.approx(1)


def test_the_loss_is_examined_again_after_a_thousand_steps(monkeypatch):
    monkeypatch.setattr("kfc.fisher.loss.EXAMINATION_PERIOD", 3)
    model = Linear(5)
    optimizer = kfc.KFC(model, clip=None)
    losses = [lambda z: F.cross_entropy(z, CLASSES)] * 3 + [lambda z: F.mse_loss(z, BINARY)] * 2
    messages = []
    for loss_of in losses:
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss_of(model(batch())).backward()
        optimizer.step()
        messages.append([str(w.message) for w in caught if "does not fit" in str(w.message)])
    optimizer.close()
    assert [len(found) for found in messages] == [0, 0, 0, 1, 0]
    assert "does not sum to zero over the classes" in messages[3][0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_read_in_low_precision(dtype):
    targets = class_targets(10, ())
    model = Linear(10).to(dtype)
    optimizer = kfc.KFC(model, curvature=kfc.Kronecker(fisher="exact"))
    (5 * F.cross_entropy(model(batch().to(dtype)).float(), targets)).backward()
    optimizer.step()
    optimizer.close()
    reference = Linear(10)
    expected = exact_factor(reference, batch(), torch.full((N, 1), 5 / N).double())
    found = optimizer.factors["layer"].derivative.double()
    assert_close(found, expected, rtol=0.05, atol=0.02 * expected.abs().max().item())


def test_the_state_continues_with_what_was_read():
    targets = class_targets(5, ())
    states, results = [], []
    for resume in (False, True):
        model = Linear(5)
        optimizer = kfc.KFC(model, seed=1)
        for step in range(6):
            if resume and step == 3:
                optimizer.close()
                optimizer = kfc.KFC(model, seed=1)
                optimizer.load_state_dict(states[0])
            optimizer.zero_grad()
            (3 * F.cross_entropy(model(batch()), targets)).backward()
            optimizer.step()
            if not resume and step == 2:
                states.append(copy.deepcopy(optimizer.state_dict()))
        results.append(model.layer.weight.detach().clone())
        assert "dimension 1" in optimizer.describe()
        optimizer.close()
    assert torch.equal(*results)


# Targets that are one class each


def derivative_of(loss: Callable[[Tensor], Tensor], outputs: Tensor) -> Tensor:
    (derivative,) = torch.autograd.grad(loss(outputs.requires_grad_()), outputs)
    outputs.requires_grad_(False)
    return derivative


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("shape", "axis"), [((7, 4), 1), ((3, 5, 2, 3), 1), ((3, 2, 5), -1)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_terms_of_one_class_each_are_those_that_are_read_in_general(shape, axis, weighted, size):
    outputs, classes = size * torch.randn(shape), shape[axis]
    labels = torch.randint(classes, outputs.movedim(axis, -1).shape[:-1])
    weight = torch.rand(classes) + 0.1 if weighted else None

    def loss(o: Tensor) -> Tensor:
        return 3 * F.cross_entropy(o.movedim(axis, 1), labels, weight)

    derivative = derivative_of(loss, outputs)
    found = read_classes(outputs, derivative, axis)
    general = read_categorical(outputs, derivative, axis)
    assert found is not None
    assert general.certain.all()
    assert_close(found.weights, general.weights)
    assert_close(found.excess, excess_of_categories(outputs, derivative, general.weights, axis))
    assert_close(found.excess, loss(outputs))


SEVEN_MIXTURES = torch.rand(7, 4, dtype=torch.float64).softmax(1)
SEVEN_LABELS = torch.tensor([0, 3, 1, 1, 2, 0, 3])


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    "loss",
    [
        lambda o: F.cross_entropy(o, SEVEN_MIXTURES),
        lambda o: F.cross_entropy(o, SEVEN_LABELS, label_smoothing=0.1),
        lambda o: F.cross_entropy(o, SEVEN_LABELS, ignore_index=1),
        lambda o: F.nll_loss(o, SEVEN_LABELS),
        lambda o: F.cross_entropy(o[:, :2], SEVEN_LABELS % 2),
        lambda o: F.mse_loss(o, SEVEN_MIXTURES),
        lambda o: F.cross_entropy(o, SEVEN_LABELS) * torch.nan,
    ],
    ids=["mixtures", "smoothed", "ignored", "log-probabilities", "unused", "squares", "nan"],
)
def test_other_targets_are_not_taken_for_one_class_each(loss):
    outputs = torch.randn(7, 4)
    assert read_classes(outputs, derivative_of(loss, outputs), 1) is None


def test_one_of_two_classes_is_uncertain():
    outputs = torch.randn(7, 2)
    derivative = derivative_of(lambda o: F.cross_entropy(o, SEVEN_LABELS % 2), outputs)
    assert read_classes(outputs, derivative, 1) is None
