"""Statistics gathered in the user's backward pass, however that pass is made."""

import copy
import gc
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import kfc
from kfc.statistics.passes import MAX_WAITING

pytestmark = pytest.mark.usefixtures("double")

EXACT = kfc.Kronecker(fisher="exact")


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 5), nn.Tanh(), nn.Linear(5, 4)
    )


def batch(size: int = 6, seed: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 1, 6, 6, generator=generator)
    return inputs, torch.randint(4, (size,), generator=generator)


def make(model: nn.Module, **options) -> kfc.KFC:
    """Return an optimizer with exact statistics that computes ν on all examples of every step."""
    clip = kfc.FisherClip(1e30, fraction=1, period=1)
    return kfc.KFC(model, clip=clip, **{"curvature": EXACT, **options})


def results(optimizer: kfc.KFC) -> tuple[dict, float]:
    """Take a step with gradients that are the same in all tests; return Ω and Γ, and ν."""
    for parameter in optimizer.model.parameters():
        parameter.grad = torch.sin(1 + parameter.detach())
    optimizer.step()
    assert optimizer.diagnostics["step"] == 1
    return optimizer.factors, optimizer.diagnostics["fisher_norm"]


def gathered(backward: Callable[[nn.Module], object], **options) -> tuple[dict, float]:
    """Return Ω, Γ and ν after a backward pass of a new model."""
    model = net()
    optimizer = make(model, **options)
    backward(model)
    return results(optimizer)


def plain(weight: float = 1.0, size: int = 6, **options) -> tuple[dict, float]:
    """Return Ω, Γ and ν of cross-entropy, by a single backward pass."""
    x, y = batch(size)
    return gathered(lambda model: (weight * F.cross_entropy(model(x), y)).backward(), **options)


def test_the_user_sees_the_same_gradients():
    x, y = batch()
    found = []
    for attached in (False, True):
        model, inputs = net(), x.clone().requires_grad_()
        optimizer = make(model) if attached else None
        F.cross_entropy(model(inputs), y).backward()
        found.append([inputs.grad, *(p.grad.clone() for p in model.parameters())])
        del optimizer
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_the_whole_model(reentrant):
    x, y = batch()

    def backward(model):
        inputs = x.clone().requires_grad_()
        F.cross_entropy(checkpoint(model, inputs, use_reentrant=reentrant), y).backward()

    assert_close(gathered(backward), plain())


def test_checkpointing_inside_the_model():
    x, y = batch()

    class Checkpointed(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = Checkpointed(*net())
    optimizer = make(model)
    F.cross_entropy(model(x), y).backward()
    assert_close(results(optimizer), plain())


def test_autocast():
    x, y = batch(64)
    found = []
    for dtype in (None, torch.bfloat16):
        model = net().float()
        optimizer = make(model)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(x.float()), y)
        loss.backward()
        found.append(results(optimizer))
    (expected, norm), (factors, rounded) = found
    assert rounded == pytest.approx(norm, rel=0.02)
    for name, (activation, derivative) in factors.items():
        assert activation.dtype == derivative.dtype == torch.float32
        for each, exact in zip((activation, derivative), expected[name], strict=True):
            assert (each - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("likelihood", ["auto", "categorical", "gaussian"])
def test_grad_scaler(likelihood, unscale):
    x, y = batch()
    found = []
    for enabled in (False, True):
        model = net()
        optimizer = make(model, likelihood=likelihood)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        outputs = model(x)
        target = torch.ones_like(outputs) * y[:, None]
        is_gaussian = likelihood == "gaussian"
        loss = F.mse_loss(outputs, target) if is_gaussian else F.cross_entropy(outputs, y)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.diagnostics["step"] == 1
        found.append((optimizer.factors, optimizer.diagnostics["fisher_norm"]))
    assert_close(*found)


def test_a_second_backward_pass_through_the_same_forward():
    x, y = batch()

    def backward(model):
        outputs = model(x)
        F.cross_entropy(outputs, y).backward(retain_graph=True)
        (0.5 * F.cross_entropy(outputs, y.flip(0))).backward()

    assert_close(gathered(backward), plain(1.5))


def test_several_backward_passes_through_one_forward_with_few_classes():
    """No class of three is without a target, so that the sum of the derivatives tells nothing."""
    x, found = torch.randn(5, 2), []
    targets = torch.tensor([[0, 1, 2, 0, 1], [1, 2, 0, 1, 2], [2, 0, 1, 2, 0]])
    for together in (True, False):
        torch.manual_seed(1)
        model = nn.Linear(2, 3)
        optimizer = make(model)
        outputs = model(x)
        if together:
            (3 * F.cross_entropy(outputs, targets[0])).backward()
        else:
            for each in targets:
                F.cross_entropy(outputs, each).backward(retain_graph=True)
        found.append(results(optimizer))
    assert_close(*found)


@pytest.mark.parametrize("option", ["retain_graph", "create_graph"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_pass_that_keeps_its_graph(option):
    x, y = batch()
    found = gathered(lambda model: F.cross_entropy(model(x), y).backward(**{option: True}))
    assert_close(found, plain())


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_a_gradient_in_the_inputs_counts_for_nothing(fisher):
    x, y = batch()
    curvature = kfc.Kronecker(fisher=fisher)

    def backward(model):
        inputs = x.clone().requires_grad_()
        loss = F.cross_entropy(model(inputs), y)
        torch.autograd.grad(loss, inputs, retain_graph=True)
        loss.backward()

    assert_close(gathered(backward, curvature=curvature), plain(curvature=curvature))


def test_a_gradient_penalty():
    """F is counted once, with larger weights than the loss has.

    The derivative in the outputs is that of the loss plus that of the penalty, which is a function
    of the outputs too. So the weights are uncertain, and the least that is possible is used.
    """
    x, y = batch()

    def backward(model):
        inputs = x.clone().requires_grad_()
        loss = F.cross_entropy(model(inputs), y)
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + gradient.square().sum()).backward()

    (found, norm), (expected, expected_norm) = gathered(backward), plain()
    assert norm == pytest.approx(expected_norm, rel=0.05)
    for name, factors in expected.items():
        assert_close(found[name].activation, factors.activation)
        ratio = found[name].derivative / factors.derivative
        assert_close(ratio, torch.full_like(ratio, ratio.mean().item()))
        assert 1 <= ratio.mean() < 1.05


def test_gradients_by_autograd_grad():
    x, y = batch()

    def backward(model):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    assert_close(gathered(backward), plain())


def test_gradients_of_some_parameters():
    """A backward pass to some parameters is one of a training step; the others have no gradient."""
    x, y = batch()
    model = net()
    optimizer = make(model)
    F.cross_entropy(model(x), y).backward(inputs=list(model[5].parameters()))
    optimizer.step()
    expected, _ = plain()
    assert_close(optimizer.factors["5"], expected["5"])


def test_two_forward_passes_and_one_backward_pass():
    x, y = batch()

    def backward(model):
        first, second = model(x[:2]), model(x[2:])
        (2 * F.cross_entropy(first, y[:2]) + 4 * F.cross_entropy(second, y[2:])).div(6).backward()

    assert_close(gathered(backward), plain())


@pytest.mark.parametrize("divided", [True, False])
def test_micro_batches(divided):
    x, y = batch()

    def backward(model):
        for part in (slice(0, 2), slice(2, 4), slice(4, 6)):
            loss = F.cross_entropy(model(x[part]), y[part])
            (loss / 3 if divided else loss).backward()

    assert_close(gathered(backward), plain(1.0 if divided else 3.0))


@pytest.mark.parametrize("first", [True, False])
def test_a_forward_pass_without_a_backward_pass(first):
    (x, y), (other, _) = batch(), batch(9, seed=3)

    def backward(model):
        if first:
            model(other)
        outputs = model(x)
        if not first:
            model(other)
        F.cross_entropy(outputs, y).backward()

    assert_close(gathered(backward), plain())


def test_many_forward_passes_without_a_backward_pass_keep_few_graphs():
    x, y = batch()
    model, activations = net(), []
    optimizer = make(model)
    model[5].register_forward_pre_hook(
        lambda _, args: activations.append(StorageWeakRef(args[0].untyped_storage()))
    )
    for _ in range(40):
        model(x)
    gc.collect()
    assert sum(not each.expired() for each in activations) <= MAX_WAITING
    F.cross_entropy(model(x), y).backward()
    found = results(optimizer)
    gc.collect()
    assert all(each.expired() for each in activations)
    assert_close(found, plain())


def test_forward_passes_whose_outputs_are_gone_keep_no_inputs():
    x, y = batch()
    model, inputs = net(), []
    optimizer = make(model)
    waiting = model(x)
    for due in (True, False):
        for _ in range(40):
            other = x.clone()
            inputs.append(StorageWeakRef(other.untyped_storage()))
            model(other)
        del other
        gc.collect()
        loss = F.cross_entropy(waiting, y) + F.cross_entropy(model(x), y)
        assert sum(not each.expired() for each in inputs) <= (MAX_WAITING if due else 0)
        optimizer.zero_grad()
        loss.backward()
        assert len(optimizer.engine.collector.observations) == 2
        optimizer.step()
        waiting = model(x)


def test_outputs_changed_in_place_by_the_loss():
    """The outputs are those of the model, and a temperature is noticed."""
    x, y = batch()

    def backward(model):
        logits = model(x)
        with pytest.warns(UserWarning, match="softmax of the outputs divided by 2"):
            F.cross_entropy(logits.div_(2.0), y).backward()

    found, expected = gathered(backward), plain()
    for name, factors in expected[0].items():
        assert_close(found[0][name].activation, factors.activation)
        ratio = found[0][name].derivative / factors.derivative
        assert_close(ratio, torch.full_like(ratio, ratio.mean().item()))
        assert 0.2 < ratio.mean() < 2


def test_views_changed_in_place_by_the_loss():
    """The output of a linear layer with several leading dimensions is a view."""
    x, y = torch.randn(6, 5, 3), torch.randint(4, (6, 5))
    found = []
    for in_place in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer = make(model)
        logits = model(x)
        logits = logits.mul_(1.0) if in_place else logits * 1.0
        F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
        found.append(results(optimizer))
    assert_close(*found)


@pytest.mark.parametrize("where", ["a hidden activation", "a parameter"])
def test_an_exception_in_the_backward_pass(where):
    x, y = batch()

    def fail(gradient):
        raise ArithmeticError("on purpose")

    model = net()
    optimizer = make(model)
    # Hooks of hidden activations run in the backward pass that gathers statistics, too.
    tensor = model[0].weight if where == "a parameter" else None
    handle = model[1].register_forward_hook(lambda *args: args[2].register_hook(fail) and None)
    if tensor is not None:
        handle.remove()
        handle = tensor.register_hook(fail)
    with pytest.raises(ArithmeticError):
        F.cross_entropy(model(x), y).backward()
    handle.remove()
    with pytest.raises(RuntimeError, match="no statistics yet"):
        optimizer.step()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    assert_close(results(optimizer), plain())


class Several(nn.Module):
    """Returns a tuple of features and of logits, with classes in the last dimension."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Conv1d(2, 3, 2), nn.Linear(3, 4)

    def forward(self, x):
        features = self.body(x).tanh()
        return features, self.head(features.transpose(1, 2))


class Direct(Several):
    """Returns logits with classes in the second dimension."""

    def forward(self, x):
        return super().forward(x)[1].transpose(1, 2)


class Flat(Several):
    """Returns one row of logits for every location."""

    def forward(self, x):
        return super().forward(x)[1].flatten(0, 1)


@pytest.mark.parametrize(
    ("output", "reference"),
    [
        (lambda out: out[1].transpose(1, 2), Direct),
        (lambda out: out[1].movedim(2, 1).contiguous(), Direct),
        (lambda out: out[1].flatten(0, 1), Flat),
    ],
)
def test_outputs_that_are_selected_and_reshaped(output, reference):
    x, y = torch.randn(6, 2, 5), torch.randint(4, (6, 4))
    expected = reference()
    optimizer = make(expected)
    outputs = expected(x)
    F.cross_entropy(outputs, y if outputs.dim() == 3 else y.flatten()).backward()
    truth = results(optimizer)
    model = Several()
    optimizer = make(model, output=output, strict=True)
    _, logits = model(x)
    F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
    assert_close(results(optimizer), truth)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_selected_output_of_a_bad_batch(bad):
    """It does not choose the likelihood."""
    x, y = torch.randn(6, 2, 5), torch.randint(4, (6, 4))
    model = Several()
    optimizer = make(model, output=lambda out: out[1].transpose(1, 2), strict=True)
    for factor in (bad, 1.0):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x)[1].flatten(0, 1), y.flatten())
        (factor * loss).backward()
        if factor == 1:
            optimizer.step()
        else:
            with pytest.warns(UserWarning, match="step 1 was skipped"):
                optimizer.step()
    assert "sums to zero over dimension 1" in optimizer.describe()


def test_a_selected_output_beside_others_that_the_loss_uses():
    """Only the selected output has curvature; the others change the gradient alone."""
    x, y = torch.randn(6, 2, 5), torch.randint(4, (6, 4))
    found = []
    for penalty in (0.0, 1.0):
        model = Several()
        optimizer = make(model, output=lambda out: out[1], strict=True)
        features, logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        (loss + penalty * features.square().mean()).backward()
        found.append(results(optimizer))
    assert_close(*found)


def test_an_output_made_of_several_has_the_weights_of_the_reduction():
    """The derivatives in its parts arrive one after the other, so that they cannot be read."""
    x, y = batch()

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.body, self.main, self.aux = nn.Linear(36, 3), nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, x):
            hidden = self.body(x.flatten(1)).tanh()
            return self.main(hidden), self.aux(hidden)

    class Stacked(Heads):
        def forward(self, x):
            return torch.stack(super().forward(x), dim=2)

    model, reference = Heads(), Stacked()
    optimizer = make(model, likelihood="categorical", output=lambda out: torch.stack(out, dim=2))
    main, aux = model(x)
    with pytest.warns(UserWarning, match="with respect to the output is unknown"):
        (F.cross_entropy(main, y) + F.cross_entropy(aux, y)).backward()
    expected = make(reference)
    F.cross_entropy(reference(x), torch.stack([y, y], dim=1)).backward()
    assert_close(results(optimizer), results(expected))


def test_a_copied_model():
    (x, y), (other, labels) = batch(), batch(9, seed=3)

    def backward(model):
        outputs = model(x)
        twin = copy.deepcopy(model)
        F.cross_entropy(twin(other), labels).backward()
        F.cross_entropy(outputs, y).backward()

    assert_close(gathered(backward), plain())


def test_retained_gradients_of_outputs_and_layers():
    x, y = batch()
    found = []
    for attached in (False, True):
        model, kept = net(), []
        optimizer = make(model) if attached else None
        handle = model[3].register_forward_hook(lambda *args, kept=kept: kept.append(args[2]))
        outputs = model(x)
        handle.remove()
        for tensor in (outputs, *kept):
            tensor.retain_grad()
        F.cross_entropy(outputs, y).backward()
        found.append([outputs.grad, kept[0].grad])
        del optimizer
    assert_close(*found, rtol=0, atol=0)
