"""A run that is killed at any moment resumes as if it had not been interrupted."""

import random
import signal
import time

import pytest

from commands import assert_clear_error, kfc, kfc_anew, start_kfc
from kfc.lab.runs import read_record
from test_training import assert_same_state, checkpoint

SETTINGS = (
    *("--data", "digits", "--net", "digits", "--epochs", "5", "--batch-size", "32"),
    *("--evaluation-period", "0.25", "--checkpoint-seconds", "0.05", "--log-period", "1"),
    *("--threads", "1", "--weight-decay", "1e-4"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "whole"
    done = kfc("train", *SETTINGS, "--out", path)
    assert done.returncode == 0, done.stderr
    return path


def assert_same_run(path, whole):
    assert_same_state(checkpoint(path), checkpoint(whole))
    found, expected = read_record(path), read_record(whole)
    timeless = [
        [{k: v for k, v in row.items() if "second" not in k} for row in record.evaluations]
        for record in (found, expected)
    ]
    assert timeless[0] == timeless[1]
    losses = [[(r["update"], r["loss"]) for r in record.progress] for record in (found, expected)]
    assert losses[0] == losses[1]
    assert found.end["reason"] == expected.end["reason"]


def wait_for(path, process, limit: float = 60.0):
    """Wait until the run has its folder; the process must not end before."""
    start = time.monotonic()
    while not (path / "metrics.jsonl").exists():
        assert process.poll() is None, process.completed().stdout
        assert time.monotonic() - start < limit
        time.sleep(0.002)


def test_killed_at_ten_random_moments(tmp_path, whole):
    """Send SIGKILL ten times, from before the first checkpoint on, then run to the end."""
    path = tmp_path / "killed"
    moments = random.Random(1)
    updates = []
    for kill in range(10):
        way = ("--out", path, *SETTINGS) if kill == 0 else ("--resume", path)
        process = start_kfc("train", *way)
        if kill == 0:
            wait_for(path, process)
        else:
            wait_for_progress(path, process, after=saved_update(path))
        time.sleep(moments.uniform(0, 0.2))
        process.kill()
        updates.append(last_update(path))
    assert max(updates) > 0, "no kill came after the beginning"
    done = kfc_anew("train", "--resume", path)
    assert done.returncode == 0, done.stderr
    assert_same_run(path, whole)


def saved_update(path):
    return checkpoint(path)["update"] if (path / "checkpoint.pt").exists() else 0


def wait_for_progress(path, process, after=0):
    """Wait until the run has made an update after this one, or has ended."""
    while process.poll() is None and last_update(path) <= after:
        time.sleep(0.005)


def last_update(path):
    rows = read_record(path).progress
    return rows[-1]["update"] if rows else 0


def test_workers_do_not_hold_the_folder_of_a_killed_run(tmp_path, whole):
    path = tmp_path / "workers"
    process = start_kfc("train", *SETTINGS, "--workers", "2", "--out", path)
    wait_for(path, process)
    time.sleep(0.5)
    process.kill()
    done = kfc("train", "--resume", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(path, whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_cleanly(tmp_path, whole, number):
    path = tmp_path / "interrupted"
    process = start_kfc("train", *SETTINGS, "--out", path)
    wait_for(path, process)
    wait_for_progress(path, process)
    process.send_signal(number)
    process.wait(timeout=60)
    done = process.completed()
    output = done.stdout + done.stderr
    assert done.returncode == 130, output
    assert f"kfc train --resume {path}" in output
    saved = checkpoint(path)["update"]
    assert saved == read_record(path).progress[-1]["update"], "no update was lost"
    assert kfc("train", "--resume", path).returncode == 0
    assert_same_run(path, whole)


def test_a_finished_run_can_be_made_longer(tmp_path, whole):
    path = tmp_path / "longer"
    assert kfc("train", *SETTINGS, "--out", path, "--epochs", "2").returncode == 0
    again = kfc("train", "--resume", path)
    assert again.returncode == 0
    assert read_record(path).end["update"] == 2 * 44
    assert kfc("train", "--resume", path, "--epochs", "5").returncode == 0
    assert_same_run(path, whole)


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, whole):
    """A limit on the size of files stops the checkpoint, as a full disk would."""
    path = tmp_path / "full"
    assert kfc("train", *SETTINGS, "--out", path, "--epochs", "1").returncode == 0
    saved = (path / "checkpoint.pt").read_bytes()
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000));"
        "sys.argv = ['kfc', *sys.argv[1:]]; from kfc.lab.cli import app; app()"
    )
    done = kfc_anew("train", "--resume", path, "--epochs", "2", program=program)
    assert_clear_error(done, 1, "cannot be written", "What was saved before is kept")
    assert len(done.stderr.strip().splitlines()) == 1, "one sentence, nothing of threads"
    assert (path / "checkpoint.pt").read_bytes() == saved
    assert kfc("train", "--resume", path, "--epochs", "5").returncode == 0
    assert_same_run(path, whole)
