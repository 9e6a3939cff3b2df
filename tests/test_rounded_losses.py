"""The likelihood is found from derivatives that were rounded to 16 bits, as with autocast."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import kfc
from kfc.fisher.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from kfc.fisher.loss import Loss

PRECISIONS = [torch.bfloat16, torch.float16]


def found(loss: Callable[[Tensor], Tensor], outputs: Tensor) -> tuple[Loss, str]:
    """Return what is known of a loss after one backward pass, and the warning."""
    outputs.requires_grad_()
    (derivative,) = torch.autograd.grad(loss(outputs), outputs)
    examined = Loss(None, strict=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        examined.examine(outputs.detach(), derivative, 1)
    return examined, " ".join(str(each.message) for each in caught)


def check(expected: type[Likelihood], loss: Callable[[Tensor], Tensor], outputs: Tensor) -> None:
    examined, warning = found(loss, outputs)
    assert type(examined.likelihood) is expected
    assert ("taken for a mean squared error" in warning) == (expected is Gaussian)
    assert expected is Gaussian or not warning


def labels(like: Tensor, part: float = 0.3) -> Tensor:
    return (torch.rand(like.shape) < part).float()


def one_hot(like: Tensor) -> Tensor:
    return F.one_hot(torch.randint(like.shape[1], (len(like),)), like.shape[1]).float()


ERRORS = {
    "squared": lambda z: F.mse_loss(z, torch.randn(z.shape)),
    "squared, fitted": lambda z: F.mse_loss(z, z.detach() + 0.1 * torch.randn(z.shape)),
    "squared, centred": lambda z: F.mse_loss(z, (t := torch.randn(z.shape)) - t.mean(1)[:, None]),
    "squared, one of the classes": lambda z: F.mse_loss(z, one_hot(z)),
    "squared, 0 or 1": lambda z: F.mse_loss(z, labels(z)),
    "squared, 1 or -1": lambda z: F.mse_loss(z, 2 * labels(z) - 1),
    "squared, far away": lambda z: F.mse_loss(z, torch.full_like(z, 100)),
    "Huber": lambda z: F.smooth_l1_loss(z, torch.randn(z.shape)),
    "absolute": lambda z: F.l1_loss(z, torch.randn(z.shape)),
}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("size", [0.02, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_real_targets(name, size, dtype):
    for outputs in (1, 2, 10, 100):
        if name == "squared, centred" and outputs == 1:
            continue  # no target but 0
        # A few outputs that are almost equal do not decide.
        for examples in (64, 256) if size < 0.1 else (8, 64, 256):
            z = (size * torch.randn(examples, outputs)).to(dtype)
            check(Gaussian, lambda z: ERRORS[name](z.float()), z)


BINARY = {
    "plain": lambda z: {},
    "weights of labels": lambda z: {"weight": torch.rand(z.shape[1]) + 0.1},
    "weights of positive labels": lambda z: {"pos_weight": 5 * torch.rand(z.shape[1]) + 0.5},
    "weights of labels and of targets": lambda z: {
        "weight": torch.rand(z.shape[1]) + 0.1,
        "pos_weight": torch.tensor(3.0),
    },
    "mask": lambda z: {"weight": labels(z, 0.5)},
    "two weights": lambda z: {"weight": 1 + 4 * labels(z)},
    "weights of examples": lambda z: {"weight": torch.rand(len(z), *[1] * (z.dim() - 1)) + 0.1},
}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("size", [0.0, 0.02, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("name", BINARY)
def test_binary_cross_entropy(name, size, is_rounded, dtype):
    """Also if the loss itself is computed in low precision."""
    for shape in ((64, 1), (8, 10), (64, 10), (64, 100), (16, 3, 7)):
        options = BINARY[name]
        if name == "weights of examples" and shape[1] < 10:
            continue  # almost every element has a weight of its own
        if "labels" in name and len(shape) > 2:
            continue

        def loss(z, options=options):
            z = z if is_rounded else z.float()
            weights = {key: value.to(z) for key, value in options(z).items()}
            total = F.binary_cross_entropy_with_logits(z, labels(z).to(z), **weights)
            return total * (1024 if dtype is torch.float16 else 1)

        check(Bernoulli, loss, (size * torch.randn(shape)).to(dtype))


def test_underflow_makes_no_weights():
    """Most of these derivatives are subnormal numbers, of which there are few."""
    z = (0.02 * torch.randn(256, 100)).half()
    check(Gaussian, lambda z: F.mse_loss(z.float(), one_hot(z)), z)


def test_training_with_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 10))
    inputs = torch.randn(128, 8)
    targets = (inputs @ torch.randn(8, 10)).sin()
    optimizer = kfc.KFC(model)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(inputs)
    with pytest.warns(UserWarning, match="taken for a mean squared error"):
        F.mse_loss(outputs.float(), targets).backward()
    optimizer.step()
    optimizer.close()
    assert "Gaussian" in optimizer.describe()


@pytest.mark.parametrize("size", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(("hard", "mode"), [(0.0, "assumed"), (0.3, "largest"), (1.0, "terms")])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_binary_targets_between_0_and_1(factor, hard, mode, size):
    """Without targets of 0 or 1, weights are those of the reduction."""
    for shape in ((64, 1), (64, 10), (64, 100)):
        z = (size * torch.randn(shape)).bfloat16().requires_grad_()
        targets = torch.rand(shape)
        targets = torch.where(torch.rand(shape) < hard, targets.round(), 0.1 + 0.8 * targets)
        scale = factor if hard else 1.0
        loss = scale * F.binary_cross_entropy_with_logits(z.float(), targets)
        (derivative,) = torch.autograd.grad(loss, z)
        examined, assumed = Loss(Bernoulli(), strict=True), 1 / z.numel()
        examined.examine(z.detach(), derivative, 1)
        weights = torch.as_tensor(examined.terms(z.detach(), derivative, assumed).weights)
        assert examined.mode == mode
        assert_close(weights.mean(), torch.tensor(scale * assumed), rtol=0.02, atol=0)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_logits_between_0_and_1_are_no_probabilities(dtype):
    z = torch.rand(256, 10).to(dtype)
    examined = Loss(Bernoulli(), strict=True)
    z.requires_grad_()
    loss = 1024 * F.binary_cross_entropy_with_logits(z.float(), labels(z))
    (derivative,) = torch.autograd.grad(loss, z)
    examined.examine(z.detach(), derivative, 1)
    assert examined.tells_excess


CENTRED = {
    "centred": lambda z: F.mse_loss(z, (t := torch.randn(z.shape)) - t.mean(1)[:, None]),
    "fitted": lambda z: F.mse_loss(z, z.detach() + 0.1 * torch.randn(z.shape)),
}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("size", [0.05, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("name", CENTRED)
def test_squared_errors_are_not_those_of_classes(name, size, dtype):
    """Sums of many squared errors are small too, compared with the sum of their sizes."""
    for outputs in (3, 10, 100, 1000):
        for examples in (8, 64):
            z = (size * torch.randn(examples, outputs)).to(dtype)
            examined, _ = found(lambda z: CENTRED[name](z.float()), z)
            assert not isinstance(examined.likelihood, Categorical)


def classes_of(like: Tensor) -> Tensor:
    return torch.randint(like.shape[1], (len(like),))


def ignored(like: Tensor) -> Tensor:
    targets = classes_of(like)
    targets[1::2] = -100
    return targets


CROSS_ENTROPIES = {
    "one class": lambda z: F.cross_entropy(z, classes_of(z)),
    "predicted class": lambda z: F.cross_entropy(z, z.argmax(1)),
    "ignored": lambda z: F.cross_entropy(z, ignored(z)),
    "class weights": lambda z: F.cross_entropy(z, classes_of(z), torch.rand(z.shape[1]).to(z)),
    "smoothed": lambda z: F.cross_entropy(z, classes_of(z), label_smoothing=0.1),
    "mixed": lambda z: F.cross_entropy(z, (0.9 * one_hot(z) + 0.1 * one_hot(z)).to(z)),
    "distilled": lambda z: F.kl_div(
        z.log_softmax(1),
        (z.detach().float() + 0.5 * torch.randn(z.shape)).softmax(1).to(z),
        reduction="batchmean",
    ),
}


@pytest.mark.parametrize(
    ("dtype", "is_rounded"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)],
)
@pytest.mark.parametrize("size", [0.0, 0.02, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("name", CROSS_ENTROPIES)
def test_cross_entropy(name, size, dtype, is_rounded):
    """Also if the loss itself is computed in low precision."""
    scale = 1024 if dtype is torch.float16 else 1
    for shape in ((8, 2), (64, 3), (8, 100), (64, 1000), (8, 50_000)):
        if name == "distilled" and is_rounded and shape[1] > 1000:
            continue  # derivatives are smaller than the rounding error of the loss
        z = (size * torch.randn(shape)).to(dtype)

        def loss(z):
            return scale * CROSS_ENTROPIES[name](z if is_rounded else z.float())

        examined, warning = found(loss, z)
        assert isinstance(examined.likelihood, Categorical)
        # Without a GradScaler, a factor is part of the loss.
        assert scale > 1 or not warning
