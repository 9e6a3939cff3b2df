"""Test the output of the benchmark program at the smallest sizes."""

import json
import subprocess
from pathlib import Path

import pytest

from commands import run_script

RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script(RUN, "--threads", "1", *arguments)


def measure(network: str, folder: Path, *sections: str) -> tuple[dict, str, str]:
    """Return the results, the printed tables and the page of one method."""
    options = ["--network", network, "--batch", "4", "--repeats", "1", "--out", str(folder)]
    done = bench("--only", "kfc, every step, no*", "--sections", *sections, *options)
    assert done.returncode == 0, done.stderr
    results = json.loads((folder / f"{network}-4.json").read_text())
    assert results["failures"] == {}
    return results, done.stdout, (folder / f"{network}-4.html").read_text()


def test_results_tables_and_page(tmp_path):
    results, printed, page = measure("resnet18-quarter", tmp_path, "steps")
    assert [row["method"] for row in results["steps"]] == ["SGD", "KFC, every step, no clip"]
    assert all(row["milliseconds"] > 0 for row in results["steps"])
    assert {"device", "threads", "torch"} <= results["machine"].keys()
    assert "kfc-torch" in results["versions"]
    assert "| KFC, every step, no clip |" in printed
    assert "<svg" in page
    assert "http" not in page


@pytest.mark.slow
@pytest.mark.parametrize("network", ["cifar10", "svhn", "vgg"])
def test_first_steps_and_memory(network, tmp_path):
    results, _, page = measure(network, tmp_path, "steps", "first")
    assert all(row["mebibytes"] >= 0.99 * row["sgd_mebibytes"] > 0 for row in results["first"])
    assert "First step and memory" in page


def test_a_library_that_is_not_installed_is_reported(tmp_path):
    options = ["--batch", "4", "--repeats", "1", "--sections", "steps", "--out", str(tmp_path)]
    done = bench("--only", "NNGeometry KFAC, every step", *options)
    assert done.returncode == 0, done.stderr
    failures = json.loads((tmp_path / "cifar10-4.json").read_text())["failures"]
    assert "No module named 'nngeometry'" in failures["NNGeometry KFAC, every step"]
    assert "No module named" in done.stdout
    assert "No module named" in (tmp_path / "cifar10-4.html").read_text()


def test_a_pattern_without_a_match_is_an_error():
    done = bench("--only", "KFCC")
    assert done.returncode != 0
    assert "no method matches ['KFCC']" in done.stderr
