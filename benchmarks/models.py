"""How public architectures are treated, and what a step costs; writes docs/models.md.

Each model has a process of its own, with limits of time and memory. Results are saved after each
model in docs/results/models.json. Models that have run without failures are left out, unless
--again is given.
Times are CPU seconds of one thread; SGD, KFC and WhitenedAdam take steps in turns.

    python benchmarks/models.py
    python benchmarks/models.py --again --only "timm/res*"

--treatment repeats only how models are treated, with one step of KFC, and keeps the times.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import os
import re
import resource
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from fnmatch import fnmatch
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from architectures import ARCHITECTURES, LIBRARIES
from machine import machine, versions
from torch import Tensor, nn
from vision import declare_operators

import kfc

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "results" / "models.json", ROOT / "docs" / "models.md"
FORKS = get_context("fork")
MEMORY = 10 * 2**30
LEAST_STEPS = 6
# The smallest share of weights without curvature for which the table says why.
NOTABLE = 0.02
METHODS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9),
    "KFC": kfc.KFC,
    "WhitenedAdam": kfc.WhitenedAdam,
}
INTRODUCTION = """# Models

How kfc treats {count} public architectures, and what a step costs, with default settings. This page
is written by `make models`, which continues where it was interrupted;
`make models MODELS='--again --only "timm/*"'` repeats some.

- Models have random weights. Those of Transformers are small ({small}). Batches have {images}
  images of mostly 64x64 pixels, or {sentences} sequences of {tokens} tokens. These are small
  batches: the cost of curvature relative to the passes falls as batches grow.
- **weights**: trained weights. **curvature**: the share of them with a Fisher block in `kfc.KFC`;
  the others have scaled gradients.
- **factors**, **inverses**: the memory of `kfc.KFC`, as the start-up line says.
- **expected**: the counted cost of a step of `kfc.KFC` in the long run, in forward and backward
  passes: 1 + N + min(S/10 + I/20, what the overhead of 0.2 leaves), where S, I and N are the costs
  of statistics, inverses and natural gradients in the start-up line. Exact Fisher norms, and the
  time of starting operations, which small models mostly consist of, are not in it.
- **KFC**, **WhitenedAdam**: CPU time of a step on one thread, relative to SGD with momentum: of the
  median step / on average. Methods took **steps** in turns, so many of each, of which the first
  half is left out: refreshes and exact Fisher norms are most frequent in the first steps. With few
  steps, costs are those of the start of training. Times may be older than the other columns,
  and from another processor: `--treatment` repeats the other columns and keeps the times.
- **notes**: why a notable share of the weights has no curvature, and the first warning.

{device}, torch {torch}, {versions}, {date}.

| model | weights | curvature | factors | inverses | expected | steps | KFC | WhitenedAdam | notes |
|---|---|---|---|---|---|---|---|---|---|
"""


# In the process of a model


def measure(name: str, steps: int, seconds: float, methods: Collection[str]) -> dict[str, Any]:
    """Return how a model is treated, and the times of the steps of methods after the first."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss_of = ARCHITECTURES[name]()
    model.train()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("kfc")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    runs, failures, reasons = {}, {}, {}
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for method in methods:
            mine = copy.deepcopy(model)
            try:
                optimizer = METHODS[method](mine)
                run = stepper(mine, optimizer, loss_of)
                run()
                if isinstance(optimizer, kfc.KFC):
                    reasons = without_curvature(optimizer)
            except Exception as error:
                failures[method] = f"{type(error).__name__}: {error}"
            else:
                runs[method] = run
        times: dict[str, list[float]] = {method: [] for method in runs}
        for done in range(steps):
            if done >= LEAST_STEPS and time.process_time() - start > seconds:
                break
            for method, run in list(runs.items()):
                try:
                    times[method].append(run())
                except Exception as error:
                    failures[method] = f"{type(error).__name__}: {error}"
                    del runs[method], times[method]
    found = [str(each.message) for each in caught if "kfc" in str(each.filename)]
    return {
        **understood(lines),
        "without": reasons,
        "times": {method: [round(each, 5) for each in all_] for method, all_ in times.items()},
        "failures": failures,
        "warnings": list(dict.fromkeys(found)),
    }


def without_curvature(optimizer: kfc.KFC) -> dict[str, float]:
    """Return the shares of trained weights without a Fisher block, by the reason."""
    trained = {n: p for n, p in optimizer.engine.model.named_parameters() if p.requires_grad}
    total, shares = sum(p.numel() for p in trained.values()), Counter[str]()
    for name, reason in optimizer.engine.plan.plain.items():
        shares[reason] += trained[name].numel() / total if name in trained else 0
    return {reason: round(share, 4) for reason, share in shares.most_common()}


def stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[nn.Module], Tensor]
) -> Callable[[], float]:
    """Return a function that takes a step and returns its CPU seconds."""

    def step() -> float:
        start = time.process_time()
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        seconds = time.process_time() - start
        if not math.isfinite(loss.item()):
            raise FloatingPointError("the loss is not finite")
        return seconds

    return step


def understood(lines: list[str]) -> dict[str, Any]:
    """Return the numbers of the start-up line of KFC, which comes first."""
    line = next((line for line in lines if " trained weights have curvature" in line), "")
    share = re.search(r"([\d.]+)% of ([\d,]+) trained weights", line)
    memory = re.search(r"factors ([\d.]+ \w+), inverses ([\d.]+ \w+)", line)
    costs = {
        name: float(found[1])
        for name in ("statistics", "inverses", "natural gradient")
        if (found := re.search(rf"\(multiply-adds\):.*?{name} ([\d.e+-]+)", line))
    }
    return {
        "share": float(share[1]) if share else None,
        "weights": int(share[2].replace(",", "")) if share else None,
        "factors": memory[1] if memory else None,
        "inverses": memory[2] if memory else None,
        "costs": costs,
    }


# The table


def expected_cost(costs: dict[str, float], overhead: float = 0.2) -> float | None:
    """Return the cost of a step in the long run, in forward and backward passes."""
    if len(costs) < 3:
        return None
    natural = costs["natural gradient"]
    left = max(overhead - natural, 0.3 * overhead)
    return 1 + natural + min(costs["statistics"] / 10 + costs["inverses"] / 20, left)


def row(name: str, result: dict[str, Any]) -> str:
    """Return a line of the table."""
    expected, times = expected_cost(result.get("costs", {})), result.get("times", {})
    plain = times.get("SGD")
    missing = "not measured" if "error" in result else "fails"
    cells = [f"`{name}`"]
    cells.append(f"{result['weights'] / 1e6:.2f} M" if result.get("weights") else "")
    cells.append(f"{result['share']:.1f}%" if result.get("share") is not None else "")
    cells += [result.get(key) or "" for key in ("factors", "inverses")]
    cells.append(f"{expected:.2f}" if expected else "")
    cells.append(str(len(plain)) if plain else "")
    for method in ("KFC", "WhitenedAdam"):
        mine = times.get(method)
        ratios = []
        if mine:
            late, plain_late = mine[len(mine) // 2 :], plain[len(plain) // 2 :]
            ratios = [f(late) / f(plain_late) for f in (statistics.median, statistics.mean)]
        cells.append(" / ".join(f"{ratio:.2f}" for ratio in ratios) or missing)
    cells.append(remarks(result))
    return "| " + " | ".join(cells) + " |"


def remarks(result: dict[str, Any]) -> str:
    """Return errors, why weights have no curvature if they are many, and the first warning."""
    found = [f"{method}: {text}" for method, text in result.get("failures", {}).items()]
    shares = list(result.get("without", {}).items())[:1]
    found += [f"{share:.1%}: {reason}" for reason, share in shares if share >= NOTABLE]
    found += [result["error"]] if "error" in result else result.get("warnings", [])[:1]
    texts = [re.sub(r"[\s|]+", " ", text) for text in found]
    return "; ".join(text if len(text) <= 160 else text[:157] + "..." for text in texts)


def page(content: dict[str, Any]) -> str:
    """Return the text of docs/models.md."""
    results = content["results"]
    names = [name for name in ARCHITECTURES if name in results]
    head = INTRODUCTION.format(count=len(names), **content["settings"], **content["machine"])
    return head + "".join(row(name, results[name]) + "\n" for name in names)


# All models


def run_model(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the results of a model from a process of its own."""
    receiver, sender = FORKS.Pipe(duplex=False)
    methods = ["KFC"] if arguments.treatment else list(METHODS)
    steps = 0 if arguments.treatment else arguments.steps
    options = sender, name, steps, arguments.seconds, methods
    process = FORKS.Process(target=send_measurements, args=options)
    process.start()
    sender.close()
    result: dict[str, Any] = {"error": f"takes longer than {arguments.timeout:.0f} s"}
    if receiver.poll(arguments.timeout):
        try:
            result = receiver.recv()
        except EOFError:
            result = {"error": "the process was killed"}
    process.kill()
    process.join()
    return result


def send_measurements(sender: Connection, name: str, *options: Any) -> None:
    """Measure a model in a process with little memory."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        sender.send(measure(name, *options))
    except Exception as error:
        sender.send({"error": f"{type(error).__name__}: {error}"})


def settings() -> dict[str, Any]:
    import architectures

    return {
        "small": "mostly two layers of width 128",
        "images": architectures.IMAGES,
        "sentences": architectures.SENTENCES,
        "tokens": architectures.TOKENS,
    }


def recorded() -> dict[str, Any]:
    """Return what is known so far."""
    content: dict[str, Any] = {"results": {}}
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else content


def described_machine() -> dict[str, str]:
    found = versions(list(LIBRARIES))
    names = ", ".join(f"{name} {version}" for name, version in found.items())
    return {**machine(torch.device("cpu")), "versions": names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="a pattern of names, such as timm/res*")
    parser.add_argument("--again", action="store_true", help="also models that have results")
    parser.add_argument("--treatment", action="store_true", help="repeat only the treatment")
    parser.add_argument("--steps", type=int, default=60, help="steps of each method, at most")
    parser.add_argument(
        "--seconds", type=float, default=30, help="CPU time after which no more steps begin"
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a model, at most")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    declare_operators()
    for library in LIBRARIES:  # once: the processes of models are forks of this one
        if find_spec(library) is None:
            parser.error(f"{library} is not installed; use `make models`")
        import_module(library)
    for name in ARCHITECTURES:
        known = recorded()["results"].get(name)
        is_due = known is None or "error" in known or known["failures"]
        if arguments.treatment:
            is_due = not is_due
        is_due = is_due or arguments.again
        if fnmatch(name, arguments.only) and is_due:
            result = run_model(name, arguments)
            if arguments.treatment and known and "error" not in result:
                result |= {"times": known["times"]}
            print(row(name, result), flush=True)
            # Read again: models may be measured side by side.
            content = recorded() | {"settings": settings(), "machine": described_machine()}
            content["results"][name] = result
            new = RESULTS.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(content, indent=1) + "\n")
            new.replace(RESULTS)
            PAGE.write_text(page(content))
    PAGE.write_text(page(recorded()))


if __name__ == "__main__":
    main()
