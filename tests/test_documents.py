"""What the documents show runs as written."""

import ast
import inspect
import itertools
import pydoc
import re
import textwrap
from pathlib import Path

import pytest
import torch

import kfc
import kfc.analysis

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "document",
    ["README.md", "docs/index.md", "docs/losses.md", "docs/layers.md", "docs/analysis.md"],
)
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


def test_the_loop_that_replaces_adamw_runs_and_so_does_the_one_before():
    """The two sides of the comparison in README.md, each as written."""
    text = (ROOT / "README.md").read_text()
    difference = re.search(r"```diff\n(.*?)```", text, re.S)[1]
    for removed in "+-":
        lines = [line[1:] for line in difference.splitlines() if line[:1] != removed]
        trained = []
        names = {
            "torch": torch,
            "F": torch.nn.functional,
            "evaluate": trained.append,
            "model": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10)),
            "loader": [(torch.randn(8, 3, 8, 8), torch.randint(10, (8,))) for _ in range(3)],
        }
        before = names["model"][1].weight.detach().clone()
        exec("\n".join(lines), names)
        assert trained == [names["model"]]
        assert not torch.equal(names["model"][1].weight, before)


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


def test_the_gallery_shows_the_commands_that_make_its_pages():
    made = re.findall(r"^\t\$\(IN_GALLERY\) (kfc .*)$", (ROOT / "Makefile").read_text(), re.M)
    shown = re.findall(r"^kfc .*$", (ROOT / "docs/gallery.md").read_text(), re.M)
    assert len(made) == 4
    assert shown == made


def referenced() -> dict[str, str]:
    """Return the options of every name in docs/reference.md."""
    text = (ROOT / "docs/reference.md").read_text()
    return dict(re.findall(r"^::: (\S+)\n((?:    .*\n)*)", text, re.M))


@pytest.mark.parametrize("module", [kfc, kfc.analysis, kfc.fisher, kfc.layers, kfc.moments])
def test_the_reference_has_every_public_name(module):
    documented = [pydoc.locate(name) for name in referenced()]
    assert None not in documented
    public = {name: getattr(module, name) for name in module.__all__}
    missing = [
        name
        for name, value in public.items()
        if not inspect.ismodule(value) and not any(value is each for each in documented)
    ]
    assert not missing


@pytest.mark.parametrize("name", ["KFC", "KFAC", "WhitenedAdam", "Preconditioner"])
def test_the_reference_has_every_public_method_of_the_optimizers(name):
    options = referenced()[f"kfc.{name}"]
    members = set(re.search(r"members: \[(.*)\]", options)[1].split(", "))
    assert "inherited_members: true" in options  # most methods are those of base classes
    classes = [each for each in getattr(kfc, name).__mro__ if each.__module__.startswith("kfc")]
    own = {
        attribute
        for each in classes
        for attribute, value in vars(each).items()
        if not attribute.startswith("_") and (callable(value) or isinstance(value, property))
    }
    # Whitening has no curvature, of which these would be.
    without = {"factors", "blocks"} if name == "WhitenedAdam" else set()
    assert members == own - without


MEASURED = re.compile(r"\d\.\d|\d%|\de-?\d")
COMMAND = re.compile(r"\bkfc [a-z]+|\bmake [a-z]+|\w+\.py\b|--[a-z]+")


def tables(path: Path) -> list[tuple[int, str, str]]:
    """Return the line of each table, what its section says before it, and its rows."""
    lines = path.read_text().splitlines()
    found, text = [], []
    for number, line in enumerate(lines, 1):
        if line.startswith("#"):
            text = []
        text.append(line)
        if re.fullmatch(r"\|[-:| ]+\|", line):
            rows = itertools.takewhile(lambda row: row.startswith("|"), lines[number:])
            found.append((number, "\n".join(text), "\n".join(rows)))
    return found


@pytest.mark.parametrize(
    "document",
    ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))],
)
def test_tables_of_measurements_name_their_command(document):
    """In their section, or in a sentence about all tables of the page."""
    page = (ROOT / document).read_text()
    start = page.split("\n## ")[0]
    if re.search(r"`(python|make) [^`]*`\s+repeats (these|the) measurements", start):
        return
    if re.search(r"[Tt]his page\s+(is|are)\s+(written|made) by `make", page):
        return
    if "A table that names no command comes from a script" in start:
        return
    unnamed = [
        f"line {number}"
        for number, text, rows in tables(ROOT / document)
        if len(MEASURED.findall(rows)) > 5 and not COMMAND.search(text)
    ]
    assert not unnamed


MODULES = {"F", "analysis", "dist", "kfc", "nn", "os", "torch", "DistributedDataParallel"}


@pytest.mark.parametrize(
    "document",
    ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))],
)
def test_snippets_import_the_modules_they_use(document):
    """In the snippet itself, or in one before it on the page."""
    imported = set()
    for snippet in re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.S):
        nodes = list(ast.walk(ast.parse(textwrap.dedent(snippet))))
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.asname or alias.name for alias in node.names]
                imported |= {name.partition(".")[0] for name in names}
        used = {node.id for node in nodes if isinstance(node, ast.Name)} & MODULES
        assert used <= imported, snippet
