"""A head that shares its weight with an embedding, compared with two that do not, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kfc
from kfc.layers import TiedEmbeddingLayer, find_layers
from kfc.moments.folding import fold, plus_diagonal, unfold
from ranks import run_ranks
from reference import fitting_loss
from test_layers import EXACT, after_one_batch
from test_look_alikes import Conv1D

pytestmark = pytest.mark.usefixtures("double")
TOKENS, WIDTH = 7, 3


class Language(nn.Module):
    """Predicts tokens from the ones before."""

    def __init__(self, *, tied: bool = True, bias: bool = False, padding: int | None = None):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH, padding_idx=padding)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, indices):
        x = self.embedding(indices)
        x = x + self.hidden(x.cumsum(1).tanh())
        return self.head(x).transpose(1, 2)


def pair(**options):
    """Return a tied model, and one with equal weights that are not tied."""
    tied, untied = Language(**options), Language(tied=False, **options)
    untied.load_state_dict(tied.state_dict())
    return tied, untied


def combined(tied_to, head, *, bias: bool):
    """Return (Ω + π Γₑ) and (Γ + Ωₑ / π) from the factors of the embedding and of the head."""
    embedded = F.pad(tied_to.derivative, (1, 0, 1, 0)) if bias else tied_to.derivative
    traces = [m.trace() for m in (head.activation, head.derivative, embedded)]
    pi = (traces[0] * tied_to.activation.sum() / (traces[1] * traces[2])).sqrt()
    return head.activation + pi * embedded, head.derivative + tied_to.activation.diag() / pi


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("padding", [None, 2])
def test_factors_and_natural_gradient(bias, padding):
    tied, untied = pair(bias=bias, padding=padding)
    indices = torch.randint(TOKENS, (5, 4))
    separate = after_one_batch(untied, indices).factors
    loss = fitting_loss(tied(indices))
    own = [tied.head.bias] if bias else []
    *shift, gradient = torch.autograd.grad(loss, [*own, tied.head.weight])
    found = after_one_batch(tied, indices, damping=0.1).factors
    assert set(found) == {"embedding", "hidden"}
    activation, derivative = combined(separate["embedding"], separate["head"], bias=bias)
    torch.testing.assert_close(found["embedding"].activation, activation)
    torch.testing.assert_close(found["embedding"].derivative, derivative)
    pi = ((activation.trace() / len(activation)) / (derivative.trace() / TOKENS)).sqrt()
    dense = torch.kron(
        derivative + 0.1**0.5 / pi * torch.eye(TOKENS),
        activation + pi * 0.1**0.5 * torch.eye(len(activation)),
    )
    matrix = torch.cat([*(each[:, None] for each in shift), gradient], dim=1)
    solution = torch.linalg.solve(dense, matrix.flatten()).reshape(matrix.shape)
    torch.testing.assert_close(tied.embedding.weight.grad, solution[:, -WIDTH:])
    if bias:
        torch.testing.assert_close(tied.head.bias.grad, solution[:, 0])


def test_the_approximation_is_not_below_the_sum_of_both_uses():
    tied, untied = pair()
    indices = torch.randint(TOKENS, (5, 4))
    separate = after_one_batch(untied, indices).factors
    found = after_one_batch(tied, indices).factors["embedding"]
    embedding, head = separate["embedding"], separate["head"]
    parts = [
        torch.kron(head.derivative, head.activation),
        torch.kron(embedding.activation.diag(), embedding.derivative),
    ]
    whole = torch.kron(found.derivative, found.activation)
    assert torch.linalg.eigvalsh(whole - sum(parts)).min() > -1e-12
    # The trace is the largest that the sum can have with correlations between both uses.
    roots = [part.trace().sqrt() for part in parts]
    torch.testing.assert_close(whole.trace(), sum(roots) ** 2)


@pytest.mark.parametrize("curvature", ["kfc", "sua", "prong", "ekfac", "diagonal"])
def test_every_curvature_trains_tied_weights(curvature):
    torch.manual_seed(0)
    model, indices = Language(bias=True), torch.randint(TOKENS, (20, 2))
    optimizer = kfc.KFC(model, lr=0.3, curvature=curvature)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(indices), indices.flip(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert "tied to an embedding" in optimizer.describe()
    assert not optimizer.engine.plan.plain
    assert losses[-1] < losses[0] / 2


def test_wide_factors_are_diagonals():
    tied, untied = pair(bias=True)
    indices = torch.randint(TOKENS, (5, 4))
    options = {"curvature": kfc.Kronecker(fisher="exact", max_factor_size=5)}
    separate = after_one_batch(untied, indices, EXACT).factors
    found = after_one_batch(tied, indices, **options).factors["embedding"]
    assert found.activation.shape == (4, 4)
    assert found.derivative.shape == (TOKENS,)
    activation, derivative = combined(separate["embedding"], separate["head"], bias=True)
    torch.testing.assert_close(found.activation, activation)
    torch.testing.assert_close(found.derivative, derivative.diag())


def test_diagonals_are_added_to_folded_matrices():
    rows = torch.randn(1, 30, 530)
    matrix, values = rows.mT @ rows, torch.rand(1, 530)
    expected = matrix + torch.diag_embed(values)
    torch.testing.assert_close(unfold(plus_diagonal(fold(matrix), values)), expected)
    torch.testing.assert_close(plus_diagonal(matrix, values), expected)


def test_resuming(tmp_path):
    torch.manual_seed(0)
    batches = [torch.randint(TOKENS, (8, 3)) for _ in range(4)]

    def steps(model, optimizer, some):
        for indices in some:
            optimizer.zero_grad()
            fitting_loss(model(indices)).backward()
            optimizer.step()

    model = Language(bias=True)
    optimizer = kfc.KFC(model)
    steps(model, optimizer, batches[:2])
    torch.save(optimizer.state_dict(), tmp_path / "state")
    resumed = Language(bias=True)
    resumed.load_state_dict(model.state_dict())
    other = kfc.KFC(resumed)
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    steps(model, optimizer, batches[2:])
    steps(resumed, other, batches[2:])
    for own, expected in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, expected)


def test_a_weight_that_only_the_head_uses():
    """The embedding has no derivatives, and its counts do not matter."""

    class Detached(Language):
        def forward(self, indices):
            with torch.no_grad():
                x = self.embedding(indices)
            return self.head(self.hidden(x)).transpose(1, 2)

    tied, untied = Detached(), Detached(tied=False)
    untied.load_state_dict(tied.state_dict())
    indices = torch.randint(TOKENS, (5, 4))
    untied.embedding.requires_grad_(False)
    found = after_one_batch(tied, indices).factors["embedding"]
    torch.testing.assert_close(found, after_one_batch(untied, indices).factors["head"])


def test_other_ties_have_no_factors():
    model = Language()
    model.second = nn.Embedding(TOKENS, WIDTH, padding_idx=1)
    model.second.weight = model.embedding.weight
    plan = find_layers(model)
    assert set(plan.layers) == {"hidden"}
    assert "share a parameter and use it differently" in plan.plain["embedding.weight"]
    model.second.padding_idx = None
    layer = find_layers(model).layers["embedding"]
    assert isinstance(layer, TiedEmbeddingLayer)
    assert layer.module is model.head


class Head(nn.Module):
    """Holds the bias of its decoder, too, as the heads of BERT in Transformers."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(TOKENS))
        self.transform = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, TOKENS)

    def forward(self, x):
        return self.decoder(self.transform(x).tanh())


def test_a_parameter_held_by_a_module_around_its_layer_belongs_to_the_layer():
    model, separate = (nn.Sequential(nn.Embedding(TOKENS, WIDTH), Head()) for _ in range(2))
    for each in (model, separate):
        each[1].decoder.weight = each[0].weight
    model[1].decoder.bias = model[1].bias
    del separate[1].bias
    separate.load_state_dict(model.state_dict(), strict=False)
    assert find_layers(model).layer_of["1.bias"] == ("0", "bias")
    assert not find_layers(model).plain
    indices = torch.randint(TOKENS, (5, 4))
    found, expected = (
        after_one_batch(each, indices, damping=0.1, loss=lambda x: fitting_loss(x.mT))
        for each in (model, separate)
    )
    assert set(found.factors) == {"0", "1.transform"}
    for name, factors in expected.factors.items():
        torch.testing.assert_close(found.factors[name], factors)
    torch.testing.assert_close(model[1].bias.grad, separate[1].decoder.bias.grad)


class GPT(nn.Module):
    """One block of GPT-2, with the parts that Transformers builds it from."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, 8), nn.Embedding(4, 8)
        self.ln_1, self.ln_2, self.ln_f = (nn.LayerNorm(8) for _ in range(3))
        self.c_attn, self.c_proj = Conv1D(24, 8), Conv1D(8, 8)
        self.c_fc, self.c_out = Conv1D(32, 8), Conv1D(8, 32)
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])[None])
        query, key, value = self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        x = x + self.c_proj(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        x = x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))
        return self.lm_head(self.ln_f(x)).transpose(1, 2)


def test_all_weights_of_a_small_gpt_have_curvature():
    torch.manual_seed(0)
    model, tokens = GPT(), torch.randint(11, (80, 4))
    optimizer = kfc.KFC(model, lr=0.03)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert not optimizer.engine.plan.plain
    assert losses[-1] < losses[0] / 2


def test_whitened_adam_updates_tied_weights_by_adam():
    optimizer = kfc.WhitenedAdam(Language())
    assert "its weight is that of an embedding, too" in optimizer.describe()


def factors_on_a_rank(rank, state, indices):
    """Return the factors after one step, of all ranks together."""
    torch.set_default_dtype(torch.float64)
    model = Language(bias=True)
    model.load_state_dict(state)
    model = DistributedDataParallel(model)
    optimizer = kfc.KFC(model, curvature=EXACT)
    fitting_loss(model(indices[rank::2])).backward()
    optimizer.step()
    return [factor.tolist() for factor in optimizer.factors["embedding"]]


def test_ranks_add_up_both_uses():
    model, indices = Language(bias=True), torch.randint(TOKENS, (8, 4))
    expected = after_one_batch(model, indices).factors["embedding"]
    for found in run_ranks(factors_on_a_rank, 2, model.state_dict(), indices):
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(own), other)
