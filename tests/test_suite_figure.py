"""The figure and the tables of the benchmark, from its recorded results."""

import json
from pathlib import Path

import pytest
import suite_figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("suite-*.json")), ids=lambda path: path.stem)
def test_the_documents_show_the_recorded_results(path):
    results = suite_figure.merged([path])
    assert suite_figure.tables(results) in (ROOT / "docs" / "experiments.md").read_text()


def test_the_figure_shows_the_recorded_results():
    results = suite_figure.merged([RESULTS / "suite-untuned.json"])
    assert (ROOT / "docs" / "pictures" / "suite.svg").read_text() == suite_figure.figure(results)


def run(workload, method, seed, seconds):
    return {
        "workload": workload,
        "method": method,
        "seed": seed,
        "seconds_to_target": seconds,
        "curve": [[1.23456, 10, 0.5]],
    }


def benchmark(path, workload, times):
    """Write results of two methods on one workload, with a list of times over seeds each."""
    runs = [run(workload, m, seed, t) for m, ts in times.items() for seed, t in enumerate(ts)]
    content = {
        "settings": {"methods": ["A", "B"], "rulesets": ["untuned"], "threads": 1},
        "workloads": {workload: {"goal": "a goal", "limit_seconds": 50.0, "metric": "test_error"}},
        "runs": runs,
    }
    path.write_text(json.dumps(content))
    return path


def test_benchmarks_are_merged_and_scored(tmp_path):
    paths = [
        benchmark(tmp_path / "one", "easy", {"A": [9.0, 10.0, 11.0], "B": [15.0, 20.0, None]}),
        benchmark(tmp_path / "two", "hard", {"A": [None, None, 8.0], "B": [4.0, 5.0, 6.0]}),
    ]
    results = suite_figure.merged(paths)
    assert suite_figure.times_of(results) == {
        "easy": {"A": 10.0, "B": 20.0},
        "hard": {"A": float("inf"), "B": 5.0},
    }
    text = suite_figure.tables(results)
    assert "| `easy` | a goal | **10** | 20 |" in text
    assert "| `hard` | a goal | > 20 | **5** |" in text  # runs end at four times the fastest
    assert "| B | 0.833 | 1.41 | 2 of 2 |" in text
    assert "| A | 0.500 | ≥ 2.00 | 1 of 2 |" in text


def test_later_files_replace_runs_and_add_methods(tmp_path):
    old = benchmark(tmp_path / "one", "easy", {"A": [9.0], "B": [5.0]})
    new = benchmark(tmp_path / "two", "easy", {"B": [7.0], "C": [8.0]})
    content = json.loads(new.read_text())
    content["settings"]["methods"] = ["B", "C"]
    new.write_text(json.dumps(content))
    results = suite_figure.merged([old, new])
    assert results["settings"]["methods"] == ["A", "B", "C"]
    assert suite_figure.times_of(results) == {"easy": {"A": 9.0, "B": 7.0, "C": 8.0}}


def test_tuned_results_have_tables_of_settings_and_test_errors(tmp_path):
    path = benchmark(tmp_path / "one", "easy", {"A": [9.0, 8.0, None], "B": [None]})
    content = json.loads(path.read_text())
    content["settings"]["rulesets"] = ["tuned"]
    values = zip(content["runs"], ["lr 1", "lr 2", "lr 3", "lr 4"], [7, 8, 9, None], strict=True)
    for run, setting, test in values:
        run |= {"setting": setting, "test": test}
    content["runs"].append({**content["runs"][0], "seconds_to_target": 10.0, "test": 1})
    path.write_text(json.dumps(content))
    tables = suite_figure.tables(suite_figure.merged([path]))
    assert "| `easy` | lr 2 | none |" in tables
    assert "| `easy` | 8% | - |" in tables  # the slower run of a seed does not count


def test_the_command_writes_both_files(tmp_path, monkeypatch, capsys):
    path = benchmark(tmp_path / "one", "easy", {"A": [9.0], "B": [None]})
    merged, svg = tmp_path / "merged.json", tmp_path / "figure.svg"
    arguments = ["suite_figure.py", str(path), "--json", str(merged), "--svg", str(svg)]
    monkeypatch.setattr("sys.argv", arguments)
    suite_figure.main()
    assert "| A | 1.000 |" in capsys.readouterr().out
    assert json.loads(merged.read_text())["runs"][0]["curve"] == [[1.235, 10.0, 0.5]]
    assert svg.read_text().count("<circle") == 4


def test_help(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["suite_figure.py", "--help"])
    with pytest.raises(SystemExit):
        suite_figure.main()
    assert "results.json" in capsys.readouterr().out
