"""Embeddings, compared with linear layers on one-hot rows, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc
from kfc.layers import find_layers
from reference import fitting_loss
from test_layers import Locations, after_one_batch

pytestmark = pytest.mark.usefixtures("double")
EXACT = kfc.Kronecker(fisher="exact")


class OneHot(nn.Module):
    """What an embedding computes, by a linear layer."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.linear = nn.Linear(*embedding.weight.shape, bias=False)
        self.linear.weight = nn.Parameter(embedding.weight.detach().T.clone())
        self.padding = embedding.padding_idx

    def forward(self, indices):
        rows = F.one_hot(indices, self.linear.in_features).to(self.linear.weight)
        if self.padding is None:
            return self.linear(rows)
        rows[..., self.padding] = 0
        outputs, is_padding = self.linear(rows), (indices == self.padding).unsqueeze(-1)
        return torch.where(is_padding, outputs.detach(), outputs)


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("shape", [(5,), (4, 3), (4, 2, 2)])
@pytest.mark.parametrize("max_factor_size", [3, 100])
def test_factors_and_natural_gradient(padding, shape, max_factor_size):
    embedding = nn.Embedding(7, 3, padding_idx=padding)
    if padding is not None:
        nn.init.zeros_(embedding.weight[padding])
    stock, indices = OneHot(embedding), torch.randint(7, shape)
    indices.flatten()[:2] = 2
    head = Locations(embedding(indices))
    options = {"curvature": kfc.Kronecker(fisher="exact", max_factor_size=max_factor_size)}
    mine = after_one_batch(nn.Sequential(embedding, head), indices, damping=0.1, **options)
    loss = fitting_loss(nn.Sequential(stock, head)(indices))
    (gradient,) = torch.autograd.grad(loss, stock.linear.weight)
    expected = after_one_batch(nn.Sequential(stock, head), indices, EXACT).factors["0.linear"]
    found = mine.factors["0"]
    assert found.activation.shape == (7,)
    # The dense Ω of the linear layer is diagonal, and nothing is lost.
    torch.testing.assert_close(torch.diag(found.activation), expected.activation)
    # The mean is that over the indices that are no padding.
    real = len(indices.flatten()) if padding is None else int((indices != padding).sum())
    derivative = expected.derivative * indices.numel() / real
    torch.testing.assert_close(found.derivative, derivative)
    ratio = (expected.activation.trace() / 7) / (derivative.trace() / 3)
    pi, root = ratio.sqrt(), 0.1**0.5
    dense = torch.kron(
        expected.activation + pi * root * torch.eye(7),
        derivative + root / pi * torch.eye(3),
    )
    solution = torch.linalg.solve(dense, gradient.T.flatten())
    torch.testing.assert_close(embedding.weight.grad.flatten(), solution)


def test_a_batch_of_padding_alone():
    model = nn.Sequential(nn.Embedding(7, 3, padding_idx=1), nn.Flatten(), nn.Linear(6, 4))
    optimizer = kfc.KFC(model, seed=0)
    for step in range(4):
        indices = torch.randint(7, (16, 2)) if step % 2 else torch.ones(16, 2, dtype=torch.long)
        optimizer.zero_grad()
        F.cross_entropy(model(indices), torch.randint(4, (16,))).backward()
        optimizer.step()
        assert optimizer.factors["0"].derivative.isfinite().all()
    assert optimizer.diagnostics["skipped_steps"] == 0


@pytest.mark.parametrize(
    "curvature", ["kfc", "sua", "prong", "ekfac", "diagonal", kfc.Kronecker(inverse="eigen")]
)
def test_every_curvature_trains_embeddings(curvature):
    model = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 7))
    indices, targets = torch.randint(7, (20, 2)), torch.randint(7, (20,))
    optimizer = kfc.KFC(model, lr=0.3, curvature=curvature)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(indices), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert optimizer.factors["0"].activation.shape == (7,)
    assert losses[-1] < losses[0] / 2


def test_the_rows_of_absent_indices_do_not_move():
    model = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 4))
    before = model[0].weight.detach().clone()
    optimizer = kfc.KFC(model, lr=0.1)
    fitting_loss(model(torch.randint(1, 5, (8, 2)))).backward()
    optimizer.step()
    moved = (model[0].weight != before).any(1)
    assert not moved[[0, 5, 6]].any()
    assert moved.any()


def test_large_indices_are_exact():
    """In float16 and in bfloat16, indices above 2048 and 256 would be rounded."""
    module = nn.Embedding(3000, 2, dtype=torch.bfloat16)
    layer = find_layers(nn.Sequential(module)).layers["0"]
    indices = torch.tensor([2999, 2999, 2049])
    counts = layer.activation_moment(indices, homogeneous=False, diagonal=True)
    assert counts.shape == (1, 3000)
    assert counts[0, 2999] == 2
    assert counts[0, 2049] == 1
    assert counts.sum() == 3


def test_rows_and_their_moments_agree():
    layer = find_layers(nn.Sequential(nn.Embedding(5, 2, padding_idx=1))).layers["0"]
    indices = torch.tensor([[0, 1, 4], [4, 4, 2]])
    rows = layer.activation_rows(indices)
    dense = layer.activation_moment(indices, homogeneous=False, diagonal=False)
    torch.testing.assert_close(dense, rows.mT @ rows)
    torch.testing.assert_close(
        layer.activation_moment(indices, homogeneous=False, diagonal=True),
        torch.tensor([[1.0, 0, 1, 0, 3]]),
    )


@pytest.mark.parametrize(
    "options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]
)
def test_options_that_change_the_gradient_have_no_factors(options):
    plan = find_layers(nn.Sequential(nn.Embedding(5, 3, **options)))
    assert next(iter(options)) in plan.plain["0.weight"]


def test_an_embedding_costs_no_product_with_its_width():
    """Otherwise the overhead of its statistics would postpone those of all layers."""
    wide = nn.Sequential(nn.Embedding(5000, 4), nn.Flatten(), nn.Linear(8, 3))
    narrow = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))
    indices = torch.randint(5, (64, 2))
    costs = []
    for model in (wide, narrow):
        optimizer = kfc.KFC(model)
        fitting_loss(model(indices)).backward()
        optimizer.step()
        costs.append(optimizer.engine.allowance.costs)
    assert costs[0].plain == costs[1].plain
    assert costs[0].statistics == costs[1].statistics


class Positions(nn.Embedding):
    """Positions from a mask, moved by two, as those of OPT in Transformers."""

    def forward(self, mask, past=0, positions=None):
        if positions is None:
            positions = (mask.cumsum(1) * mask - 1).long()[:, past:]
        return super().forward(positions + 2)


class Scaled(nn.Embedding):
    """Rows times a number, as in Gemma and BART of Transformers."""

    scale = 3.0

    def forward(self, indices):
        return self.scale * super().forward(indices)


class Derived(nn.Module):
    """Looks tokens and positions up in embeddings of its own classes, or of torch's."""

    def __init__(self, *, stock: bool):
        super().__init__()
        self.tokens = (nn.Embedding if stock else Scaled)(7, 3, padding_idx=1)
        self.positions = (nn.Embedding if stock else Positions)(8, 3)
        self.head = nn.Linear(3, 7, bias=False)

    def forward(self, indices):
        mask = (indices != 1).long()
        if type(self.tokens) is nn.Embedding:
            positions = self.positions((mask.cumsum(1) * mask - 1).long() + 2)
            return self.head((Scaled.scale * self.tokens(indices) + positions).tanh()).mT
        return self.head((self.tokens(indices) + self.positions(mask)).tanh()).mT

    def tie(self):
        """Let the head, and another embedding, have the weight of the tokens."""
        self.head.weight = self.tokens.weight
        self.shared = nn.Embedding(7, 3, padding_idx=1)
        self.shared.weight = self.tokens.weight
        return self


@pytest.mark.parametrize("tied", [False, True])
def test_subclasses_are_embeddings_whatever_they_do_to_indices_and_rows(tied):
    models = [Derived(stock=stock) for stock in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    if tied:
        models = [model.tie() for model in models]
    indices = torch.randint(7, (5, 4))
    found, expected = (after_one_batch(model, indices, damping=0.1) for model in models)
    assert set(found.factors) == {"tokens", "positions"} | (set() if tied else {"head"})
    for name, factors in expected.factors.items():
        torch.testing.assert_close(found.factors[name], factors)
    for own, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_subclasses_that_look_nothing_up_are_no_embeddings():
    class Product(nn.Embedding):
        def forward(self, indices):
            return F.one_hot(indices, self.num_embeddings).to(self.weight) @ self.weight

    plan = find_layers(nn.Sequential(Product(7, 3), nn.Linear(3, 2)))
    assert set(plan.layers) == {"1"}
    assert plan.plain["0.weight"] == "Product overrides forward; register a layer class for it"


def test_functions_called_with_the_weight_of_an_embedding_are_its_calls():
    class Functional(Derived):
        def forward(self, indices):
            mask = (indices != 1).long()
            positions = (mask.cumsum(1) * mask - 1).long() + 2
            rows = F.embedding(indices, self.tokens.weight, padding_idx=-6)
            rows = Scaled.scale * rows + F.embedding(positions, self.positions.weight)
            return self.head(rows.tanh()).mT

    models = [Functional(stock=True), Derived(stock=True)]
    models[1].load_state_dict(models[0].state_dict())
    indices = torch.randint(7, (5, 4))
    found, expected = (after_one_batch(model, indices) for model in models)
    assert set(found.factors) == {"tokens", "positions", "head"}
    for name, factors in expected.factors.items():
        torch.testing.assert_close(found.factors[name], factors)
