"""Layers without curvature: excluded by name, or for want of statistics."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kfc
from ranks import run_ranks


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)
        self.proj = nn.Linear(6, 6)

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return self.proj(F.scaled_dot_product_attention(query, key, value))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


QKV = {f"blocks.{i}.qkv.{role}" for i in range(2) for role in ("weight", "bias")}


def backward(model, optimizer, examples: int = 8):
    x, y = torch.randn(examples, 4, 6), torch.randint(3, (examples,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def described(optimizer, word: str) -> set[str]:
    """Return the parameters whose line of ``describe()`` contains a word."""
    lines = optimizer.describe().splitlines()
    return {line.split()[0] for line in lines if word in line}


# Excluded by name


def test_layers_excluded_by_a_pattern_of_modules_follow_the_plain_gradient():
    model = Transformer()
    optimizer = kfc.KFC(
        model,
        lr=0.1,
        momentum=0.0,
        clip=None,
        fallback_lr=0.5,
        groups=[
            {"prefix": "*.bias", "weight_decay": 0.0},
            {"prefix": "*.qkv", "treatment": "plain"},
            {"prefix": "head", "lr": 0.2},
        ],
    )
    assert described(optimizer, "plain gradient") == QKV
    assert described(optimizer, "groups[1] excludes it") == QKV
    backward(model, optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        if name in QKV:
            torch.testing.assert_close(parameter, before[name] - 0.5 * parameter.grad)
    assert set(optimizer.factors) == {"blocks.0.proj", "blocks.1.proj", "head"}
    by_name = {n: g for g in optimizer.param_groups for n in g["param_names"]}
    assert by_name["head.weight"]["lr"] == 0.2
    assert by_name["blocks.0.qkv.weight"]["treatment"] == "plain"


def test_an_override_sets_the_rate_of_the_layers_that_it_excludes():
    groups = [{"prefix": "*.qkv", "treatment": "plain", "lr": 0.7}]
    optimizer = kfc.KFC(Transformer(), fallback_lr=0.5, groups=groups)
    by_name = {n: g["lr"] for g in optimizer.param_groups for n in g["param_names"]}
    assert {by_name[name] for name in QKV} == {0.7}


@pytest.mark.parametrize("kind", [kfc.KFAC, kfc.WhitenedAdam])
def test_every_optimizer_with_groups_excludes_layers(kind):
    model = Transformer()
    optimizer = kind(model, groups=[{"prefix": "*.qkv", "treatment": "plain"}])
    word = "Adam" if kind is kfc.WhitenedAdam else "plain gradient"
    assert described(optimizer, "groups[0] excludes it") == QKV
    assert described(optimizer, word) >= QKV
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if kind is kfc.KFAC:
        x, y = torch.randn(8, 4, 6), torch.randint(3, (8,))
        optimizer.step(lambda: F.cross_entropy(model(x), y))
    else:
        backward(model, optimizer)
        optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert set(optimizer.activation_factors) == {"blocks.0.proj", "blocks.1.proj", "head"}


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([{"prefix": "head", "treatment": "none"}], r"groups\[0\]: treatment must be one of"),
        ([{"prefix": "*.bias", "treatment": "plain"}], "has that of its weight; use the prefix"),
        ([{"prefix": "*.conv", "treatment": "plain"}], r"\['\*\.conv'\] match no parameter"),
        ([{"prefix": "*.qkv", "treatment": "plain", "damping": 0.1}], "damping, which has no"),
        ([{"treatment": "plain"}], 'must be a dict with a "prefix"'),
    ],
)
def test_bad_treatments_are_refused_and_leave_no_hooks(groups, match):
    model = Transformer()
    with pytest.raises(ValueError, match=match):
        kfc.KFC(model, groups=groups)
    assert not any(m._forward_hooks for m in model.modules())


# Layers used functionally


class Functional(nn.Module):
    """A model that uses the weights of two layers in ways that hooks on modules do not see."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.hidden = nn.Linear(16, 8)
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = torch.conv2d(x, 2 * self.conv.weight, self.conv.bias)
        return self.head(
            self.scale * F.relu(x.flatten(1) @ self.hidden.weight.T + self.hidden.bias)
        )


FALLEN = {f"{layer}.{role}" for layer in ("conv", "hidden") for role in ("weight", "bias")}


def images(examples: int = 8):
    return torch.randn(examples, 1, 4, 4), torch.randint(3, (examples,))


def differentiate(model, optimizer, data):
    x, y = data
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


@pytest.mark.parametrize("examples", [8, 96])  # in the user's own passes, and in a replay
def test_layers_without_statistics_fall_back_once_with_one_warning(examples, recwarn):
    model, data = Functional(), images(examples)
    optimizer = kfc.KFC(model, lr=0.1, momentum=0.0, clip=None, fallback_lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    squares = dict.fromkeys(FALLEN, 0.0)
    for step, rate in enumerate((0.5, 0.25, 0.125), start=1):
        differentiate(model, optimizer, data)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        scheduler.step()
        for name in FALLEN:
            own = model.get_parameter(name)
            squares[name] = 0.99 * squares[name] + 0.01 * own.grad**2
            deviation = (squares[name] / (1 - 0.99**step)).sqrt() + 1e-8
            torch.testing.assert_close(own, before[name] - rate * own.grad / deviation)
    (warned,) = [w for w in recwarn if "no statistics" in str(w.message)]
    share = (4 * 10 + 8 * 17) / (4 * 10 + 8 * 17 + 3 * 9 + 8)
    assert "'conv', 'hidden' have a gradient" in str(warned.message)
    assert f"{share:.1%} of the trained weights" in str(warned.message)
    assert described(optimizer, "scaled gradient") == FALLEN | {"scale"}
    assert set(optimizer.factors) == {"head"}


@pytest.mark.filterwarnings("ignore:.*no statistics")
@pytest.mark.parametrize("kind", [kfc.KFC, kfc.KFAC, kfc.WhitenedAdam, kfc.Preconditioner])
def test_a_run_with_layers_that_fell_back_resumes_bit_for_bit(kind, recwarn):
    batches = [images() for _ in range(4)]

    def steps(model, optimizer, some):
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        for x, y in some:
            if kind is kfc.KFAC:
                optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
                continue
            sgd.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if kind is kfc.Preconditioner:
                sgd.step()

    model = Functional()
    optimizer = kind(model)
    steps(model, optimizer, batches[:2])
    resumed = Functional()
    resumed.load_state_dict(model.state_dict())
    other = kind(resumed)
    other.load_state_dict(optimizer.state_dict())
    recwarn.clear()
    steps(model, optimizer, batches[2:])
    steps(resumed, other, batches[2:])
    assert not [w for w in recwarn if "no statistics" in str(w.message)]
    for own, expected in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("kind", [kfc.KFC, kfc.WhitenedAdam])
def test_a_state_from_before_the_fallback_gives_layers_their_curvature_back(kind):
    class Switched(Functional):
        is_functional = False

        def forward(self, x):
            return (
                super().forward(x) if self.is_functional else self.head(self.hidden(x.flatten(1)))
            )

    model, data = Switched(), images()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = kind(model)
    differentiate(model, optimizer, data)
    optimizer.step()
    state = optimizer.state_dict()
    model.requires_grad_(True)
    model.is_functional = True
    differentiate(model, optimizer, data)
    with pytest.warns(UserWarning, match="'conv', 'hidden' have a gradient, but no statistics"):
        optimizer.step()
    model.is_functional = False
    optimizer.load_state_dict(state)
    differentiate(model, optimizer, data)
    optimizer.step()
    assert set(optimizer.activation_factors) == {"hidden", "head"}


def test_a_model_without_any_usable_layer_is_trained():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 3)

        def forward(self, x):
            return x.flatten(1) @ self.head.weight.T + self.head.bias

    model, data = Bare(), images()
    optimizer = kfc.KFC(model, lr=0.1)
    losses = []
    differentiate(model, optimizer, data)
    with pytest.warns(UserWarning, match="100.0% of the trained weights"):
        optimizer.step()
    for _ in range(5):
        losses.append(differentiate(model, optimizer, data).item())
        optimizer.step()
    assert losses == sorted(losses, reverse=True)


class Calls(nn.Module):
    """A model that calls the modules of its layers, or the functions that they call."""

    def __init__(self, *, functional: bool) -> None:
        super().__init__()
        self.functional = functional
        self.conv = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2, bias=False)
        self.hidden = nn.Linear(32, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        if not self.functional:
            x = self.up(F.relu_(self.conv(x))).flatten(1)
            return self.head(F.relu_(self.hidden(x)))
        x = F.conv2d(x, self.conv.weight, bias=self.conv.bias, stride=2, padding=(1, 1))
        x = F.conv_transpose2d(F.relu_(x), self.up.weight, None, 2).flatten(1)
        return self.head(F.relu_(F.linear(x, self.hidden.weight, self.hidden.bias)))


@pytest.mark.parametrize("examples", [8, 96])
@pytest.mark.parametrize(
    "make",
    [
        lambda model: kfc.KFC(model, seed=0),
        lambda model: kfc.KFC(model, curvature=kfc.EKFAC(fisher="exact")),
        lambda model: kfc.KFC(model, curvature=kfc.Kronecker(fisher="empirical")),
        kfc.WhitenedAdam,
    ],
    ids=["sampled", "exact", "empirical", "whitened"],
)
def test_functions_called_with_parameters_of_a_layer_are_calls_of_the_layer(make, examples):
    models = [Calls(functional=functional) for functional in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [make(model) for model in models]
    for _ in range(12):
        data = images(examples)
        for model, optimizer in zip(models, optimizers, strict=True):
            differentiate(model, optimizer, data)
            optimizer.step()
    assert set(optimizers[0].activation_factors) == {"conv", "up", "hidden", "head"}
    for own, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(own, expected)


def test_functional_layers_gather_statistics_after_resuming():
    def factors(*, resume: bool):
        torch.manual_seed(1)
        model = Calls(functional=True)
        options = {"schedule": kfc.Periods(1, 1), "seed": 0}
        optimizer = kfc.KFC(model, **options)
        for _ in range(3):
            differentiate(model, optimizer, images())
            optimizer.step()
            if resume:
                state = optimizer.state_dict()
                optimizer.close()
                optimizer = kfc.KFC(model, **options)
                optimizer.load_state_dict(state)
        return optimizer.factors["hidden"].activation

    assert torch.equal(factors(resume=True), factors(resume=False))


def test_module_and_functional_calls_of_a_layer_are_its_locations(double):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x):
            x = self.hidden(x.flatten(1)).tanh()
            return self.head(F.linear(x, self.hidden.weight, self.hidden.bias))

    model, (x, y) = Twice(), images()
    optimizer = kfc.KFC(model)
    for _ in range(2):
        first = F.pad(x.flatten(1), (1, 0), value=1.0)
        second = F.pad(model.hidden(x.flatten(1)).tanh(), (1, 0), value=1.0)
        expected = (first.mT @ first + second.mT @ second).detach() / len(x)
        differentiate(model, optimizer, (x, y))
        optimizer.estimate_factors([x])
        torch.testing.assert_close(optimizer.factors["hidden"].activation, expected)
        differentiate(model, optimizer, (x, y))
        optimizer.step()


def test_functions_are_not_watched_after_the_forward_pass_even_if_it_failed():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(5, 2))
    optimizer = kfc.KFC(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 4))
    assert torch._C._len_torch_function_stack() == 0
    model[1] = nn.Identity()
    F.cross_entropy(model(torch.randn(2, 4)), torch.tensor([0, 2])).backward()
    assert torch._C._len_torch_function_stack() == 0
    optimizer.step()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, conv: F.conv2d(x, conv.weight, conv.bias),  # another stride
        lambda x, conv: F.conv2d(x, conv.weight, stride=2),  # without the bias
        lambda x, conv: F.conv2d(x, conv.weight, conv.bias.clone(), stride=2),
    ],
)
def test_functions_that_compute_something_else_are_no_calls_of_the_layer(call):
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 2, 2, stride=2), nn.LazyLinear(3)

        def forward(self, x):
            return self.head(call(x, self.conv).flatten(1))

    model, data = Other(), images()
    model(data[0])
    optimizer = kfc.KFC(model)
    differentiate(model, optimizer, data)
    with pytest.warns(UserWarning, match="'conv' has a gradient, but no statistics"):
        optimizer.step()


class Biases(nn.Module):
    """Adds biases of its own to those of a layer without any, as attention in timm's BEiT."""

    def __init__(self, *, functional: bool) -> None:
        super().__init__()
        self.functional = functional
        self.qkv, self.head = nn.Linear(16, 6, bias=False), nn.Linear(6, 3)
        self.bias = nn.Parameter(torch.randn(2, 3))

    def forward(self, x):
        bias = self.bias.flatten()
        if self.functional:
            return self.head(F.linear(x.flatten(1), self.qkv.weight, bias).tanh())
        return self.head((self.qkv(x.flatten(1)) + bias).tanh())


def test_a_bias_that_is_not_the_layers_changes_nothing_for_its_weight():
    models = [Biases(functional=functional) for functional in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [kfc.KFC(model, seed=0) for model in models]
    for _ in range(12):
        data = images(8)
        for model, optimizer in zip(models, optimizers, strict=True):
            differentiate(model, optimizer, data)
            optimizer.step()
    assert set(optimizers[0].activation_factors) == {"qkv", "head"}
    for own, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(own, expected)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 3) for _ in range(2))

    def forward(self, x, routes):
        x = x.flatten(1)
        outputs = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(routes == number)
            outputs = outputs.index_add(0, rows, expert(x[rows]))
        return outputs


@pytest.mark.filterwarnings("ignore:.*skipped:UserWarning")
@pytest.mark.parametrize("examples", [8, 96])  # in the user's own passes, and in a replay
@pytest.mark.parametrize("is_bad", [False, True])
def test_layers_with_gradients_of_zero_fall_back_for_one_step(examples, is_bad, recwarn):
    model = Experts()
    optimizer = kfc.KFC(model, schedule=kfc.Periods(100, 100), weight_decay=0.1)
    unused = model.experts[1].weight.detach().clone()
    for step in range(4):
        x, y = images(examples)
        routes = torch.arange(examples) % (2 if step == 3 else 1)
        optimizer.zero_grad()
        F.cross_entropy(model(x, routes), y).backward()
        if is_bad and step == 1:
            model.experts[0].weight.grad[0, 0] = torch.nan
        optimizer.step()
        assert set(optimizer.factors) == {"experts.0", *(["experts.1"] if step == 3 else [])}
        assert described(optimizer, "scaled gradient") == set()
        assert optimizer.state_dict()["curvature"]["without_statistics"] == []
        assert torch.equal(model.experts[1].weight, unused) == (step < 3)
    assert not [w for w in recwarn if "no statistics" in str(w.message)]


def train_on_a_rank(rank: int):
    torch.manual_seed(0)
    model = Functional()
    wrapped = DistributedDataParallel(model)
    optimizer = kfc.KFC(wrapped, lr=0.1)
    x, y = images(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            differentiate(wrapped, optimizer, (x[4 * rank :][:4], y[4 * rank :][:4]))
            optimizer.step()
    count = sum("no statistics" in str(each.message) for each in caught)
    return [p.detach().numpy() for p in model.parameters()], set(optimizer.factors), count


def test_ranks_fall_back_together_and_one_of_them_warns():
    first, second = run_ranks(train_on_a_rank, 2)
    assert first[1] == second[1] == {"head"}
    assert (first[2], second[2]) == (1, 0)
    assert all((a == b).all() for a, b in zip(first[0], second[0], strict=True))
