"""The rooms of the code: which may import which, how large their files are, what they need."""

import ast
import dataclasses
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kfc

SOURCE = Path(kfc.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# From the top to the bottom: a room imports only from itself and from rooms below it.
ROOMS = [
    "lab/",
    "analysis/",
    "optimizers/",
    "distributed/",
    "statistics/",
    "fisher/",
    "curvature/",
    "distributed/reducer.py",
    "layers/",
    "distributed/synchronised.py",
    "moments/",
    "schedule.py",
    "_*.py",
]

LONGEST_FILE, LONGEST_FUNCTION, MOST_ARGUMENTS = 400, 60, 16


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def room_of(name: str) -> str:
    """Return the room of a file, given by its path relative to the package."""
    if name == "__main__.py":
        return "lab/"
    if name == "__init__.py":  # the public names, which come from the optimizers and below
        return "optimizers/"
    if name in ROOMS:
        return name
    top, *inside = name.split("/")
    return f"{top}/" if inside else "_*.py" if top.startswith("_") else top


def file_of(module: str) -> str | None:
    """Return the file of a module of the package, relative to it; ``None`` if there is none."""
    path = SOURCE.joinpath(*module.split(".")[1:])
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if candidate.is_file():
            return name_of(candidate)
    return None


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those under ``if TYPE_CHECKING:``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from at_run_time(node)


def imported_files(path: Path) -> set[str]:
    """Return the files of the package that a file imports, anywhere in it.

    The reducer is the interface that both sides share. It may name types of the rooms above it.
    """
    tree = ast.parse(path.read_text())
    nodes = at_run_time(tree) if name_of(path) == "distributed/reducer.py" else ast.walk(tree)
    modules = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name if file_of(name) else str(node.module) for name in inner}
    found = {module: file_of(module) for module in modules if module.split(".")[0] == "kfc"}
    unknown = [module for module, name in found.items() if name is None]
    assert not unknown, f"{path} imports {unknown}, which do not exist"
    return {name for name in found.values() if name is not None}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_rooms_import_only_from_rooms_below_them(path):
    own = ROOMS.index(room_of(name_of(path)))
    too_high = [name for name in imported_files(path) if ROOMS.index(room_of(name)) < own]
    assert not too_high, f"{name_of(path)} is in {ROOMS[own]} and must not import {too_high}"


def test_contributing_lists_the_same_rooms():
    text = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
    section = re.search(r"^## The rooms$(.*?)^## ", text, re.M | re.S).group(1)
    rows = re.findall(r"^\| `(.+?)` \| .+ \|$", section, re.M)
    assert rows == ROOMS


def test_every_room_exists_and_every_file_has_one():
    assert {room_of(name_of(path)) for path in FILES} == set(ROOMS)


def test_the_top_level_has_one_private_module():
    files = {path.name for path in SOURCE.glob("*.py")}
    private = {name for name in files if re.match("_[^_]", name)}
    assert len(private) <= 1, f"join {sorted(private)}"
    assert files - private == {"__init__.py", "__main__.py", "schedule.py"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        where = f"{node.name}, line {node.lineno}"
        assert node.end_lineno - node.lineno + 1 <= LONGEST_FUNCTION, f"{where} is too long"
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        assert count <= MOST_ARGUMENTS, f"{where} has {count} arguments"


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "__main__.py"], ids=name_of)
def test_constructors_of_dataclasses_have_few_arguments(path):
    parts = ["kfc", *path.relative_to(SOURCE).with_suffix("").parts]
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    for owner in filter(dataclasses.is_dataclass, vars(module).values()):
        arguments = [field for field in dataclasses.fields(owner) if field.init]
        assert len(arguments) <= MOST_ARGUMENTS, owner


# Assignments to attributes that are not fields of another object of ours.
ALLOWED = (
    "self._thread.",  # threading.local
    "_thread.",
    "ctx.",  # torch.autograd.Function
    "weight.grad",
    "matrix.grad",
    "output.grad",
    "call.__",  # functools
    "table.",  # rich
    "TEMPLATES.globals",  # jinja2
    "function._torchdynamo_disable",
    "function.__defaults__",  # of torch
    "config.skip_nnmodule_hook_guards",  # torch._dynamo
)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_fields_are_assigned_by_their_own_object(path):
    for node in ast.walk(ast.parse(path.read_text())):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        flat = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
        for target in flat:
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                text = ast.unparse(target)
                own = re.fullmatch(r"(self|cls)\.\w+", text)
                assert own or text.startswith(ALLOWED), f"line {target.lineno} assigns {text}"


def test_import_needs_torch_alone():
    blocked = (
        *("numpy", "scipy", "sklearn", "PIL", "pooch", "pandas"),
        *("rich", "typer", "plotly", "jinja2", "tensorboard"),
    )
    program = f"""
import sys
sys.modules.update(dict.fromkeys({blocked!r}))  # importing any of these now fails
import torch, kfc, kfc.analysis
model = torch.nn.Linear(2, 3)
optimizer = kfc.KFC(model)
model(torch.randn(4, 2)).sum().backward()
optimizer.step()
optimizer.describe()
kfc.analysis.compare_approximations(model, torch.randn(4, 2))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
