"""Run folders: complete at every moment, never overwritten, with clear errors."""

import json
import os
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from commands import run_script
from kfc.lab.checkpoints import write_checkpoint
from kfc.lab.config import make_config
from kfc.lab.disk import RunError, write_atomically
from kfc.lab.metrics import MEASURES
from kfc.lab.runs import RunFolder, read_record


@pytest.fixture
def config():
    return make_config(data="digits", epochs=1, threads=1)


@pytest.fixture
def folder(tmp_path, config):
    made = RunFolder.create(tmp_path / "run", config, "digest", "KFC")
    yield made
    made.close()


def output_of(program: str, script: Path, *arguments: object) -> str:
    """Write a program to ``script``, run it in a process, and return its output."""
    script.write_text(program)
    done = run_script(script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def row(update: int, kind: str = "progress", **more: object) -> dict:
    numbers = {
        "progress": {"loss": 2.0, "images_per_second": 100.0},
        "evaluation": {**dict.fromkeys(MEASURES, 2.0), "step_seconds": {}, "diagnostics": {}},
    }
    place = {"kind": kind, "update": update, "epoch": 0.5, "seconds": 1.0}
    return {**place, **numbers.get(kind, {}), **more}


def test_a_record_has_what_was_written(folder, config):
    folder.write(row(0, "evaluation", train_loss=2.5))
    folder.write(row(10, loss=float("nan")))
    folder.write(row(20, "end", reason="epochs", message=""))
    record = read_record(folder.path)
    assert record.config == config
    assert (record.name, record.data_digest) == ("KFC", "digest")
    assert record.evaluations[0]["train_loss"] == 2.5
    assert record.progress[0]["loss"] is None, "NaN is not JSON"
    assert record.end["reason"] == "epochs"
    assert record.environment["torch"] == torch.__version__
    assert list(folder.path.glob("events.out.tfevents*"))


def test_tensorboard_reads_the_events(folder):
    folder.write(row(0, "evaluation", train_loss=2.5))
    folder.write(row(10, loss=0.5))
    folder.close()
    accumulator = EventAccumulator(str(folder.path))
    accumulator.Reload()
    (point,) = accumulator.Scalars("evaluation/train_loss")
    assert (point.step, point.value) == (0, 2.5)
    assert accumulator.Scalars("progress/loss")[0].step == 10


def test_a_folder_is_never_overwritten(folder, config):
    with pytest.raises(RunError, match="never overwritten"):
        RunFolder.create(folder.path, config, "digest", "KFC")


def test_one_process_at_a_time(folder, tmp_path):
    program = (
        "import sys, pathlib\nfrom kfc.lab.runs import RunFolder, RunError\n"
        "try: RunFolder(pathlib.Path(sys.argv[1]))\n"
        "except RunError as error: print(error)"
    )
    assert "in use" in output_of(program, tmp_path / "program.py", folder.path)


def test_metrics_after_the_checkpoint_are_discarded(folder):
    folder.write(row(10))
    folder.save({"update": 10})
    folder.write(row(20))
    folder.close()
    again = RunFolder(folder.path)
    assert again.load()["update"] == 10
    again.write(row(20, loss=0.25))
    rows = read_record(again.path).progress
    assert [r["update"] for r in rows] == [10, 20]
    assert rows[-1]["loss"] == 0.25
    again.close()


def test_a_run_without_updates_begins_again(folder):
    folder.write(row(0, "evaluation", train_loss=2.5))
    folder.close()
    again = RunFolder(folder.path)
    assert again.load() is None
    again.write(row(0, "evaluation", train_loss=2.5))
    assert len(read_record(again.path).evaluations) == 1
    again.close()


def test_an_incomplete_last_row_is_ignored(folder):
    folder.write(row(10))
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "progress", "upd')
    assert [r["update"] for r in read_record(folder.path).progress] == [10]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", b"{", "damaged"),
        ("config.json", b"[]", "damaged"),
        ("config.json", b'{"format": 99}', "another version"),
        ("metrics.jsonl", b"nonsense\n{}\n", "line 1"),
        ("metrics.jsonl", b"3\n", "line 1"),
        ("metrics.jsonl", b'{"kind": "other", "update": 1}\n', "checksum is wrong"),
    ],
)
def test_damaged_files_are_named(folder, file, content, words):
    folder.close()
    (folder.path / file).write_bytes(content)
    with pytest.raises(RunError, match=words) as caught:
        read_record(folder.path)
    assert file in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04" + bytes(100)])
def test_a_damaged_checkpoint_is_refused(folder, content):
    (folder.path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(RunError, match=r"checkpoint\.pt is damaged"):
        folder.load()


def test_loading_a_checkpoint_runs_no_code(folder, tmp_path):
    class Bad:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/harm",)

    write_checkpoint(folder.path, {"update": 1, "bad": Bad()}, 1, replace_newest=False)
    with pytest.raises(RunError, match="not the checkpoint of a run"):
        folder.load()
    assert not (tmp_path / "harm").exists()


def test_metrics_shorter_than_the_checkpoint_are_refused(folder):
    folder.write(row(10))
    folder.save({"update": 10})
    folder.close()
    (folder.path / "metrics.jsonl").write_bytes(b"")
    again = RunFolder(folder.path)
    with pytest.raises(RunError, match="shorter"):
        again.load()
    again.close()


def test_a_folder_that_is_not_a_run(tmp_path):
    with pytest.raises(RunError, match="not a run"):
        read_record(tmp_path)


def test_a_folder_that_cannot_be_created(config):
    with pytest.raises(RunError, match="cannot be written"):
        RunFolder.create(Path("/proc/nowhere/run"), config, "digest", "KFC")


def test_an_unfinished_write_leaves_the_old_file(tmp_path):
    """A limit on the size of files makes the write fail half-way, like a full disk."""
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    program = """
import resource, pathlib, sys
from kfc.lab.disk import write_atomically
path = pathlib.Path(sys.argv[1])
write_atomically(path, b"good")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_atomically(path, bytes(10_000))
except OSError as error:
    print("refused:", error.strerror)
"""
    assert "refused" in output_of(program, tmp_path / "program.py", path)
    assert path.read_bytes() == b"good"
    assert os.listdir(path.parent) == ["file"]


def test_config_json_is_complete_and_readable(folder):
    header = json.loads((folder.path / "config.json").read_text())
    assert header["config"]["optimizer"] == "kfc"
    assert header["config"]["options"]["damping"] == 1e-3
    assert {"kfc", "torch", "python", "system", "processor", "cores"} <= set(header["environment"])


def test_atomic_writes_replace(tmp_path):
    write_atomically(tmp_path / "file", b"one")
    write_atomically(tmp_path / "file", b"two")
    assert (tmp_path / "file").read_bytes() == b"two"
