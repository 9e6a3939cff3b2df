"""Linear systems with the exact Fisher matrix, compared with dense solutions in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfc


class Scaled(nn.Module):
    """A convolutional network with a parameter that has no curvature."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 3)
        )
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = Scaled().double()
    inputs = torch.randn(10, 2, 6, 6).double()
    inputs[:, 1] *= 10
    vector = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    return model, inputs, vector


def dense_fisher(model, inputs) -> torch.Tensor:
    """Return the mean of Jᵀ (diag(p) - p pᵀ) J over the examples."""
    names = [name for name, _ in model.named_parameters()]
    values = tuple(p.detach() for p in model.parameters())

    def outputs(*parameters):
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(model, state, (inputs,))

    state = torch.get_rng_state()
    jacobians = torch.autograd.functional.jacobian(outputs, values)
    torch.set_rng_state(state)
    p = outputs(*values).softmax(1)
    torch.set_rng_state(state)
    jacobian = torch.cat([j.flatten(2) for j in jacobians], dim=2)
    hessian = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    return torch.einsum("nai,nab,nbj->ij", jacobian, hessian, jacobian) / len(inputs)


def flat(vector) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in vector.values()])


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("preconditioner", ["kfc", kfc.Kronecker(inverse="eigen"), "ekfac", None])
def test_solutions_are_those_of_the_dense_system(problem, preconditioner, mode):
    model, inputs, vector = problem
    model.train(mode)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    random_state = torch.get_rng_state()
    found = kfc.solve_fisher(
        model,
        inputs,
        vector,
        damping=0.01,
        preconditioner=preconditioner,
        tolerance=1e-8,
        max_iterations=1000,
    )
    assert torch.equal(torch.get_rng_state(), random_state)
    fisher = dense_fisher(model, inputs)
    expected = torch.linalg.solve(fisher + 0.01 * torch.eye(len(fisher)), flat(vector))
    torch.testing.assert_close(flat(found.solution), expected, rtol=1e-5, atol=1e-5)
    assert found.converged
    assert found.residuals[0] == 1.0
    assert found.residuals[-1] <= 1e-8 < found.residuals[-2]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
    assert not any(module._forward_hooks for module in model.modules())


def test_the_approximation_saves_iterations():
    torch.manual_seed(0)
    model = Scaled().double().eval()
    # Badly scaled inputs, and so many that F has full rank, which would limit the iterations
    inputs = torch.randn(300, 2, 6, 6).double() * torch.tensor([1.0, 100.0]).view(2, 1, 1)
    loss = F.cross_entropy(model(inputs), torch.randint(3, (300,)))
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    with_it, without = (
        kfc.solve_fisher(
            model, inputs, gradient, damping=1e-4, tolerance=1e-4, max_iterations=400, **options
        )
        for options in ({}, {"preconditioner": None})
    )
    assert with_it.converged
    assert without.converged
    assert len(with_it.residuals) < 0.5 * len(without.residuals)


def test_factors_that_were_gathered_before_precondition(problem):
    model, inputs, vector = problem
    labels = torch.randint(3, (len(inputs),))
    preconditioner = kfc.Preconditioner(model, damping=0.01, schedule=kfc.Periods(1, 1))
    with pytest.raises(ValueError, match="no inverses yet"):
        kfc.solve_fisher(model, inputs, vector, preconditioner=preconditioner)
    F.cross_entropy(model(inputs), labels).backward()
    preconditioner.step()
    factors = preconditioner.factors
    model.eval()
    found = kfc.solve_fisher(
        model, inputs, list(vector.values()), damping=0.01, preconditioner=preconditioner
    )
    assert isinstance(found.solution, list)
    assert found.converged
    torch.testing.assert_close(preconditioner.factors, factors, rtol=0, atol=0)
    with pytest.raises(ValueError, match="another model"):
        kfc.solve_fisher(Scaled().double(), inputs, vector, preconditioner=preconditioner)


def test_models_with_several_arguments():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, x, y):
            return self.left(x) + self.right(y)

    model = Pair()
    inputs = torch.randn(6, 3), torch.randn(6, 4)
    vector = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    found = kfc.solve_fisher(model, inputs, vector, damping=0.1)
    assert found.converged


def test_iterations_end_and_are_reported(problem):
    model, inputs, vector = problem
    reports = []
    found = kfc.solve_fisher(
        model,
        inputs,
        vector,
        tolerance=0.0,
        max_iterations=3,
        progress=lambda *values: reports.append(values),
    )
    assert not found.converged
    assert reports == list(enumerate(found.residuals))[1:]
    zero = {name: torch.zeros_like(v) for name, v in vector.items()}
    found = kfc.solve_fisher(model, inputs, zero)
    assert found.converged
    assert not flat(found.solution).any()


def test_bad_arguments(problem):
    model, inputs, vector = problem
    with pytest.raises(ValueError, match="damping must be a finite number, above 0"):
        kfc.solve_fisher(model, inputs, vector, damping=0.0)
    with pytest.raises(ValueError, match="max_iterations must be a whole number"):
        kfc.solve_fisher(model, inputs, vector, max_iterations=0)
    with pytest.raises(ValueError, match="does not have"):
        kfc.solve_fisher(model, inputs, {"other": torch.ones(3)})
    vector["scale"] = torch.full((3,), torch.nan, dtype=torch.float64)
    with pytest.raises(FloatingPointError, match="not finite"):
        kfc.solve_fisher(model, inputs, vector)
