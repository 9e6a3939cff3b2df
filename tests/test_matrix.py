"""The script that runs the tests with several versions of Python and torch."""

import argparse
import sys
from pathlib import Path

import pytest

import matrix
from matrix import FAILED, PASSED, UNAVAILABLE, Outcome, Pair


def test_pairs_are_read_and_written():
    assert Pair.parse("3.12:2.14.1") == Pair("3.12", "2.14.1")
    assert str(Pair("3.12", "2.14.1")) == "3.12:2.14.1"
    for wrong in ("3.12", "2.14.1", "3.12:new", "3.12:2.14.1:"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"such as 3\.11:2\.13\.0"):
            Pair.parse(wrong)


def test_only_cpu_builds_are_installed(tmp_path, monkeypatch):
    """A build for CUDA has gigabytes."""
    asked = []
    monkeypatch.setattr(matrix, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(matrix, "_pip", lambda python, *arguments: asked.append(arguments[0]))
    monkeypatch.setattr("sys.platform", "linux")
    matrix.install(Pair("{}.{}".format(*sys.version_info[:2]), "2.13.0"))
    assert asked == ["torch==2.13.0+cpu"] * 2
    monkeypatch.setattr("sys.platform", "darwin")
    assert matrix.cpu_build("2.13.0") == "2.13.0"


def test_an_interpreter_that_does_not_run_is_passed_over(tmp_path, monkeypatch):
    shims, home = tmp_path / "shims", tmp_path / "home"
    own = home / ".pyenv" / "versions" / "3.99.1" / "bin"
    for folder, name, text in (
        (shims, "python3.99", "echo 'command not found' >&2; exit 127"),
        (own, "python", "echo Python 3.99.1"),
    ):
        folder.mkdir(parents=True)
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(shims), prepend=":")
    monkeypatch.setattr(Path, "home", lambda: home)
    assert matrix.find_python("3.99") == own / "python"
    with pytest.raises(matrix.UnavailableError, match=r"there is no python3\.98"):
        matrix.find_python("3.98")


def test_what_is_not_available_is_reported_and_not_recorded(tmp_path, monkeypatch, capsys):
    outcomes = {
        "3.98:1.0.0": Outcome(UNAVAILABLE, "there is no python3.98"),
        "3.11:2.13.0": Outcome(PASSED, "5 passed", "3.11.7 2.13.0+cpu 0.1.0"),
        "3.12:2.13.0": Outcome(FAILED, "1 failed", "3.12.1 2.13.0+cpu 0.1.0"),
    }
    monkeypatch.setattr(matrix, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(matrix, "run", lambda pair, tests: outcomes[str(pair)])
    monkeypatch.setattr("sys.argv", ["matrix.py", *outcomes])
    assert matrix.main() == 1
    printed = capsys.readouterr().out
    assert "| 3.98 | 1.0.0 | unavailable | there is no python3.98 |" in printed
    assert {key: row["status"] for key, row in matrix.recorded().items()} == {
        "3.11:2.13.0": PASSED,
        "3.12:2.13.0": FAILED,
    }
    monkeypatch.setattr("sys.argv", ["matrix.py", "3.11:2.13.0", "--tests", "tests/test_rooms.py"])
    monkeypatch.setattr(matrix, "RECORD", tmp_path / "other.json")
    assert matrix.main() == 0
    assert matrix.recorded() == {}, "a part of the suite is no claim"
