"""Exact Fisher products of models with operations that have no forward-mode derivative."""

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import kfc
from kfc._helpers import forward_level
from reference import cross_entropy, exact_fisher


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, derivative):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * derivative


class Custom(nn.Linear):
    def forward(self, x):
        return Cube.apply(super().forward(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.lstm(x.unflatten(1, (1, -1)))[0][:, -1])


class Quantised(nn.Linear):
    def forward(self, x):
        weight = torch.fake_quantize_per_tensor_affine(self.weight.float(), 0.01, 0, -128, 127)
        return F.linear(x, weight.to(x), self.bias)


class Bag(nn.Module):
    """Neither has a forward mode nor a second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(7, 4), nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(self.bag(tokens))


MODELS = {
    "lstm": Recurrent,
    "weight norm": lambda: nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(4, 5)), nn.Linear(5, 3)),
    "custom function": lambda: nn.Sequential(Custom(4, 5), nn.Linear(5, 3)),
    "fake quantisation": lambda: nn.Sequential(Quantised(4, 5), nn.Linear(5, 3)),
}


def random_vector(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(p) for name, p in model.named_parameters()}


def flat(vector) -> torch.Tensor:
    return torch.cat([v.flatten() for v in vector.values()])


# In float64, torch computes an LSTM by operations that have a forward mode.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "lstm"])
def test_products_by_double_backward_are_exact(name, double):
    model, inputs = MODELS[name](), torch.randn(6, 4)
    vector, state = random_vector(model), {k: v.clone() for k, v in model.state_dict().items()}
    dense = exact_fisher(model, inputs, cross_entropy())
    with pytest.warns(UserWarning, match="no forward-mode derivative"):
        form = kfc.fisher.quadratic_form(model, inputs, vector)
    torch.testing.assert_close(form, flat(vector) @ dense @ flat(vector))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once for each model
        product = kfc.fisher.vector_product(model, inputs, vector)
        some = {name: vector[name] for name in list(vector)[:1]}
        part = kfc.fisher.quadratic_form(model, inputs, some)
    torch.testing.assert_close(flat(product), dense @ flat(vector))
    first = flat(some)
    torch.testing.assert_close(part, first @ dense[: len(first), : len(first)] @ first)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_products_of_recurrent_layers_are_exact():
    model, inputs = Recurrent(), torch.randn(6, 4)
    vector = random_vector(model)
    with pytest.warns(UserWarning, match="mkldnn_rnn_layer"):
        form = kfc.fisher.quadratic_form(model, inputs, vector)
    dense = exact_fisher(model.double(), inputs.double(), cross_entropy())
    long = flat(vector).double()
    torch.testing.assert_close(form, long @ dense @ long, rtol=1e-5, atol=0)


def test_outputs_without_parameters_do_not_change(double):
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Custom(4, 3)

        def forward(self, x):
            return {"body": self.body(x), "data": x[:, :2]}

    model, inputs = Constant(), torch.randn(6, 4)
    vector, both = random_vector(model), {"body": "categorical", "data": "categorical"}
    with pytest.warns(UserWarning, match="no forward-mode derivative"):
        form = kfc.fisher.quadratic_form(model, inputs, vector, likelihood=both)
    own = {name.removeprefix("body."): value for name, value in vector.items()}
    dense = exact_fisher(model.body, inputs, cross_entropy())
    torch.testing.assert_close(form, flat(own) @ dense @ flat(own))


def train(model, optimizer, inputs, steps: int = 8) -> list[float]:
    labels = torch.arange(len(inputs)) % 3
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def warned(caught, words: str) -> int:
    return sum(words in str(each.message) for each in caught)


@pytest.mark.parametrize("name", MODELS)
def test_models_without_forward_mode_train_with_the_exact_norm(name, recwarn):
    model = MODELS[name]()
    optimizer = kfc.KFC(model, lr=0.03)
    losses = train(model, optimizer, torch.randn(12, 4))
    assert losses[-1] < losses[0]
    assert optimizer.diagnostics["clip_evaluations"] > 1
    assert warned(recwarn, "no forward-mode derivative") == 1


def test_models_without_second_derivatives_train_with_the_estimated_norm(recwarn):
    model, tokens = Bag(), torch.randint(7, (12, 4))
    optimizer = kfc.KFC(model, lr=3.0, clip=kfc.FisherClip(1e-3, period=4))
    assert optimizer.diagnostics["clip_evaluations"] == 0
    train(model, optimizer, tokens, 6)
    numbers = optimizer.diagnostics
    assert numbers["clip_evaluations"] == 0
    assert numbers["clip_guards"] == 6
    assert warned(recwarn, "The clip limits the estimated norm") == 1
    assert warned(recwarn, "no forward-mode derivative") == 0
    state = optimizer.state_dict()
    resumed = kfc.KFC(model, lr=3.0, clip=kfc.FisherClip(1e-3, period=4))
    resumed.load_state_dict(state)
    recwarn.clear()
    train(model, resumed, tokens, 2)
    assert resumed.diagnostics["clip_guards"] == 8
    assert warned(recwarn, "estimated norm") == 0


def test_kfac_says_which_operation_has_no_derivatives():
    model, tokens = Bag(), torch.randint(7, (12, 4))
    optimizer = kfc.KFAC(model)
    with pytest.raises(RuntimeError, match=r"has neither: .*_embedding_bag"):
        optimizer.step(lambda: F.cross_entropy(model(tokens), torch.arange(12) % 3))


class OtherThread:
    """A thread that stays at a level of forward-mode differentiation."""

    def __enter__(self) -> None:
        self.done, entered = threading.Event(), threading.Event()

        def run() -> None:
            with forward_level():
                entered.set()
                self.done.wait()

        self.thread = threading.Thread(target=run)
        self.thread.start()
        entered.wait()

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()


def test_a_level_of_another_thread_changes_nothing(recwarn, double):
    model, inputs = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(6, 4)
    vector = random_vector(model)
    expected = kfc.fisher.quadratic_form(model, inputs, vector)
    optimizer = kfc.KFC(model, lr=0.03)
    with OtherThread():
        torch.testing.assert_close(kfc.fisher.quadratic_form(model, inputs, vector), expected)
        losses = train(model, optimizer, inputs, 4)
    assert losses[-1] < losses[0]
    assert set(optimizer.factors) == {"0", "2"}
    assert optimizer.diagnostics["clip_evaluations"] > 0
    assert warned(recwarn, "forward-mode") == 0
