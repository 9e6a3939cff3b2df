"""Models that return more than a tensor, without ``output=``."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfc


@dataclass
class Record:
    loss: Tensor | None
    logits: Tensor
    hidden_states: Tensor


class Named(NamedTuple):
    hidden_states: Tensor
    logits: Tensor


class ModelOutput(OrderedDict):
    """A dict whose items are attributes, as in Hugging Face."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


RESULTS = {
    "record": lambda logits, hidden: Record(None, logits, hidden),
    "named tuple": lambda logits, hidden: Named(hidden, logits),
    "model output": lambda logits, hidden: ModelOutput(logits=logits, hidden_states=hidden),
    "tuple": lambda logits, hidden: (logits, hidden.detach()),
    "list": lambda logits, hidden: [hidden.detach(), logits],
    "with a loss": lambda logits, hidden: (logits.square().mean(), logits, hidden.argmax(1)),
    "nested": lambda logits, hidden: (logits, {"hidden": (hidden.detach(), None)}),
}


class Model(nn.Module):
    def __init__(self, returned=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.returned = returned
        self.logits: Tensor

    def forward(self, x):
        hidden = self.body(x).tanh()
        self.logits = self.head(hidden)
        return self.logits if self.returned is None else self.returned(self.logits, hidden)


def train(model, make, examples: int):
    optimizer = make(model)
    torch.manual_seed(1)
    for _ in range(4):
        x, y = torch.randn(examples, 6), torch.randint(3, (examples,))

        def loss(x=x, y=y):
            model(x)
            return F.cross_entropy(model.logits, y)

        if isinstance(optimizer, kfc.KFAC):
            optimizer.step(loss)
            continue
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    optimizer.describe(torch.randn(4, 6))
    return list(model.parameters())


@pytest.mark.parametrize("kind", [kfc.KFC, kfc.KFAC, kfc.WhitenedAdam])
@pytest.mark.parametrize("name", RESULTS)
def test_unambiguous_outputs_are_found(name, kind):
    for examples in (12, 96):
        found = train(Model(RESULTS[name]), kind, examples)
        expected = train(Model(), kind, examples)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["record", "tuple", "list"])
def test_some_passes_may_return_only_the_tensor(name):
    model, plain = Model(RESULTS[name]), Model()
    optimizers = kfc.KFC(model, likelihood="gaussian"), kfc.KFC(plain, likelihood="gaussian")
    for _ in range(3):
        x = torch.randn(12, 6)
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            each(x)
            F.mse_loss(each.logits, torch.zeros_like(each.logits)).backward()
            optimizer.step()
        model.returned = None
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize(
    "returned",
    [
        lambda logits, hidden: (logits, hidden),
        lambda logits, hidden: (logits, (hidden, hidden)),
        lambda logits, hidden: {"outputs": logits},
        lambda logits, hidden: ((logits,), 1),
        lambda logits, hidden: (logits.argmax(1),),
        lambda logits, hidden: ModelOutput(scores=logits),
    ],
)
def test_ambiguous_outputs_are_errors_that_say_what_to_write(returned):
    model = Model(returned)
    optimizer = kfc.KFC(model)
    with pytest.raises(TypeError, match=r"not a tensor; .*output=lambda out: out.logits"):
        model(torch.randn(12, 6))
    optimizer.close()


def test_exact_fisher_products_take_the_same_outputs():
    model, plain, x = Model(RESULTS["record"]), Model(), torch.randn(5, 6)
    vector = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for returned in ("record", "with a loss"):
        model.returned = RESULTS[returned]
        form = kfc.fisher.quadratic_form(model, x, vector)
        torch.testing.assert_close(form, kfc.fisher.quadratic_form(plain, x, vector))
