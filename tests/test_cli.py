"""The command line: every command with valid and invalid arguments."""

import json
import re
import sys

import pytest
from torch.multiprocessing.spawn import ProcessExitedException

import kfc as package
from commands import assert_clear_error, kfc, kfc_anew, kfc_here
from kfc.lab.cli import app
from kfc.lab.cli.screen import RunDisplay, progress_bars
from kfc.lab.config import make_config
from kfc.lab.runs import read_record
from test_training import checkpoint

SMALL = ("--data", "digits", "--epochs", "1", "--threads", "1")
KFAC = ("--data", "digits", "--optimizer", "kfac")
COMMANDS = [
    *("demo", "train", "compare", "report", "inspect", "bench", "data", "data list", "data get")
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    done = kfc("train", *SMALL, "--batch-size", "64", "--out", path)
    assert done.returncode == 0, done.stderr
    return path, done


def test_version_and_help():
    assert kfc_anew("--version").stdout.strip() == f"kfc {package.__version__}"
    assert kfc("--help").returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    done = kfc_here(*command.split(), "--help")
    assert done.returncode == 0
    assert re.search(rf"Examples?:\s+.*(kfc {command}|make bench)", done.stdout, re.S)


def test_help_has_examples_and_exit_codes():
    done = kfc_here("--help")
    assert re.search(r"Examples:\s+kfc demo\s+kfc train --data", done.stdout)
    codes = "Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 the run diverged, 130 interrupted,"
    assert codes in done.stdout


def test_bench_points_to_the_benchmark():
    done = kfc("bench")
    assert done.returncode == 0, done.stderr
    assert "make bench" in done.stdout


def test_completion_can_be_shown():
    done = kfc_anew(
        "--show-completion",
        "bash",
        SHELL="/bin/bash",
        _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1",
    )
    assert done.returncode == 0
    assert "_KFC_COMPLETE" in done.stdout or "complete" in done.stdout


def test_unknown_commands_and_options():
    similar = "Error: no such command 'trian'. Did you mean 'train'?"
    assert_clear_error(kfc("trian"), 2, similar, "kfc --help")
    assert_clear_error(kfc_here("train", "--rate", "3"), 2, "Error: no such option", "train --help")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "train --data cifra10",
            "data must be one of digits,; got 'cifra10'; did you mean 'cifar10'?",
        ),
        (
            "train --data digits --net Digit",
            "net must be one of; got 'Digit'; did you mean 'digits'?",
        ),
        ("train --data digits --optimizer kfca", "; got 'kfca'; did you mean 'kfc'?"),
        ("train --data digits --optimizer lion", "; got 'lion'"),
        ("train --data digits --curvature ekfca", "; got 'ekfca'; did you mean 'ekfac'?"),
        ("compare figure-3", "the preset must be one of; did you mean 'figure3-cifar10'?"),
        ("compare suite --methods adamv", "; got 'adamv'; did you mean 'AdamW'?"),
        ("data get cifar", "Error: the data set must be one of; did you mean 'cifar10'?"),
        ("plan resnt20", "net must be one of; did you mean 'resnet20'?"),
        ("inspect --data digits --net digit", "net must be one of; did you mean 'digits'?"),
        ("train --data digits --time 3days", "Error: --time must be a positive duration"),
        ("report", "Error: missing argument"),
    ],
)
def test_errors_have_one_style_and_suggest_similar_names(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = kfc_here(*arguments.split())
    assert_clear_error(done, 2, *filter(None, message.split(";")))
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line]
    assert len(lines) == 1, "no usage, no box, no progress bar"
    assert lines[0].startswith("Error: ")
    assert ("did you mean" in lines[0]) == ("did you mean" in message)


def test_a_wrong_network_is_reported_before_the_data_is_loaded(tmp_path, monkeypatch):
    """The data folder is empty, so that loading would fail."""
    (tmp_path / "misfit2.py").write_text("from torch import nn\ndef net(): return nn.Flatten()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")  # no npm
    for net, words in (
        ("misfit2:net", "it returned (2, 3072)"),
        ("nowhere:net", "could not be imported"),
        ("autoencoder", "28x28 pixels"),
    ):
        for command in (["train"], ["inspect"]):
            given = [*command, "--data", "cifar10", "--net", net, "--data-dir", tmp_path]
            assert_clear_error(kfc_here(*given), 2, words)
    (tmp_path / "mine.toml").write_text(
        'title = "Mine"\n[settings]\ndata = "cifar10"\n'
        '[methods.SGD]\noptimizer = "sgd"\nnet = "misfit2:net"\n'
    )
    done = kfc_here("compare", "mine.toml", "--data-dir", tmp_path)
    assert_clear_error(done, 2, "method SGD: ", "it returned (2, 3072)")


def test_the_command_without_its_extra_says_how_to_install_it():
    """As if typer were not installed."""
    program = "import sys; sys.modules['typer'] = None; from kfc.__main__ import main; main()"
    done = kfc_anew(program=program)
    words = "needs the package typer", 'pip install "kfc-torch[experiments]"'
    assert_clear_error(done, 1, *words)
    assert done.stderr.startswith("Error: ")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "--data", "digits", "--lr", "0"], 2, "lr must be"),
        (["train", "--resume", "nowhere"], 1, "is not a run"),
        (["compare", "--resume", "nowhere"], 1, "not the folder of a comparison"),
        (["report", "nowhere"], 1, "is not a run"),
        (["bench", "now"], 2, "unexpected extra argument"),
        (["data", "fetch"], 2, "no such command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_end_a_process_clearly(tmp_path, arguments, code, words):
    """Run each command in a process; demo and data are tested elsewhere."""
    assert_clear_error(kfc(*arguments, cwd=tmp_path), code, words)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


# train


def test_train_leaves_a_complete_folder(run):
    path, done = run
    assert f"kfc report {path}" in done.stdout
    assert "epoch 1, update 22" in done.stdout
    record = read_record(path)
    assert record.end["reason"] == "epochs"
    assert record.config.problem.batch_size == 64
    assert (path / "checkpoint.pt").exists()
    header = json.loads((path / "config.json").read_text())
    assert header["data_digest"]


def test_an_evaluation_is_shown_with_its_parameters_and_splits(run):
    """Every number says of which parameters, which split and which update it is."""
    path, done = run
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    first, last = read_record(path).evaluations
    shown = [f"train loss {row['train_loss']:.4g} " for row in (first, last)]
    assert re.match(rf"epoch 0, update 0, .*: initial parameters: {re.escape(shown[0])}", lines[0])
    assert "averaged" not in lines[0]
    assert lines[1].startswith("epoch 1, update 22, ")
    assert f": averaged parameters: train loss {last['averaged_train_loss']:.4g} " in lines[1]
    assert f"; raw parameters: {shown[1]}" in lines[1]
    assert f", test loss {last['test_loss']:.4g} error {last['test_error']:.2f}%" in lines[1]


def test_the_progress_bar_says_to_which_update_an_error_belongs():
    progress = progress_bars(hidden=True)
    display = RunDisplay(progress, "kfc", make_config(data="digits", epochs=2))
    place = {"epoch": 0.0, "update": 0, "seconds": 0.0}
    keys = [f"{kind}{split}" for kind in ("averaged_", "") for split in ("train_", "test_")]
    measures = {f"{key}{what}": 88.97 for key in keys for what in ("loss", "error")}
    now = {"kind": "progress", "loss": 1.234, "images_per_second": 512.3, "fisher_norm": 0.25}
    display({"kind": "evaluation", **place, **measures})
    display({**place, **now, "update": 10})
    expected = "update 10: batch loss 1.23 (raw), ν 0.25, 512 images/s"
    assert progress.tasks[0].fields["state"] == expected
    display({"kind": "evaluation", **place, **measures, "update": 12, "averaged_test_error": 42.0})
    display({**place, **now, "update": 20})
    state = progress.tasks[0].fields["state"]
    assert state == expected.replace("10", "20") + ", test error 42.00% (averaged, update 12)"


def test_train_imports_a_network_of_the_user(tmp_path):
    (tmp_path / "mynets.py").write_text(
        "from torch import nn\n"
        "def small():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10))\n"
    )
    done = kfc("train", *SMALL, "--net", "mynets:small", "--optimizer", "sgd", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "digits-mynets-small-sgd" / "config.json").exists()


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("nn.Linear(64, 7)", "it returned (2, 7)"),
        ("nn.Linear(32, 10)", "fails on images (2, 1, 8, 8)"),
        ("nn.LSTM(64, 10)", "it returned tuple"),
    ],
)
def test_networks_that_do_not_fit_the_data(tmp_path, monkeypatch, returned, words):
    (tmp_path / "misfit.py").write_text(
        f"from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), {returned})\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "misfit", raising=False)
    done = kfc_here("train", *SMALL, "--net", "misfit:net", "--out", "run")
    assert_clear_error(done, 2, "misfit:net", words)
    assert not (tmp_path / "run").exists()


def test_a_second_run_gets_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert kfc_here("train", *SMALL, "--updates", "1", "--optimizer", "adam").returncode == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == [
        "digits-digits-adam",
        "digits-digits-adam-2",
    ]


def test_a_terminal_that_cannot_encode_greek(tmp_path):
    done = kfc_anew("train", *SMALL, "--out", tmp_path / "run", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr


def test_divergence_in_the_last_update_is_detected(tmp_path):
    """The loss of the last batch was computed before that update."""
    arguments = (*SMALL, "--updates", "1", "--optimizer", "sgd", "--lr", "1e30")
    done = kfc_here("train", *arguments, "--out", tmp_path / "run")
    assert_clear_error(done, 3, "diverged", "not finite")
    assert checkpoint(tmp_path / "run")["update"] == 0, "the parameters are not kept"


@pytest.mark.filterwarnings("ignore::UserWarning:kfc")
def test_divergence_has_its_own_exit_code_and_a_diagnosis(tmp_path):
    arguments = (*SMALL, "--epochs", "20", "--optimizer", "sgd", "--lr", "1e20")
    done = kfc("train", *arguments, "--out", tmp_path / "run")
    assert_clear_error(done, 3, "diverged", "not finite", "try a smaller --lr")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "data must be given"),
        (["--data", "imagenet"], 2, "data must be one of"),
        (["--data", "digits", "--optimizer", "lion"], 2, "optimizer must be one of"),
        (["--data", "digits", "--net", "lenet"], 2, "net must be one of"),
        (["--data", "digits", "--net", "cuda-convnet"], 2, "32x32"),
        (["--data", "digits", "--net", "nowhere:net"], 2, "could not be imported"),
        (
            ["--data", "digits", "--init", "cuda-convnet"],
            2,
            "init of digits must be one of kaiming",
        ),
        (["--data", "digits", "--lr", "fast"], 2, "--lr: "),
        (["--data", "digits", "--lr", "0"], 2, "lr must be"),
        (
            ["--data", "digits", "--optimizer", "sgd", "--damping", "1"],
            2,
            "damping has no effect with the optimizer sgd",
        ),
        (["--data", "digits", "--max-staleness", "3"], 2, "no effect without asynchronous"),
        (["--data", "digits", "--curvature", "ekfac", "--inverse", "eigen"], 2, "no effect with"),
        ([*KFAC, "--model-damping", "1", "--initial-model-damping", "2"], 2, "has no effect with"),
        (["--data", "digits", "--weight-decay", "some"], 2, 'must be a number or "cuda-convnet"'),
        (["--data", "digits", "--time", "3 days"], 2, "must be a positive duration"),
        (["--data", "digits", "--batch-size", "5000"], 2, "at most the examples used (1438)"),
        (["--data", "digits", "--batch-size", "0"], 2, "batch_size must be"),
        (["--data", "digits", "--threads", "0"], 2, "threads must be"),
        (["--data", "digits", "--threads", "9999999999"], 2, "threads must be at most"),
        (["--data", "digits", "--workers", "9999999999"], 2, "workers must be at most"),
        (["--data", "digits", "--seed", "99999999999999999999"], 2, "seed must be at most"),
        (["--data", "digits", "--lr", "1e300"], 2, "lr must be at most 3.40282e+38"),
        (["--data", "digits", "--weight-decay", "1e39"], 2, "weight_decay must be at most"),
        (["--data", "digits", "--momentum", "nan"], 2, "momentum must be"),
        (["--data", "digits", "--device", "meta"], 2, "device meta cannot be used here"),
        (["--data", "digits", "--device", "cuda:9"], 2, "device"),
        (["--data", "digits", "--fisher", "guess"], 2, "fisher"),
        (["--data", "digits", "--curvature", "guess"], 2, "curvature must be one of"),
        (["--data", "digits", "--out", "/proc/nowhere/run"], 1, "cannot be written"),
        (["--data", "mnist", "--data-dir", "typo"], 1, "typo does not exist; correct --data-dir"),
        (["--data", "mnist", "--data-dir", "/proc/nowhere", "--create"], 1, "cannot be created"),
        (["--resume", "nowhere"], 1, "is not a run"),
        (["--resume", "nowhere", "--lr", "0.1"], 2, "keeps its settings, so --lr"),
    ],
)
def test_wrong_arguments_of_train(tmp_path, monkeypatch, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")  # no npm
    assert_clear_error(kfc_here("train", *arguments), code, words)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_run_is_not_overwritten(run):
    path, _ = run
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    assert_clear_error(kfc("train", *SMALL, "--out", path), 1, "never overwritten", "--resume")
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


# report


def test_a_run_cannot_be_resumed_to_an_earlier_end(run):
    path, _ = run
    done = kfc_here("train", "--resume", path, "--epochs", "0.5")
    assert_clear_error(done, 1, "has already passed the new limit", "epoch 1")
    assert read_record(path).config.length.epochs == 1


def test_runs_with_the_same_name_are_distinguished(tmp_path):
    for place in ("one", "two"):
        done = kfc_here("train", *SMALL, "--updates", "1", "--out", tmp_path / place / "run")
        assert done.returncode == 0
    done = kfc_here("report", tmp_path / "one/run", tmp_path / "two/run", "-o", tmp_path / "p.html")
    assert done.returncode == 0
    assert f"run ({tmp_path / 'two/run'})" in (tmp_path / "p.html").read_text()


def test_report_writes_a_page(run, tmp_path):
    path, _ = run
    done = kfc("report", path, "-o", tmp_path / "page" / "report.html", "--train-error", "50")
    assert done.returncode == 0, done.stderr
    assert "50% training error" in done.stdout
    assert "<html" in (tmp_path / "page" / "report.html").read_text()


def test_wrong_arguments_of_report(run, tmp_path):
    path, _ = run
    assert_clear_error(kfc("report"), 2, "missing argument")
    for arguments, code, words in [
        ([tmp_path], 1, "is not a run"),
        ([path, "-o", tmp_path], 2, "is a folder"),
        ([path, "-o", "/proc/nowhere/page.html"], 1, "could not be written"),
        ([path, "--baseline", "nobody"], 2, "baseline must be one of"),
        ([path, "--train-error", "low"], 2, "--train-error: "),
    ]:
        assert_clear_error(kfc_here("report", *arguments), code, words)


# demo


def test_demo_prints_tables_and_writes_a_page(tmp_path):
    done = kfc("demo", "--epochs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("SGD", "Adam", "KFC", "epochs", "updates", "seconds", "training error"):
        assert word in done.stdout
    page = (tmp_path / "runs" / "demo" / "report.html").read_text()
    assert "<script src=" not in page, "the page must not need a network"
    again = kfc("demo", "--epochs", "1", cwd=tmp_path)
    assert again.returncode == 0
    assert (tmp_path / "runs" / "demo-2" / "report.html").exists()


def test_wrong_arguments_of_demo(tmp_path):
    assert_clear_error(kfc("demo", "--epochs", "0"), 2, "epochs must be")
    assert_clear_error(kfc_here("demo", "--out", tmp_path), 1, "never overwritten")


def test_only_usage_errors_are_printed_as_such(monkeypatch):
    """Errors of processes have an exit code, too."""

    def fail(*args, **kwargs):
        raise ProcessExitedException("terminated", 0, 1, 7)

    monkeypatch.setattr("kfc.lab.cli.TyperGroup.main", fail)
    with pytest.raises(ProcessExitedException, match="terminated"):
        app()
