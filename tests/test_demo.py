"""The command line, through real processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kfc
from kfc.cli import app
from kfc.experiments.data import load_digits
from kfc.experiments.training import Evaluation, Run
from kfc.report.page import write_page
from kfc.report.table import summary_rows


def command(*arguments: str) -> subprocess.CompletedProcess:
    program = [sys.executable, "-c", "from kfc.cli import app; app()", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(program, capture_output=True, text=True, check=False, env=environment)


def test_demo_prints_a_table_and_writes_a_page(tmp_path):
    page = tmp_path / "folder" / "demo.html"
    done = command("demo", "--epochs", "2", "--out", str(page))
    assert done.returncode == 0, done.stderr
    for word in ("SGD", "KFC", "epochs", "updates", "seconds", "train loss", "test error"):
        assert word in done.stdout
    text = page.read_text()
    assert "Plotly.newPlot" in text
    assert "<script src=" not in text, "the page must not need a network"


def test_bad_arguments_have_an_exit_code_and_a_message(tmp_path):
    folder = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert folder.exit_code == 2
    assert "is a folder" in folder.output
    assert CliRunner().invoke(app, ["demo", "--epochs", "0"]).exit_code == 2
    blocked = tmp_path / "file"
    blocked.write_text("")
    unwritable = CliRunner().invoke(app, ["demo", "--epochs", "1", "--out", f"{blocked}/demo.html"])
    assert unwritable.exit_code == 1


def test_version_and_help():
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0
    assert command("--version").stdout.strip() == f"kfc {kfc.__version__}"


def test_digits_are_the_embedded_data_set():
    data = load_digits()
    assert len(data.train_labels) + len(data.test_labels) == 1797
    assert data.train_images.shape[1:] == (1, 8, 8)
    assert set(data.test_labels.tolist()) == set(range(10))
    torch.testing.assert_close(data.train_images.mean(0), torch.zeros(1, 8, 8), atol=1e-6, rtol=0)


def example_run(name: str, error: float) -> Run:
    start = Evaluation(0, 0, 0.0, 2.3, 90.0, 2.3, 90.0)
    return Run(name, "settings", [start, Evaluation(1, 10, 0.5, 0.1, error, 0.2, 5.0)])


def test_table_says_when_the_target_was_reached():
    rows = summary_rows([example_run("a", 0.5), example_run("b", 3.0)])
    assert rows[0] == ("optimizer", "a", "b")
    assert rows[-1][1:] == ("10", "not reached")


def test_names_are_escaped(tmp_path):
    page = tmp_path / "page.html"
    write_page(page, "<b>title", "text & more", [example_run("<script>x", 1.0)])
    text = page.read_text()
    assert "<b>title" not in text
    assert "<th>&lt;script&gt;x</th>" in text
    assert "text &amp; more" in text


ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("document", ["README.md", "docs/index.md", "docs/layers.md"])
def test_snippets_in_the_documents_run(document):
    """As written, one after the other, on a model and a loader."""
    names = {
        "model": torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 10)
        ),
        "loader": [(torch.randn(8, 3, 8, 8), torch.randint(10, (8,))) for _ in range(3)],
        "evaluate": lambda model: None,
    }
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.S)
    assert snippets
    for index, snippet in enumerate(snippets):
        exec(compile(snippet, f"{document}, snippet {index}", "exec"), names)


def test_the_documented_layer_has_the_right_factors():
    """The worked example of docs/layers.md, against the layer's own Jacobian."""
    names: dict = {}
    text = (ROOT / "docs/layers.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", text, re.S)[0], names)
    layer = names["model"][1].double()
    inputs = torch.randn(5, 64, dtype=torch.float64)
    preconditioner = kfc.Preconditioner(names["model"])
    names["model"](inputs).sum().backward()
    preconditioner.step()
    row_of = torch.func.jacrev(
        lambda weight, bias: torch.func.functional_call(
            layer, {"weight": weight, "bias": bias}, (inputs,)
        )[:, 0],
        argnums=(0, 1),
    )
    weight, bias = row_of(layer.weight.detach(), layer.bias.detach())
    rows = torch.cat([bias[:, :1], weight[:, 0]], dim=1)
    torch.testing.assert_close(preconditioner.factors["1"].activation, rows.T @ rows / 5)
