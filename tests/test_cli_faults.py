"""Commands answer damaged folders, foreign code and closed pipes with a sentence and a code."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import ENVIRONMENT, assert_clear_error, kfc, kfc_anew, kfc_here, start_kfc
from kfc.lab.cli.screen import printable
from kfc.lab.disk import read_checked, write_checked
from kfc.lab.runs import read_record
from test_training import checkpoint

SMALL = ("--data", "digits", "--optimizer", "sgd", "--batch-size", "128", "--threads", "1")
# Leaves a mark when it is imported.
PAYLOAD = """
from pathlib import Path
from torch import nn
Path(__file__).with_name("imported").touch()
def f():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    done = kfc_here("train", *SMALL, "--epochs", "2", "--out", path)
    assert done.returncode == 0, done.stdout
    return path


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


# Checkpoints


def test_a_damaged_checkpoint_is_announced(copy):
    content = (copy / "checkpoint.pt").read_bytes()
    (copy / "checkpoint.pt").write_bytes(content[:-1])
    done = kfc_here("train", "--resume", copy)
    assert done.returncode == 0
    assert "Warning:" in done.stdout
    assert "checkpoint-1.pt, of update 11, is used instead" in done.stdout


def test_an_inspection_says_that_the_newest_checkpoint_is_damaged(copy, tmp_path):
    (copy / "checkpoint.pt").write_bytes(b"nothing")
    few = ("--examples", "4", "--samples", "1", "--approximation", "kfc")
    done = kfc_here("inspect", copy, *few, "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stdout
    words = "checkpoint-1.pt, of update 11, is used instead"
    assert words in done.stdout
    assert words in (tmp_path / "page.html").read_text()


def test_a_missing_checkpoint_asks_for_a_restart(copy):
    for name in ("checkpoint.pt", "checkpoint-1.pt"):
        (copy / name).unlink()
    words = ("has no checkpoint.pt", f"kfc train --resume {copy} --restart")
    assert_clear_error(kfc_here("train", "--resume", copy), 1, *words)
    assert kfc_here("train", "--resume", copy, "--restart").returncode == 0
    assert checkpoint(copy)["update"] == 22
    assert_clear_error(kfc_here("train", *SMALL, "--restart"), 2, "--restart must be given with")


def test_a_launcher_that_repeats_the_command_does_not_begin_again(copy):
    variables = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a job"}
    command = ("train", "--resume", copy, "--restart", "--epochs", "3")
    done = kfc(*command, **variables, TORCHELASTIC_RESTART_COUNT="1")
    assert done.returncode == 0, done.stderr
    assert f"Restarted: {copy} continues from update 22" in done.stdout


def test_a_new_limit_is_recorded_only_if_the_run_continues(copy):
    shutil.copy(copy / "config.json", copy / "before")
    for file in copy.glob("checkpoint*"):
        file.write_bytes(b"nothing")
    assert_clear_error(kfc_here("train", "--resume", copy, "--epochs", "9"), 1, "damaged")
    assert (copy / "config.json").read_bytes() == (copy / "before").read_bytes()


# Code in folders


def with_network(run, folder, name="payload:f"):
    """Copy a run into a folder, and let it have another network, with a correct digest."""
    shutil.copytree(run, folder)
    file = folder / "config.json"
    header = read_checked(file)
    config = {**header["config"], "net": name, "init": None}
    write_checked(file, {**header, "config": config})
    (folder / "payload.py").write_text(PAYLOAD)
    return folder


@pytest.mark.parametrize(
    "command", [("inspect",), ("train", "--resume"), ("report", "-o", "page.html")]
)
def test_a_folder_does_not_import_code(run, tmp_path, monkeypatch, command):
    folder = with_network(run, tmp_path / "run")
    monkeypatch.chdir(folder)
    done = kfc_here(*command, ".")
    assert not (folder / "imported").exists()
    if command[0] == "report":
        assert done.returncode == 0
    else:
        words = ("asks for the network payload:f", "runs code", "--net payload:f", "--trust-net")
        assert_clear_error(done, 2, *words)


@pytest.mark.parametrize("command", ["inspect", "train"])
def test_a_named_network_is_not_imported_from_the_folder(run, tmp_path, monkeypatch, command):
    folder = with_network(run, tmp_path / "run")
    monkeypatch.chdir(folder)
    way = ["--resume", "."] if command == "train" else ["."]
    done = kfc_here(command, *way, "--net", "payload:f")
    assert_clear_error(done, 2, "would be imported from", "in the folder of the run")
    assert not (folder / "imported").exists()
    done = kfc_here(command, *way, "--net", "other:f")
    assert done.returncode == 2
    assert not (folder / "imported").exists()


def test_a_named_network_imports_nothing_from_the_folder(run, tmp_path, monkeypatch):
    folder = with_network(run, tmp_path / "run", "outside:f")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "outside.py").write_text("from payload import f\n")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    monkeypatch.chdir(folder)
    done = kfc_here("inspect", ".", "--net", "outside:f")
    assert_clear_error(done, 2, "could import modules from the current directory", "--trust-net")
    assert not (folder / "imported").exists()


def test_a_network_is_named_again_to_resume(tmp_path):
    (tmp_path / "payload.py").write_text(PAYLOAD)
    arguments = (*SMALL, "--net", "payload:f", "--updates", "3", "--out", "run")
    assert kfc("train", *arguments, cwd=tmp_path).returncode == 0
    for number, way in enumerate((("--net", "payload:f"), ("--trust-net",)), start=4):
        more = ("train", "--resume", "run", "--updates", number)
        assert_clear_error(kfc(*more, cwd=tmp_path), 2, "asks for the network payload:f")
        done = kfc(*more, *way, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        few = ("--examples", "4", "--samples", "1", "--approximation", "kfc")
        done = kfc("inspect", "run", *way, *few, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    done = kfc("train", "--resume", "run", "--net", "digits", cwd=tmp_path)
    assert_clear_error(done, 2, "keeps its network, payload:f; got digits")


def test_a_comparison_does_not_import_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "payload.py").write_text(PAYLOAD)
    (tmp_path / "mine.toml").write_text(
        'title = "mine"\n[settings]\ndata = "digits"\nnet = "payload:f"\nepochs = 1\nthreads = 1\n'
        '[methods.SGD]\noptimizer = "sgd"\n'
    )
    assert kfc("compare", "mine.toml", "--out", "runs", cwd=tmp_path).returncode == 0
    shutil.move(tmp_path / "payload.py", tmp_path / "runs" / "payload.py")
    (tmp_path / "imported").unlink()
    more = ("compare", "--resume", "runs", "--epochs", "2")
    assert_clear_error(kfc(*more, cwd=tmp_path), 2, "asks for the network payload:f")
    inside = ("compare", "--resume", ".", "--epochs", "2")
    done = kfc(*inside, "--net", "payload:f", cwd=tmp_path / "runs")
    assert_clear_error(done, 2, "in the folder of the run")
    assert not list(tmp_path.rglob("imported"))
    assert kfc(*inside, "--trust-net", cwd=tmp_path / "runs").returncode == 0
    assert_clear_error(kfc_here("compare", "demo", "--net", "a:b"), 2, "only for --resume")


def test_a_run_with_other_settings_is_not_continued_by_a_comparison(run, tmp_path, monkeypatch):
    """A run's own folder could name code that the comparison does not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(
        'title = "mine"\n[settings]\ndata = "digits"\nupdates = 2\nthreads = 1\n'
        '[methods.SGD]\noptimizer = "sgd"\nlr = 0.05\n'
    )
    assert kfc_here("compare", "mine.toml", "--out", "runs").returncode == 0
    shutil.rmtree(tmp_path / "runs" / "sgd-lr0.05")
    folder = with_network(run, tmp_path / "runs" / "sgd-lr0.05")
    (folder / "metrics.jsonl").unlink()
    monkeypatch.chdir(folder)
    done = kfc_here("compare", "--resume", "..", "--epochs", "5")
    assert_clear_error(done, 1, "not the run of this comparison")
    assert not (folder / "imported").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="links need permission")
def test_links_in_a_folder_do_not_lead_to_other_files(run, tmp_path):
    for name in (".lock", "metrics.jsonl", ".checkpoint.pt.part", ".config.json.part"):
        folder, mine = shutil.copytree(run, tmp_path / f"run{name}"), tmp_path / f"mine{name}"
        mine.write_text("mine")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(mine)
        done = kfc_here("train", "--resume", folder, "--restart", "--epochs", "1")
        assert done.returncode == 0, done.stdout
        assert mine.read_text() == "mine", name


# Divergence


def test_a_finite_loss_far_above_its_start_has_exit_code_3(tmp_path):
    (tmp_path / "growing.py").write_text(
        "from torch import nn\n"
        "class Growing(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) * (1e12 if self.training else 1)\n"
        "def net():\n"
        "    return nn.Sequential(nn.Flatten(), Growing(64, 10))\n"
        "def good():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    arguments = ("--net", "growing:net", "--lr", "1e-30", "--updates", "20")
    done = kfc("train", *SMALL, *arguments, "--out", "run", cwd=tmp_path)
    assert_clear_error(done, 3, "diverged: the loss is ", "at the beginning", "a smaller --lr")
    (tmp_path / "both.toml").write_text(
        'title = "both"\n[settings]\ndata = "digits"\nupdates = 20\nthreads = 1\n'
        '[methods.good]\noptimizer = "sgd"\nnet = "growing:good"\n'
        '[methods.bad]\noptimizer = "sgd"\nnet = "growing:net"\nlr = 1e-30\n'
    )
    done = kfc("compare", "both.toml", "--out", "runs", cwd=tmp_path)
    assert done.returncode == 0, "one of two runs is good"
    assert "bad (lr 1e-30) diverged: the loss is" in done.stdout
    ends = [read_record(path).end["reason"] for path in sorted(tmp_path.glob("runs/*/"))]
    assert ends == ["diverged", "updates"]


# Sentences


@pytest.mark.parametrize("content", ["null", "[]", "{}", "[" * 100_000, "\x00\x01"])
@pytest.mark.parametrize(
    "command", [("report",), ("inspect",), ("train", "--resume"), ("compare", "--resume")]
)
def test_a_damaged_configuration(copy, content, command):
    name = "comparison.json" if command[0] == "compare" else "config.json"
    (copy / name).write_text(content)
    assert_clear_error(kfc_here(*command, copy), 1, f"{name} is damaged")


@pytest.mark.parametrize(
    "content",
    [b"null\n", b"[]\n", b'{"kind": [], "update": {}}\n', b"[" * 100_000 + b"\n"],
)
def test_damaged_metrics(copy, content):
    (copy / "metrics.jsonl").write_bytes(content)
    assert_clear_error(kfc_here("report", copy), 1, "metrics.jsonl, line 1 is damaged")
    done = kfc_here("train", "--resume", copy)
    assert_clear_error(done, 1, "metrics.jsonl", "--restart")


@pytest.mark.parametrize(
    "content",
    [
        f"a = {'[' * 5000}",
        f"{'.'.join('a' * 5000)} = 1",
        'title = "t"\n[settings]\ndata = "digits"\n[methods.SGD]\noptimizer = "sgd"\n'
        f"lr{'.a' * 5000} = 1",
        f'title = "t"\n[settings]\ndata{".a" * 5000} = 1\n[methods.SGD]\noptimizer = "sgd"',
        f'title = "t"\nbaseline = {"[" * 300}{"]" * 300}\n[settings]\ndata = "digits"\n'
        '[methods.SGD]\noptimizer = "sgd"',
    ],
)
def test_a_file_that_is_nested_deeply(tmp_path, content):
    (tmp_path / "deep.toml").write_text(content)
    done = kfc_here("compare", tmp_path / "deep.toml", "--out", tmp_path / "out")
    assert_clear_error(done, 2)
    assert len(done.stdout) < 500


@pytest.mark.parametrize(
    ("net", "words"),
    [
        ("nn.LazyLinear(10)", "whose 1.weight is lazy"),
        ("nn.LazyBatchNorm1d(), nn.Linear(64, 10)", "is lazy"),
        ("nn.Linear(64, 10, device='meta')", "whose 1.weight is on the device meta"),
        ("nn.Linear(64, 10).requires_grad_(False)", "all of its 2 parameters are frozen"),
        ("nn.Unflatten(1, (1, 64)), nn.AdaptiveAvgPool1d(10), nn.Flatten()", "no parameters"),
    ],
)
@pytest.mark.parametrize("optimizer", ["kfc", "sgd", "kfac", "whitened-adam", "muon"])
def test_networks_without_anything_to_train(tmp_path, monkeypatch, net, words, optimizer):
    (tmp_path / "nothing.py").write_text(
        f"from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), {net})\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "nothing", raising=False)
    arguments = ("--data", "digits", "--threads", "1", "--optimizer", optimizer)
    done = kfc_here("train", *arguments, "--net", "nothing:net", "--out", "run")
    assert_clear_error(done, 2, "nothing:net", words)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_that_are_not_utf8(run, tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xffn"))
    done = kfc("train", *SMALL, "--updates", "1", "--out", folder)
    assert done.returncode == 0, done.stderr
    done = kfc("report", folder, run, "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "r\\udcffn" in (tmp_path / "page.html").read_text()
    assert kfc("train", "--resume", folder, "--updates", "2").returncode == 0
    few = ("--examples", "4", "--samples", "1", "--approximation", "kfc")
    assert kfc("inspect", folder, *few, "-o", tmp_path / "two.html").returncode == 0
    page = Path(os.fsdecode(os.fsencode(tmp_path) + b"/p\xffge.html"))
    assert kfc("report", run, "-o", page).returncode == 0


def test_control_characters_are_escaped(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "a\x1b[31mb\x07")
    done = kfc_here("train", "--resume", folder)
    assert "\x1b" not in done.stdout
    assert "a\\x1b[31mb\\x07" in done.stdout
    file = folder / "config.json"
    header = read_checked(file)
    write_checked(file, {**header, "name": "bad\x1b]0;title\x07\x9b\u202ename"})
    done = kfc_here("report", folder, "-o", tmp_path / "page.html")
    assert done.returncode == 0
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(done.stdout)
    assert_clear_error(kfc_here("report", tmp_path / "no\x1bwhere"), 1, "no\\x1bwhere")
    assert printable("one\nKFC ν é →") == "one\nKFC ν é →"


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoint.pt", "x", "a.JSON"])
@pytest.mark.parametrize("command", [("report",), ("inspect",), ("plan", "digits")])
def test_a_page_never_replaces_a_file_of_a_run(copy, name, command):
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    runs = () if command[0] == "plan" else (copy,)
    done = kfc_here(*command, *runs, "--out", copy / name)
    assert_clear_error(done, 2, "could replace a file of a run", ".html")
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before


def test_a_page_may_be_in_the_folder_of_a_run(copy):
    assert kfc_here("report", copy, "-o", copy / "page.html").returncode == 0


# Processes


def test_a_closed_pipe_ends_quietly_with_a_checkpoint(tmp_path):
    path = tmp_path / "run"
    command = [sys.executable, "-m", "kfc", "train", *SMALL, "--epochs", "1000", "--out", str(path)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT},
    )
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) == 141
    assert errors == b""
    update = checkpoint(path)["update"]
    assert update >= read_record(path).evaluations[-1]["update"] > 0
    assert kfc("train", "--resume", path, "--updates", update + 1).returncode == 0


def test_a_folder_that_is_removed_during_the_run(tmp_path):
    path = tmp_path / "run"
    more = ("--epochs", "100000", "--checkpoint-seconds", "0.05", "--evaluation-period", "50")
    process = start_kfc("train", *SMALL, *more, "--out", path)
    latest = time.monotonic() + 60
    while not (path / "checkpoint-1.pt").exists():
        assert time.monotonic() < latest
        time.sleep(0.01)
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)
    done = process.completed()
    assert_clear_error(done, 1, f"{path} cannot be written", "it was removed")
    assert done.stderr.count("\n") == 1


# Says when the imports of the package begin.
SIGNAL_OF_IMPORTS = """
import importlib.abc, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            print(1, flush=True)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.3, 0.8])
@pytest.mark.parametrize("way", [("-c", "from kfc_command import main; main()"), ("-m", "kfc")])
def test_an_interruption_of_the_imports_is_quiet(tmp_path, way, seconds):
    (tmp_path / "sitecustomize.py").write_text(SIGNAL_OF_IMPORTS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, *way, "train", "--data", "digits", "--out", tmp_path / "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
    )
    process.stdout.readline()
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert not (tmp_path / "run").exists()


def test_an_interruption_after_the_end_is_quiet():
    program = (
        "import atexit, os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "from kfc_command import main\n"
        "sys.argv[1:] = ['--version']\n"
        "main()\n"
    )
    done = kfc_anew(program=program)
    assert (done.returncode, done.stderr) == (130, "")
    assert done.stdout.startswith("kfc ")


def test_the_record_of_a_run_is_json(run):
    """Other programs read it as well."""
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["kind"] in ("evaluation", "progress", "estimate", "end")
