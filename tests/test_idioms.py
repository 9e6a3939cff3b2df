"""Idioms of training loops that no other test covers, and the table of all of them."""

import ast
import copy
import io
import pickle
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close

import kfc

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "integrations.md"
LEAST_ROWS = 40

# Exact targets: with sampled ones, another pass means other samples.
MAKERS = {
    "KFC": lambda model: kfc.KFC(
        model, curvature=kfc.Kronecker(fisher="exact"), schedule=kfc.Periods(1, 1)
    ),
    "WhitenedAdam": lambda model: kfc.WhitenedAdam(model, schedule=kfc.Periods(1, 1)),
}
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 2, 4, 4, generator=generator)
    return x, torch.randint(3, (12,), generator=generator)


def loss_of(model, step: int) -> torch.Tensor:
    x, y = batch(step)
    return F.cross_entropy(model(x), y)


def usual(model, optimizer, steps: int = 3) -> list[torch.Tensor]:
    """Train as most people do, and return the parameters."""
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return list(model.parameters())


def trained(make, steps: int = 3) -> list[torch.Tensor]:
    model = network()
    return usual(model, make(model), steps)


# The loop


def zeroed_between(model, optimizer, step):
    loss = loss_of(model, step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def zeroed_afterwards(model, optimizer, step):
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def zeroed_by_the_model(model, optimizer, step):
    model.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()


def zeroed_in_place(model, optimizer, step):
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, step).backward()
    optimizer.step()


def set_to_none_by_hand(model, optimizer, step):
    for parameter in model.parameters():
        parameter.grad = None
    loss_of(model, step).backward()
    optimizer.step()


@every_optimizer
@pytest.mark.parametrize(
    "style",
    [
        zeroed_between,
        zeroed_afterwards,
        zeroed_by_the_model,
        zeroed_in_place,
        set_to_none_by_hand,
    ],
)
def test_every_way_to_reset_gradients(style, make):
    model = network()
    optimizer = make(model)
    for step in range(3):
        style(model, optimizer, step)
    assert_close(list(model.parameters()), trained(make), rtol=0, atol=0)


@every_optimizer
def test_evaluation_in_inference_mode_between_steps(make):
    model = network()
    optimizer = make(model)
    for step in range(3):
        usual_step = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(usual_step[0]), usual_step[1]).backward()
        optimizer.step()
        model.eval()
        with torch.inference_mode():
            model(batch(9)[0])
        model.train()
    assert_close(list(model.parameters()), trained(make), rtol=0, atol=0)


@every_optimizer
def test_a_pass_whose_gradients_are_dropped(make):
    """As that of a generator through its discriminator."""
    model = network()
    optimizer = make(model)
    for step in range(3):
        loss_of(model, 100 + step).backward()
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert_close(list(model.parameters()), trained(make), rtol=0, atol=0)


@every_optimizer
def test_sharpness_aware_steps(make):
    """The curvature and the gradient are those of the perturbed parameters."""
    model, perturbed = network(), network()
    optimizer, other = make(model), make(perturbed)
    loss_of(model, 0).backward()
    shifts = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), shifts)
        torch._foreach_add_(list(perturbed.parameters()), shifts)
    optimizer.zero_grad()
    for each in (model, perturbed):
        loss_of(each, 0).backward()
    assert_close([p.grad for p in model.parameters()], [p.grad for p in perturbed.parameters()])
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), shifts)
    before = [p.detach().clone() for p in model.parameters()]
    for each in (optimizer, other):
        each.step()
    assert_close(optimizer.activation_factors, other.activation_factors)
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_gradients_changed_by_hooks_of_parameters():
    """The natural gradient is linear in the gradient."""
    moved = []
    for factor in (1.0, 2.0):
        model = network()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient, factor=factor: factor * gradient)
        optimizer = kfc.KFC(model, momentum=0.0, clip=None, curvature=kfc.Kronecker(fisher="exact"))
        before = [p.detach().clone() for p in model.parameters()]
        usual(model, optimizer, 1)
        moved.append([p.detach() - b for p, b in zip(model.parameters(), before, strict=True)])
    assert_close(moved[1], [2 * each for each in moved[0]], rtol=1e-3, atol=1e-6)


def test_learning_rates_set_by_hand():
    model = network()
    optimizer = MAKERS["KFC"](model)
    usual(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = group["momentum"] = 0.0
    usual(model, optimizer, 1)
    assert_close(list(model.parameters()), before, rtol=0, atol=0)


# Copies of the model and of the optimizer


@every_optimizer
def test_moving_averages_of_torch(make):
    model = network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = make(model)
    expected = None
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        average.update_parameters(model)
        values = [p.detach().clone() for p in model.parameters()]
        # The first update copies the parameters.
        expected = (
            values
            if expected is None
            else [0.5 * a + 0.5 * b for a, b in zip(expected, values, strict=True)]
        )
        loss_of(average, 7).backward()  # a copy does not feed the optimizer
        average.zero_grad()
    assert_close(list(average.parameters()), expected)
    assert_close(list(model.parameters()), trained(make), rtol=0, atol=0)


@every_optimizer
@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_optimizers_are_not_copied(copied, make):
    with pytest.raises(TypeError, match=r"save its state_dict\(\)"):
        copied(make(network()))


@every_optimizer
def test_state_dicts_are_loaded_with_weights_only(make):
    model = network()
    optimizer = make(model)
    usual(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = network()
    resumed = make(other)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert_close(usual(other, resumed), usual(model, optimizer), rtol=0, atol=0)


@every_optimizer
def test_a_second_optimizer_for_the_same_model(make):
    model = network()
    first = make(model)
    first.close()
    assert_close(usual(model, make(model)), trained(make), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="the optimizer is closed"):
        usual(model, first, 1)


# Other uses of the model


class TiedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mixer = nn.Embedding(7, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.mixer(self.embedding(tokens))))


@every_optimizer
def test_tied_weights_stay_tied(make):
    torch.manual_seed(0)
    model = TiedModel()
    optimizer = make(model)
    tokens = torch.randint(7, (32,))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(F.cross_entropy(model(tokens), (tokens + 1) % 7))
        losses[-1].backward()
        optimizer.step()
    assert model.head.weight is model.embedding.weight
    assert losses[-1] < losses[0]


@every_optimizer
def test_functional_transforms_between_steps(make):
    """Gradients of single examples, for instance."""
    model = network()
    optimizer = make(model)

    def loss(parameters, x, y):
        model.eval()  # batch normalisation over one example is no use
        output = torch.func.functional_call(model, parameters, (x.unsqueeze(0),))
        model.train()
        return F.cross_entropy(output, y.unsqueeze(0))

    for step in range(3):
        values = {name: p.detach() for name, p in model.named_parameters()}
        single = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(values, *batch(8))
        assert single["0.weight"].shape == (12, 4, 2, 3, 3)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert_close(list(model.parameters()), trained(make), rtol=0, atol=0)


@every_optimizer
def test_tracing_leaves_no_statistics(make):
    model = network()
    optimizer = make(model)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    traced = torch.jit.trace(model, batch(5)[0])
    model.load_state_dict({**model.state_dict(), **buffers})
    assert not optimizer.factors
    assert_close(usual(model, optimizer), trained(make), rtol=0, atol=0)
    assert_close(traced(batch(6)[0]), model(batch(6)[0]))  # in training mode, as it was traced


@every_optimizer
def test_scripting_with_hooks_is_refused_and_says_what_works(make):
    model = network()
    before = torch.jit.script(model)
    optimizer = make(model)
    for refused in (model, copy.deepcopy(model)):
        with pytest.raises(AttributeError, match=r"torch\.jit\.script cannot compile .*close"):
            torch.jit.script(refused)
    usual(model, optimizer)
    model.eval(), before.eval()
    assert_close(before(batch(6)[0]), model(batch(6)[0]))
    optimizer.close()
    assert_close(torch.jit.script(model)(batch(6)[0]), model(batch(6)[0]))


@every_optimizer
def test_symbolic_tracing(make):
    model = network()
    optimizer = make(model)
    usual(model, optimizer)
    traced = torch.fx.symbolic_trace(model)
    model.eval(), traced.eval()
    assert_close(traced(batch(6)[0]), model(batch(6)[0]))


@every_optimizer
def test_exporting(make):
    model = network()
    optimizer = make(model)
    usual(model, optimizer)
    model.eval()
    program = torch.export.export(model, (batch(6)[0],))
    assert_close(program.module()(batch(6)[0]), model(batch(6)[0]))
    model.train()
    usual(model, optimizer, 1)


@every_optimizer
def test_pruned_weights_stay_zero(make):
    model = network()
    prune.l1_unstructured(model[4], "weight", amount=0.5)
    optimizer = make(model)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        losses.append(loss_of(model, 0))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert (model[4].weight[model[4].weight_mask == 0] == 0).all()


@pytest.mark.parametrize("kind", [kfc.KFC, kfc.KFAC, kfc.WhitenedAdam, kfc.Preconditioner])
def test_parameters_in_place_of_the_model_are_refused(kind):
    model = network()
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    for given in (model.parameters(), list(model.parameters()), groups):
        with pytest.raises(TypeError) as error:
            kind(given)
        lines = str(error.value).splitlines()
        assert "Pass the model itself" in lines[0]
        assert [line.strip() for line in lines[1:]] == [
            "optimizer = kfc.KFC(model)",
            "trainer = Trainer(model, args, optimizers=(optimizer, None))  # Hugging Face",
        ]
    with pytest.raises(TypeError, match=r"got int$"):
        kind(3)


# The table


def rows() -> list[list[str]]:
    """Return the cells of the table of idioms."""
    section = DOCUMENT.read_text().split("\n## Idioms\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@cache
def sources(path: Path) -> dict[str, str]:
    """Return the source of every test function of a file, by name."""
    text = path.read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) for node in functions}


def test_the_table_has_many_rows_and_each_idiom_once():
    names = [row[0] for row in rows()]
    assert len(names) >= LEAST_ROWS
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_every_row_of_the_table_names_a_test_of_its_outcome(row):
    _, outcome, _, test = row
    assert outcome in ("works", "refused")
    file, name = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", test).groups()
    source = sources(TESTS / file)[name]
    if outcome == "refused":
        assert re.search(r"raises|run_ranks", source), "the test has to expect an error"
    assert "pytest.skip(" not in source
