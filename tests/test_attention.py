"""``nn.MultiheadAttention``, compared with attention that is written out, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc
from kfc.layers import find_layers
from reference import cross_entropy, derivative_factor, fitting_loss
from test_layers import EXACT, after_one_batch

pytestmark = pytest.mark.usefixtures("double")
HEADS, WIDTH = 2, 4


class Attending(nn.Module):
    """Attention with a head; queries, keys and values are the same, or not."""

    def __init__(self, kind: str = "self", **options) -> None:
        super().__init__()
        self.kind = kind
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
        self.register_buffer("mix", torch.randn(WIDTH, 3))

    def sources(self, x):
        """Return queries, keys and values, (examples, length, WIDTH)."""
        if self.kind == "self":
            return x, x, x
        memory = x[:, :2].sin()
        return x, memory, memory if self.kind == "cross" else memory.cos()

    def forward(self, x):
        sources = self.sources(x)
        if not self.attention.batch_first:
            # The same tensors stay the same.
            first = {id(each): each.transpose(0, 1) for each in sources}
            sources = tuple(first[id(each)] for each in sources)
        found = self.attention(*sources, need_weights=False)[0]
        found = found if self.attention.batch_first else found.transpose(0, 1)
        return found.mean(1).tanh() @ self.mix


def written_out(model, query, key, value):
    """Return what the model computes from projected queries, keys and values, before the head."""
    heads = [each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (query, key, value)]
    scores = heads[0] @ heads[1].mT / (WIDTH // HEADS) ** 0.5
    return (scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2)


def with_ones(rows):
    return torch.cat([torch.ones(*rows.shape[:-1], 1), rows], dim=-1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross", "separate"])
def test_factors(kind, bias, batch_first):
    model = Attending(kind, bias=bias, batch_first=batch_first)
    attention, inputs = model.attention, torch.randn(5, 3, WIDTH)
    if bias:
        nn.init.normal_(attention.in_proj_bias)
    factors = after_one_batch(model, inputs).factors
    assert set(factors) == {"attention", "attention.out_proj"}
    with torch.no_grad():
        projected = [
            F.linear(source, *parts)
            for source, *parts in zip(
                model.sources(inputs),
                attention.in_proj_weight.chunk(3),
                *([attention.in_proj_bias.chunk(3)] if bias else []),
                strict=True,
            )
        ]
        rows = written_out(model, *projected)
        out = attention.out_proj(rows)
    lengths = [3, 3, 3] if kind == "self" else [3, 2, 2]
    homogeneous = with_ones if bias else torch.clone

    def rest(calls):
        """Return the outputs from the projections, side by side along the length."""
        parts = calls.split(lengths, dim=1)
        return attention.out_proj(written_out(model, *parts)).mean(1).tanh() @ model.mix

    # One call for the inputs that are the same; a call uses a part of the outputs.
    fisher = torch.autograd.functional.jacobian(rest, torch.cat(projected, 1))
    calls = {"self": [(0, 1, 2)], "cross": [(0,), (1, 2)], "separate": [(0,), (1,), (2,)]}[kind]
    sources = [homogeneous(model.sources(inputs)[uses[0]]) for uses in calls]
    activation = sum(torch.einsum("nti,ntj->ij", each, each) for each in sources) / 5
    torch.testing.assert_close(factors["attention"].activation, activation)
    derivative, count = torch.zeros(3 * WIDTH, 3 * WIDTH), 0
    outputs = rest(torch.cat(projected, 1)).softmax(1)
    for n in range(5):
        hessian = outputs[n].diag() - outputs[n].outer(outputs[n])
        own = fisher[n, :, n].split(lengths, dim=1)  # (classes, length, WIDTH) each
        for uses in calls:
            for t in range(lengths[uses[0]]):
                padded = torch.zeros(3, 3, WIDTH)
                for use in uses:
                    padded[:, use] = own[use][:, t]
                padded = padded.flatten(1)
                derivative += padded.T @ hessian @ padded / 5
        count += sum(lengths[uses[0]] for uses in calls)
    torch.testing.assert_close(factors["attention"].derivative, derivative * 5 / count)

    def after(out):
        return out.mean(1).tanh() @ model.mix

    expected = derivative_factor(after, out, cross_entropy(), channels_last=True)[0]
    torch.testing.assert_close(factors["attention.out_proj"].derivative, expected)
    rows = homogeneous(rows)
    expected = torch.einsum("nti,ntj->ij", rows, rows) / 5
    torch.testing.assert_close(factors["attention.out_proj"].activation, expected)


@pytest.mark.parametrize("kind", ["self", "cross", "separate"])
def test_statistics_do_not_change_outputs_and_gradients(kind):
    model, inputs = Attending(kind, batch_first=True), torch.randn(5, 3, WIDTH)
    expected = model(inputs)
    gradients = torch.autograd.grad(fitting_loss(expected), list(model.parameters()))
    optimizer = kfc.KFC(model)
    outputs = model(inputs)
    assert torch.equal(outputs, expected)
    fitting_loss(outputs).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    optimizer.close()


@pytest.mark.parametrize("optimizer", [kfc.KFC, kfc.WhitenedAdam])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_encoder_layers_train_with_factors(optimizer, dropout):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(24, 3))
    # A quarter of 96 examples is replayed for statistics.
    inputs, targets = torch.randn(96, 3, 8), torch.randint(3, (96,))
    trained = optimizer(model, lr=0.05)
    losses = []
    for _ in range(20):
        trained.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        trained.step()
        losses.append(loss.item())
    names = ("self_attn", "self_attn.out_proj", "linear1", "linear2")
    layers = {f"0.layers.{i}.{name}" for i in range(2) for name in names}
    assert set(trained.activation_factors) == layers | {"2"}
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("curvature", ["sua", "prong", "ekfac", "diagonal"])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_other_approximations_train_attention(curvature, kind):
    model = Attending(kind, batch_first=True)
    optimizer = kfc.KFC(model, curvature=curvature)
    before = [p.detach().clone() for p in model.parameters()]
    fitting_loss(model(torch.randn(6, 3, WIDTH))).backward()
    optimizer.step()
    assert not optimizer.engine.plan.plain
    for old, new in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, new)


def test_what_the_factors_do_not_cover():
    other = nn.MultiheadAttention(4, 2, kdim=3)
    extra = nn.MultiheadAttention(4, 2, add_bias_kv=True)
    plan = find_layers(nn.ModuleList([other, extra]))
    assert set(plan.layers) == {"0.out_proj", "1", "1.out_proj"}
    assert "separate" in plan.plain["0.q_proj_weight"]
    assert "does not cover 'bias_k'" in plan.plain["1.bias_k"]


def test_frozen_projections():
    model = Attending(batch_first=True)
    model.attention.in_proj_weight.requires_grad_(False)
    inputs = torch.randn(5, 3, WIDTH)
    factors = after_one_batch(model, inputs, EXACT).factors["attention"]
    assert factors.activation.shape == (1, 1)
    assert factors.activation.item() == pytest.approx(3)
    assert factors.derivative.shape == (3 * WIDTH, 3 * WIDTH)
