"""Runs in several processes, as `torchrun` starts them, and what becomes of them.

Most are forked, with the variables that torchrun sets, in place of an import of torch each.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from commands import ENVIRONMENT, assert_clear_error, kfc, kfc_here, start_kfc
from kfc.distributed.workers import Workers
from kfc.experiments.config import make_config
from kfc.experiments.data import load
from kfc.experiments.processes import Launch, RanksFailedError, gather_texts
from kfc.experiments.runs import RunFolder, read_record
from kfc.experiments.training import Trainer
from ranks import run_ranks
from test_training import assert_same_state, checkpoint

SMALL = ("--data", "digits", "--optimizer", "sgd", "--threads", "1")
# Longer than any test; with checkpoints all the time.
ENDLESS = (*SMALL, "--batch-size", "64", "--epochs", "100000", "--evaluation-period", "20")
ENDLESS += ("--checkpoint-seconds", "0.1", "--log-period", "1")


class Job:
    """What torchrun would start: processes with its variables, and the store they meet at."""

    def __init__(self, cwd: Path, name: str = "a job") -> None:
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._cwd = cwd
        self._name = name
        self._started = []

    def start(self, size, *arguments, restarts=0, **variables):
        """A command for each rank."""
        common = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": self._name,
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            **variables,
        }
        ranks = [
            start_kfc(*arguments, cwd=self._cwd, **common, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(size)
        ]
        self._started += ranks
        return ranks

    def run(self, size, *arguments, **more):
        """To the end; what each rank has printed."""
        return [command.completed() for command in self.start(size, *arguments, **more)]

    def end(self):
        for command in self._started:
            if command.poll() is None:
                command.kill()


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    made.end()


def assert_all_well(done):
    """Rank 0 speaks, the others are silent."""
    for rank, one in enumerate(done):
        assert one.returncode == 0, one.stdout + one.stderr
        assert bool(one.stdout) == (rank == 0)
        assert one.stderr == ""


def wait_for(path, seconds=60.0):
    latest = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < latest, f"there is no {path}"
        time.sleep(0.01)


def wait_for_progress(path, seconds=60.0):
    latest = time.monotonic() + seconds
    wait_for(path / "metrics.jsonl", seconds)
    while '"progress"' not in (path / "metrics.jsonl").read_text():
        assert time.monotonic() < latest, "there is no update"
        time.sleep(0.01)


def output_of(done):
    return " ".join((done.stdout + done.stderr).split())


# What several ranks compute


@pytest.mark.parametrize(
    "settings",
    [
        ("--optimizer", "sgd", "--updates", "14", "--batch-size", "101"),  # parts of 50 and 51
        ("--optimizer", "kfc", "--updates", "14", "--batch-size", "128", "--fisher", "exact"),
        # What it chooses is sensitive: from step to step, differences grow tenfold.
        ("--optimizer", "kfac", "--updates", "2", "--batch-size", "128", "--fisher", "exact"),
    ],
    ids=lambda settings: settings[1],
)
def test_two_ranks_do_what_one_process_does(job, tmp_path, settings):
    """But for the order in which floats are added."""
    common = ("--data", "digits", "--threads", "1", "--log-period", "1")
    one, two = tmp_path / "one", tmp_path / "two"
    assert kfc("train", *common, *settings, "--out", one).returncode == 0
    done = job.run(2, "train", *common, *settings, "--out", two)
    assert_all_well(done)
    assert f"Run: {two}" in done[0].stdout
    expected, found = checkpoint(one), checkpoint(two)
    assert found.keys() == expected.keys()
    assert found["model"].keys() == expected["model"].keys(), "no prefix of a wrapper"
    for name, value in expected["model"].items():
        assert_close(found["model"][name], value, rtol=2e-4, atol=2e-5)
    records = [read_record(path) for path in (one, two)]
    assert [record.environment["processes"] for record in records] == [1, 2]
    for mine, theirs in zip(*(record.progress for record in records), strict=True):
        assert mine.keys() == theirs.keys()
        assert mine["update"] == theirs["update"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
    for mine, theirs in zip(*(record.evaluations for record in records), strict=True):
        assert mine["averaged_test_loss"] == pytest.approx(theirs["averaged_test_loss"], rel=1e-3)


NORMALISED = """
from torch import nn
def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                         nn.Dropout(0.2), nn.Linear(144, 10))
"""


def test_all_ranks_evaluate_the_network_that_is_saved(job, tmp_path, monkeypatch):
    """On the CPU every rank has batch statistics of its own."""
    (tmp_path / "normalised.py").write_text(NORMALISED)
    arguments = (*SMALL, "--net", "normalised:net", "--epochs", "1", "--out", tmp_path / "run")
    assert_all_well(job.run(2, "train", *arguments))
    monkeypatch.chdir(tmp_path)
    trainer = Trainer.resume(RunFolder.open(tmp_path / "run"), load("digits"))
    trainer.close()
    recorded = trainer.last_evaluation
    assert trainer.parts.evaluate(trainer.parts.test)[0] == pytest.approx(recorded["test_loss"])
    with trainer.parts.averages.swapped_in():
        loss, _ = trainer.parts.evaluate(trainer.parts.train)
    assert loss == pytest.approx(recorded["averaged_train_loss"])


def draw(rank, path):
    """Random numbers before and after a checkpoint."""
    workers, data = Workers(dist.group.WORLD), load("digits")
    config = make_config(data="digits", optimizer="sgd", updates=2, threads=1)
    trainer = Trainer.start(path, config, data, name="run", workers=workers)
    trainer.advance(1e-9)
    trainer.save()
    with trainer._at_work():
        first = torch.rand(1).item()
    trainer.close()
    folder = trainer.folder if rank else RunFolder.open(path)
    again = Trainer.resume(folder, data, workers=workers)
    with again._at_work():
        second = torch.rand(1).item()
    again.close()
    return first, second


def test_ranks_draw_different_numbers_also_after_a_resumption(tmp_path):
    [(first, second), others] = run_ranks(draw, 2, tmp_path / "run")
    assert first == second, "rank 0 goes on with its own"
    assert first not in others


# Checkpoints and the number of ranks


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    """Half of a run."""
    path = tmp_path_factory.mktemp("runs") / "half"
    arguments = (*SMALL, "--updates", "10", "--optimizer", "kfc", "--fisher", "exact")
    arguments += ("--batch-size", "128", "--out", path)
    assert_all_well(Job(path.parent).run(2, "train", *arguments))
    return path


def copied(path, to):
    to.mkdir()
    for name in ("config.json", "metrics.jsonl", "checkpoint.pt"):
        (to / name).write_bytes((path / name).read_bytes())
    return to


def test_a_checkpoint_of_two_ranks_is_one_of_one_process(of_two_ranks, tmp_path):
    path = copied(of_two_ranks, tmp_path / "run")
    trainer = Trainer.resume(RunFolder.open(path), load("digits"))
    trainer.save()
    trainer.close()
    expected = checkpoint(of_two_ranks)
    assert_same_state(checkpoint(path), expected)


@pytest.mark.parametrize("size", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_it_goes_on_with_any_number_of_ranks(job, of_two_ranks, tmp_path, size):
    """To where two ranks would have come, but for the order in which floats are added."""
    ends = []
    for name, ranks in (("others", size), ("two", 2)):
        path = copied(of_two_ranks, tmp_path / name)
        done = job.run(ranks, "train", "--resume", path, "--updates", "15")
        assert_all_well(done)
        ends.append(checkpoint(path))
    assert ends[0]["update"] == ends[1]["update"] == 15
    for name, value in ends[1]["model"].items():
        assert_close(ends[0]["model"][name], value, rtol=2e-4, atol=2e-5)


# Faults


def test_the_others_name_a_rank_that_was_killed(job, tmp_path):
    path = tmp_path / "run"
    ranks = job.start(2, "train", *ENDLESS, "--out", path)
    wait_for(path / "checkpoint.pt")
    ranks[1].kill()
    ranks[0].wait(30)
    done = ranks[0].completed()
    assert_clear_error(done, 1, "Error: rank 0 of 2: rank 1 has not been heard of", "killed")
    assert done.stderr.count("\n") == 1, "one line"
    saved = checkpoint(path)["update"]
    assert kfc("train", "--resume", path, "--updates", saved + 2).returncode == 0
    assert read_record(path).end["update"] == saved + 2


def test_a_stopped_rank_is_not_waited_for_longer_than_the_timeout(job, tmp_path):
    path = tmp_path / "run"
    ranks = job.start(2, "train", *ENDLESS, "--timeout", "4s", "--out", path)
    try:
        wait_for(path / "checkpoint.pt")
        ranks[1].send_signal(signal.SIGSTOP)
        ranks[0].wait(30)
    finally:
        ranks[1].kill()
    assert_clear_error(ranks[0].completed(), 1, "rank 1 has not been heard of", "stopped")
    assert checkpoint(path)["update"] > 0


BROKEN = """
import os
import torch
from torch import nn
class Faulty(nn.Module):
    def __init__(self):
        super().__init__()
        self.passes = 0
    def forward(self, x):
        self.passes += self.training
        bad = os.environ.get("RANK") == "1" and self.passes == 4
        # Of its square root the value is fine, and the derivative is not.
        return x + torch.sqrt(x * 0.0) if bad else x
def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), Faulty(), nn.Linear(20, 10))
"""


@pytest.mark.parametrize("log_period", [1, 7])
def test_divergence_is_traced_to_the_rank_where_it_began(job, tmp_path, log_period):
    (tmp_path / "broken.py").write_text(BROKEN)
    arguments = (*SMALL, "--net", "broken:net", "--log-period", log_period, "--out", "run")
    first, second = job.run(2, "train", *arguments)
    words = "diverged: it began with the gradients of rank 1 at update 4"
    assert_clear_error(first, 3, words, "try a smaller --lr")
    assert second.returncode == 3
    assert second.stdout + second.stderr == ""
    assert words.removeprefix("diverged: ") in read_record(tmp_path / "run").end["message"]


def test_a_step_that_kfc_skips_is_the_fault_of_a_rank(job, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    arguments = (*SMALL, "--optimizer", "kfc", "--batch-size", "128", "--updates", "8")
    first, second = job.run(2, "train", *arguments, "--net", "broken:net", "--out", "run")
    assert first.returncode == second.returncode == 0
    assert "step 3 was skipped: rank 1 gave gradients" in output_of(first)
    assert output_of(second) == ""
    assert read_record(tmp_path / "run").evaluations[-1]["diagnostics"]["skipped_steps"] == 1


def test_a_full_disk_of_rank_0_is_no_riddle_to_the_others(job, tmp_path):
    path = tmp_path / "run"
    ranks = job.start(2, "train", *ENDLESS, "--out", path)
    wait_for(path / "checkpoint.pt")
    # In the way of the next checkpoint, as root is stopped by no permission.
    (path / ".checkpoint.pt.part").mkdir()
    done = [command.completed() for command in ranks]
    assert_clear_error(done[0], 1, "cannot be written", "What was saved before is kept")
    assert_clear_error(done[1], 1, "rank 1 of 2: rank 0 failed at step")
    assert checkpoint(path)["update"] > 0


def start_with_other_data(rank, path):
    data = load("digits")
    data = replace(data, digest="another") if rank == 1 else data
    config = make_config(data="digits", optimizer="sgd", updates=2, threads=1)
    try:
        Trainer.start(path, config, data, name="run", workers=Workers(dist.group.WORLD))
    except RanksFailedError as failure:
        return failure.rank, failure.kind.__name__, str(failure.error)


def test_ranks_with_other_data_do_not_begin(tmp_path):
    first, second = run_ranks(start_with_other_data, 2, tmp_path / "run")
    assert first == (1, "RunError", "None")
    assert second[:2] == (1, "RunError")
    assert "rank 0 has other data" in second[2]
    assert not (tmp_path / "run").exists()


# Interruptions and restarts


def test_an_interruption_saves_whatever_signals_follow(job, tmp_path):
    path = tmp_path / "run"
    ranks = job.start(2, "train", *ENDLESS, "--checkpoint-seconds", "1000", "--out", path)
    wait_for_progress(path)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        for command in ranks:
            with suppress(ProcessLookupError):
                command.send_signal(number)
    first, second = (command.completed() for command in ranks)
    assert first.returncode == second.returncode == 130, first.stdout + first.stderr
    resumption = f"torchrun --nproc-per-node=2 -m kfc train --resume {path}"
    assert f"Go on: {resumption}" in first.stdout
    assert second.stdout + second.stderr == ""
    assert checkpoint(path)["update"] == read_record(path).progress[-1]["update"] > 0


def test_a_restarted_job_goes_on_in_the_folder_that_it_made(job, tmp_path):
    """Also if it had no checkpoint yet; another job gets a folder of its own, or none."""
    arguments = (*SMALL, "--updates", "30", "--checkpoint-seconds", "0.01")
    runs = tmp_path / "runs"
    assert_all_well(job.run(2, "train", *arguments, "--log-period", "1"))
    path = runs / "digits-digits-sgd"
    whole = checkpoint(path)
    (path / "checkpoint.pt").unlink()
    done = job.run(2, "train", *arguments, "--log-period", "1", restarts=1)
    assert_all_well(done)
    assert f"{path.relative_to(tmp_path)} goes on from update 0" in done[0].stdout
    assert_same_state(checkpoint(path)["model"], whole["model"])
    assert len(read_record(path).evaluations) == 4
    assert [folder.name for folder in runs.iterdir()] == [path.name]
    other = Job(tmp_path, "another job")
    done = other.run(2, "train", *arguments, "--log-period", "1", "--out", path, restarts=1)
    assert_clear_error(done[0], 1, "never overwritten")
    assert done[1].returncode == 1


def test_what_has_diverged_is_not_tried_again(job, tmp_path):
    arguments = (*SMALL, "--lr", "1e30", "--out", "run")
    assert [done.returncode for done in job.run(2, "train", *arguments)] == [3, 3]
    again = job.run(2, "train", *arguments, restarts=1)
    assert_clear_error(again[0], 1, "run has diverged, and is not tried again")


@contextmanager
def torchrun(path, *arguments):
    """Running, for a run in this folder; the file has what it and its processes print."""
    log = path.with_name("log")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [*launcher, *map(str, arguments), "--out", str(path)],
        env={**os.environ, **ENVIRONMENT},
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()
        for rank in range(2):
            with suppress(AssertionError):
                os.kill(process_of_rank(rank, path), signal.SIGKILL)


def process_of_rank(rank, path):
    """Of the run in this folder."""
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes()
            if f"RANK={rank}".encode() in variables and str(path).encode() in command:
                return int(folder.name)
    raise AssertionError(f"there is no rank {rank}")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_goes_on_after_a_kill(tmp_path, rank):
    path = tmp_path / "run"
    command = ("--max-restarts=1", "-m", "kfc", "train", *ENDLESS, "--epochs", "20")
    with torchrun(path, *command) as (job, log):
        wait_for(path / "checkpoint.pt")
        os.kill(process_of_rank(rank, path), signal.SIGKILL)
        assert job.wait(120) == 0, log.read_text()
    text = log.read_text()
    assert f"Error: rank {1 - rank} of 2: rank {rank} has not been heard of" in text
    went_on = re.search(rf"Restarted: {re.escape(str(path))} goes on from update (\d+)", text)
    assert int(went_on[1]) > 0, "there was a checkpoint"
    assert f"Run: {path}" in text
    record = read_record(path)
    assert record.end["reason"] == "epochs"
    updates = [row["update"] for row in record.progress]
    assert updates == sorted(set(updates))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_ends_with_a_stopped_rank(tmp_path, rank):
    """Within the timeout, the time to find out who it is, and torchrun's 30 s."""
    path = tmp_path / "run"
    with torchrun(path, "-m", "kfc", "train", *ENDLESS, "--timeout", "5s") as (job, log):
        wait_for(path / "checkpoint.pt")
        os.kill(process_of_rank(rank, path), signal.SIGSTOP)
        assert job.wait(70) == 1
    words = f"Error: rank {1 - rank} of 2: rank {rank} has not been heard of"
    assert words in log.read_text()
    assert checkpoint(path)["update"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("times", [1, 2])
def test_torchrun_passes_interruptions_on(tmp_path, number, times):
    path = tmp_path / "run"
    command = ("-m", "kfc", "train", *ENDLESS, "--checkpoint-seconds", "1000")
    with torchrun(path, *command) as (job, log):
        wait_for(path / "metrics.jsonl")
        time.sleep(2)
        for _ in range(times):
            job.send_signal(number)
            time.sleep(0.2)
        job.wait(60)
        wait_for(path / "checkpoint.pt")
    assert f"Go on: torchrun --nproc-per-node=2 -m kfc train --resume {path}" in log.read_text()


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("train", "--data", "digits", "--lr", "0"), 2, "lr must be"),
        (("train", "--data", "digits", "--batch-size", "1"), 2, "an example for each of 2"),
        (("train", "--data", "digits", "--damping", "-1", "--out", "new"), 2, "damping"),
        (("train", "--data", "digits", "--device", "mps"), 2, "cpu or on cuda"),
        (("train", "--resume", "nowhere"), 1, "is not a run"),
        (("train", *SMALL, "--out", "."), 1, "never overwritten"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_mistakes_end_all_ranks_with_one_message(job, tmp_path, arguments, code, words):
    first, second = job.run(2, *arguments)
    assert_clear_error(first, code, words)
    assert output_of(first).count("Error") == 1
    assert second.returncode == code
    assert output_of(second) == ""
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "--rate", "3"), "No such option"),
        (("train", "--data", "digits", "--timeout", "0"), "no time to wait for"),
        (("demo",), "kfc demo runs in one process"),
        (("inspect", "run"), "torchrun is for kfc train alone"),
    ],
)
def test_mistakes_that_need_no_other_rank(monkeypatch, arguments, words):
    monkeypatch.setattr("kfc.cli.SECONDS_FOR_RANK_0_TO_SPEAK", 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert_clear_error(kfc_here(*arguments), 2, words)
    monkeypatch.setenv("RANK", "1")
    silent = kfc_here(*arguments)
    assert silent.returncode == 2
    assert silent.stdout == ""


def test_a_rank_that_is_not_started_is_named(job, tmp_path):
    done = job.run(2, "train", *SMALL, "--timeout", "4s", "--out", tmp_path / "run", WORLD_SIZE="3")
    words = "rank 0 of 3 found no way to the others: after 4 s nothing had been heard of rank 2"
    assert_clear_error(done[0], 1, words)
    assert_clear_error(done[1], 1, "rank 0 had not called this one, or not all had answered")


# The launcher's variables


def test_what_the_launcher_says():
    alone = Launch.from_environment({"HOME": "/root"})
    assert (alone.rank, alone.size, alone.job, alone.command()) == (0, 1, None, "kfc")
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    launch = Launch.from_environment({**variables, "TORCHELASTIC_RUN_ID": "job"})
    assert (launch.rank, launch.size, launch.local_rank, launch.job) == (5, 8, 1, "job")
    assert launch.command() == "torchrun --nnodes=2 --nproc-per-node=4 -m kfc"
    nameless = [{**variables, "TORCHELASTIC_RUN_ID": "none"}] * 2
    jobs = {Launch.from_environment(one).job for one in nameless}
    assert len(jobs) == 1
    assert str(os.getppid()) in jobs.pop()


def tell(rank):
    return gather_texts(Workers(dist.group.WORLD), "abc – ν" * rank)


def test_ranks_tell_each_other_texts():
    assert run_ranks(tell, 3) == [["", "abc – ν", "abc – νabc – ν"]] * 3
