"""Which way imports go, and what `import kfc` needs."""

import ast
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import kfc

SOURCE = Path(kfc.__file__).parent

# Each room imports only from rooms above it.
ROOMS = [
    "checks",
    "periods",
    "budget",
    "generator",
    "randomness",
    "buffers",
    "skipping",
    "likelihoods",
    "spectral",
    "correlation",
    "patches",
    "stationary",
    "kronecker",
    "layers",
    "session",
    "capture",
    "fisher",
    "distributed",
    "curvature",
    "gathering",
    "description",
    "renewal",
    "schedule",
    "teamwork",
    "preconditioner",
    "analysis",
    "optimizers",
    "experiments",
    "report",
    "cli",
    "__main__",
]


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "kfc":
                names = [f"kfc.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("kfc.")}
    return found


def test_rooms_import_only_from_rooms_above_them():
    files = [p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py"]
    assert len(files) > 15
    for path in files:
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        allowed = set(ROOMS[: ROOMS.index(room) + 1])
        used = imported_rooms(path) & set(ROOMS)
        assert used <= allowed, f"{path.name} in {room} imports {used - allowed}"


def test_import_needs_torch_alone():
    blocked = ("numpy", "scipy", "sklearn", "rich", "plotly", "PIL", "typer", "pandas")
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


def test_stretch_starts_at_one_and_ends_at_its_limit():
    stretch = kfc.Stretch(10)
    due = [k for k in range(1, 1001) if k == 1 or k % stretch.at(k) == 0]
    gaps = [b - a for a, b in pairwise(due)]
    assert due[:23] == list(range(1, 24))
    assert max(gaps) == 10
    assert all(gap <= max(1, k / 12) for k, gap in zip(due[1:], gaps, strict=True) if k > 24)
    assert gaps[-5:] == [10] * 5
