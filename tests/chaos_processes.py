"""Attacks on processes: kills, a full disk, a clock that jumps."""

import json
import shutil
import subprocess
import time

from chaos import FoundFault
from commands import kfc, run_script, start_kfc
from test_kill import assert_same_run
from test_torchrun import Job

COMMON = ("--data", "digits", "--batch-size", "64", "--epochs", "3", "--evaluation-period", "0.4")
COMMON += ("--checkpoint-seconds", "0.02", "--log-period", "1", "--threads", "1")
METHODS = ("kfc", "kfac", "whitened-adam", "sgd", "adam", "muon")
COMPARISON = """
title = "chaos"
slice_seconds = 0.05
[settings]
data = "digits"
batch_size = 64
epochs = 2
evaluation_period = 0.5
checkpoint_seconds = 0.02
log_period = 1
threads = 1
[methods.SGD]
optimizer = "sgd"
[methods.KFC]
optimizer = "kfc"
"""


def require_end(done, codes=(0,)):
    """Raise a fault unless a command has ended with one of these codes, without a traceback."""
    output = done.stdout + done.stderr
    if done.returncode not in codes or "Traceback" in output:
        raise FoundFault(f"exit code {done.returncode} of {done.args}:\n{output[-2000:]}")


def require_same(path, whole):
    try:
        assert_same_run(path, whole)
    except AssertionError as error:
        raise FoundFault(f"{path} was resumed, and is not the whole run: {error}") from error


def reference(folder, name, make):
    """Return the folder of an undisturbed run, made once, and the seconds that it took."""
    path = folder.parent / "references" / name
    done = path.with_suffix(".json")
    if not done.exists():
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(exist_ok=True)
        kfc("--version")  # starts the server that forks
        start = time.monotonic()
        make(path)
        done.write_text(json.dumps(time.monotonic() - start))
    return path, json.loads(done.read_text())


# Kills


def size_of_metrics(path):
    return sum(file.stat().st_size for file in path.rglob("metrics.jsonl"))


def wait_for_moment(draws, processes, path, whole, seconds):
    """Wait for a random moment; return whether none of the processes has ended before.

    The moment is a time, a row of the metrics, or one in the middle of a checkpoint.
    """
    kind = draws.choice(("time", "row", "checkpoint"))
    start, latest = time.monotonic(), draws.uniform(0.0, 1.0) * seconds
    done = size_of_metrics(path)
    rest = max(0, size_of_metrics(whole) - done)
    size = done + draws.uniform(0.0, 0.5) * rest
    while all(process.poll() is None for process in processes):
        if kind == "time" and time.monotonic() - start > latest:
            return True
        now = size_of_metrics(path)
        if kind == "row" and now > size:
            time.sleep(draws.uniform(0.0, 0.02))
            return True
        # Drafts of checkpoints exist only for a moment, and may not be seen.
        seen = kind == "checkpoint" and next(path.rglob(".checkpoint*.part"), None)
        if kind == "checkpoint" and now > (size if seen else size + 0.3 * rest):
            return True
        time.sleep(0.001)
    return False


def kill_repeatedly(draws, command, first, path, whole, seconds, attempts):
    """Kill a command and resume it several times, then let it end; return the number of kills.

    Args:
        first: the arguments that begin the run, or the runs.
    """

    def arguments():
        return (command, *(("--resume", path) if path.exists() else (*first, "--out", path)))

    kills = 0
    for _ in range(attempts):
        process = start_kfc(*arguments())
        if not wait_for_moment(draws, [process], path, whole, seconds):
            require_end(process.completed())
            break
        process.kill()
        kills += 1
    require_end(kfc(*arguments()))
    return kills


def undisturbed(scratch, method):
    """Return the folder of a whole run with an optimizer, and the seconds that it took."""
    settings = (*COMMON, "--optimizer", method)
    return reference(
        scratch, method, lambda path: require_end(kfc("train", *settings, "--out", path))
    )


def kill_train(draws, scratch):
    method = draws.choice(METHODS)
    whole, seconds = undisturbed(scratch, method)
    path, first = scratch / "run", (*COMMON, "--optimizer", method)
    attempts = draws.randint(4, 8)
    kills = kill_repeatedly(draws, "train", first, path, whole, seconds, attempts)
    require_same(path, whole)
    return "resumed bit for bit", kills


def kill_compare(draws, scratch):
    definition = scratch.parent / "chaos.toml"
    definition.write_text(COMPARISON)
    whole, seconds = reference(
        scratch,
        "comparison",
        lambda path: require_end(kfc("compare", definition, "--out", path)),
    )
    path, attempts = scratch / "runs", draws.randint(3, 5)
    kills = kill_repeatedly(draws, "compare", (definition,), path, whole, seconds, attempts)
    for each in whole.glob("*/"):
        require_same(path / each.name, each)
    return "resumed bit for bit", kills


def kill_ranks(draws, scratch):
    """Kill one of two ranks, or both; the other has to end by itself."""
    settings = (*COMMON, "--optimizer", draws.choice(("kfc", "sgd")), "--timeout", "10s")

    def make(path):
        for done in Job(path.parent).run(2, "train", *settings, "--out", path):
            require_end(done)

    whole, seconds = reference(scratch, f"two-{settings[-3]}", make)
    path, kills = scratch / "run", 0

    def way():
        return ("--resume", path) if path.exists() else (*settings, "--out", path)

    for _ in range(draws.randint(2, 3)):
        ranks = Job(scratch).start(2, "train", *way(), *(settings[-2:] if path.exists() else ()))
        wait_for_moment(draws, ranks, path, whole, seconds)
        for rank in draws.choice(((0,), (1,), (0, 1), (1, 0))):
            if ranks[rank].poll() is None:
                ranks[rank].kill()
                kills += 1
        for command in ranks:
            command.wait(60)
            if command.poll() != -9:
                require_end(command.completed(), (0, 1))
    for done in Job(scratch).run(2, "train", *way()):
        require_end(done)
    require_same(path, whole)
    return "resumed bit for bit", kills


# The disk and the clock


LIMITED = """
import resource, sys
size = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
sys.argv = ["kfc", *sys.argv[2:]]
from kfc.lab.cli import app
app()
"""


def fill_disk(draws, scratch):
    """Let the disk be full in the course of a run, then continue with enough space."""
    settings = (*COMMON, "--optimizer", "kfc")
    whole, _ = undisturbed(scratch, "kfc")
    size = (whole / "checkpoint.pt").stat().st_size
    disk = scratch / "disk"
    disk.mkdir()
    limit = int(size * draws.uniform(0.1, 3.0))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={limit}", "tmpfs", disk],
        capture_output=True,
        check=False,
    )
    path = disk / "run"
    try:
        if mounted.returncode == 0:
            done = kfc("train", *settings, "--out", path)
        else:
            script = scratch / "limited.py"
            script.write_text(LIMITED)
            limit = int(size * draws.uniform(0.01, 1.0))
            done = run_script(script, limit, "train", *settings, "--out", path)
        require_end(done, (0, 1))
        if done.returncode == 1 and "cannot be written" not in done.stderr:
            raise FoundFault(done.stderr)
        kept = shutil.copytree(path, scratch / "run") if path.exists() else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", disk], check=False)
    if kept is None:
        return "no run was begun", 1
    require_end(kfc("train", "--resume", kept))
    require_same(kept, whole)
    return "ended with a sentence, resumed bit for bit", 1


JUMPING = """
import itertools, random, sys, time
draws, real, offsets = random.Random(sys.argv[1]), time.perf_counter, itertools.accumulate(
    iter(lambda: draws.choice([0.0] * 50 + [3600.0]), None))
time.time = lambda: draws.uniform(0, 4e9)
import kfc.lab.costs
kfc.lab.costs.perf_counter = lambda: real() + next(offsets)
sys.argv = ["kfc", *sys.argv[2:]]
from kfc.lab.cli import app
app()
"""


def jump_clock(draws, scratch):
    """Let the time of day be random, and the timer jump forward by hours."""
    settings = (*COMMON, "--optimizer", "kfc")
    whole, _ = undisturbed(scratch, "kfc")
    script = scratch / "jumping.py"
    script.write_text(JUMPING)
    path = scratch / "run"
    require_end(run_script(script, draws.random(), "train", *settings, "--out", path))
    require_same(path, whole)
    return "trained bit for bit", 1


# By name, the number of attempts for one seed, and the function. A run is killed several times.
ATTACKS = {
    "kill of train": (20, kill_train),
    "kill of compare": (5, kill_compare),
    "kill of two ranks": (6, kill_ranks),
    "full disk": (8, fill_disk),
    "jumping clock": (5, jump_clock),
}
