"""Training with ``torch.compile``: the same parameters as eager training, and compiled graphs."""

import gc
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import kfc


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1))


def sequential():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


class Graphs:
    """A backend of ``torch.compile`` that runs graphs eagerly, and counts them and their runs."""

    def __init__(self):
        self.compiled = self.runs = 0

    def __call__(self, graph, _):
        self.compiled += 1

        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def graphs():
    yield Graphs()
    torch._dynamo.reset()


def wrapped_before(model, make, backend):
    compiled = torch.compile(model, backend=backend)
    return compiled, make(compiled)


def original_given(model, make, backend):
    compiled = torch.compile(model, backend=backend)
    return compiled, make(model)


def wrapped_after(model, make, backend):
    optimizer = make(model)
    return torch.compile(model, backend=backend), optimizer


def in_place_before(model, make, backend):
    model.compile(backend=backend)
    return model, make(model)


def in_place_after(model, make, backend):
    optimizer = make(model)
    model.compile(backend=backend)
    return model, optimizer


WAYS = [wrapped_before, original_given, wrapped_after, in_place_before, in_place_after]


class Preconditioned:
    def __init__(self, model, **options):
        self.preconditioner = kfc.Preconditioner(model, **options)
        self.engine = self.preconditioner.engine
        self.sgd = torch.optim.SGD(self.preconditioner.model.parameters(), lr=1e-3)

    def zero_grad(self):
        self.sgd.zero_grad()

    def step(self):
        self.preconditioner.step()
        self.sgd.step()


OPTIMIZERS = {
    "KFC": kfc.KFC,
    "KFAC": kfc.KFAC,
    "WhitenedAdam": kfc.WhitenedAdam,
    "Preconditioner": Preconditioned,
}


def train(model, optimizer, steps=30, size=64):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(size, 2, 4, 4, generator=generator)
        y = torch.randint(3, (size,), generator=generator)

        optimizer.zero_grad()
        if isinstance(optimizer, kfc.KFAC):
            optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
        else:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def seeded(network):
    torch.manual_seed(0)
    return network()


def eager_result(network, make, **options):
    model = seeded(network)
    train(model, make(model), **options)
    return model.state_dict()


@pytest.mark.parametrize("network", [Network, sequential])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_parameters_as_eager_training(name, way, network, graphs):
    model, make = seeded(network), OPTIMIZERS[name]
    compiled, optimizer = way(model, make, graphs)
    assert optimizer.engine.model is model
    train(compiled, optimizer)
    assert_close(model.state_dict(), eager_result(network, make), rtol=1e-4, atol=1e-5)
    assert graphs.compiled == 1
    # The others gather statistics in most of the first steps; graphs of KFAC evaluate the loss.
    assert graphs.runs >= (20 if name == "WhitenedAdam" else 5)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("fisher", ["sampled", "exact", "empirical"])
def test_statistics_of_whole_batches_come_from_eager_passes(fisher, fullgraph, graphs):
    def make(model):
        return kfc.KFC(model, curvature=kfc.Kronecker(fisher=fisher), schedule=kfc.Periods(5, 5))

    model = seeded(Network)
    optimizer = make(model)
    train(torch.compile(model, backend=graphs, fullgraph=fullgraph), optimizer, size=8)
    expected = eager_result(Network, make, size=8)
    assert_close(model.state_dict(), expected, rtol=1e-4, atol=1e-5)
    assert graphs.compiled == 1
    assert graphs.runs == 30 - 7  # steps 1, 5, 10, ... are due


@pytest.mark.parametrize("network", [Network, sequential])
@pytest.mark.parametrize("way", [wrapped_before, in_place_before])
def test_model_that_ran_before_its_optimizer_was_made(way, network, graphs):
    model = seeded(network)
    compiled, _ = way(model, lambda compiled: compiled, graphs)
    start = {name: value.clone() for name, value in compiled.state_dict().items()}
    compiled(torch.randn(64, 2, 4, 4)).sum().backward()
    compiled.load_state_dict(start)
    train(compiled, kfc.KFC(compiled), steps=8)
    expected = eager_result(network, kfc.KFC, steps=8)
    assert_close(model.state_dict(), expected, rtol=1e-4, atol=1e-5)


def test_models_that_are_alike_without_an_optimizer(graphs):
    other = torch.compile(seeded(sequential), backend=graphs)
    compiled, optimizer = wrapped_before(seeded(sequential), kfc.KFC, graphs)
    other(torch.randn(64, 2, 4, 4)).sum().backward()
    train(compiled, optimizer, steps=8)
    expected = eager_result(sequential, kfc.KFC, steps=8)
    assert_close(compiled._orig_mod.state_dict(), expected, rtol=1e-4, atol=1e-5)


def wrap_part(model, graphs):
    model.conv = torch.compile(model.conv, backend=graphs)


def compile_part(model, graphs):
    model.conv.compile(backend=graphs)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("compile_", [wrap_part, compile_part])
def test_layers_compiled_on_their_own(compile_, graphs):
    model = seeded(Network)
    compile_(model, graphs)
    optimizer = kfc.KFC(model)
    train(model, optimizer)
    found = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
    assert_close(found, eager_result(Network, kfc.KFC), rtol=1e-4, atol=1e-5)
    assert len(optimizer.factors) == 2
    assert graphs.runs >= 10


def test_compiled_training_step(graphs):
    model = seeded(Network)
    optimizer = kfc.KFC(model)

    @torch.compile(backend=graphs)
    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        x = torch.randn(64, 2, 4, 4, generator=generator)
        step(x, torch.randint(3, (64,), generator=generator))
    expected = eager_result(Network, kfc.KFC, steps=12)
    assert_close(model.state_dict(), expected, rtol=1e-4, atol=1e-5)
    assert graphs.runs >= 8


def test_failed_and_interrupted_passes_do_not_turn_compilation_off(graphs):
    for error in (ValueError, KeyboardInterrupt):
        model = seeded(Network)
        compiled, optimizer = wrapped_after(model, kfc.KFC, graphs)
        handle = model.head.register_forward_hook(raising(error))
        with pytest.raises(error):
            train(compiled, optimizer, steps=1)
        handle.remove()
        train(compiled, optimizer)
        before = graphs.runs
        other = torch.compile(sequential(), backend=graphs)
        other(torch.randn(2, 2, 4, 4))
        assert graphs.runs == before + 1


def test_interrupted_models_that_are_gone_do_not_turn_compilation_off(graphs):
    """Whatever the order in which they go."""
    pairs = []
    for _ in range(2):
        model = seeded(Network)
        compiled, optimizer = wrapped_after(model, kfc.KFC, graphs)
        model.head.register_forward_hook(raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(compiled, optimizer, steps=1)
        pairs.append((model, compiled, optimizer))
    del model, compiled, optimizer
    while pairs:
        del pairs[0]
        gc.collect()
    before = graphs.runs
    torch.compile(sequential(), backend=graphs)(torch.randn(2, 2, 4, 4))
    assert graphs.runs == before + 1


def raising(error):
    def hook(*_):
        raise error

    return hook


def test_evaluation_stays_compiled(graphs):
    model = seeded(Network)
    compiled, optimizer = wrapped_after(model, kfc.KFC, graphs)
    x = torch.randn(6, 2, 4, 4)
    model.eval()
    assert_close(compiled(x), model(x))
    assert graphs.runs == 1
    optimizer.close()
    compiled.train()(x).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("way", [wrapped_after, in_place_before])
def test_default_backend(way):
    model = seeded(Network)
    compiled, optimizer = way(model, kfc.KFC, "inductor")
    train(compiled, optimizer)
    assert_close(model.state_dict(), eager_result(Network, kfc.KFC), rtol=1e-3, atol=1e-4)


def test_compiled_models_are_refused_where_torch_cannot_run_them_eagerly():
    script = """
import torch
from torch._C._dynamo import eval_frame
strategy = eval_frame.set_code_exec_strategy
del eval_frame.set_code_exec_strategy
import kfc
eval_frame.set_code_exec_strategy = strategy  # the compiler itself needs it
model = torch.nn.Linear(2, 2)
model.compile()
try:
    kfc.KFC(model)
except ValueError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "the model is compiled, and this version of torch" in found.stdout, found.stderr


def test_compiler_is_not_imported():
    script = "import sys, kfc; print('torch._dynamo' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr
