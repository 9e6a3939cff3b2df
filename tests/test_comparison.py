"""Comparisons: presets and files, runs in turn, the choice of learning rates, the command."""

from itertools import pairwise
from pathlib import Path

import pytest

from commands import assert_clear_error, kfc, kfc_here
from kfc.lab.comparison.runner import ComparisonRunner
from kfc.lab.comparison.settings import (
    make_comparison,
    preset_names,
    read_comparison,
    read_specification,
    with_overrides,
    write_specification,
)
from kfc.lab.config import ConfigError
from kfc.lab.data import load
from kfc.lab.disk import RunError
from kfc.lab.networks import NetworkError
from kfc.lab.runs import read_record

FIGURES = Path(__file__).parents[1] / "benchmarks" / "figures"
SMALL = {
    "title": "Small",
    "slice_seconds": 0.02,
    "tuning_seconds": 0.1,
    "settings": {"data": "digits", "epochs": 3, "batch_size": 128, "threads": 1},
    "methods": {"SGD": {"optimizer": "sgd", "lr": 0.03}, "KFC": {"optimizer": "kfc"}},
}


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def small(**changes):
    return make_comparison({**SMALL, **changes})


def run(comparison, folder, data, on_row=lambda one, row: None, **more):
    runner = ComparisonRunner(comparison, folder, data, on_row, **more)
    runner.run()
    return runner


# Reading


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", preset_names())
def test_presets_are_complete(name, quick):
    if quick and name == "demo":
        with pytest.raises(ConfigError, match="no \\[quick\\] table"):
            read_comparison(name, quick=True, overrides={})
        return
    comparison = read_comparison(name, quick=quick, overrides={})
    configs = [config for runs in comparison.candidates().values() for config in runs]
    assert any(config.method.optimizer in ("kfc", "kfac") for config in configs)
    assert any(config.method.optimizer == "sgd" for config in configs)
    assert len({config.machine.seed for config in configs}) == 1
    if quick:
        # At most ten minutes in all: one learning rate per method, and time for evaluations.
        assert len(configs) == len(comparison.methods)
        assert sum(config.length.seconds for config in configs) <= 480
    assert comparison.train_losses or (comparison.train_errors and comparison.test_errors)


def test_there_is_a_preset_for_every_figure():
    assert {"demo", "modern", "figure4"} <= set(preset_names())
    assert {"figure3-cifar10", "figure3-svhn", "figure5", "figure5-svhn"} <= set(preset_names())
    for name in ("figure5", "figure5-svhn"):
        candidates = read_comparison(name, quick=False, overrides={}).candidates()
        sizes = [config.problem.batch_size for configs in candidates.values() for config in configs]
        assert set(sizes) == {4096}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    "name", ["figure3-cifar10", "figure3-svhn", "figure4", "figure5", "figure5-svhn"]
)
def test_the_figures_of_the_paper_keep_its_settings(name, quick):
    """Averages from the first parameters on; for CIFAR-10, the initial weights of cuda-convnet."""
    comparison = read_comparison(name, quick=quick, overrides={})
    for config in (config for configs in comparison.candidates().values() for config in configs):
        assert config.records.averaging_fraction == 1
        problem = config.problem
        expected = (
            ("cuda-convnet", "centred") if problem.data == "cifar10" else ("kaiming", "normalised")
        )
        assert (problem.init, problem.inputs) == expected


@pytest.mark.parametrize("name", ["rates", "weight-decay", "baselines"])
def test_comparisons_beside_the_figures_are_of_the_same_problem(name):
    chooses = read_comparison(str(FIGURES / f"{name}.toml"), quick=False, overrides={})
    figure = read_comparison("figure3-cifar10", quick=False, overrides={})
    [theirs] = figure.candidates()["KFC"]
    for config in (config for configs in chooses.candidates().values() for config in configs):
        assert config.problem.data == theirs.problem.data
        assert config.problem.init == theirs.problem.init
        assert config.records.averaging_fraction == 1
        assert config.method.options.get("fraction") == theirs.method.options.get("fraction") or (
            config.method.optimizer != "kfc"
        )


def test_overrides_replace_the_options_of_a_preset():
    comparison = read_comparison("demo", quick=False, overrides={"epochs": 2.0, "seed": 7})
    for configs in comparison.candidates().values():
        assert configs[0].length.epochs == 2
        assert configs[0].machine.seed == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"typo": 1}, "every key must be one of .*; got 'typo'"),
        ({"methods": {}}, "needs methods"),
        ({"methods": {"SGD": 3}}, "must be tables"),
        ({"methods": {"SGD": {"optimizer": "sgd", "lr": []}}}, "empty list"),
        ({"methods": {"SGD": {"optimizer": "sgd", "damping": 1}}}, "method SGD: damping"),
        ({"baseline": "Adam"}, "baseline must be one of SGD, KFC; got 'Adam'"),
        ({"slice_seconds": 0}, "slice_seconds"),
        ({"train_errors": [120]}, "every goal in train_errors"),
        ({"train_errors": 6}, "must be a list of numbers"),
        ({"title": 5}, "title must be a str"),
        ({"introduction": ["a"]}, "introduction must be a str"),
        ({"stop_at_goals": "false"}, "stop_at_goals must be true or false, got 'false'"),
        ({"settings": {"data": "digits", "net": 5}}, "net must be a string"),
        ({"settings": {"data": "digits", "batch_size": False}}, "batch_size must be"),
        ({"settings": {"data": "nothing"}}, "data must be one of"),
    ],
)
def test_invalid_comparisons_are_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        small(**changes)


@pytest.mark.parametrize("limit", ["epochs", "seconds"])
def test_an_overriding_limit_replaces_all_others(limit):
    comparison = read_comparison("figure3-cifar10", quick=False, overrides={limit: 3.0})
    for configs in comparison.candidates().values():
        ends = {"epochs": configs[0].length.epochs, "seconds": configs[0].length.seconds}
        assert {name for name, value in ends.items() if value is not None} == {limit}


@pytest.mark.parametrize(
    "own", [{"batch_size": 5000}, {"momentum": 1.5}, {"init": "cuda-convnet"}, {"net": "vgg"}]
)
def test_errors_of_building_are_found_before_there_is_a_folder(digits, tmp_path, own):
    comparison = small(methods={"KFC": {"optimizer": "kfc", **own}})
    runner = ComparisonRunner(comparison, tmp_path / "new", digits, lambda one, row: None)
    with pytest.raises((ConfigError, NetworkError), match="method KFC"):
        runner.check()
    assert not (tmp_path / "new").exists()


def test_methods_may_not_share_a_folder(digits, tmp_path):
    methods = {"a b": {"optimizer": "sgd"}, "a-b": {"optimizer": "sgd"}}
    with pytest.raises(ConfigError, match="must differ"):
        ComparisonRunner(small(methods=methods), tmp_path, digits, lambda one, row: None)


# Running


def test_runs_take_turns_from_the_same_start(digits, tmp_path):
    turns = []
    runner = run(
        small(settings={**SMALL["settings"], "log_period": 1}),
        tmp_path,
        digits,
        on_row=lambda one, row: turns.append(one.method),
    )
    changes = sum(a != b for a, b in pairwise(turns))
    assert changes > 6, "the runs did not take turns"
    sgd, ours = runner.records()
    assert (sgd.name, ours.name) == ("SGD", "KFC")
    first = [record.evaluations[0]["train_loss"] for record in (sgd, ours)]
    assert first[0] == first[1], "they start from the same weights"
    assert sgd.end["reason"] == ours.end["reason"] == "epochs"


@pytest.fixture(scope="module")
def tuned(digits, tmp_path_factory):
    """Return a comparison with several learning rates, and its records."""
    # Even on a fast machine, all epochs take much longer than the trial of a learning rate.
    sgd = {"optimizer": "sgd", "lr": [1e-7, 0.05, 1e-6], "epochs": 16}
    methods = {"SGD": sgd, "KFC": {"optimizer": "kfc", "epochs": 2}}
    comparison = small(methods=methods, tuning_seconds=0.06, slice_seconds=0.01)
    return comparison, run(comparison, tmp_path_factory.mktemp("tuned"), digits).records()


def test_the_learning_rate_with_the_lowest_loss_continues(tuned):
    ends = {(r.name, r.config.method.lr): r.end["reason"] for r in tuned[1]}
    assert ends == {
        ("SGD", 1e-7): "not chosen",
        ("SGD", 0.05): "epochs",
        ("SGD", 1e-6): "not chosen",
        ("KFC", 0.003): "epochs",
    }


def test_the_better_half_of_the_learning_rates_continues(digits, tmp_path):
    """Of five rates three, two and one are left, after a quarter, half and all of the time."""
    rates = [1e-9, 0.05, 1e-8, 1e-6, 1e-7]
    methods = {"SGD": {"optimizer": "sgd", "lr": rates, "epochs": 60, "log_period": 1}}
    comparison = small(methods=methods, tuning_seconds=0.32, slice_seconds=0.01)
    records = {r.config.method.lr: r for r in run(comparison, tmp_path, digits).records()}
    ends = {rate: record.end for rate, record in records.items()}
    assert [rate for rate in rates if ends[rate]["reason"] == "epochs"] == [0.05]
    dropped = sorted(rate for rate in rates if ends[rate]["reason"] == "not chosen")
    assert dropped == [1e-9, 1e-8, 1e-7, 1e-6]
    seconds = [ends[rate]["seconds"] for rate in dropped]
    assert min(seconds[:2]) >= 0.08
    assert max(seconds[:2]) < 0.32, "these were dropped after a quarter of the time"
    assert seconds[2] >= 0.16
    assert seconds[3] >= 0.32


def test_a_choice_is_not_repeated_after_an_interruption(digits, tmp_path):
    """The rates that the first choice left are all tried for twice the time."""
    rates = [0.05, 0.04, 0.03, 1e-7]
    methods = {"SGD": {"optimizer": "sgd", "lr": rates, "epochs": 60, "log_period": 1}}
    comparison = small(methods=methods, tuning_seconds=0.4, slice_seconds=0.01)
    dropped = []

    def note(one, row):
        dropped.extend([one.config.method.lr] if row["kind"] == "end" else [])

    run(comparison, tmp_path, digits, note, interrupted=lambda: len(dropped) == 2)
    assert len(dropped) == 2
    assert 1e-7 in dropped
    records = run(comparison, tmp_path, digits).records()
    ends = {record.config.method.lr: record.end for record in records}
    late = [end for rate, end in ends.items() if rate not in dropped]
    assert sorted(end["reason"] for end in late) == ["epochs", "not chosen"]
    assert min(end["seconds"] for end in late) >= 0.4


@pytest.mark.filterwarnings("ignore::UserWarning:kfc")
def test_a_rate_that_diverges_is_not_chosen(digits, tmp_path):
    # Even on a busy machine, the loss of its second update is logged before the choice.
    methods = {"SGD": {"optimizer": "sgd", "lr": [1e18, 0.1], "log_period": 1}}
    runner = run(small(methods=methods, tuning_seconds=0.5), tmp_path, digits)
    ends = {r.config.method.lr: r.end["reason"] for r in runner.records()}
    assert ends == {1e18: "diverged", 0.1: "epochs"}


def test_runs_end_at_their_goals(digits, tmp_path):
    settings = {**SMALL["settings"], "epochs": 200, "evaluation_period": 0.5}
    comparison = small(settings=settings, train_errors=[50.0, 10.0], stop_at_goals=True)
    for record in run(comparison, tmp_path, digits).records():
        assert record.end["reason"] == "targets"
        assert record.evaluations[-1]["averaged_train_error"] <= 10
        assert record.end["epoch"] < 100


def test_an_interrupted_comparison_resumes_to_the_same_end(digits, tuned, tmp_path):
    comparison, whole = tuned
    finished, patience, interruptions = False, 5, 0
    while not finished:
        rows = []
        runner = ComparisonRunner(
            comparison,
            tmp_path / "parts",
            digits,
            lambda one, row, rows=rows: rows.append(row),
            interrupted=lambda rows=rows, patience=patience: len(rows) >= patience,
        )
        finished = runner.run()
        patience += 5
        interruptions += not finished
    assert interruptions > 1
    for mine, theirs in zip(runner.records(), whole, strict=True):
        if theirs.end["reason"] == "not chosen":  # its length depends on timing
            assert mine.end["reason"] == "not chosen"
            continue
        mine_last, theirs_last = mine.evaluations[-1], theirs.evaluations[-1]
        assert mine.end["reason"] == theirs.end["reason"]
        for key in ("update", "train_loss", "test_loss", "averaged_train_loss"):
            assert mine_last[key] == theirs_last[key]


def test_a_comparison_made_longer_equals_one_that_was_longer_from_the_start(digits, tmp_path):
    methods = {
        "SGD": {"optimizer": "sgd", "lr": [1e-7, 0.05], "epochs": 1},
        "KFC": {"optimizer": "kfc"},
        "wild": {"optimizer": "sgd", "lr": 1e25},
    }
    settings = {**SMALL["settings"], "epochs": 1}
    short = small(settings=settings, methods=methods, tuning_seconds=1e-3)
    run(short, tmp_path / "parts", digits)
    longer = with_overrides(short, {"epochs": 2.0})
    grown = {
        record.path.name: record for record in run(longer, tmp_path / "parts", digits).records()
    }
    assert grown["sgd-lr1e-07"].end["reason"] == "not chosen"
    assert grown["wild-lr1e+25"].end["reason"] == "diverged"
    whole = run(longer, tmp_path / "whole", digits).records()
    for record in (r for r in whole if r.end["reason"] == "epochs"):
        mine = grown[record.path.name]
        assert mine.end["epoch"] == record.end["epoch"] == 2
        assert mine.config == record.config
        assert mine.evaluations[-1]["train_loss"] == record.evaluations[-1]["train_loss"]


def test_a_run_beyond_a_shortened_limit_is_unchanged(digits, tmp_path):
    comparison = small()
    run(comparison, tmp_path, digits)
    before = [record.evaluations for record in run(comparison, tmp_path, digits).records()]
    shorter = with_overrides(comparison, {"epochs": 1.0})
    after = run(shorter, tmp_path, digits).records()
    assert [record.evaluations for record in after] == before
    assert all(record.config.length.epochs == 3 for record in after)


def test_a_comparison_is_read_as_it_was_written(tmp_path):
    comparison = small(train_errors=[5.0])
    write_specification(tmp_path / "new", comparison)
    assert read_specification(tmp_path / "new").candidates() == comparison.candidates()
    with pytest.raises(RunError, match="never overwritten"):
        write_specification(tmp_path / "new", comparison)
    (tmp_path / "new" / "comparison.json").write_text("{")
    with pytest.raises(RunError, match=r"comparison\.json is damaged"):
        read_specification(tmp_path / "new")


# The command


TOML = """
title = "Mine <b>"
slice_seconds = 0.05
train_errors = [20]
[settings]
data = "digits"
epochs = 2
threads = 1
batch_size = 128
[methods.SGD]
optimizer = "sgd"
lr = 0.05
[methods.KFC]
optimizer = "kfc"
"""


def test_compare_ends_with_tables_and_a_page(tmp_path):
    (tmp_path / "mine.toml").write_text(TOML)
    done = kfc("compare", "mine.toml", "--out", "result", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("SGD", "KFC", "20% training error", "updates", "seconds"):
        assert words in done.stdout
    page = (tmp_path / "result" / "report.html").read_text()
    assert "Mine &lt;b&gt;" in page
    assert read_record(tmp_path / "result" / "kfc-lr0.003").end["reason"] == "epochs"
    again = kfc("compare", "--resume", "result", cwd=tmp_path)
    assert again.returncode == 0, "a finished comparison can be shown again"
    assert "20% training error" in again.stdout
    longer = kfc("compare", "--resume", "result", "--epochs", "3", cwd=tmp_path)
    assert longer.returncode == 0, longer.stdout + longer.stderr
    assert read_record(tmp_path / "result" / "kfc-lr0.003").end["epoch"] == 3
    assert read_specification(tmp_path / "result").settings["epochs"] == 3


def test_wrong_arguments_of_compare(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.toml").write_text("title = ")
    (tmp_path / "mine.toml").write_text(TOML)
    (tmp_path / "wrong.toml").write_text(TOML.replace("128", "5000"))
    (tmp_path / "quick.toml").write_text("quick = 5\n" + TOML)
    (tmp_path / "there").mkdir()
    assert_clear_error(
        kfc("compare", "figure9", cwd=tmp_path), 2, "the preset must be one of", "got 'figure9'"
    )
    for arguments, code, words in [
        ([], 2, "name a preset"),
        (["missing.toml"], 2, "cannot be read"),
        (["broken.toml"], 2, "not valid TOML"),
        (["mine.toml", "--quick"], 2, "no [quick] table"),
        (["wrong.toml", "--out", "new"], 2, "at most the examples used (1438)"),
        (["quick.toml", "--quick"], 2, "quick must be a table"),
        (["mine.toml", "--time", "soon"], 2, "must be a positive duration"),
        (["mine.toml", "--out", "there"], 1, "never overwritten"),
        (["--resume", "there"], 1, "not the folder of a comparison"),
        (["mine.toml", "--resume", "there"], 2, "keeps its settings"),
        (["--resume", "there", "--seed", "2"], 2, "only the length of its runs"),
    ]:
        assert_clear_error(kfc_here("compare", *arguments), code, words)
    assert not (tmp_path / "new").exists()


def test_a_comparison_in_which_all_runs_diverge_has_its_own_exit_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = TOML.split("[methods.KFC]")[0].replace("0.05", "1e25")
    (tmp_path / "wild.toml").write_text(alone)
    done = kfc_here("compare", "wild.toml", "--out", "wild")
    assert_clear_error(done, 3, "SGD (lr 1e+25) diverged: the loss", "all runs diverged")
