"""Parameters without a Fisher block, whose gradients are divided by their second moments."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc


class Bare(nn.Module):
    """A layer with factors between two parameters without any."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4, 3))

    def forward(self, x):
        return torch.tanh(self.layer(x + self.shift)) @ self.scale


OTHERS = ("shift", "scale")
PLAIN = [{"prefix": list(OTHERS), "treatment": "plain"}]


def batches(count: int, examples: int = 8):
    return [(torch.randn(examples, 4), torch.randint(3, (examples,))) for _ in range(count)]


def train(model, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def others(model):
    return {name: model.get_parameter(name).detach().clone() for name in OTHERS}


def described(optimizer, word: str) -> set[str]:
    lines = optimizer.describe().splitlines()
    return {line.split()[0] for line in lines if word in line}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_updates_are_those_of_adam_in_place_of_the_gradient(momentum, decay):
    """m ← μm - α √(1 - μ²) (g + λθ) / (√(v̂ + (λθ)²) + ε), θ ← θ + m; v of the loss's gradients."""
    model = Bare()
    optimizer = kfc.KFC(model, lr=0.1, momentum=momentum, clip=None, weight_decay=decay)
    assert described(optimizer, "scaled gradient") == set(OTHERS)
    squares, moved = (dict.fromkeys(OTHERS, 0.0) for _ in range(2))
    for step, (x, y) in enumerate(batches(5), start=1):
        before = others(model)
        train(model, optimizer, [(x, y)])
        for name in OTHERS:
            parameter = model.get_parameter(name)
            squares[name] = 0.99 * squares[name] + 0.01 * parameter.grad**2
            penalty = decay * before[name]
            deviation = (squares[name] / (1 - 0.99**step) + penalty**2).sqrt() + 1e-8
            direction = (parameter.grad + penalty) / deviation
            rate = 0.1 * math.sqrt(1 - momentum**2)
            moved[name] = momentum * moved[name] - rate * direction
            torch.testing.assert_close(parameter.detach(), before[name] + moved[name])
    assert set(optimizer.factors) == {"layer"}


def test_steps_have_the_length_of_the_rate_with_any_momentum():
    """This holds for gradients that are independent from step to step."""
    for momentum in (0.0, 0.9):
        model = nn.ParameterDict({"weight": torch.zeros(1000)})
        optimizer = kfc.KFC(model, lr=0.01, momentum=momentum, clip=None)
        lengths = []
        for step in range(60):
            optimizer.zero_grad()
            before = model["weight"].detach().clone()
            model["weight"].grad = torch.randn(1000) * torch.linspace(0.1, 10, 1000)
            optimizer.step()
            if step >= 30:
                lengths.append((model["weight"].detach() - before).square().mean().sqrt())
        assert torch.stack(lengths).mean().item() == pytest.approx(0.01, rel=0.1)


class Positions(nn.Module):
    """Adds the first rows of a longer table to its inputs."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(0.02 * torch.randn(64, 16))
        self.layer, self.head = nn.Linear(10, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head((self.layer(x) + self.table[: x.shape[1]]).relu().mean(1))


def test_weight_decay_does_not_throw_elements_without_a_gradient():
    model = Positions()
    optimizer = kfc.KFC(model, lr=0.01, weight_decay=1e-3, seed=0)
    x = torch.randn(64, 8, 10)
    y = x[..., :4].mean(1).argmax(1)
    for _ in range(100):
        before = model.table.detach()[8:].clone()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        # Momentum adds up equal steps.
        limit = 0.01 * math.sqrt(1 - 0.9**2) / (1 - 0.9)
        assert (model.table.detach()[8:] - before).abs().max() < 1.01 * limit
    assert loss < 0.2


def test_the_gradient_as_it_is():
    model = Bare()
    optimizer = kfc.KFC(model, momentum=0.0, clip=None, fallback_lr=0.5, groups=PLAIN)
    assert described(optimizer, "plain gradient") == set(OTHERS)
    before = others(model)
    train(model, optimizer, batches(1))
    for name in OTHERS:
        parameter = model.get_parameter(name)
        torch.testing.assert_close(parameter.detach(), before[name] - 0.5 * parameter.grad)


def test_layers_can_be_scaled_by_name():
    model = Bare()
    optimizer = kfc.KFC(model, groups=[{"prefix": "layer", "treatment": "scaled"}])
    assert described(optimizer, "scaled gradient") == {*OTHERS, "layer.weight", "layer.bias"}
    train(model, optimizer, batches(3))
    assert not optimizer.factors


@pytest.mark.parametrize("kind", [kfc.KFAC, kfc.WhitenedAdam])
def test_other_optimizers_refuse_the_treatment(kind):
    with pytest.raises(ValueError, match='treatment "scaled" is one of kfc'):
        kind(Bare(), groups=[{"prefix": "layer", "treatment": "scaled"}])


@pytest.mark.usefixtures("double")
def test_the_loss_bound_covers_scaled_gradients():
    """-∇ᵀm = κE, with the loss itself as E of a batch whose loss can be zero."""
    model, (x, y) = Bare(), batches(1)[0]
    clip = kfc.FisherClip(None, loss_bound=0.25)
    optimizer = kfc.KFC(model, lr=10.0, clip=clip)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    moved = [(p.detach() - before[name]) for name, p in model.named_parameters()]
    decrease = -sum((p.grad * m).sum() for p, m in zip(model.parameters(), moved, strict=True))
    assert optimizer.diagnostics["loss_bound_factor"] < 1
    torch.testing.assert_close(decrease, 0.25 * loss.detach())


@pytest.mark.usefixtures("double")
def test_the_clip_covers_scaled_gradients():
    model, (x, y) = Bare(), batches(1)[0]
    clip = kfc.FisherClip(1e-3, loss_bound=None, fraction=1.0)
    optimizer = kfc.KFC(model, lr=10.0, momentum=0.0, clip=clip)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    vector = {name: after[name] - before[name] for name in before}
    assert optimizer.diagnostics["clip_factor"] < 1
    norm = kfc.fisher.quadratic_form(model, x, vector, likelihood="categorical")
    assert float(norm) == pytest.approx(1e-3)


def test_a_skipped_step_leaves_the_moments_as_they_were():
    data = batches(4)
    states = []
    for bad in (False, True):
        torch.manual_seed(0)
        model = Bare()
        optimizer = kfc.KFC(model, seed=0)
        train(model, optimizer, data[:2])
        if bad:
            x, y = data[0]
            with pytest.warns(UserWarning, match="not finite"):
                train(model, optimizer, [(x * math.nan, y)])
        train(model, optimizer, data[2:])
        states.append([optimizer.state[p]["exp_avg_sq"] for p in (model.shift, model.scale)])
    assert optimizer.diagnostics["skipped_steps"] == 1
    torch.testing.assert_close(*states)


def test_bad_steps_on_a_device_leave_the_moments_as_they_were(asynchronous):
    data = batches(3)
    model = Bare()
    clip = kfc.FisherClip(None)  # an exact Fisher norm would tell at once
    optimizer = kfc.KFC(model, schedule=kfc.Periods(50, 50), clip=clip)
    train(model, optimizer, data[:2])
    before = [
        {name: optimizer.state[p][name].clone() for name in ("step", "exp_avg_sq")}
        for p in (model.shift, model.scale)
    ]
    optimizer.zero_grad()
    x, y = data[2]
    F.cross_entropy(model(x), y).backward()
    model.shift.grad[0] = math.nan
    optimizer.step()
    for parameter, state in zip((model.shift, model.scale), before, strict=True):
        for name, value in state.items():
            assert torch.equal(optimizer.state[parameter][name], value)


def test_resuming_continues_the_moments(tmp_path):
    data = batches(6)
    model = Bare()
    optimizer = kfc.KFC(model, averaging_timescale=5)
    train(model, optimizer, data[:3])
    torch.save(optimizer.state_dict(), tmp_path / "state")
    resumed = Bare()
    resumed.load_state_dict(model.state_dict())
    other = kfc.KFC(resumed, averaging_timescale=5)
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for each, own in ((model, optimizer), (resumed, other)):
        train(each, own, data[3:])
    for own, expected in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, expected)


class Recurrent(nn.Module):
    """A recurrent layer over random sequences, whose first token is to be remembered."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 6)
        self.recurrent = kind(6, 12, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, tokens):
        return self.head(self.recurrent(self.embedding(tokens))[0][:, -1])


class Paired(nn.Module):
    """``nn.Bilinear``, whose output is a product of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 6)
        self.product = nn.Bilinear(6, 6, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.product(x[:, 0], x[:, 1]).tanh())


MODELS = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "Bilinear": Paired,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:.*forward-mode")
def test_modules_without_factors_train(name, recwarn):
    """The loss with scaled gradients is below that with plain ones, at the default rate."""
    losses = {}
    for treatment in ("scaled", "plain"):
        torch.manual_seed(0)
        model = MODELS[name]()
        inner = "product" if name == "Bilinear" else "recurrent"
        groups = [{"prefix": inner, "treatment": treatment}]
        optimizer = kfc.KFC(model, lr=0.01, groups=groups)
        own = {n for n, _ in model.named_parameters() if n.startswith(inner)}
        assert described(optimizer, f"{treatment} gradient") == own
        for _ in range(60):
            tokens = torch.randint(4, (64, 4))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens), tokens[:, 0])
            loss.backward()
            optimizer.step()
        losses[treatment] = loss.item()
    assert losses["scaled"] < 0.5
    assert losses["scaled"] < losses["plain"]
