"""Compare inverses and solves with dense Kronecker products."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kfc.curvature.damped import invert_shifted
from kfc.curvature.factor import eigendecompose
from kfc.curvature.kronecker import EigenInverse, FactoredInverse, Factors, factor_balance

DOUBLE = torch.float64


def random_factor(groups: int, size: int, rank: int | None = None) -> torch.Tensor:
    rows = torch.randn(groups, rank or size + 3, size, dtype=DOUBLE)
    return rows.mT @ rows


def vec(matrix: torch.Tensor) -> torch.Tensor:
    """Stack the columns, as in (A ⊗ B) vec V = vec(B V Aᵀ)."""
    return matrix.T.flatten()


def balance(activation: torch.Tensor, derivative: torch.Tensor) -> float:
    """Return π by its definition, from the trace norms of Ω ⊗ I and I ⊗ Γ."""
    eye_a, eye_d = torch.eye(len(activation)), torch.eye(len(derivative))
    upper = torch.kron(activation, eye_d.to(activation)).trace()
    lower = torch.kron(eye_a.to(activation), derivative).trace()
    return float((upper / lower).sqrt())


shapes = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5))


@given(shapes, st.sampled_from([1e-3, 1.0]))
def test_factored_inverse_solves_the_damped_kronecker_system(sizes, damping):
    groups, n, m = sizes
    factors = Factors(random_factor(groups, n), random_factor(groups, m))
    gradient = torch.randn(groups, m, n, dtype=DOUBLE)
    natural = FactoredInverse.of(factors, damping).apply(gradient)
    for g in range(groups):
        activation, derivative = factors.activation[g], factors.derivative[g]
        pi = balance(activation, derivative)
        dense = torch.kron(
            activation + pi * damping**0.5 * torch.eye(n, dtype=DOUBLE),
            derivative + damping**0.5 / pi * torch.eye(m, dtype=DOUBLE),
        )
        torch.testing.assert_close(vec(natural[g]), torch.linalg.solve(dense, vec(gradient[g])))


@given(shapes, st.sampled_from([1e-3, 1.0]))
def test_eigen_inverse_solves_the_exactly_damped_system(sizes, damping):
    groups, n, m = sizes
    factors = Factors(random_factor(groups, n), random_factor(groups, m))
    gradient = torch.randn(groups, m, n, dtype=DOUBLE)
    natural = EigenInverse.of(factors, damping).apply(gradient)
    for g in range(groups):
        dense = torch.kron(factors.activation[g], factors.derivative[g])
        dense = dense + damping * torch.eye(n * m, dtype=DOUBLE)
        torch.testing.assert_close(vec(natural[g]), torch.linalg.solve(dense, vec(gradient[g])))


@pytest.mark.parametrize("kind", [FactoredInverse, EigenInverse])
@pytest.mark.parametrize("which", ["activation", "derivative", "both"])
def test_diagonal_factors_are_diagonal_matrices(kind, which):
    diagonals = Factors(torch.rand(2, 4, dtype=DOUBLE), torch.rand(2, 3, dtype=DOUBLE))
    mixed = Factors(
        diagonals.activation if which != "derivative" else random_factor(2, 4),
        diagonals.derivative if which != "activation" else random_factor(2, 3),
    )
    dense = Factors(*(torch.diag_embed(f) if f.dim() == 2 else f for f in mixed))
    gradient = torch.randn(2, 3, 4, dtype=DOUBLE)
    torch.testing.assert_close(
        kind.of(mixed, 1e-2).apply(gradient), kind.of(dense, 1e-2).apply(gradient)
    )


def test_balance_is_one_where_a_trace_is_zero():
    zero, some = torch.zeros(1, 3, 3), torch.eye(3)[None]
    assert factor_balance(Factors(zero, some)) == 1
    assert factor_balance(Factors(some, zero)) == 1
    assert factor_balance(Factors(4 * some, some)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [FactoredInverse, EigenInverse])
@pytest.mark.parametrize("damping", [0.0, 1e-12, 1e-3])
@pytest.mark.parametrize("case", ["zero", "rank one", "1x1", "condition 1e12", "tiny", "huge"])
def test_degenerate_factors_have_finite_inverses(case, damping, kind, dtype):
    n = 1 if case == "1x1" else 40
    basis, _ = torch.linalg.qr(torch.randn(n, n, dtype=DOUBLE))
    spectrum = {
        "zero": torch.zeros(n),
        "rank one": torch.cat([torch.ones(1), torch.zeros(n - 1)]),
        "1x1": torch.ones(n),
        "condition 1e12": torch.logspace(-6, 6, n),
        "tiny": torch.full((n,), 1e-15),
        "huge": torch.full((n,), 1e15),
    }[case].to(DOUBLE)
    factor = ((basis * spectrum) @ basis.T)[None].to(dtype)
    for factors in (Factors(factor, factor), Factors(factor, torch.eye(3, dtype=dtype)[None])):
        gradient = torch.randn(1, factors.derivative.shape[-1], n, dtype=dtype)
        assert torch.isfinite(kind.of(factors, damping).apply(gradient)).all()


def spread_factor(largest: float, n: int = 60) -> torch.Tensor:
    basis, _ = torch.linalg.qr(torch.randn(n, n, dtype=DOUBLE))
    spectrum = torch.logspace(-4, math.log10(largest), n, dtype=DOUBLE)
    return ((basis * spectrum) @ basis.T)[None].float()


def shifted_inverse(factor: torch.Tensor, shift: float) -> torch.Tensor:
    """Return the dense inverse, by applying it to the identity."""
    (inverse,) = invert_shifted([factor], [torch.tensor([shift], dtype=factor.dtype)])
    return inverse.after(torch.eye(factor.shape[-1], dtype=factor.dtype)[None])


@pytest.mark.parametrize("largest", [1e3, 1e4, 1e6])
def test_float32_inverses_stay_accurate_when_badly_conditioned(largest):
    factor = spread_factor(largest)
    inverse = shifted_inverse(factor, 1e-2)
    # The exact inverse of the rounded factor; eigenvalues that rounding made negative are 0.
    values, basis = torch.linalg.eigh(factor.double())
    true = (basis / (values.clamp_min(0) + 1e-2).unsqueeze(-2)) @ basis.mT
    assert (inverse - true).norm() / true.norm() < 0.1


def test_an_inverse_is_never_larger_than_the_damping_allows():
    """With condition 1e10, small eigenvalues are rounding errors, and some are negative."""
    inverse = shifted_inverse(spread_factor(1e8), 1e-2)
    values = torch.linalg.eigvalsh(inverse.double())
    assert values.min() > -1e-3
    assert values.max() < 1.01 / 1e-2


def test_singular_factors_get_their_pseudo_inverse():
    factor = random_factor(1, 6, rank=2)
    inverse = shifted_inverse(factor, 0.0)
    torch.testing.assert_close(inverse, torch.linalg.pinv(factor), rtol=1e-6, atol=1e-8)


def test_eigendecomposition_of_a_rank_deficient_factor():
    factor = random_factor(2, 8, rank=3)
    values, basis = eigendecompose(factor)
    torch.testing.assert_close((basis * values.unsqueeze(-2)) @ basis.mT, factor)
    assert (values >= 0).all()
    assert ((values > 0).sum(-1) == 3).all()


def test_eigendecomposition_retries_in_float64_if_it_does_not_converge(monkeypatch):
    real, calls = torch.linalg.eigh, []

    def fails_in_float32(matrix):
        calls.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return real(matrix)

    factor = random_factor(1, 4).float()
    monkeypatch.setattr(torch.linalg, "eigh", fails_in_float32)
    values, basis = eigendecompose(factor)
    assert calls == [torch.float32, torch.float64]
    torch.testing.assert_close((basis * values.unsqueeze(-2)) @ basis.mT, factor)


@pytest.mark.parametrize("kind", [FactoredInverse, EigenInverse])
@pytest.mark.parametrize("method", ["whiten", "unwhiten"])
def test_inverses_of_kronecker_products_have_no_root(kind, method):
    inverse = kind.of(Factors(random_factor(1, 3), random_factor(1, 2)), 0.1)
    with pytest.raises(NotImplementedError, match=f"{kind.__name__} has no root"):
        getattr(inverse, method)(torch.zeros(1, 2, 3, dtype=DOUBLE))
