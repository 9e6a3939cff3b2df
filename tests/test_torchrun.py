"""Runs of `kfc train` in several processes, as torchrun starts them.

Most are forked with the variables that torchrun sets, to save the time of importing torch.
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
from kfc.distributed.ranks import Ranks
from kfc.lab.config import make_config
from kfc.lab.data import load
from kfc.lab.processes.ranks import Launch, RanksFailedError, gather_objects
from kfc.lab.runs import RunFolder, read_record
from kfc.lab.training import Trainer
from ranks import run_ranks
from test_training import assert_same_state, checkpoint

SMALL = ("--data", "digits", "--optimizer", "sgd", "--threads", "1")
# Longer than any test, with frequent checkpoints.
ENDLESS = (*SMALL, "--batch-size", "64", "--epochs", "100000", "--evaluation-period", "20")
ENDLESS += ("--checkpoint-seconds", "0.1", "--log-period", "1")


class Job:
    """A job of torchrun: processes with its environment variables, and its store."""

    def __init__(self, cwd: Path, name: str = "a job") -> None:
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._cwd = cwd
        self._name = name
        self._started = []

    def start(self, size, *arguments, restarts=0, **variables):
        """Start the command on each rank."""
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
        """Run the command on each rank to its end; return what each has printed."""
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
    """Check that all ranks succeed, and that only rank 0 prints."""
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


# Results


@pytest.mark.parametrize(
    "settings",
    [
        ("--optimizer", "sgd", "--updates", "14", "--batch-size", "101"),  # parts of 50 and 51
        # Differences grow from step to step.
        ("--optimizer", "kfc", "--updates", "8", "--batch-size", "128", "--fisher", "exact"),
        # Its choices are sensitive: differences grow tenfold in each.
        ("--optimizer", "kfac", "--updates", "2", "--batch-size", "128", "--fisher", "exact"),
    ],
    ids=lambda settings: settings[1],
)
def test_two_ranks_do_what_one_process_does(job, tmp_path, settings):
    """Up to rounding, because ranks add numbers in another order."""
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
    """Although every rank has its own batch statistics on the CPU."""
    (tmp_path / "normalised.py").write_text(NORMALISED)
    arguments = (*SMALL, "--net", "normalised:net", "--epochs", "1", "--out", tmp_path / "run")
    assert_all_well(job.run(2, "train", *arguments))
    monkeypatch.chdir(tmp_path)
    trainer = Trainer.resume(RunFolder(tmp_path / "run"), load("digits"))
    trainer.close()
    recorded = trainer.last_evaluation
    assert trainer.components.evaluate("test")[0] == pytest.approx(recorded["test_loss"])
    with trainer.components.averages.swapped_in():
        loss, _ = trainer.components.evaluate("train")
    assert loss == pytest.approx(recorded["averaged_train_loss"])


def draw(rank, path):
    """Return random numbers after the second update, without and with resumption before it."""
    ranks, data = Ranks(dist.group.WORLD), load("digits")
    config = make_config(data="digits", optimizer="sgd", updates=2, threads=1)
    trainer = Trainer.start(path, config, data, name="run", ranks=ranks)
    trainer.advance(1e-9)
    trainer.save()
    checkpoint = path / "checkpoint.pt"
    if rank == 0:
        content = checkpoint.read_bytes()
    trainer.advance()
    first = torch.rand(1).item()
    trainer.close()
    if rank == 0:
        checkpoint.write_bytes(content)
    folder = trainer.folder if rank else RunFolder(path)
    again = Trainer.resume(folder, data, ranks=ranks)
    assert again.update == 1
    again.advance()
    second = torch.rand(1).item()
    again.close()
    return first, second


def test_ranks_draw_different_numbers_also_when_resumed(tmp_path):
    [(first, second), others] = run_ranks(draw, 2, tmp_path / "run")
    assert first == second, "rank 0 draws the same numbers"
    assert others[0] == others[1], "rank 1 draws the same numbers"
    assert first not in others


# Checkpoints and the number of ranks


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    """Return the folder of half a run."""
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


def test_one_process_loads_a_checkpoint_of_two_ranks(of_two_ranks, tmp_path):
    path = copied(of_two_ranks, tmp_path / "run")
    trainer = Trainer.resume(RunFolder(path), load("digits"))
    trainer.save()
    trainer.close()
    expected = checkpoint(of_two_ranks)
    assert_same_state(checkpoint(path), expected)


@pytest.mark.parametrize("size", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_ranks_resumes_a_run(job, of_two_ranks, tmp_path, size):
    """With the result of two ranks, up to rounding."""
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


# Which collective fails first depends on the moment: one of the trainer or one of DDP.
BROKEN_OFF = r"Error: rank {} of 2: (all_reduce of .*|a collective of .*) failed at step \d+: "


def test_a_killed_rank_ends_the_others_with_one_line(job, tmp_path):
    path = tmp_path / "run"
    ranks = job.start(2, "train", *ENDLESS, "--out", path)
    wait_for(path / "checkpoint-1.pt")  # the second, after an update
    ranks[1].kill()
    ranks[0].wait(30)
    done = ranks[0].completed()
    assert_clear_error(done, 1, "by peer", "The output of the other ranks may say why")
    assert re.match(BROKEN_OFF.format(0), done.stderr), done.stderr
    assert done.stderr.count("\n") == 1, "one line"
    saved = checkpoint(path)["update"]
    assert kfc("train", "--resume", path, "--updates", saved + 2).returncode == 0
    assert read_record(path).end["update"] == saved + 2


def test_a_stopped_rank_is_not_waited_for_longer_than_the_timeout(job, tmp_path):
    path = tmp_path / "run"
    ranks = job.start(2, "train", *ENDLESS, "--timeout", "4s", "--out", path)
    try:
        wait_for(path / "checkpoint-1.pt")  # the second, after an update
        ranks[1].send_signal(signal.SIGSTOP)
        ranks[0].wait(30)
    finally:
        ranks[1].kill()
    done = ranks[0].completed()
    assert done.returncode == 1
    assert re.match(BROKEN_OFF.format(0) + ".*(Timed out|timeout)", done.stderr), done.stderr
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
        # The value of the square root is finite, but its derivative is not.
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


def test_a_skipped_step_names_the_rank(job, tmp_path):
    # The passes of a step are those of the user, of its statistics and of the clip.
    (tmp_path / "broken.py").write_text(BROKEN.replace("passes == 4", "passes == 5"))
    arguments = (*SMALL, "--optimizer", "kfc", "--batch-size", "128", "--updates", "8")
    arguments += ("--estimate-factors", "0", "--statistics-period", "1", "--inverse-period", "1")
    first, second = job.run(2, "train", *arguments, "--net", "broken:net", "--out", "run")
    assert first.returncode == second.returncode == 0
    assert "step 2 was skipped: rank 1 gave gradients" in output_of(first)
    assert output_of(second) == ""
    assert read_record(tmp_path / "run").evaluations[-1]["diagnostics"]["skipped_steps"] == 1


def test_a_full_disk_of_rank_0_ends_all_ranks(job, tmp_path):
    path = tmp_path / "run"
    ranks = job.start(2, "train", *ENDLESS, "--out", path)
    wait_for(path / "checkpoint-1.pt")  # the second, after an update
    # Prevents the next checkpoint; missing permissions would not prevent root.
    (path / ".checkpoint.pt.part").mkdir()
    done = [command.completed() for command in ranks]
    assert_clear_error(done[0], 1, "cannot be written", "What was saved before is kept")
    assert_clear_error(done[1], 1, "The output of the other ranks may say why")
    assert re.match(BROKEN_OFF.format(1), done[1].stderr), done[1].stderr
    assert checkpoint(path)["update"] > 0


def start_with_other_data(rank, path):
    data = load("digits")
    data = replace(data, digest="another") if rank == 1 else data
    config = make_config(data="digits", optimizer="sgd", updates=2, threads=1)
    try:
        Trainer.start(path, config, data, name="run", ranks=Ranks(dist.group.WORLD))
    except RanksFailedError as failure:
        return failure.rank, failure.kind.__name__, str(failure.error)


def test_ranks_with_different_data_do_not_start(tmp_path):
    first, second = run_ranks(start_with_other_data, 2, tmp_path / "run")
    assert first == (1, "RunError", "None")
    assert second[:2] == (1, "RunError")
    assert "rank 0 has other data" in second[2]
    assert not (tmp_path / "run").exists()


# Interruptions and restarts


def test_an_interruption_saves_a_checkpoint_in_spite_of_further_signals(job, tmp_path):
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
    assert f"To continue: {resumption}" in first.stdout
    assert second.stdout + second.stderr == ""
    assert checkpoint(path)["update"] == read_record(path).progress[-1]["update"] > 0


def test_a_restarted_job_continues_in_its_folder(job, tmp_path):
    """Even if there is no row yet. Another job does not continue there."""
    arguments = (*SMALL, "--updates", "30", "--checkpoint-seconds", "0.01")
    runs = tmp_path / "runs"
    assert_all_well(job.run(2, "train", *arguments, "--log-period", "1"))
    path = runs / "digits-digits-sgd"
    whole = checkpoint(path)
    for name in ("checkpoint.pt", "checkpoint-1.pt", "metrics.jsonl"):
        (path / name).unlink()
    done = job.run(2, "train", *arguments, "--log-period", "1", restarts=1)
    assert_all_well(done)
    assert f"{path.relative_to(tmp_path)} continues from update 0" in done[0].stdout
    assert_same_state(checkpoint(path)["model"], whole["model"])
    assert len(read_record(path).evaluations) == 4
    assert [folder.name for folder in runs.iterdir()] == [path.name]
    other = Job(tmp_path, "another job")
    done = other.run(2, "train", *arguments, "--log-period", "1", "--out", path, restarts=1)
    assert_clear_error(done[0], 1, "never overwritten")
    assert done[1].returncode == 1


def test_a_run_that_diverged_is_not_restarted(job, tmp_path):
    arguments = (*SMALL, "--lr", "1e30", "--out", "run")
    assert [done.returncode for done in job.run(2, "train", *arguments)] == [3, 3]
    again = job.run(2, "train", *arguments, restarts=1)
    assert_clear_error(again[0], 1, "run has diverged and is not continued")


@contextmanager
def torchrun(path, *arguments):
    """Run torchrun with this output folder; yield its process and the file of its output."""
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
    """Return the process id of a rank of the run in this folder."""
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes()
            if f"RANK={rank}".encode() in variables and str(path).encode() in command:
                return int(folder.name)
    raise AssertionError(f"there is no rank {rank}")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_after_a_kill(tmp_path, rank):
    path = tmp_path / "run"
    command = ("--max-restarts=1", "-m", "kfc", "train", *ENDLESS, "--epochs", "20")
    with torchrun(path, *command) as (job, log):
        wait_for(path / "checkpoint-1.pt")  # the second, after an update
        os.kill(process_of_rank(rank, path), signal.SIGKILL)
        assert job.wait(120) == 0, log.read_text()
    text = log.read_text()
    assert re.search(BROKEN_OFF.format(1 - rank), text)
    went_on = re.search(rf"Restarted: {re.escape(str(path))} continues from update (\d+)", text)
    assert int(went_on[1]) > 0, "there was a checkpoint"
    assert f"Run: {path}" in text
    record = read_record(path)
    assert record.end["reason"] == "epochs"
    updates = [row["update"] for row in record.progress]
    assert updates == sorted(set(updates))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_ends_with_a_stopped_rank(tmp_path, rank):
    """Within the timeout and torchrun's 30 s."""
    path = tmp_path / "run"
    with torchrun(path, "-m", "kfc", "train", *ENDLESS, "--timeout", "15s") as (job, log):
        wait_for(path / "checkpoint-1.pt")  # the second, after an update
        os.kill(process_of_rank(rank, path), signal.SIGSTOP)
        assert job.wait(70) == 1
    text = log.read_text()
    assert re.search(BROKEN_OFF.format(1 - rank), text)
    assert "Root Cause" in text
    assert re.search(rf"CollectiveError: rank {1 - rank} of 2", text), "torchrun has its traceback"
    assert checkpoint(path)["update"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("times", [1, 2])
def test_torchrun_forwards_interruptions(tmp_path, number, times):
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
    assert (
        f"To continue: torchrun --nproc-per-node=2 -m kfc train --resume {path}" in log.read_text()
    )


# Usage errors


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("train", "--data", "digits", "--lr", "0"), 2, "lr must be"),
        (("train", "--data", "digits", "--batch-size", "1"), 2, "number of ranks (2), got 1"),
        (("train", "--data", "digits", "--damping", "-1", "--out", "new"), 2, "damping"),
        (("train", "--data", "digits", "--device", "mps"), 2, "cpu or on cuda"),
        (("train", "--resume", "nowhere"), 1, "is not a run"),
        (("train", *SMALL, "--out", "."), 1, "never overwritten"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_usage_errors_end_all_ranks_with_one_message(job, tmp_path, arguments, code, words):
    first, second = job.run(2, *arguments)
    assert_clear_error(first, code, words)
    assert output_of(first).count("Error") == 1
    assert second.returncode == code
    assert output_of(second) == ""
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "--rate", "3"), "no such option"),
        (("train", "--data", "digits", "--timeout", "0"), "must be a positive duration"),
        (("demo",), "kfc demo runs in one process"),
        (("inspect", "run"), "only kfc train works with torchrun"),
    ],
)
def test_usage_errors_found_by_each_rank(monkeypatch, arguments, words):
    monkeypatch.setattr("kfc.lab.cli.SECONDS_FOR_MESSAGE_OF_RANK_0", 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert_clear_error(kfc_here(*arguments), 2, words)
    monkeypatch.setenv("RANK", "1")
    silent = kfc_here(*arguments)
    assert silent.returncode == 2
    assert silent.stdout == ""


def test_a_rank_that_is_not_started_is_named(job, tmp_path):
    done = job.run(2, "train", *SMALL, "--timeout", "4s", "--out", tmp_path / "run", WORLD_SIZE="3")
    could_not = "of 3 could not join the other ranks:"
    assert_clear_error(done[0], 1, f"rank 0 {could_not} no response from rank 2 within 4 s")
    assert_clear_error(done[1], 1, f"rank 1 {could_not} not all ranks started within 4 s")


# Environment variables


def test_the_variables_of_torchrun_are_read():
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


def gather(rank):
    return gather_objects(Ranks(dist.group.WORLD), "abc – ν" * rank, "texts")


def test_texts_of_all_ranks_are_gathered():
    assert run_ranks(gather, 3) == [["", "abc – ν", "abc – νabc – ν"]] * 3
