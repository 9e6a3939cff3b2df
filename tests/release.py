"""Build the wheel and the source distribution, and check that both install and work.

    python tests/release.py

Each is installed in an environment of its own, in a temporary folder outside of the repository:
first torch, pinned, and the package alone, with which ``tests/smoke.py`` trains three steps; then
the extra "experiments", with which ``kfc demo`` writes its page. ``make release`` runs this, and
prints what to upload.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
# Files that are not Python, which a wrong configuration of the build leaves out.
PACKAGED = (
    "kfc/py.typed",
    "kfc/lab/presets/demo.toml",
    "kfc/lab/report/templates/base.html",
    "kfc/lab/report/vendor/plotly-cartesian.min.js.gz",
    "kfc_command.py",
)
WITHOUT_EXTRA = 'pip install "kfc-torch[experiments]"'


class ReleaseError(Exception):
    """What keeps the package from being released."""


def run(*command: str | Path, folder: Path = ROOT, fails: bool = False) -> str:
    """Return what a command prints.

    Args:
        fails: whether the command has to fail.
    """
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if bool(done.returncode) != fails:
        raise ReleaseError(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n"
            f"{done.stdout}{done.stderr}"
        )
    return done.stdout + done.stderr


def version() -> str:
    """Return the version of the code, if change log and citation have the same."""
    found = {
        name: (re.search(pattern, (ROOT / name).read_text(), re.M) or [None, None])[1]
        for name, pattern in {
            "src/kfc/__init__.py": r'^__version__ = "(.+)"$',
            "CHANGELOG.md": r"^## (\S+)",
            "CITATION.cff": r'^version: "?([^"\s]+)"?$',
        }.items()
    }
    if len(set(found.values())) > 1 or None in found.values():
        raise ReleaseError(f"the versions differ: {found}")
    return str(found["src/kfc/__init__.py"])


def build(expected: str) -> list[Path]:
    """Return the wheel and the source distribution."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    wheel = DIST / f"kfc_torch-{expected}-py3-none-any.whl"
    source = DIST / f"kfc_torch-{expected}.tar.gz"
    if found := {wheel, source} ^ set(DIST.iterdir()):
        raise ReleaseError(f"missing or not expected in dist: {sorted(map(str, found))}")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    return [wheel, source]


def check_content(package: Path) -> None:
    """Raise an error if a package lacks files, or has some that do not belong in it."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            names, prefix = archive.namelist(), ""
        foreign = [name for name in names if not re.match(r"kfc/|kfc_command\.py|kfc_torch-", name)]
    else:
        with tarfile.open(package) as archive:
            names = archive.getnames()
        prefix = f"{package.name.removesuffix('.tar.gz')}/src/"
        foreign = [name for name in names if re.search(r"\.(pyc|pt|venv)|/runs/", name)]
    if missing := [name for name in PACKAGED if prefix + name not in names]:
        raise ReleaseError(f"{package.name} lacks {missing}")
    if foreign:
        raise ReleaseError(f"{package.name} must not contain {foreign}")


def try_out(package: Path, folder: Path) -> None:
    """Install a package in a clean environment, and use it with torch alone and with the extra."""
    run(sys.executable, "-m", "venv", folder / "venv")
    commands = folder / "venv" / "bin"
    python, kfc = commands / "python", commands / "kfc"
    pinned = (ROOT / "constraints.txt").read_text()
    torch = next(line for line in pinned.splitlines() if line.startswith("torch=="))
    # What is installed with the package must agree with torch, and be a version we tested.
    pip = (python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    run(*pip, torch, folder=folder)
    before = installed(python)
    run(*pip, package, folder=folder)
    if installed(python) - before != {"kfc-torch"}:
        raise ReleaseError(f"kfc needs more than torch: {installed(python) - before}")
    shutil.copy(ROOT / "tests" / "smoke.py", folder)
    print(run(python, "smoke.py", folder=folder).splitlines()[-1], flush=True)
    if WITHOUT_EXTRA not in run(kfc, "demo", folder=folder, fails=True):
        raise ReleaseError("without its extra, the command does not say how to install it")
    run(*pip, f"{package}[experiments]", folder=folder)
    run(kfc, "demo", "--out", folder / "demo", folder=folder)
    page = folder / "demo" / "report.html"
    if "WhitenedAdam" not in page.read_text():
        raise ReleaseError("kfc demo has not written its page")
    print(
        f"{package.name}: kfc demo wrote a page of {page.stat().st_size / 1e6:.1f} MB", flush=True
    )


def installed(python: Path) -> set[str]:
    """Return the names of the packages of an environment."""
    lines = run(python, "-m", "pip", "list", "--format=freeze").splitlines()
    return {line.partition("==")[0] for line in lines if "==" in line}


def main() -> int:
    try:
        packages = build(version())
        for package in packages:
            check_content(package)
            with tempfile.TemporaryDirectory() as folder:
                try_out(package, Path(folder))
    except ReleaseError as error:
        print(f"not ready for release: {error}", file=sys.stderr)
        return 1
    print("\nBoth packages install and work. To upload them:\n")
    paths = [sys.executable, *packages]
    python, *names = (Path(path).absolute().relative_to(ROOT) for path in paths)
    print(f"    {python} -m twine upload {' '.join(map(str, names))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
