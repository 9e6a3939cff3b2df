"""The random attacks of `make chaos`: a few of them, and whether faults are reported."""

import json

import pytest

import chaos
import chaos_inside


@pytest.mark.parametrize("name", ["bit flip", "truncation", "damaged comparison"])
def test_attacks_on_files_find_no_fault(name, tmp_path):
    _, function = chaos_inside.ATTACKS[name]
    for number in range(6):
        found = chaos.attack(function, f"test {name} {number}", tmp_path / "scratch")
        assert found["outcome"] != "FAULT", found["fault"]


def test_another_result_is_a_fault(tmp_path, monkeypatch):
    """A flip in the events of TensorBoard is harmless, but here the whole run is another."""

    def differ(*_):
        raise AssertionError("another number")

    monkeypatch.setattr(chaos_inside, "assert_same_run", differ)
    _, function = chaos_inside.ATTACKS["bit flip"]
    found = [chaos.attack(function, f"test {i}", tmp_path / "scratch") for i in range(6)]
    faults = [each["fault"] for each in found if each["outcome"] == "FAULT"]
    assert faults
    assert all("resumed with another result: another number" in each for each in faults), faults


def test_attempts_are_recorded_and_faults_reported(tmp_path, monkeypatch, capsys):
    attempts = []

    def fail_once(draws, scratch):
        attempts.append(draws.random())
        if len(attempts) == 2:
            raise chaos.FoundFault("silent corruption")
        return "well", 2

    monkeypatch.setattr(chaos, "attacks_of", lambda part: {"trial": (3, fail_once)})
    for _ in range(2):  # the second time, nothing is left to do
        chaos.run_part("inside", 5, tmp_path, 1.0, "")
    assert len(set(attempts)) == 3
    rows = [json.loads(line) for line in (tmp_path / "inside-5.jsonl").read_text().splitlines()]
    assert sorted(row["number"] for row in rows) == [0, 1, 2]
    (fault,) = chaos.report(tmp_path)
    assert fault["fault"] == "silent corruption"
    output = capsys.readouterr()
    assert "| trial | 5 | well | 4 |" in output.out
    assert "silent corruption" in output.err
