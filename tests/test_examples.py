"""The examples run as scripts and reach a good result."""

import re
from pathlib import Path

import pytest

from commands import run_script

EXAMPLES = Path(__file__).parent.parent / "examples"

# The least percentage in the last line printed; each example reaches a few percent more.
LEAST = {
    "digits": ("test accuracy", 92),
    "segmentation": ("test overlap", 85),
    "signals": ("test accuracy", 93),
    "tuple_output": ("test accuracy", 96),
    "hessian_free": ("test accuracy", 90),
}


def run(name: str) -> str:
    done = run_script(EXAMPLES / f"{name}.py")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", LEAST)
def test_example_reaches_a_good_result(name):
    measure, least = LEAST[name]
    percentages = re.findall(rf"{measure} ([\d.]+)%", run(name))
    assert float(percentages[-1]) > least


def test_every_example_is_tested_and_listed():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == set(LEAST)
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"{name}.py" in listed for name in scripts)


@pytest.mark.parametrize("name", LEAST)
def test_examples_import_only_the_public_library(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    imported = re.findall(r"^(?:import|from) (\S+)", text, re.M)
    assert "kfc" in imported
    assert set(imported) <= {"kfc", "math", "sklearn.datasets", "torch", "torch.nn.functional"}
