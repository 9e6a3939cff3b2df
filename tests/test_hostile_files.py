"""Files that no run writes, in the places of a run's files: a sentence, and no change."""

import json
import os
import shutil
import sys
from types import NoneType

import pytest

from commands import assert_clear_error, kfc_here
from kfc.lab.comparison.settings import make_comparison, write_specification
from kfc.lab.disk import RunError, read_checked, write_checked
from kfc.lab.metrics import MEASURES, Position, encode
from kfc.lab.runs import read_record

SMALL = ("--data", "digits", "--batch-size", "128", "--threads", "1", "--log-period", "5")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    assert kfc_here("train", *SMALL, "--epochs", "2", "--out", path).returncode == 0
    return path


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def contents(path):
    return {file: file.is_file() and file.read_bytes() for file in path.rglob("[!.]*")}


@pytest.mark.skipif(sys.platform == "win32", reason="it has no named pipes")
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoint", ".lock"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_pipes_and_folders_in_the_place_of_files(copy, name, make):
    """The commands would wait for a pipe for ever."""
    for file in copy.glob(f"{name}*"):
        file.unlink()
        make(file)
    if name == ".lock" and not (copy / name).exists():
        make(copy / name)
    before = contents(copy)
    words = "has no config.json" if name == "config.json" else "is not a regular file"
    for command in ("train", "--resume"), ("inspect",), ("report", "-o", copy / "page.html"):
        reads = {"report": ("config.json", "metrics.jsonl"), "train": (name,)}
        if name in reads.get(command[0], (name,) if name != ".lock" else ()):
            assert_clear_error(kfc_here(*command, copy), 1, words)
            assert contents(copy) == before


def write_rows(path, rows):
    """Replace the metrics of a run by rows with correct checksums."""
    position, lines = Position.at_start(read_checked(path / "config.json")["run"]), []
    for row in rows:
        line, position = encode(row, position)
        lines.append(line)
    (path / "metrics.jsonl").write_bytes(b"".join(lines))


def rows_of(path):
    rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if name != "check"} for row in rows]


def of_other_types(value):
    types = ((int, float, NoneType), str, dict, list)
    [own] = [each for each in types if isinstance(value, each)]
    return [other for other in (3, "x", {}, []) if not isinstance(other, own)]


@pytest.mark.parametrize("kind", ["estimate", "evaluation", "progress", "end"])
def test_rows_with_values_of_wrong_types(copy, kind):
    rows = rows_of(copy)
    assert rows[0].keys() > set(MEASURES)
    index = next(index for index, row in enumerate(rows) if row["kind"] == kind)
    for name, value in rows[index].items():
        too_large = [10**400] if name in ("update", "epoch", "seconds") else []
        for other in (*of_other_types(value), *too_large):
            write_rows(copy, [*rows[:index], {**rows[index], name: other}, *rows[index + 1 :]])
            with pytest.raises(RunError, match=f"line {index + 1} is damaged: "):
                read_record(copy)


def test_rows_without_what_all_have(copy):
    rows = rows_of(copy)
    for index, name in ((0, "train_loss"), (0, "seconds"), (-1, "reason"), (0, "kind")):
        changed = [dict(row) for row in rows]
        del changed[index][name]
        write_rows(copy, changed)
        with pytest.raises(RunError, match=f"damaged: .*{name}"):
            read_record(copy)
    write_rows(copy, rows)
    assert read_record(copy).end["reason"] == "epochs"


def test_an_id_that_cannot_be_encoded(copy):
    file = copy / "config.json"
    write_checked(file, {**read_checked(file), "run": "\ud800"})
    with pytest.raises(RunError, match=r"config\.json is damaged.*surrogates"):
        read_record(copy)


def test_a_number_with_thousands_of_digits(tmp_path):
    (tmp_path / "long.toml").write_text(f"title = {'9' * 5000}")
    done = kfc_here("compare", tmp_path / "long.toml", "--out", tmp_path / "out")
    assert_clear_error(done, 2, "long.toml is not valid TOML", "4300 digits")


def test_a_refused_comparison_begins_no_run(tmp_path):
    """Although a run that it lacks comes before the one that cannot be continued."""
    comparison = make_comparison(
        {
            "title": "two",
            "settings": {"data": "digits", "updates": 3, "threads": 1},
            "methods": {"A": {"optimizer": "sgd"}, "B": {"optimizer": "adam"}},
        }
    )
    write_specification(tmp_path / "runs", comparison)
    assert kfc_here("compare", "--resume", tmp_path / "runs").returncode == 0
    shutil.rmtree(tmp_path / "runs" / "a-lr0.01")
    for file in tmp_path.glob("runs/b-*/checkpoint*"):
        file.write_bytes(b"nothing")
    before = contents(tmp_path)
    done = kfc_here("compare", "--resume", tmp_path / "runs", "--epochs", "2")
    assert_clear_error(done, 1, "checkpoint.pt is damaged")
    assert contents(tmp_path) == before
