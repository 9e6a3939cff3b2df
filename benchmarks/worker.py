"""Measure the first step and the peak memory of one method, and print them as JSON."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from machine import peak_bytes, wait_for
from methods import METHODS, PLAIN, Method, Step
from networks import NETWORKS

# The SGD steps that warm up the process, and that the first step is compared with.
WARM_UP = 6


def peak_mebibytes(run: Callable[[], None], device: torch.device) -> float:
    """Return the largest memory that torch's allocator held for a function at any time."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    return peak_bytes(run) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--network", choices=NETWORKS, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    network = NETWORKS[arguments.network]
    images, labels = network.data(arguments.batch, device)

    def timed(step: Step) -> float:
        wait_for(device)
        start = perf_counter()
        step(images, labels)
        wait_for(device)
        return perf_counter() - start

    plain = PLAIN.build(network.model(device))
    usual = statistics.median([timed(plain) for _ in range(WARM_UP)][1:])
    model = network.model(device)
    start = perf_counter()
    step = METHODS[arguments.method].build(model)
    building = perf_counter() - start
    first = timed(step)

    def three_steps(method: Method) -> None:
        step = method.build(network.model(device))
        for _ in range(3):
            step(images, labels)

    result = {
        "building": building,
        "first_step": first,
        "sgd_step": usual,
        "sgd_mebibytes": peak_mebibytes(lambda: three_steps(PLAIN), device),
        "mebibytes": peak_mebibytes(lambda: three_steps(METHODS[arguments.method]), device),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
