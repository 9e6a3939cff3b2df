"""The training loop: configuration, optimizers, averages, evaluations, records, resumption."""

import copy
import itertools
import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kfc.lab.averages import Averages
from kfc.lab.baselines import MuonOptions
from kfc.lab.components import RunComponents, weight_costs
from kfc.lab.config import ConfigError, Length, config_from_dict, make_config
from kfc.lab.data import Inputs, load
from kfc.lab.diagnosis import find_origin
from kfc.lab.disk import RunError
from kfc.lab.method import Setup
from kfc.lab.muon import as_matrix
from kfc.lab.networks import build
from kfc.lab.optimizers import OPTIMIZERS
from kfc.lab.runs import RunFolder, read_record
from kfc.lab.training import Trainer


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def config_of(**settings):
    defaults = {"data": "digits", "epochs": 2, "batch_size": 128, "threads": 1}
    return make_config(**{**defaults, **settings})


def run(path, data, **settings):
    trainer = Trainer.start(path, config_of(**settings), data, name="run")
    trainer.advance()
    trainer.close()
    return trainer


# Configuration


def test_defaults_come_from_network_and_optimizer():
    config = make_config(data="cifar10")
    problem, method = config.problem, config.method
    assert (problem.net, problem.init, problem.inputs) == ("cuda-convnet", "kaiming", "normalised")
    assert (method.optimizer, method.lr, problem.batch_size) == ("kfc", 3e-3, 512)
    assert make_config(data="cifar10", init="cuda-convnet").problem.inputs == "centred"
    assert make_config(data="mnist", net="autoencoder").problem.inputs == "unit"
    assert make_config(data="cifar10", net="mynets:small").problem.inputs == "normalised"
    assert make_config(data="cifar10", optimizer="sgd").problem.batch_size == 128
    assert config.length.epochs == 10
    assert make_config(data="cifar10", updates=5).length.epochs is None
    assert config_from_dict(config.to_dict()) == config


def test_a_run_folder_may_lack_an_option_that_was_added_later(digits, tmp_path):
    values = config_of(updates=1).to_dict()
    del values["options"]["curvature"]
    trainer = Trainer.start(tmp_path / "run", config_from_dict(values), digits, name="run")
    trainer.advance()
    trainer.close()
    assert trainer.end["reason"] == "updates"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "data must be given"),
        ({"data": "imagenet"}, "data must be one of"),
        (
            {"data": "digits", "optimizer": "sgd", "damping": 0.1},
            "damping has no effect with the optimizer sgd",
        ),
        ({"data": "digits", "optimizer": "lion"}, "optimizer must be one of"),
        ({"data": "digits", "typo": 1}, "every option must be one of .* got 'typo'"),
        ({"data": "digits", "lr": -1.0}, "lr must be"),
        ({"data": "digits", "lr": float("nan")}, "lr must be"),
        ({"data": "digits", "batch_size": 2.5}, "batch_size must be a whole number"),
        ({"data": "digits", "epochs": 0}, "epochs must be"),
        ({"data": "digits", "weight_decay": "cuda-convnet"}, "there are no weight costs for"),
        (
            {"data": "cifar10", "weight_decay": "cuda-convnet", "decay_biases": True},
            "weight_decay must be a number with decay_biases, got 'cuda-convnet'",
        ),
        ({"data": "digits", "weight_decay": "some"}, "weight_decay must be a finite number"),
        ({"data": "digits", "asynchronous_inverses": 1}, "must be true or false"),
        ({"data": "digits", "inputs": "raw"}, "inputs must be one of"),
        ({"data": "digits", "device": "toaster"}, "toaster"),
    ],
)
def test_invalid_options_are_named(settings, words):
    with pytest.raises(ConfigError, match=words):
        make_config(**settings)


@pytest.mark.parametrize(
    "settings", [{"batch_size": 5000}, {"momentum": 1.0}, {"fisher": "wrong"}, {"device": "cuda:7"}]
)
def test_errors_of_building_the_components_leave_no_folder(digits, tmp_path, settings):
    with pytest.raises((ConfigError, ValueError)):
        Trainer.start(tmp_path / "run", config_of(**settings), digits, name="run")
    assert not (tmp_path / "run").exists()


def test_weights_have_weight_costs_and_biases_if_wanted(digits):
    model = build("digits", image=(1, 8, 8), classes=10, init=None, seed=0)
    costs = weight_costs(config_of(weight_decay=0.5), model)
    assert set(costs.values()) == {0.5}
    assert costs.keys() == {n for n, p in model.named_parameters() if p.dim() > 1}
    everything = weight_costs(config_of(weight_decay=0.5, decay_biases=True), model)
    assert everything == dict.fromkeys(dict(model.named_parameters()), 0.5)
    published = make_config(data="cifar10", weight_decay="cuda-convnet")
    assert weight_costs(published, model)["fc10.weight"] == 1.0


# Optimizers


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "soap"])
def test_every_optimizer_learns_the_digits(digits, tmp_path, name):
    trainer = run(tmp_path / "run", digits, optimizer=name, epochs=6, weight_decay=1e-4)
    assert trainer.end["reason"] == "epochs"
    assert trainer.last_evaluation["train_error"] < 10


def test_asynchronous_inverses_are_an_option(digits, tmp_path):
    options = {"asynchronous_inverses": True, "max_staleness": 2, "inverse_period": 3}
    trainer = run(tmp_path / "run", digits, optimizer="kfc", updates=6, **options)
    assert (
        trainer.components.optimizer.diagnostics["staleness"] == 3
    )  # computed at step 3, the next are applied at step 8


@pytest.mark.parametrize("name", ["kfc", "kfac"])
def test_the_curvature_is_an_option(digits, tmp_path, name):
    trainer = run(tmp_path / "run", digits, optimizer=name, curvature="prong", updates=3)
    assert read_record(tmp_path / "run").config.method.options["curvature"] == "prong"
    assert "white derivatives" in str(trainer.components.optimizer.describe())


def test_soap_needs_its_package(digits, tmp_path):
    try:
        import pytorch_optimizer  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="pip install pytorch-optimizer"):
            run(tmp_path / "run", digits, optimizer="soap")
    else:
        assert run(tmp_path / "run", digits, optimizer="soap").end["reason"] == "epochs"


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_muon_updates_the_weights_in_place(memory_format):
    model = build("digits", image=(1, 8, 8), classes=10, init=None, seed=0)
    model.to(memory_format=memory_format)
    optimizer = MuonOptions().make(model, Setup(0.1, {}, 0, "categorical"))
    before = copy.deepcopy(model.state_dict())
    weight = next(p for p in model.parameters() if p.dim() == 4 and p.shape[1] > 1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    name = next(n for n, p in model.named_parameters() if p is weight)
    optimizer.step()
    assert all((model.state_dict()[n] != before[n]).any() for n in before)
    # The orthogonal factor of a matrix with more columns than rows has rows of equal length.
    step = (weight.detach() - before[name]).flatten(1)
    assert (step.norm(dim=1) / step.norm(dim=1).mean() - 1).abs().max() < 0.3


def test_the_matrix_of_a_weight_is_a_view():
    weight = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    assert as_matrix(weight).data_ptr() == weight.data_ptr()
    assert as_matrix(weight).shape == (4, 12)


# Averages and evaluation


@pytest.mark.parametrize("fraction", [1.0, 0.125])
def test_averages_are_a_mean_at_first_and_exponential_later(fraction):
    model = torch.nn.Linear(1, 1, bias=False).double()
    averages = Averages(model, 10.0, fraction)
    values = [model.weight.item()]
    expected = values[0]
    for count in range(1, 100):
        with torch.no_grad():
            model.weight.copy_(torch.randn(1, 1))
        values.append(model.weight.item())
        averages.update(count)
        weight = -math.expm1(-1 / min(10.0, fraction * count + 0.5))
        expected += weight * (values[-1] - expected)
        average = averages.state_dict()["weight"].item()
        assert average == pytest.approx(expected)
        if count == 9 and fraction == 1:
            assert average == pytest.approx(sum(values) / len(values), abs=0.05)
    with averages.swapped_in():
        assert model.weight.item() == average
    assert model.weight.item() == values[-1]


def test_averages_forget_the_initial_parameters():
    """The weight of θ₀ after k updates is about 1/k with a fraction of 1, and k⁻⁸ with 1/8."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    remaining = {}
    for fraction in (1.0, 0.125):
        averages = Averages(model, 1000.0, fraction)
        with torch.no_grad():
            model.weight.zero_()
        for count in range(1, 101):
            averages.update(count)
        remaining[fraction] = averages.state_dict()["weight"].item()
        torch.nn.init.ones_(model.weight)
    assert remaining[1.0] == pytest.approx(1 / 101, rel=0.1)
    assert remaining[0.125] < 1e-9


def test_averages_cover_running_statistics():
    model = torch.nn.BatchNorm1d(2)
    averages = Averages(model, 5.0)
    assert set(averages.state_dict()) == {"weight", "bias", "running_mean", "running_var"}


def test_evaluation_returns_mean_loss_and_error(digits):
    components = RunComponents(config_of(evaluation_examples=1200), digits)
    loss, error = components.evaluate("train")
    model = components.model
    outputs = model(Inputs.normalised(digits.train)(digits.train.images[:1200]))
    labels = torch.tensor(digits.train.labels[:1200])
    assert loss == pytest.approx(F.cross_entropy(outputs, labels).item(), rel=1e-5)
    assert error == pytest.approx(100 * (outputs.argmax(1) != labels).float().mean().item())
    assert model.training


# Records


def test_a_run_records_evaluations_and_progress(digits, tmp_path):
    run(tmp_path / "run", digits, epochs=3, evaluation_period=0.5, log_period=5)
    record = read_record(tmp_path / "run")
    updates = [row["update"] for row in record.evaluations]
    # An epoch has 11 batches: an evaluation every round(5.5) updates, and one at the end.
    assert updates == [0, 6, 12, 18, 24, 30, 33]
    assert [row["update"] for row in record.progress] == [5, 10, 15, 20, 25, 30]
    last = record.evaluations[-1]
    assert last["epoch"] == 3
    assert last["averaged_train_error"] < record.evaluations[0]["averaged_train_error"]
    assert record.progress[-1]["fisher_norm"] is not None
    layers = last["diagnostics"]["layers"]
    assert len(layers) == 3
    assert all(layer["pi"] > 0 for layer in layers.values())
    assert record.end["reason"] == "epochs"


@pytest.mark.parametrize(
    ("optimizer", "own"),
    [("kfc", {"forward", "backward", "clip"}), ("kfac", {"forward and backward", "model"})],
)
def test_the_times_of_the_parts_of_an_update_add_up(digits, tmp_path, optimizer, own):
    run(tmp_path / "run", digits, optimizer=optimizer, epochs=2, evaluation_period=1)
    first, second = read_record(tmp_path / "run").evaluations[1:]
    per_update = (second["seconds"] - first["seconds"]) / (second["update"] - first["update"])
    parts = second["step_seconds"]
    assert sum(parts.values()) == pytest.approx(per_update, rel=1e-6)
    assert own | {"data", "statistics", "inverses"} <= set(parts)
    assert all(value >= 0 for value in parts.values())


def test_processor_time_is_recorded_and_continues_after_a_resumption(digits, tmp_path, monkeypatch):
    clock = itertools.count()  # every measured part of an update takes one second
    monkeypatch.setattr("kfc.lab.costs.process_time", lambda: next(clock))
    settings = {"optimizer": "sgd", "evaluation_period": 100.0}
    trainer = run(tmp_path / "run", digits, updates=2, **settings)
    first = trainer.last_evaluation["processor_seconds"]
    assert 2 * 6 <= first <= 2 * 6 + 3, "six parts, and waiting for the device"
    longer = RunFolder(tmp_path / "run", Length(epochs=None, updates=4))
    again = Trainer.resume(longer, digits)
    again.advance()
    again.close()
    second = again.last_evaluation["processor_seconds"]
    assert 2 * 6 <= second - first <= 2 * 6 + 3
    rows = read_record(tmp_path / "run").evaluations
    assert [row["processor_seconds"] for row in rows] == [0.0, first, second]


@pytest.mark.parametrize(
    ("limit", "reason"),
    [({"updates": 7}, "updates"), ({"seconds": 1e-3}, "time"), ({"epochs": 0.5}, "epochs")],
)
def test_a_run_ends_at_the_first_limit(digits, tmp_path, limit, reason):
    trainer = run(tmp_path / "run", digits, **{"epochs": 50, **limit})
    assert trainer.end["reason"] == reason
    assert trainer.last_evaluation["update"] == trainer.update


@pytest.mark.filterwarnings("ignore::UserWarning:kfc")
@pytest.mark.parametrize("optimizer", ["sgd", "kfc"])
def test_nan_ends_the_run_with_a_diagnosis(digits, tmp_path, optimizer):
    trainer = Trainer.start(
        tmp_path / "run", config_of(optimizer=optimizer, log_period=1), digits, name="run"
    )
    trainer.advance(1e-9)
    trainer.save()
    with torch.no_grad():
        trainer.components.model[3].weight[0] = float("nan")
    assert not trainer.advance()
    trainer.close()
    assert trainer.end["reason"] == "diverged"
    assert "3.weight" in trainer.end["message"]
    assert "--lr" in trainer.end["message"]
    again = RunFolder(tmp_path / "run")
    assert all(torch.isfinite(v).all() for v in again.load()["model"].values())
    again.close()


@pytest.mark.filterwarnings("ignore::UserWarning:kfc")
def test_overflow_in_the_network_is_traced_to_its_layer(digits, tmp_path):
    """KFC skips such a step, so that the parameters are unchanged and the layer can be found."""
    trainer = Trainer.start(tmp_path / "run", config_of(log_period=1), digits, name="")
    with torch.no_grad():
        trainer.components.model[3].weight.fill_(3e38)
    trainer.advance()
    trainer.close()
    assert "all parameters are finite" in trainer.end["message"]
    assert "the first layer whose output is not finite is 3;" in trainer.end["message"]


@pytest.mark.parametrize(
    ("ranks", "rank", "words"),
    [
        ([(math.nan, math.inf)], 0, ""),
        ([(math.nan, 8), (math.nan, 8)], 0, ""),
        ([(math.nan, 8), (math.nan, 7)], 1, "it began with the gradients of rank 1 at update 7"),
        ([(1, math.inf), (1, 9), (1, 9)], 1, "it began with the gradients of ranks 1 and 2 at u"),
        ([(1, math.inf), (math.inf, math.inf)], 1, "only the loss of rank 1 is not finite"),
        ([(1, math.inf), (1, math.inf)], 0, ""),
    ],
)
def test_divergence_is_traced_to_the_first_rank(ranks, rank, words):
    found, description = find_origin(ranks)
    assert found == rank
    assert description.startswith(words)
    assert bool(description) == bool(words)


def test_kfac_recovers_from_nan_after_its_first_step_and_diverges_before(digits, tmp_path):
    config = config_of(optimizer="kfac", updates=4, log_period=1)
    for name, begun in (("begun", True), ("new", False)):
        trainer = Trainer.start(tmp_path / name, config, digits, name="run")
        if begun:
            trainer.advance(1e-9)
        with torch.no_grad():
            trainer.components.model[3].weight[0] = float("nan")
        trainer.advance()
        trainer.close()
        assert trainer.end["reason"] == ("updates" if begun else "diverged")
    assert "3.weight" in trainer.end["message"]
    assert "--initial-model-damping" in trainer.end["message"]


def test_kfac_records_what_it_adapts(digits, tmp_path):
    run(tmp_path / "run", digits, optimizer="kfac", epochs=1, log_period=5)
    record = read_record(tmp_path / "run")
    assert record.config.method.lr is None
    chosen = ("lr", "momentum", "model_damping", "factor_damping", "reduction_ratio")
    for row in record.progress:
        assert all(isinstance(row[name], float) for name in chosen)
        assert row["model_change"] < 0
    fixed = run(tmp_path / "fixed", digits, optimizer="kfac", updates=3, lr=0.01, log_period=1)
    assert fixed.components.optimizer.step_diagnostics["lr"] == pytest.approx(0.01)


def test_autoencoders_reconstruct_images(digits, tmp_path):
    trainer = run(tmp_path / "run", digits, net="digits-autoencoder", optimizer="kfac", epochs=8)
    first, *_, last = read_record(tmp_path / "run").evaluations
    images = digits.train.images / 16.0
    by_the_mean_image = 100 * (images - images.mean(axis=0)).std()
    assert last["train_error"] < by_the_mean_image < first["train_error"]
    inputs = torch.tensor(images, dtype=torch.float32)
    with torch.no_grad():
        outputs = trainer.components.model(inputs)
    loss = F.binary_cross_entropy_with_logits(outputs, inputs).item()
    assert last["train_loss"] == pytest.approx(loss, rel=1e-5)
    error = 100 * (outputs.sigmoid() - inputs).square().mean().sqrt().item()
    assert last["train_error"] == pytest.approx(error, rel=1e-5)
    with pytest.raises(ConfigError, match="inputs must be 'unit' for digits-autoencoder"):
        config_of(net="digits-autoencoder", inputs="normalised")


# Resumption, bit for bit


def tensors_of(state, prefix=""):
    """Return every tensor and number of a nested state, by path."""
    if isinstance(state, dict):
        items = state.items()
    elif isinstance(state, (list, tuple)):
        items = enumerate(state)
    else:
        return {prefix: state}
    return {k: v for key, item in items for k, v in tensors_of(item, f"{prefix}/{key}").items()}


def assert_same_state(found, expected):
    """Compare everything except times and what only this run has."""
    found, expected = tensors_of(found), tensors_of(expected)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        own = ("/run", "/metrics_bytes", "/metrics_check", "/last_log/1")
        if "seconds" in path or path.startswith("/settings/") or path in own:
            continue
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[path], value), path
        else:
            assert found[path] == value or value != value, path


def checkpoint(path):
    return torch.load(path / "checkpoint.pt", weights_only=True)


@pytest.mark.parametrize("optimizer", ["kfc", "kfac", "sgd", "adam", "muon"])
def test_resumption_changes_no_bit(digits, tmp_path, optimizer):
    settings = {"optimizer": optimizer, "epochs": 3, "evaluation_period": 0.7, "weight_decay": 1e-3}
    run(tmp_path / "whole", digits, **settings)
    config = config_of(**settings)
    trainer = Trainer.start(tmp_path / "parts", config, digits, name="run")
    while trainer.advance(0.02):
        torch.randn(3)  # another use of the global generator
        trainer.save()
        trainer.close()
        trainer = Trainer.resume(RunFolder(tmp_path / "parts"), digits)
    trainer.close()
    assert_same_state(checkpoint(tmp_path / "parts"), checkpoint(tmp_path / "whole"))
    parts, whole = (read_record(tmp_path / name).evaluations for name in ("parts", "whole"))
    for mine, theirs in zip(parts, whole, strict=True):
        assert {k: v for k, v in mine.items() if "seconds" not in k} == {
            k: v for k, v in theirs.items() if "seconds" not in k
        }


def test_dropout_resumes_bit_for_bit(digits, tmp_path, monkeypatch):
    (tmp_path / "withdropout.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    settings = {"net": "withdropout:net", "epochs": 2}
    run(tmp_path / "whole", digits, **settings)
    trainer = Trainer.start(tmp_path / "parts", config_of(**settings), digits, name="run")
    while trainer.advance(0.01):
        trainer.save()
        trainer.close()
        torch.manual_seed(17)
        trainer = Trainer.resume(RunFolder(tmp_path / "parts"), digits)
    trainer.close()
    assert_same_state(checkpoint(tmp_path / "parts"), checkpoint(tmp_path / "whole"))


def test_a_run_on_other_data_is_not_resumed(digits, tmp_path):
    run(tmp_path / "run", digits)
    other = replace(digits, digest="another digest")
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(RunError, match="other data"):
        Trainer.resume(folder, other)
    folder.close()


def test_a_network_that_has_changed_since_is_refused(digits, tmp_path, monkeypatch):
    text = "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), {})\n"
    module = tmp_path / "changing.py"
    module.write_text(text.format("nn.Linear(64, 10)"))
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "run", digits, net="changing:net")
    module.write_text(text.format("nn.Linear(64, 5), nn.Linear(5, 10)"))
    monkeypatch.delitem(sys.modules, "changing")
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(RunError, match="does not fit the network"):
        Trainer.resume(folder, digits)
    folder.close()


@pytest.mark.parametrize("optimizer", ["kfc", "kfac", "whitened-adam"])
def test_the_seed_determines_the_state_of_the_optimizer(digits, optimizer):
    """Whatever the process has drawn before."""
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        components = RunComponents(config_of(optimizer=optimizer), digits)
        states.append(components.optimizer.state_dict())
        assert torch.initial_seed() == seed
    assert_same_state(*states)


def test_the_seed_determines_batches_and_weights(digits):
    one, two = (RunComponents(config_of(optimizer=o), digits) for o in ("kfc", "sgd"))
    for mine, theirs in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(one.batches.epoch(0), two.batches.epoch(0), strict=True):
        assert torch.equal(mine[1], theirs[1])
