"""The loss bound: the excess against losses computed directly, and what it does to training."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc
from kfc.optimizers.bound import Excess, LossBound, excess_loss

pytestmark = pytest.mark.usefixtures("double")


def entropy(targets, axis=1):
    return -torch.special.xlogy(targets, targets).sum(axis)


def soft_targets(*shape, axis=1):
    return torch.rand(*shape).softmax(axis)


def network(outputs=4):
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs))


def excess_after(model, loss, *inputs, **options):
    """Return E as the optimizer sees it after the backward pass of a loss."""
    optimizer = kfc.KFC(model, **options)
    loss(model(*inputs)).backward()
    optimizer.engine.begin_step(optimizer.engine.gradients())
    return float(excess_loss(optimizer.engine))


LABELS = torch.tensor([0, 3, 1, 1, 2, 0, 3])
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5], dtype=torch.float64)
BINARY = torch.tensor([[1.0, 0, 0, 1]] * 3 + [[0.0, 1, 1, 0]] * 4, dtype=torch.float64)
REAL = torch.linspace(-3, 3, 28, dtype=torch.float64).reshape(7, 4)


@pytest.mark.parametrize(
    ("loss", "excess", "options"),
    [
        (lambda o: F.cross_entropy(o, LABELS), None, {}),
        (lambda o: 3 * F.cross_entropy(o, LABELS, CLASS_WEIGHTS, reduction="sum"), None, {}),
        (lambda o: F.cross_entropy(o, LABELS, ignore_index=1), None, {}),
        (lambda o: F.nll_loss(o.log_softmax(1), LABELS), None, {}),
        (lambda o: F.binary_cross_entropy_with_logits(o, BINARY), None, {}),
        (lambda o: F.mse_loss(o, REAL), None, {"likelihood": "gaussian"}),
        (lambda o: 0.5 * F.mse_loss(o, REAL), None, {"likelihood": kfc.Gaussian(variance=1.0)}),
        (
            lambda o: F.cross_entropy(o, LABELS, label_smoothing=0.2),
            lambda o: (
                F.cross_entropy(o, LABELS, label_smoothing=0.2)
                - entropy(0.8 * F.one_hot(LABELS, 4) + 0.05).mean()
            ),
            {},
        ),
    ],
    ids=["mean", "class weights", "ignored", "nll", "bce", "mse", "half mse", "smoothed"],
)
def test_the_excess_is_the_loss_minus_its_least_value(loss, excess, options):
    model, inputs = network(), torch.randn(7, 5)
    expected = (excess or loss)(model(inputs)).item()
    assert excess_after(model, loss, inputs, **options) == pytest.approx(expected, rel=1e-6)


def test_the_excess_of_mixtures_of_classes():
    model, inputs, targets = network(), torch.randn(7, 5), soft_targets(7, 4)
    expected = F.kl_div(model(inputs).log_softmax(1), targets, reduction="batchmean").item()
    found = excess_after(model, lambda o: F.cross_entropy(o, targets), inputs)
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_excess_over_locations():
    model = nn.Conv2d(2, 3, 3)
    inputs, labels = torch.randn(4, 2, 6, 6), torch.randint(3, (4, 4, 4))
    expected = F.cross_entropy(model(inputs), labels).item()
    found = excess_after(model, lambda o: F.cross_entropy(o, labels), inputs)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("likelihood", "loss", "targets"),
    [("auto", F.cross_entropy, LABELS), ("gaussian", F.mse_loss, REAL)],
)
def test_the_excess_of_micro_batches_is_that_of_the_batch(likelihood, loss, targets):
    model, inputs = network(), torch.randn(7, 5)
    optimizer = kfc.KFC(model, likelihood=likelihood)
    expected = loss(model(inputs), targets).item()
    for part in (slice(0, 5), slice(5, 7)):
        count = part.stop - part.start
        (loss(model(inputs[part]), targets[part]) * count / 7).backward()
    optimizer.engine.begin_step(optimizer.engine.gradients())
    assert float(excess_loss(optimizer.engine)) == pytest.approx(expected, rel=1e-6)


def test_the_excess_does_not_contain_the_loss_scale():
    model, inputs = network(), torch.randn(7, 5)
    optimizer = kfc.KFC(model)
    expected = F.cross_entropy(model(inputs), LABELS).item()
    (1024 * F.cross_entropy(model(inputs), LABELS)).backward()
    optimizer.engine.begin_step(optimizer.engine.gradients(), 1024.0)
    assert float(excess_loss(optimizer.engine)) == pytest.approx(expected, rel=1e-6)


def test_the_excess_of_several_outputs_is_their_sum():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x):
            hidden = self.body(x).tanh()
            return {"a": self.a(hidden), "b": self.b(hidden)}

    model, inputs = TwoHeads(), torch.randn(7, 5)

    def loss(o):
        return F.cross_entropy(o["a"], LABELS) + 0.3 * F.mse_loss(o["b"], REAL)

    likelihoods = {"a": "categorical", "b": kfc.Gaussian(weight=0.3)}
    expected = loss(model(inputs)).item()
    found = excess_after(model, loss, inputs, likelihood=likelihoods)
    assert found == pytest.approx(expected, rel=1e-6)


class Laplace(kfc.Gaussian):
    """A likelihood of the user's own without an excess."""

    def excess(self, outputs, derivative, weights):
        return None


def test_an_unknown_excess_is_the_closure_s_loss_or_infinite():
    model, inputs = network(), torch.randn(7, 5)
    optimizer = kfc.KFC(model, likelihood=Laplace())
    loss = F.mse_loss(model(inputs), REAL)
    loss.backward()
    optimizer.engine.begin_step(optimizer.engine.gradients())
    assert float(excess_loss(optimizer.engine)) == float("inf")
    assert float(excess_loss(optimizer.engine, loss)) == pytest.approx(loss.item())
    assert float(excess_loss(optimizer.engine, -loss)) == float("inf")


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("predicted", "excess", "factor"),
    [
        *[(0.8, 1.0, 0.5), (0.4, 1.0, 1.0), (0.3, 1.0, 1.0), (0.1, 1.0, 2.0), (0.01, 1.0, 3.0)],
        *[(0.8, 2.0, 1.0), (0.0, 1.0, 1.0), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0), (0.01, INF, 1.0)],
        *[(0.01, NAN, 1.0), (0.01, -1.0, 0.0), (0.0, -1.0, 1.0)],
    ],
)
def test_a_step_changes_the_loss_by_a_share_of_its_excess(predicted, excess, factor):
    """With κ = 0.4: by 0.2 to 0.4 times the excess, where a threefold step is long enough."""
    value = torch.tensor(excess, dtype=torch.float64)
    for is_exact in (None, torch.tensor(True), torch.tensor(False)):
        bound = LossBound(0.4)
        found = bound.resize(torch.tensor(predicted).double(), Excess(value, value, is_exact))
        expected = factor if is_exact is None or is_exact else min(factor, 1.0)
        assert found.item() == pytest.approx(expected, rel=1e-6)
        assert bound.diagnostics()["loss_bounds"] == (factor < 1)


def falling(per_step, steps=300):
    """Return a bound with κ = 0.4 after an excess that fell by this share per step."""
    bound = LossBound(0.4)
    for step in range(steps):
        bound.without_outliers(torch.tensor((1 - per_step) ** step).double(), None)
    return bound


@pytest.mark.parametrize(
    ("per_step", "growth"), [(-0.05, 1.0), (0.02, 1.0), (0.06, 1.547), (0.09, 2.0)]
)
def test_the_share_grows_where_the_excess_falls_fast(per_step, growth):
    bound, one = falling(per_step), torch.tensor(1.0).double()
    yes, no = torch.tensor(True), torch.tensor(False)
    for is_exact, expected in ((None, growth), (yes, growth), (no, 1.0)):
        found = bound.resize(8 * one, Excess(one, one, is_exact)).item()
        assert found == pytest.approx(0.4 * expected / 8, rel=0.01)


def test_an_unknown_excess_and_a_bad_step_are_no_trend():
    bound = falling(0.06)
    before = bound.state_dict()["decrease"]
    yes, no = torch.tensor(True), torch.tensor(False)
    for excess, bad, is_exact in (
        *((INF, None, None), (NAN, yes, None), (5.0, yes, None), (5.0, None, no)),
        (-1.0, None, None),
    ):
        bound.without_outliers(torch.tensor(excess).double(), bad, is_exact)
    assert before == pytest.approx(-math.log(0.94), rel=1e-3)
    assert bound.state_dict()["decrease"] == before


def test_a_bad_first_step_sets_no_mean():
    bound = LossBound(0.4)
    bound.without_outliers(torch.tensor(5.0).double(), torch.tensor(True))
    assert bound.state_dict()["mean_excess"] is None


def test_states_of_the_bound():
    bound, other = falling(-0.05), LossBound(0.4)
    state = bound.state_dict()
    assert state["decrease"] < 0
    other.check_state(state)
    other.load_state_dict(state)
    assert other.state_dict() == state
    with pytest.raises(ValueError, match="decrease must be a finite number; got None"):
        other.check_state({**state, "decrease": None})
    with pytest.raises(ValueError, match="at least 0; got -1"):
        other.check_state({**state, "mean_excess": -1})


def test_an_unknown_excess_is_no_outlier():
    bound = LossBound(0.4)
    excesses = [1.0, INF, INF, 1.5, 100.0]
    found = [bound.without_outliers(torch.tensor(e).double(), None).item() for e in excesses]
    # The mean is 1, then 1.05.
    assert found == pytest.approx([1.0, INF, INF, 1.5, 2.1])


def test_an_excess_of_zero_is_no_mean():
    bound = LossBound(0.4)
    found = [bound.without_outliers(torch.tensor(e).double(), None).item() for e in (0.0, 5.0)]
    assert found == [0.0, 5.0]


def test_a_closure_s_loss_lengthens_no_step():
    """It is only an upper bound of the excess."""
    results = []
    for has_closure in (False, True):
        torch.manual_seed(0)
        model, inputs = network(), torch.randn(7, 5)
        optimizer = kfc.WhitenedAdam(model, loss_bound=1e3)
        for _ in range(3):

            def loss(model=model, inputs=inputs, optimizer=optimizer):
                optimizer.zero_grad()
                value = F.l1_loss(model(inputs), REAL)
                value.backward()
                return value

            if has_closure:
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_steps_that_change_little_are_lengthened():
    torch.manual_seed(0)
    model, inputs, factors = network(), torch.randn(7, 5), []
    optimizer = kfc.WhitenedAdam(model, lr=0.3)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), LABELS).backward()
        optimizer.step()
        factors.append(optimizer.diagnostics["loss_bound_factor"])
    assert max(factors) == 3
    assert any(1 < factor < 3 for factor in factors)


def confident_model():
    """Return a model and a batch with one confidently wrong example."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    inputs = torch.randn(7, 5)
    with torch.no_grad():
        labels = (40 * model(inputs)).argmax(1)
        model.weight.mul_(40)
        model.bias.mul_(40)
    labels[0] = (labels[0] + 1) % 4
    return model, inputs, labels


@pytest.mark.parametrize("bound", [0.25, 1.0])
def test_a_confidently_wrong_example_does_not_cause_a_huge_step(bound):
    model, inputs, labels = confident_model()
    free = copy.deepcopy(model)
    sizes = {}
    for name, net, share in (("bounded", model, bound), ("free", free, None)):
        before = [p.detach().clone() for p in net.parameters()]
        loss = F.cross_entropy(net(inputs), labels)
        clip = kfc.FisherClip(1e9, loss_bound=share)
        optimizer = kfc.KFC(net, lr=0.1, clip=clip, schedule=kfc.Periods(1, 1))
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), labels).backward()
        slopes = [p.grad.clone() for p in net.parameters()]
        optimizer.step()
        moves = [p.detach() - b for p, b in zip(net.parameters(), before, strict=True)]
        sizes[name] = -float(sum((g * m).sum() for g, m in zip(slopes, moves, strict=True)))
    assert sizes["bounded"] == pytest.approx(bound * loss.item(), rel=1e-6)
    assert sizes["free"] > 2 * loss.item()


def test_momentum_is_shortened_with_the_step():
    model, inputs, labels = confident_model()
    optimizer = kfc.KFC(model, lr=0.1, clip=kfc.FisherClip(None))
    before = model.weight.detach().clone()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    torch.testing.assert_close(momentum, model.weight.detach() - before)
    assert optimizer.diagnostics["loss_bound_factor"] < 1
    assert optimizer.diagnostics["loss_bounds"] == 1


def test_options_without_effect_are_refused():
    with pytest.raises(ValueError, match="no effect without a limit"):
        kfc.FisherClip(None, fraction=0.5)
    with pytest.raises(ValueError, match="pass clip=None"):
        kfc.FisherClip(None, loss_bound=None)
    with pytest.raises(ValueError, match="loss_bound"):
        kfc.FisherClip(loss_bound=0)


@pytest.mark.parametrize("waits", [True, False])
def test_momentum_that_leads_uphill_is_dropped(waits):
    torch.manual_seed(0)
    model, inputs = network(), torch.randn(7, 5)
    schedule = kfc.Periods(1, 1) if waits else kfc.Periods(100, 100)
    options = {"clip": kfc.FisherClip(None), "schedule": schedule, "likelihood": "categorical"}
    optimizer = kfc.KFC(model, lr=0.01, **options)
    for _ in range(2):  # the second step is not due in the second schedule
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), LABELS).backward()
        for parameter in model.parameters():
            parameter.grad.neg_()  # momentum now leads uphill
        optimizer.step()
    assert optimizer.diagnostics["momentum_restarts"] == 0
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), LABELS).backward()
    slopes = [p.grad.clone() for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    moves = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
    assert sum((g * m).sum() for g, m in zip(slopes, moves, strict=True)) < 0
    assert optimizer.diagnostics["momentum_restarts"] == 1


def test_without_bound_momentum_may_lead_uphill():
    clip = kfc.FisherClip(0.3, loss_bound=None)
    assert "momentum_restarts" not in kfc.KFC(network(), clip=clip).diagnostics


def test_a_loss_that_fits_no_likelihood_has_no_bound_also_after_loading():
    model, inputs = network(), torch.randn(7, 5)
    optimizer = kfc.WhitenedAdam(model)
    F.l1_loss(model(inputs), REAL).backward()
    optimizer.step()
    resumed = kfc.WhitenedAdam(model)
    resumed.load_state_dict(optimizer.state_dict())
    for each in (optimizer, resumed):
        each.zero_grad()
        F.l1_loss(model(inputs), REAL).backward()
        each.engine.begin_step(each.engine.gradients())
        assert float(excess_loss(each.engine)) == float("inf")


@pytest.mark.parametrize("same", [True, False])
def test_the_fisher_norm_of_a_whole_step_with_momentum_is_limited(same):
    """Also if groups differ in learning rate, momentum and weight decay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    images, labels = torch.randn(20, 5).double(), torch.randint(3, (20,))
    options = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.01}
    groups = None if same else [{"prefix": "2", **options}]
    clip = kfc.FisherClip(1e-3, fraction=1, period=1, loss_bound=100.0)
    curvature = kfc.Kronecker(fraction=1)
    optimizer = kfc.KFC(model, 0.1, clip=clip, groups=groups, curvature=curvature, seed=0)
    decays = dict.fromkeys(dict(model.named_parameters()), 0.0)
    if not same:
        decays |= {"2.weight": 0.01, "2.bias": 0.01}
    norms = []
    for _ in range(6):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        twin = copy.deepcopy(model)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        step = {name: p.detach() - before[name] for name, p in model.named_parameters()}
        norm = kfc.fisher.quadratic_form(twin, images, step)
        norms.append(float(norm + sum(decays[n] * v.square().sum() for n, v in step.items())))
    assert max(norms) <= 1e-3 * (1 + 1e-9)
    assert sum(norm > 0.999e-3 for norm in norms) >= 4
