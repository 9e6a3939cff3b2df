"""A clip that shortens update after update must not stop training."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc
from kfc.optimizers.bound import least_factor

# A limit so low that the clip alone would stop training.
TINY = 1e-12
KAPPA, LEAST = 0.25, 0.01


def problem():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.randn(12, 6).double(), torch.arange(12) % 3


def predicted_decrease(model, optimizer, x, y) -> tuple[float, float]:
    """Make a step; return -∇hᵀm and the excess, which is the loss for targets of one class."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    moves = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
    slopes = [p.grad for p in model.parameters()]
    products = [(s * m).sum() for s, m in zip(slopes, moves, strict=True)]
    return -sum(products).item(), loss.item()


@pytest.mark.filterwarnings("ignore:the clip has shortened")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_clip_that_stays_low_leaves_a_hundredth_of_what_the_loss_bound_allows(momentum):
    model, x, y = problem()
    optimizer = kfc.KFC(
        model, lr=3.0, momentum=momentum, clip=kfc.FisherClip(TINY), schedule=kfc.Periods()
    )
    for step in range(1, 15):
        decrease, excess = predicted_decrease(model, optimizer, x, y)
        if step < 10:
            assert decrease < 1e-3 * LEAST * KAPPA * excess  # as ν asks for
        else:
            assert decrease == pytest.approx(LEAST * KAPPA * excess, rel=1e-3)
        assert optimizer.diagnostics["clip_factor"] < 0.01


@pytest.mark.filterwarnings("ignore:the clip has shortened")
def test_an_update_is_never_longer_than_a_hundredth_of_itself_while_the_clip_is_low():
    model, x, y = problem()
    optimizer = kfc.KFC(model, lr=1e-3, momentum=0.0, clip=kfc.FisherClip(TINY))
    for _ in range(12):
        decrease, excess = predicted_decrease(model, optimizer, x, y)
    assert optimizer.diagnostics["clip_factor"] == 0.01
    assert decrease < LEAST * KAPPA * excess


@pytest.mark.filterwarnings("ignore:the clip has shortened")
def test_without_the_loss_bound_the_clip_is_the_papers():
    model, x, y = problem()
    clip = kfc.FisherClip(TINY, fraction=1, loss_bound=None)
    optimizer = kfc.KFC(model, lr=3.0, momentum=0.0, clip=clip, schedule=kfc.Periods())
    for _ in range(14):
        predicted_decrease(model, optimizer, x, y)
        state = optimizer.diagnostics
        assert state["clip_factor"] == pytest.approx((TINY / state["fisher_norm"]) ** 0.5)


def test_the_warning_comes_once_and_says_what_to_do(recwarn):
    model, x, y = problem()
    optimizer = kfc.KFC(model, lr=3.0, clip=kfc.FisherClip(TINY))
    counts = []
    for _ in range(25):
        predicted_decrease(model, optimizer, x, y)
        found = [w for w in recwarn if "the clip has shortened" in str(w.message)]
        counts.append(len(found))
    assert counts == [0] * 9 + [1] * 16
    assert "larger batches, a smaller lr or a larger damping" in str(found[0].message)
    assert "clip=kfc.FisherClip(None)" in str(found[0].message)


def test_a_clip_that_is_sometimes_low_is_left_alone(recwarn):
    model, x, y = problem()
    optimizer = kfc.KFC(model, lr=3.0, clip=kfc.FisherClip(TINY))
    for step in range(1, 30):
        for group in optimizer.param_groups:
            group["lr"] = 0.0 if step % 8 == 0 else 3.0  # ν = 0: nothing to shorten
        predicted_decrease(model, optimizer, x, y)
        if step % 8:
            assert optimizer.diagnostics["clip_factor"] < 1e-5
    assert not [w for w in recwarn if "the clip has shortened" in str(w.message)]


@pytest.mark.filterwarnings("ignore:the clip has shortened")
def test_a_frozen_run_resumes_bit_for_bit():
    model, x, y = problem()
    optimizer = kfc.KFC(model, lr=3.0, clip=kfc.FisherClip(TINY), seed=0)
    for _ in range(12):
        predicted_decrease(model, optimizer, x, y)
    resumed, _, _ = problem()
    resumed.load_state_dict(model.state_dict())
    other = kfc.KFC(resumed, lr=3.0, clip=kfc.FisherClip(TINY), seed=0)
    other.load_state_dict(optimizer.state_dict())
    for _ in range(3):
        assert predicted_decrease(resumed, other, x, y) == predicted_decrease(
            model, optimizer, x, y
        )


@pytest.mark.parametrize(
    ("decrease", "limit", "expected"),
    [(2.0, 1.0, 0.005), (0.005, 1.0, 1.0), (1.0, float("inf"), 0.0), (-1.0, 1.0, 0.0)],
)
def test_the_least_factor_of_a_step(decrease, limit, expected):
    assert least_factor(decrease, limit) == pytest.approx(expected)
