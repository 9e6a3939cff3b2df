"""Attack runs and optimizers at random, and check that nothing is corrupted silently.

`python tests/chaos.py --seed 0`, or `make chaos`, takes about ten minutes. Every attempt is
recorded in the folder when it has ended; the same command continues after an interruption, and
prints a table of all attempts. The exit code is 1 if there was silent corruption, a hang or a
traceback.
"""

import argparse
import json
import logging
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from kfc.lab.disk import locked

LIMIT_SECONDS = 300  # of one attempt, which takes seconds
PARTS = ("processes", "inside")


class FoundFault(Exception):  # noqa: N818
    """An attack that led to silent corruption, or to something else that must not happen."""


def attacks_of(part):
    """Return the attacks of a part: by name, their number for one seed and their function."""
    if part == "processes":
        from chaos_processes import ATTACKS
    else:
        from chaos_inside import ATTACKS
    return ATTACKS


@contextmanager
def limited_time():
    def stop(number, frame):
        raise FoundFault(f"it hangs: not over after {LIMIT_SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def attack(function, seed_text, scratch):
    """Return what an attempt led to: how many events of what outcome, or the fault."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        with limited_time():
            outcome, count = function(random.Random(seed_text), scratch)
    except FoundFault as fault:
        return {"outcome": "FAULT", "count": 1, "fault": str(fault)}
    except Exception:
        return {"outcome": "FAULT", "count": 1, "fault": traceback.format_exc(limit=-8)}
    return {"outcome": outcome, "count": count}


def run_part(part, seed, folder, minutes, only):
    """Make all attempts of a part that are not recorded yet, in random order.

    Only one process at a time can do this in a folder, since the attempts share runs.
    """
    place = folder / part
    place.mkdir(exist_ok=True)
    lock = locked(place)
    results = folder / f"{part}-{seed}.jsonl"
    known = {(row["attack"], row["number"]) for row in read(results)}
    attacks = attacks_of(part)
    plan = [(name, i) for name, (count, _) in attacks.items() for i in range(count)]
    random.Random(seed).shuffle(plan)
    latest = time.monotonic() + 60 * minutes
    with results.open("a") as file:
        for name, number in plan:
            if (name, number) in known or (only and not name.startswith(only)):
                continue
            if time.monotonic() > latest:
                break
            start = time.monotonic()
            found = attack(attacks[name][1], f"{seed} {name} {number}", place / "scratch")
            seconds = round(time.monotonic() - start, 2)
            row = {"attack": name, "number": number, "seconds": seconds, **found}
            file.write(json.dumps(row) + "\n")
            file.flush()
    lock.close()


def read(results):
    """Return the recorded attempts; the last line may be incomplete."""
    lines = results.read_text().split("\n")[:-1] if results.exists() else []
    return [json.loads(line) for line in lines]


def report(folder):
    """Print a table of all attempts of all seeds; return the faults."""
    rows = [row for file in sorted(folder.glob("*-*.jsonl")) for row in read(file)]
    counts = Counter()
    for row in rows:
        counts[row["attack"], row["outcome"]] += row["count"]
    totals = Counter()
    for (name, _), count in counts.items():
        totals[name] += count
    print("| attack | number | outcome | |\n|---|---|---|---|")
    for name, outcome in sorted(counts):
        print(f"| {name} | {totals[name]} | {outcome} | {counts[name, outcome]} |")
    faults = [row for row in rows if row["outcome"] == "FAULT"]
    for row in faults:
        print(f"\n{row['attack']} {row['number']}:\n{row['fault']}", file=sys.stderr)
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after this time")
    parser.add_argument("--folder", type=Path, default=Path(".chaos"), help="records and runs")
    parser.add_argument("--only", default="", help="attacks whose name begins with this")
    parser.add_argument("--part", choices=PARTS, help="run one part, in this process")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.part:
        warnings.simplefilter("ignore")
        logging.getLogger("kfc").setLevel(logging.ERROR)
        run_part(options.part, options.seed, folder, options.minutes, options.only)
        return 0
    # One process for each part: processes that are killed, and attacks inside of a process.
    command = [sys.executable, __file__, "--seed", options.seed, "--minutes", options.minutes]
    command += ["--folder", folder, "--only", options.only]
    running = [subprocess.Popen([*map(str, command), "--part", part]) for part in PARTS]
    ended = [process.wait() for process in running]
    return 1 if report(folder) or any(ended) else 0


if __name__ == "__main__":
    import chaos  # the module whose exceptions the attacks raise

    sys.exit(chaos.main())
