"""The likelihood is found from derivatives that were rounded to 16 bits, as with autocast."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kfc.fisher.likelihoods import Categorical
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


def one_hot(like: Tensor) -> Tensor:
    return F.one_hot(torch.randint(like.shape[1], (len(like),)), like.shape[1]).float()


ERRORS = {
    "centred": lambda z: F.mse_loss(z, (t := torch.randn(z.shape)) - t.mean(1)[:, None]),
    "fitted": lambda z: F.mse_loss(z, z.detach() + 0.1 * torch.randn(z.shape)),
}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("size", [0.05, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("name", ERRORS)
def test_squared_errors_are_not_those_of_classes(name, size, dtype):
    """Sums of many squared errors are small too, compared with the sum of their sizes."""
    for outputs in (3, 10, 100, 1000):
        for examples in (8, 64):
            z = (size * torch.randn(examples, outputs)).to(dtype)
            examined, _ = found(lambda z: ERRORS[name](z.float()), z)
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
