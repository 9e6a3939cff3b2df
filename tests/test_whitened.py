"""`WhitenedAdam` against a dense transcription in float64, and the invariance of whitening."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import kfc
from kfc.curvature.whitening import WhiteningRoot, count_blocks, inverse_root
from kfc.layers import ConvolutionLayer, LinearLayer, MatrixLayer, TransposedConvolutionLayer
from reference import Affine, receptive_rows

pytestmark = pytest.mark.usefixtures("double")

DECAY, DAMPING, EPS, LR, LAMBDA = 0.7, 0.2, 1e-6, 0.05, 0.3
BETAS = (0.8, 0.9)
PERIODS = kfc.Periods(2, 3)
WHITENED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)


def matrix_of(module, tensors):
    """Return (bias, weight), or the one of them that is given, as (groups, I, n)."""
    groups, parts = getattr(module, "groups", 1), []
    if "bias" in tensors:
        parts.append(tensors["bias"].reshape(groups, -1, 1))
    if "weight" in tensors:
        weight = tensors["weight"]
        if isinstance(module, nn.ConvTranspose2d):
            weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
        parts.append(weight.reshape(groups, -1, weight[0].numel()))
    return torch.cat(parts, dim=2)


def parts_of(module, matrix, trained):
    """Invert ``matrix_of``."""
    groups, parts = getattr(module, "groups", 1), {}
    if "bias" in trained:
        parts["bias"], matrix = matrix[:, :, 0].flatten(), matrix[:, :, 1:]
    if "weight" in trained:
        shape = module.weight.shape
        if isinstance(module, nn.ConvTranspose2d):
            matrix = matrix.unflatten(2, (shape[0] // groups, -1)).transpose(1, 2)
        parts["weight"] = matrix.reshape(shape)
    return parts


def second_moment(module, inputs, trained):
    """Return the explicit patch matrix's Σ rowᵀ row, in the columns that are trained."""
    rows = receptive_rows(module, inputs)
    if module.bias is not None:
        start, stop = 0 if "bias" in trained else 1, None if "weight" in trained else 1
        rows = rows[:, :, start:stop]
    return rows.mT @ rows


def root_of(omega, blocks=1, has_bias=True):
    """Return L⁻¹ of the damped Ω, without centred second moments between blocks of inputs."""
    mean = omega.diagonal(dim1=-2, dim2=-1).mean(-1)
    damped = omega + DAMPING * mean[:, None, None] * torch.eye(omega.shape[-1])
    inputs = damped[:, has_bias:, has_bias:]
    means = 0
    if has_bias:
        means = damped[:, 1:, :1] @ damped[:, :1, 1:] / damped[:, :1, :1]
    block_of = torch.arange(inputs.shape[-1]) * blocks // max(inputs.shape[-1], 1)
    inside = block_of[:, None] == block_of
    damped[:, has_bias:, has_bias:] = torch.where(inside, inputs - means, 0) + means
    return torch.linalg.inv(torch.linalg.cholesky(damped))


def blocks_of(layer, size):
    """Return the number of blocks of a module's inputs."""
    if not layer.weight.requires_grad:
        return 1
    if isinstance(layer, nn.Linear):
        return count_blocks(layer.in_features, 1, size)
    return count_blocks(layer.in_channels // layer.groups, layer.weight[0, 0].numel(), size)


def adam_step(state, gradient, rotation=None, step=0):
    """Return the normalised gradient; with a rotation period, in a basis of the outputs."""
    state["t"] = state.get("t", 0) + 1
    interval = rotation // 2 if rotation is not None and rotation % 2 == 0 else rotation
    if rotation is not None and (step == 1 or step % interval == 0):
        decay = 0.95**interval
        state["L"] = decay * state.get("L", 0) + (1 - decay) * gradient @ gradient.mT
        if "U" not in state:
            state["U"] = torch.linalg.eigh(state["L"])[1].flip(-1)
        elif step % rotation == 0:
            state["U"] = torch.linalg.qr(state["L"] @ state["U"])[0]
    rotated = gradient if rotation is None else state["U"].mT @ gradient
    state["v"] = BETAS[1] * state.get("v", 0) + (1 - BETAS[1]) * rotated**2
    step = rotated / ((state["v"] / (1 - BETAS[1] ** state["t"])).sqrt() + EPS)
    return step if rotation is None else state["U"] @ step


class Iterates:
    """Schedule-free averaging by its definition: x is the mean of all z with the weights t³."""

    def __init__(self, parameters, betas=BETAS):
        self.z = {p: p.detach().clone() for p in parameters}
        self.weighted = {p: torch.zeros_like(p) for p in self.z}
        self.beta, self.t, self.weights = betas[0], 0, 0.0

    def share_at_once(self):
        """Return how far the parameters move in this update if z moves by 1."""
        weight = (self.t + 1) ** 3
        return 1 - self.beta + self.beta * weight / (self.weights + weight)

    def warm_up(self):
        return min(1.0, (self.t + 1) / 20)

    @torch.no_grad()
    def move(self, steps):
        """Add steps to z, by parameter, and set the parameters."""
        self.t += 1
        self.weights += self.t**3
        for p, step in steps.items():
            self.z[p] = self.z[p] + step
            self.weighted[p] = self.weighted[p] + self.t**3 * self.z[p]
            p.copy_(self.beta * self.weighted[p] / self.weights + (1 - self.beta) * self.z[p])


def binary_loss(outputs, labels):
    """Return the cross-entropy of independent outputs: is it this class or not?"""
    return F.binary_cross_entropy_with_logits(outputs, F.one_hot(labels, 3).to(outputs))


def dense_whitened_adam(model, steps, rotation, loss_bound, loss=F.cross_entropy, block_size=256):
    """Train with dense matrices; return the parameters after every step.

    Args:
        steps: the micro-batches of every step.
        rotation: the period of the bases of the outputs, or ``None``. The last layer has none if
            the loss treats its outputs independently.
        loss_bound: κ, or ``None``.
        block_size: the largest number of inputs in a block.
    """
    calls, omega, roots, states, history, mean, decrease = [], {}, {}, {}, [], None, 0.0
    iterates = Iterates([p for p in model.parameters() if p.requires_grad])
    layers = [module for module in model.modules() if isinstance(module, WHITENED)]
    for layer in layers:
        layer.register_forward_hook(lambda m, args, _: calls.append((m, args[0].detach())))
    for k, passes in enumerate(steps, start=1):
        model.zero_grad()
        calls.clear()
        examples = sum(len(x) for x, _ in passes)
        losses = [loss(model(x), y) * len(x) / examples for x, y in passes]
        sum(losses).backward()
        excess = sum(losses).item()
        mean = excess if mean is None else mean
        usual = min(excess, 2 * mean)
        before, mean = mean, 0.9 * mean + 0.1 * min(excess, 10 * mean)
        decrease = 0.95 * decrease + 0.05 * math.log(before / mean)
        if loss_bound is not None:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(usual / excess)
        own, update = set(), {}
        recorded = list(calls)
        for layer in layers:
            trained = {n: p for n, p in layer.named_parameters() if p.requires_grad}
            if k == 1 or k % PERIODS.statistics == 0:
                inputs = [i for module, i in recorded if module is layer]
                new = sum(second_moment(layer, i, trained) for i in inputs) / examples
                omega[layer] = DECAY * omega[layer] + (1 - DECAY) * new if k > 1 else new
            if k == 1 or k % PERIODS.inverse == 0:
                blocks = blocks_of(layer, block_size)
                roots[layer] = root_of(omega[layer], blocks, "bias" in trained)
            gradient = matrix_of(layer, {n: p.grad for n, p in trained.items()})
            is_mixed = loss is not binary_loss or layer is not layers[-1]
            period = rotation if "weight" in trained and is_mixed else None
            white = adam_step(states.setdefault(layer, {}), gradient @ roots[layer].mT, period, k)
            step = white @ roots[layer]
            step = step * white.norm() / step.norm()
            update |= {trained[n]: s for n, s in parts_of(layer, step, trained).items()}
            own |= set(trained.values())
        for p in model.parameters():
            if p.requires_grad and p not in own:
                update[p] = adam_step(states.setdefault(p, {}), p.grad)
        rate = LR * iterates.warm_up()
        change = rate * sum((p.grad * step).sum() for p, step in update.items())
        change, factor = change.abs() * iterates.share_at_once(), 1.0
        if loss_bound is not None:
            change *= excess / usual  # with the gradient as it was
            limit = loss_bound * usual * min(max(decrease / 0.04, 1.0), 2.0)
            if change > limit:
                factor = limit / change
            elif change < limit / 2:
                factor = min(3.0, limit / 2 / change)
        iterates.move({p: -LR * LAMBDA * p - factor * rate * step for p, step in update.items()})
        history.append([p.detach().clone() for p in model.parameters()])
    return history


class Twice(nn.Module):
    """A network that calls one layer twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.inner(self.inner(x.flatten(1)[:, :6]).tanh()).tanh())


def flat(*layers):
    net = nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
    net(torch.randn(1, 2, 5, 5))
    return net


def frozen(net, name):
    net.get_parameter(name).requires_grad_(False)
    return net


NETWORKS = {
    "linear": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(50, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)
    ),
    "convolution": lambda: flat(nn.Conv2d(2, 3, 3, padding=1)),
    "stride and groups": lambda: flat(nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2)),
    "transposed": lambda: flat(nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1)),
    "transposed, groups": lambda: flat(nn.ConvTranspose2d(2, 4, 2, stride=2, groups=2, bias=False)),
    "groups of maps": lambda: flat(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 3, groups=2)),
    "transposed, groups of maps": lambda: flat(
        nn.Conv2d(2, 4, 2), nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2)
    ),
    "one dimension": lambda: flat(nn.Flatten(2), nn.Conv1d(2, 3, 4, dilation=2)),
    "other parameters": lambda: flat(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.PReLU()),
    "locations": lambda: flat(nn.Linear(5, 4)),
    "several calls": Twice,
    "frozen weight": lambda: frozen(flat(nn.Conv2d(2, 4, 3, groups=2)), "0.weight"),
    "frozen bias": lambda: frozen(flat(nn.Conv2d(2, 3, 3)), "0.bias"),
}


def trained(model, steps, loss=F.cross_entropy, **options):
    """Train with ``WhitenedAdam``; return the parameters after every step."""
    given_options = {
        "betas": BETAS,
        "eps": EPS,
        "weight_decay": LAMBDA,
        "damping": DAMPING,
        "whitening": kfc.Whitening(factor_decay=DECAY),
        "schedule": PERIODS,
    }
    optimizer, history = kfc.WhitenedAdam(model, LR, **{**given_options, **options}), []
    for passes in steps:
        optimizer.zero_grad()
        examples = sum(len(x) for x, _ in passes)
        for x, y in passes:
            (loss(model(x), y) * len(x) / examples).backward()
        optimizer.step()
        history.append([p.detach().clone() for p in model.parameters()])
    return history


def batches(*sizes, steps=8):
    """Return micro-batches of these sizes for every step."""
    return [
        [(torch.randn(n, 2, 5, 5), torch.randint(3, (n,))) for n in sizes] for _ in range(steps)
    ]


@pytest.mark.parametrize(
    ("sizes", "rotation", "loss_bound"),
    [((6,), None, None), ((4, 2), None, 0.005), ((6,), 4, 0.005), ((4, 2), 4, 0.5)],
    ids=["one pass", "micro-batches, bounded", "rotated, bounded", "lengthened"],
)
@pytest.mark.parametrize("name", NETWORKS)
def test_eight_steps_equal_the_dense_transcription(name, sizes, rotation, loss_bound):
    steps = batches(*sizes)
    if loss_bound is not None:
        steps[4] = [(100 * x, y) for x, y in steps[4]]  # an outlier
    mine, dense = NETWORKS[name](), NETWORKS[name]()
    dense.load_state_dict(mine.state_dict())
    found = trained(mine, steps, rotation_period=rotation, loss_bound=loss_bound)
    expected = dense_whitened_adam(dense, steps, rotation, loss_bound)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_longer_steps_where_the_loss_falls_fast_equal_the_dense_transcription(monkeypatch):
    """The same batch again and again: the loss falls by more than 4% per step, so that κ grows."""
    steps = 60 * batches(6, steps=1)
    mine, other, dense = (NETWORKS["convolution"]() for _ in range(3))
    for network in (other, dense):
        network.load_state_dict(mine.state_dict())
    found = trained(mine, steps, rotation_period=4, loss_bound=0.06)
    expected = dense_whitened_adam(dense, steps, 4, 0.06)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    monkeypatch.setattr("kfc.optimizers.bound.LARGEST_GROWTH", 1.0)
    without = trained(other, steps, rotation_period=4, loss_bound=0.06)
    assert torch.equal(without[10][0], found[10][0])
    assert not torch.allclose(without[-1][0], found[-1][0], rtol=1e-3)


@pytest.mark.parametrize("block_size", [1, 9])
@pytest.mark.parametrize("name", NETWORKS)
def test_blocks_equal_the_dense_transcription(name, block_size):
    steps = batches(4, 2)
    mine, dense = NETWORKS[name](), NETWORKS[name]()
    dense.load_state_dict(mine.state_dict())
    whitening = kfc.Whitening(factor_decay=DECAY, block_size=block_size)
    found = trained(mine, steps, whitening=whitening, rotation_period=4, loss_bound=0.005)
    expected = dense_whitened_adam(dense, steps, 4, 0.005, block_size=block_size)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", NETWORKS)
def test_independent_outputs_are_not_rotated(name):
    steps = batches(6)
    mine, dense = NETWORKS[name](), NETWORKS[name]()
    dense.load_state_dict(mine.state_dict())
    options = {"rotation_period": 4, "loss_bound": 0.005, "likelihood": "bernoulli"}
    found = trained(mine, steps, binary_loss, **options)
    expected = dense_whitened_adam(dense, steps, 4, 0.005, binary_loss)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def rotated_weights(model, loss, **options):
    """Return the names of the weights that have a basis after a step."""
    optimizer = kfc.WhitenedAdam(model, **options)
    loss(model(torch.randn(8, 4))).backward()
    optimizer.step()
    named = model.named_parameters()
    return {name for name, p in named if "basis" in optimizer.state[p]}


TARGETS = torch.randint(2, (8, 6), generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs: F.binary_cross_entropy_with_logits(outputs.flatten(1), TARGETS),
        lambda outputs: F.binary_cross_entropy_with_logits(outputs.flatten(1), 0.3 * TARGETS),
        lambda outputs: F.mse_loss(outputs.flatten(1), TARGETS),
    ],
    ids=["hard targets", "soft targets", "squared error"],
)
def test_the_layer_of_independent_outputs_is_found_behind_a_reshape(loss):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Unflatten(1, (2, 3)))
    assert rotated_weights(model, loss) == {"0.weight"}


class Ended(nn.Module):
    """A network whose output layer is followed by an operation."""

    def __init__(self, last, ending):
        super().__init__()
        self.first, self.last, self.ending = nn.Linear(4, 4), last, ending

    def forward(self, x):
        return self.ending(self.last(self.first(x).tanh()))


def image_head():
    """Return a layer from four values to an image (N, 2, 3, 3), in the order channels last."""
    convolution = nn.Conv2d(1, 2, 2, padding=1)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), convolution.to(memory_format=torch.channels_last)
    )


@pytest.mark.parametrize(
    ("last", "ending"),
    [
        (image_head, lambda y: y),
        (image_head, lambda y: y.flatten(1)),
        (image_head, lambda y: y.permute(0, 2, 3, 1)),
        (lambda: nn.Linear(4, 6), lambda y: y.reshape(8, 2, 3).transpose(1, 2).contiguous()),
        (lambda: nn.Linear(4, 6), lambda y: y.float()),
    ],
    ids=["convolution", "copied", "permuted", "transposed and copied", "cast"],
)
def test_the_layer_of_independent_outputs_is_found_behind_operations(last, ending):
    model = Ended(last(), ending)
    assert rotated_weights(model, lambda y: F.mse_loss(y, torch.ones_like(y))) == {"first.weight"}


def test_the_layer_of_independent_outputs_is_found_behind_a_backward_hook():
    model = Ended(nn.Linear(4, 6), lambda y: y)
    model.last.register_full_backward_hook(lambda *_: None)
    assert rotated_weights(model, lambda y: F.mse_loss(y, TARGETS)) == {"first.weight"}


def test_no_layer_is_rotated_before_the_likelihood_is_known():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6))
    optimizer = kfc.WhitenedAdam(model)
    for factor in (0.0, 1.0):
        optimizer.zero_grad()
        outputs = model(torch.randn(8, 4))
        (factor * F.binary_cross_entropy_with_logits(outputs, TARGETS)).backward()
        optimizer.step()
    assert "basis" in optimizer.state[model[0].weight]
    assert "basis" not in optimizer.state[model[2].weight]
    assert "except layers of independent model outputs: 2" in optimizer.describe()


def test_layers_before_an_activation_and_classes_are_rotated():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6))
    classes = TARGETS.argmax(dim=1)
    both = {"0.weight", "2.weight"}
    assert rotated_weights(model, lambda outputs: F.cross_entropy(outputs, classes)) == both
    bounded = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh())
    assert rotated_weights(bounded, lambda outputs: F.mse_loss(outputs, TARGETS)) == both


def test_only_independent_ones_of_several_outputs_are_not_rotated():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 5)
            self.kind, self.place = nn.Linear(5, 3), nn.Linear(5, 2)

        def forward(self, x):
            hidden = self.body(x).tanh()
            return {"kind": self.kind(hidden), "place": self.place(hidden)}

    def loss(outputs):
        kind = F.cross_entropy(outputs["kind"], TARGETS[:, :3].argmax(dim=1))
        return kind + F.mse_loss(outputs["place"], TARGETS[:, :2])

    likelihood = {"kind": "categorical", "place": "gaussian"}
    found = rotated_weights(Heads(), loss, likelihood=likelihood, output=lambda result: result)
    assert found == {"body.weight", "kind.weight"}


def test_a_resumed_run_still_does_not_rotate_independent_outputs():
    model = NETWORKS["linear"]()
    steps = batches(6, steps=6)
    options = {"rotation_period": 2, "schedule": kfc.Periods(50, 50)}
    optimizer = kfc.WhitenedAdam(model, **options)

    def train(model, optimizer, steps):
        for passes in steps:
            for x, y in passes:
                optimizer.zero_grad()
                binary_loss(model(x), y).backward()
                optimizer.step()

    train(model, optimizer, steps[:3])
    other = NETWORKS["linear"]()
    other.load_state_dict(model.state_dict())
    resumed = kfc.WhitenedAdam(other, **options)
    resumed.load_state_dict(optimizer.state_dict())
    train(model, optimizer, steps[3:])
    train(other, resumed, steps[3:])
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


def schedule_free_adam(model, lr, betas, weight_decay=0.0, eps=1e-8):
    """Return a function that makes one step of schedule-free Adam."""
    iterates, squares = Iterates(model.parameters(), betas), {}

    def step():
        rate, steps = lr * iterates.warm_up(), {}
        for p in model.parameters():
            squares[p] = betas[1] * squares.get(p, 0) + (1 - betas[1]) * p.grad**2
            deviation = (squares[p] / (1 - betas[1] ** (iterates.t + 1))).sqrt() + eps
            steps[p] = -rate * p.grad / deviation - lr * weight_decay * p.detach()
        iterates.move(steps)

    return step


def test_without_layers_it_is_schedule_free_adam():
    """Normalisation layers and other parameters have no Ω."""
    mine, theirs = (nn.Sequential(nn.LayerNorm([2, 5, 5]), nn.PReLU()) for _ in range(2))
    steps = [passes[0] for passes in batches(5, steps=30)]
    one = kfc.WhitenedAdam(mine, weight_decay=0.1)
    other = schedule_free_adam(theirs, 0.015, (0.8, 0.99), weight_decay=0.1)
    for x, _ in steps:
        for model, step in ((mine, one.step), (theirs, other)):
            model.zero_grad()
            model(x).square().flatten(1).sum(1).sin().mean().backward()
            step()
    torch.testing.assert_close(list(mine.parameters()), list(theirs.parameters()))


def test_a_wide_factor_is_diagonal():
    model = nn.Linear(6, 3)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    optimizer = kfc.WhitenedAdam(
        model,
        0.1,
        weight_decay=0.0,
        whitening=kfc.Whitening(max_factor_size=6),
        damping=DAMPING,
        rotation_period=None,
        loss_bound=None,
    )
    before = matrix_of(model, {"weight": model.weight.detach(), "bias": model.bias.detach()})
    F.cross_entropy(model(x), y).backward()
    gradient = matrix_of(model, {"weight": model.weight.grad, "bias": model.bias.grad})
    optimizer.step()
    omega = receptive_rows(model, x).square().sum(1) / 8
    torch.testing.assert_close(optimizer.activation_factors[""], omega[0])
    white = gradient.sign()  # the first step of Adam
    step = white / (omega + DAMPING * omega.mean()).sqrt()
    after = matrix_of(model, {"weight": model.weight.detach(), "bias": model.bias.detach()})
    expected = before - 0.1 / 20 * step * white.norm() / step.norm()  # the first of 20 steps
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)


# The root


def test_the_root_is_that_of_the_damped_factor():
    rows = torch.randn(2, 4, 6)  # of rank 4
    omega = rows.mT @ rows
    root = inverse_root(omega, 0.1, 2, has_bias=False)
    shift = 0.1 * omega.diagonal(dim1=1, dim2=2).mean(1)
    damped = omega + shift[:, None, None] * torch.eye(6)
    torch.testing.assert_close(root.mT @ root, torch.linalg.inv(damped))
    assert torch.equal(root, root.tril())
    diagonal = omega.diagonal(dim1=1, dim2=2)
    found = inverse_root(diagonal, 0.1, 2, has_bias=False)
    torch.testing.assert_close(found, (diagonal + shift[:, None]) ** -0.5)


def test_the_root_of_a_singular_factor_without_damping_is_a_pseudo_inverse():
    rows = torch.randn(1, 4, 6)
    omega = rows.mT @ rows
    root = inverse_root(omega, 0.0, 1, has_bias=True)
    torch.testing.assert_close(root @ root, torch.linalg.pinv(omega))


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_the_root_of_zero_is_the_identity(damping):
    factor = torch.stack([torch.zeros(3, 3), torch.diag(torch.tensor([4.0, 4.0, 4.0]))])
    expected = torch.stack([torch.eye(3), torch.eye(3) / (4 + 4 * damping) ** 0.5])
    found = inverse_root(factor, damping, 2, has_bias=True)
    torch.testing.assert_close(found, expected)


def blocks_with_bias(rows, blocks):
    """Return the second moments of blocks of columns, each with a leading 1."""
    parts = rows.unflatten(1, (blocks, -1)).transpose(0, 1)
    parts = F.pad(parts, (1, 0), value=1.0)
    return parts.mT @ parts


def test_the_root_of_singular_blocks_centres_them():
    rows = torch.randn(3, 8) + 2  # two blocks of four inputs, of rank 2 without their mean
    root = inverse_root(blocks_with_bias(rows, 2), 0.0, 1, has_bias=True)
    centred = (rows - rows.mean(0)).unflatten(1, (2, 4)).transpose(0, 1)
    white = WhiteningRoot({"root": root}).whiten(F.pad(rows, (1, 0), value=1.0).unsqueeze(0))[0]
    # Whitened rows have the second moments of a projection, within and outside of the mean.
    torch.testing.assert_close(white[:, 0], torch.full((3,), 3**-0.5))
    for block, part in zip(centred, white[:, 1:].unflatten(1, (2, 4)).transpose(0, 1), strict=True):
        torch.testing.assert_close(part.mT @ part, torch.linalg.pinv(block) @ block)


def test_the_root_of_nearly_singular_blocks_keeps_the_damping():
    torch.manual_seed(0)
    rows = (torch.randn(100, 1) + 1e-5 * torch.randn(100, 128)).float()
    root = inverse_root(blocks_with_bias(rows, 2), 1e-7, 1, has_bias=True)
    difference = F.normalize(torch.eye(64)[0] - torch.eye(64)[1], dim=0).float()
    mean = (rows.square().sum() + 100) / 129
    found = (root[0, 1:, 1:] @ difference).norm()
    torch.testing.assert_close(found, (1e-7 * mean) ** -0.5, rtol=0.1, atol=0)


@pytest.mark.parametrize(
    ("maps", "offsets", "size", "blocks"),
    [
        (32, 25, 256, 4),
        (1024, 1, 256, 4),
        (64, 9, 256, 4),
        (10, 9, 256, 1),
        (257, 1, 256, 1),
        (1021, 1, 256, 1),
        (514, 1, 256, 2),
        (3, 256, 256, 3),
        (3, 1024, 256, 3),
        (48, 1, 1, 48),
    ],
)
def test_blocks_are_of_whole_input_maps_and_neither_wide_nor_narrow(maps, offsets, size, blocks):
    assert count_blocks(maps, offsets, size) == blocks


@pytest.mark.parametrize("homogeneous", [True, False])
@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (LinearLayer(nn.Linear(6, 2)), torch.randn(5, 3, 6)),
        (ConvolutionLayer(nn.Conv2d(6, 4, 3, stride=2, groups=2)), torch.randn(4, 6, 7, 7)),
        (ConvolutionLayer(nn.Conv1d(6, 4, 3, padding=1)), torch.randn(4, 6, 40)),
        (
            TransposedConvolutionLayer(nn.ConvTranspose2d(6, 2, 2, stride=2)),
            torch.randn(4, 6, 4, 4),
        ),
    ],
    ids=["linear", "groups and stride", "correlation", "transposed"],
)
def test_block_moments_are_blocks_of_the_whole(layer, inputs, homogeneous):
    inputs = inputs.double()
    source = layer.row_source(inputs, layer.module.double()(inputs))
    found = layer.block_moment(source, 3, homogeneous=homogeneous)
    expected = MatrixLayer.block_moment(layer, source, 3, homogeneous=homogeneous)
    torch.testing.assert_close(found, expected)
    whole = layer.activation_moment(source, homogeneous=homogeneous, diagonal=False)
    start, width = int(homogeneous), found.shape[-1] - homogeneous
    for group, matrix in enumerate(whole):
        for block in range(3):
            part = matrix[start:, start:][block * width :, block * width :][:width, :width]
            torch.testing.assert_close(found[3 * group + block, start:, start:], part)


# Invariance (section 4 of the paper)


def transformed(layer, matrix, offset):
    """Return the layer behind an affine map of its input channels, as the same function."""
    other = type(layer)(**arguments(layer))
    with torch.no_grad():
        weight = torch.einsum("ij...,jk->ik...", layer.weight, torch.linalg.inv(matrix))
        other.weight.copy_(weight)
        other.bias.copy_(layer.bias - torch.einsum("ij...,j->i", weight, offset))
    return nn.Sequential(Affine(matrix, offset), other)


def arguments(layer):
    if isinstance(layer, nn.Linear):
        return {"in_features": layer.in_features, "out_features": layer.out_features}
    return {
        "in_channels": layer.in_channels,
        "out_channels": layer.out_channels,
        "kernel_size": layer.kernel_size,
    }


class Whitened:
    """One layer with its Ω, undamped, and its gradient in network and whitened coordinates."""

    def __init__(self, model, name, x, y, block_size=256):
        self.model, self.name = model, name
        whitening = kfc.Whitening(block_size=block_size)
        self.optimizer = kfc.WhitenedAdam(model, 0.0, damping=0.0, whitening=whitening)
        outputs = model(x)
        F.cross_entropy(outputs.flatten(2).sum(2) if outputs.dim() > 2 else outputs, y).backward()
        self.optimizer.step()  # sets Ω; the learning rate is zero
        parameters = dict(model.named_parameters())
        self.layer = model if name == "" else model.get_submodule(name)
        self.omega = self.optimizer.activation_factors[name]
        by_role = {n.rpartition(".")[2]: p.grad for n, p in parameters.items()}
        self.curvature = self.optimizer.engine.curvature
        self.white = self.curvature.whiten({name: matrix_of(self.layer, by_role)})[name][0]

    def map_back(self, white):
        """Return a step in the coordinates of the network, by role."""
        step = self.curvature.unwhiten({self.name: white[None]})[self.name]
        return parts_of(self.layer, step, [n for n, _ in self.layer.named_parameters()])

    def change(self, white, inputs):
        """Return the change of the layer's outputs by the step -Δ."""
        step = self.map_back(white)
        return torch.func.functional_call(self.layer, step, (inputs,))


def pair(kind, seed):
    """Return a layer, the same function in other coordinates, and the layer's inputs in both."""
    torch.manual_seed(seed)
    layer = nn.Linear(3, 4) if kind == "linear" else nn.Conv2d(3, 4, 2)
    x = torch.randn(60, 3) if kind == "linear" else torch.randn(60, 3, 4, 4)
    y = torch.randint(4, (60,))
    matrix, offset = torch.eye(3) + 0.4 * torch.randn(3, 3), torch.randn(3)
    other = transformed(layer, matrix, offset)
    torch.testing.assert_close(other(x), layer(x))
    return Whitened(layer, "", x, y), Whitened(other, "1", x, y), x, other[0](x)


@pytest.mark.parametrize("layer", [nn.Linear(6, 4), nn.Conv2d(6, 4, 2)], ids=["linear", "conv"])
def test_blocks_are_invariant_to_maps_of_their_own_channels(layer):
    """With T lower triangular within blocks of two channels, whitened gradients are the same."""
    layer = layer.double()
    x = torch.randn(60, 6) if isinstance(layer, nn.Linear) else torch.randn(60, 6, 4, 4)
    y = torch.randint(4, (60,))
    blocks = [torch.tensor([[1.5, 0.0], [0.7, 0.5]]), torch.eye(2), torch.diag(torch.rand(2) + 1)]
    offset = torch.randn(6)
    if isinstance(layer, nn.Conv2d):  # an offset of a padded map would not be one of the patches
        blocks[0] = torch.diag(torch.tensor([1.5, 0.5]))
    other = transformed(layer, torch.block_diag(*blocks), offset)
    size = 2 * layer.weight[0, 0].numel()
    mine, theirs = Whitened(layer, "", x, y, size), Whitened(other, "1", x, y, size)
    assert mine.omega.shape == (3, 1 + size, 1 + size)
    torch.testing.assert_close(theirs.white, mine.white)


SEEDS = st.integers(0, 10_000)
KINDS = st.sampled_from(["linear", "convolution"])


@settings(max_examples=15)
@given(KINDS, SEEDS)
def test_whitened_gradients_of_one_function_differ_by_a_rotation(kind, seed):
    """With rows T a: G̃' = G' Q, Q = R⁻ᵀ Tᵀ R̃ᵀ orthogonal, if Ω has full rank."""
    one, other, _, _ = pair(kind, seed)
    assert torch.linalg.matrix_rank(one.omega) == len(one.omega)
    # There is a rotation Q with G̃' = G' Q if and only if the Gram matrices are equal.
    torch.testing.assert_close(other.white @ other.white.mT, one.white @ one.white.mT)


@settings(max_examples=15)
@given(KINDS, SEEDS)
def test_a_step_that_commutes_with_rotations_is_invariant(kind, seed):
    """Dividing a layer's whitened gradient by its RMS changes both functions in the same way."""
    one, other, x, x_other = pair(kind, seed)
    changes = [
        each.change(each.white / each.white.square().mean().sqrt(), inputs)
        for each, inputs in ((one, x), (other, x_other))
    ]
    torch.testing.assert_close(*changes)


@settings(max_examples=15)
@given(KINDS, SEEDS)
def test_the_norm_of_a_whitened_step_is_the_change_of_the_outputs(kind, seed):
    """Σ_t E‖Δ a_t‖² = ‖Δ'‖² for any step Δ', so that its size means the same for any inputs."""
    one, other, x, x_other = pair(kind, seed)
    for each, inputs in ((one, x), (other, x_other)):
        white = each.white.sign()  # the first step of Adam
        change = each.change(white, inputs).square().sum() / len(inputs)
        torch.testing.assert_close(change, white.square().sum())


def test_adam_is_invariant_to_shifts_and_scales_of_inputs():
    """The whitened coordinates are then the same, as for any triangular map of the rows (1, a)."""
    torch.manual_seed(1)
    x, y = torch.randn(60, 3), torch.randint(4, (60,))
    layer = nn.Linear(3, 4)
    maps = {
        "shift and scales": torch.diag(torch.tensor([5.0, 0.2, 2.0])),
        "general": torch.eye(3) + 0.4 * torch.randn(3, 3),
    }
    whole = Whitened(layer, "", x, y)
    expected = whole.change(whole.white.sign(), x)
    changes = {}
    for name, matrix in maps.items():
        other = transformed(layer, matrix, torch.tensor([3.0, -1.0, 0.5]))
        each = Whitened(other, "1", x, y)
        changes[name] = each.change(each.white.sign(), other[0](x))
    torch.testing.assert_close(changes["shift and scales"], expected)
    assert not torch.allclose(changes["general"], expected, rtol=0.1)


def test_with_large_damping_it_is_schedule_free_adam():
    """The root is then a multiple of the identity, which the moments and the norm ignore."""
    one, other = nn.Linear(5, 3), nn.Linear(5, 3)
    other.load_state_dict(one.state_dict())
    schedule = kfc.Periods(100, 100)
    options = {"schedule": schedule, "rotation_period": None, "loss_bound": None}
    mine = kfc.WhitenedAdam(one, damping=1e14, eps=0.0, weight_decay=0.0, **options)
    adam = schedule_free_adam(other, 0.015, (0.8, 0.99), eps=0.0)
    for _ in range(6):
        x, y = torch.randn(8, 5), torch.randint(3, (8,))
        for model, step in ((one, mine.step), (other, adam)):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            step()
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()))
