"""The first estimate of the factors in `kfc train`, with which Algorithm 1 begins."""

import json
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close

from commands import assert_clear_error, kfc_here
from kfc.distributed.ranks import Ranks
from kfc.lab.comparison.runner import ComparisonRunner
from kfc.lab.comparison.settings import make_comparison, preset_names, read_comparison
from kfc.lab.components import RunComponents
from kfc.lab.config import ConfigError, config_from_dict, make_config
from kfc.lab.data import Batches, Inputs, load
from kfc.lab.report.diagnostics import cost_by_part, cost_rows
from kfc.lab.runs import RunFolder, read_record
from kfc.lab.training import Trainer
from ranks import run_ranks
from test_training import assert_same_state, checkpoint


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def config_of(**settings):
    defaults = {"data": "digits", "updates": 3, "batch_size": 128, "threads": 1}
    return make_config(**{**defaults, **settings})


def started(path, data, **settings):
    return Trainer.start(path, config_of(**settings), data, name="run")


def estimated(path, data, **settings):
    """Return a trainer after its first estimate and before its first update."""
    trainer = started(path, data, **settings)
    trainer.advance(1e-9)
    trainer.close()
    assert trainer.update == 0
    return trainer


def factors_of(trainer):
    return {
        f"{name} {side}": getattr(factors, side)
        for name, factors in trainer.components.optimizer.factors.items()
        for side in ("activation", "derivative")
    }


# What is estimated


@pytest.mark.parametrize("settings", [{}, {"train_examples": 700}, {"estimate_factors": 300}])
def test_the_estimate_is_that_of_all_examples_in_one_batch(digits, tmp_path, settings):
    """For Γ only with the exact Fisher matrix, which does not depend on draws."""
    trainer = estimated(tmp_path / "run", digits, fisher="exact", **settings)
    config = trainer.folder.config
    count = settings.get("estimate_factors", config.problem.train_examples or 1438)
    components = RunComponents(config, digits)
    batches = Batches(
        digits.train,
        components.inputs,
        count,
        config.machine.seed,
        examples=config.problem.train_examples,
    )
    images, labels = components.on_device(*next(batches.epoch(0)))
    components.optimizer.estimate_factors(
        [(images, labels)], lambda out, batch: F.cross_entropy(out, batch[1])
    )
    for name, factors in components.optimizer.factors.items():
        found = trainer.components.optimizer.factors[name]
        assert_close(found.activation, factors.activation, rtol=1e-4, atol=1e-5)
        assert_close(found.derivative, factors.derivative, rtol=2e-3, atol=1e-6)


def test_the_first_update_averages_its_batch_into_the_estimate(digits, tmp_path):
    trainer = estimated(tmp_path / "run", digits, factor_decay=0.75)
    before = {name: value.clone() for name, value in factors_of(trainer).items()}
    trainer = started(tmp_path / "again", digits, factor_decay=0.75, updates=1)
    trainer.advance()
    trainer.close()
    alone = started(tmp_path / "alone", digits, estimate_factors=0, updates=1)
    alone.advance()
    alone.close()
    batch, after = factors_of(alone), factors_of(trainer)
    for name, value in after.items():
        if "activation" in name:  # targets are drawn anew for Γ
            assert_close(value, 0.75 * before[name] + 0.25 * batch[name])


def test_the_estimate_leaves_weights_buffers_and_batches_alone(digits, tmp_path, monkeypatch):
    (tmp_path / "normalised.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),\n"
        "                         nn.Dropout(0.5), nn.Linear(144, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    trainer = estimated(tmp_path / "run", digits, net="normalised:net")
    fresh = RunComponents(trainer.folder.config, digits)
    assert_same_state(trainer.components.model.state_dict(), fresh.model.state_dict())
    assert all(p.grad is None for p in trainer.components.model.parameters())


def test_the_task_decides_the_loss(digits, tmp_path):
    trainer = estimated(tmp_path / "run", digits, net="digits-autoencoder")
    assert read_record(tmp_path / "run").estimate["examples"] == 1438
    assert "loss: Bernoulli(reduction='mean')" in trainer.components.optimizer.describe()


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 1438),
        ({"train_examples": 500}, 500),
        ({"estimate_factors": 200}, 200),
        ({"estimate_factors": 0}, 0),
        ({"fisher": "empirical"}, 0),
        ({"fisher": "empirical", "estimate_factors": 0}, 0),
        ({"optimizer": "kfac"}, 0),
        ({"optimizer": "kfac", "estimate_factors": 200}, 200),
        ({"optimizer": "sgd"}, 0),
    ],
)
def test_how_many_examples_are_used(digits, settings, count):
    config = config_of(**settings)
    assert config_from_dict(config.to_dict()) == config
    assert RunComponents(config, digits).estimated_examples == count


def test_without_an_estimate_training_begins_at_once(digits, tmp_path):
    trainer = started(tmp_path / "run", digits, estimate_factors=0, updates=2)
    trainer.advance()
    trainer.close()
    record = read_record(tmp_path / "run")
    assert record.estimate is None
    assert "first estimate" not in cost_by_part(record)


def test_kfac_can_estimate_too(digits, tmp_path):
    trainer = started(tmp_path / "run", digits, optimizer="kfac", estimate_factors=256)
    trainer.advance()
    trainer.close()
    assert trainer.end["reason"] == "updates"
    assert read_record(tmp_path / "run").estimate["examples"] == 256


# Wrong options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--estimate-factors", "5000"), "estimate_factors must be at most the examples used"),
        (("--estimate-factors", "-1"), "estimate_factors must be"),
        (("--estimate-factors", "5", "--fisher", "empirical"), "must be 0 with fisher 'empirical'"),
        (("--estimate-factors", "5", "--optimizer", "sgd"), "no effect with the optimizer sgd"),
        (("--factor-decay", "paper"), 'must be a number or "averaging"'),
        (("--factor-decay", "1"), "factor_decay must be"),
    ],
)
def test_options_that_cannot_be_used(tmp_path, options, words):
    out = tmp_path / "run"
    assert_clear_error(kfc_here("train", "--data", "digits", *options, "--out", out), 2, words)
    assert not out.exists()


def test_comparisons_take_the_option():
    with pytest.raises(ConfigError, match="must be 0 with fisher 'empirical', got 7"):
        config_of(fisher="empirical", estimate_factors=7)


# Batches


@pytest.mark.parametrize(("count", "sizes"), [(300, [100, 100, 100]), (129, [65, 64]), (5, [5])])
def test_a_sample_has_every_example_once(digits, count, sizes):
    batches = Batches(digits.train, Inputs.unit(digits.train), 128, seed=3)
    found = [len(images) for images, _ in batches.sample(count)]
    assert found == sizes
    all_labels = torch.cat([labels for _, labels in batches.sample(len(digits.train))])
    expected = torch.tensor(digits.train.labels)
    assert_close(all_labels.sort().values, expected.sort().values, check_dtype=False)
    with pytest.raises(ValueError, match="count must be at most 1438"):
        batches.sample(1439)


def test_ranks_share_a_sample(digits):
    inputs = Inputs.unit(digits.train)
    whole = Batches(digits.train, inputs, 128, seed=3)
    parts = [Batches(digits.train, inputs, 128, seed=3, rank=r, ranks=3) for r in range(3)]
    samples = [batches.sample(300) for batches in (whole, *parts)]
    for (images, labels), *shares in zip(*samples, strict=True):
        assert_close(torch.cat([share[0] for share in shares]), images)
        assert_close(torch.cat([share[1] for share in shares]), labels)
    assert [len(list(part.sample(2))) for part in parts] == [0, 1, 1]


# Times


def test_the_time_of_the_estimate_is_training_time_and_a_cost(digits, tmp_path):
    trainer = started(tmp_path / "run", digits, updates=11, log_period=1)
    trainer.advance()
    trainer.close()
    record = read_record(tmp_path / "run")
    assert record.estimate["update"] == 0
    assert record.evaluations[0]["seconds"] == 0 < record.estimate["seconds"]
    assert record.progress[0]["seconds"] > record.estimate["seconds"]
    # The rate of the first update does not include the estimate.
    first = record.progress[0]
    passed = first["seconds"] - record.estimate["seconds"]
    assert first["images_per_second"] == pytest.approx(128 / passed, rel=1e-6)
    costs = cost_by_part(record)
    assert costs["first estimate"] == pytest.approx(1000 * record.estimate["seconds"] / 11)
    assert sum(costs.values()) == pytest.approx(1000 * record.end["seconds"] / 11, rel=1e-3)
    assert all(value >= 0 for value in costs.values())
    assert [row[0] for row in cost_rows([record])][:2] == ["part", "first estimate"]


def test_a_time_limit_shorter_than_the_estimate_ends_the_run(digits, tmp_path):
    trainer = started(tmp_path / "run", digits, updates=None, seconds=1e-3)
    trainer.advance()
    trainer.close()
    assert (trainer.end["reason"], trainer.update) == ("time", 1)


def test_the_command_shows_the_estimate(tmp_path):
    arguments = ("--data", "digits", "--updates", "2", "--threads", "1", "--out", tmp_path / "run")
    done = kfc_here("train", *arguments, "--estimate-factors", "600", "--factor-decay", "averaging")
    assert done.returncode == 0, done.stdout
    assert "first estimate of the factors: 600 examples, " in done.stdout
    header = json.loads((tmp_path / "run" / "config.json").read_text())["config"]["options"]
    assert (header["estimate_factors"], header["factor_decay"]) == (600, "averaging")


def test_the_progress_of_the_estimate_is_reported_but_not_written(digits, tmp_path):
    rows = []
    trainer = Trainer.start(
        tmp_path / "run", config_of(updates=1), digits, name="run", on_row=rows.append
    )
    trainer.advance()
    trainer.close()
    done = [row["done"] for row in rows if row["kind"] == "estimating"]
    assert len(done) == 12
    assert done == sorted(done)
    assert done[-1] == 1438
    kinds = [row["kind"] for row in rows if row["kind"] != "estimating"]
    assert kinds[:2] == ["evaluation", "estimate"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == kinds


# Interruption, resumption, errors


def interrupted_after(calls):
    """Return a function that returns True from that call on."""
    count = 0

    def interrupted():
        nonlocal count
        count += 1
        return count > calls

    return interrupted


def test_an_interrupted_estimate_leaves_nothing_and_is_made_again(digits, tmp_path):
    whole = started(tmp_path / "whole", digits)
    whole.advance()
    whole.close()
    trainer = started(tmp_path / "parts", digits)
    before = trainer.components.optimizer.state_dict()
    assert trainer.advance(interrupted=interrupted_after(4))
    assert trainer.update == 0
    assert trainer.seconds < 0.01, "an estimate that is given up does not count"
    assert not trainer.components.optimizer.factors
    assert_same_state(trainer.components.optimizer.state_dict(), before)
    trainer.save()
    trainer.close()
    assert read_record(tmp_path / "parts").estimate is None
    trainer = Trainer.resume(RunFolder(tmp_path / "parts"), digits)
    trainer.advance()
    trainer.close()
    assert read_record(tmp_path / "parts").estimate["examples"] == 1438
    assert_same_state(checkpoint(tmp_path / "parts"), checkpoint(tmp_path / "whole"))


def test_a_complete_estimate_is_not_made_again(digits, tmp_path):
    whole = started(tmp_path / "whole", digits)
    whole.advance()
    whole.close()
    trainer = estimated(tmp_path / "parts", digits)
    seconds = trainer.seconds
    folder = RunFolder(tmp_path / "parts")
    trainer.folder = folder
    folder.load()
    trainer.save()
    trainer.close()
    rows = []
    trainer = Trainer.resume(RunFolder(tmp_path / "parts"), digits, on_row=rows.append)
    assert trainer.seconds == seconds
    trainer.advance()
    trainer.close()
    assert not any(row["kind"].startswith("estimat") for row in rows)
    assert_same_state(checkpoint(tmp_path / "parts"), checkpoint(tmp_path / "whole"))


@pytest.mark.filterwarnings("ignore::UserWarning:kfc")
def test_statistics_that_are_not_finite_end_the_run_with_a_diagnosis(digits, tmp_path):
    trainer = started(tmp_path / "run", digits)
    with torch.no_grad():
        trainer.components.model[3].weight[0] = float("nan")
    assert not trainer.advance()
    trainer.close()
    assert (trainer.end["reason"], trainer.update) == ("diverged", 0)
    assert "the factors cannot be estimated: batch 0 gave statistics" in trainer.end["message"]
    assert "3.weight" in trainer.end["message"]


# Ranks


def estimate_on_ranks(rank, path, calls):
    ranks = Ranks(dist.group.WORLD)
    config = config_of(fisher="exact", batch_size=100, updates=1)
    trainer = Trainer.start(path, config, load("digits"), name="run", ranks=ranks)
    # Only rank 1 is interrupted.
    stop = interrupted_after(calls if rank == 1 else math.inf)
    trainer.advance(1e-9, stop)
    trainer.close()
    return {name: value.tolist() for name, value in factors_of(trainer).items()}


def test_two_ranks_estimate_what_one_process_does(digits, tmp_path):
    one = factors_of(estimated(tmp_path / "one", digits, fisher="exact", batch_size=100))
    first, second = run_ranks(estimate_on_ranks, 2, tmp_path / "two", math.inf)
    assert first == second
    for name, value in one.items():
        assert_close(torch.tensor(first[name]), value, rtol=2e-3, atol=1e-5)


def test_an_interruption_of_one_rank_ends_the_estimate_of_all(tmp_path):
    assert run_ranks(estimate_on_ranks, 2, tmp_path / "run", 3) == [{}, {}]


# Comparisons


def test_learning_rates_are_tried_for_their_time_after_the_estimate(digits, tmp_path):
    """A slice as short as this ends after the estimate, before the first update."""
    content = {
        "title": "two learning rates",
        "settings": {"data": "digits", "batch_size": 128, "updates": 4, "threads": 1},
        "methods": {"KFC": {"lr": [0.003, 0.001]}},
        "tuning_seconds": 1e-3,
        "slice_seconds": 1e-9,
    }
    runner = ComparisonRunner(make_comparison(content), tmp_path, digits, lambda run, row: None)
    assert runner.run()
    ends = sorted((record.end["reason"], record.end["update"]) for record in runner.records())
    assert [reason for reason, _ in ends] == ["not chosen", "updates"]
    assert all(update > 0 for _, update in ends)
    assert all(record.estimate["examples"] == 1438 for record in runner.records())


@pytest.mark.parametrize("preset", preset_names())
def test_presets_estimate_on_everything_unless_quick(preset):
    """Quick versions are too short for an estimate on a large data set."""
    for quick in (False, True) if preset != "demo" else (False,):
        comparison = read_comparison(preset, quick=quick, overrides={})
        configs = [c for each in comparison.candidates().values() for c in each]
        for config in configs:
            if config.method.optimizer == "kfc":
                assert (config.method.options["estimate_factors"] is not None) == quick
