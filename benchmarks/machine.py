"""The machine and the versions that a benchmark ran on, and its peak memory."""

from __future__ import annotations

import platform
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()  # Linux only
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def versions(packages: list[str]) -> dict[str, str]:
    """Return the versions of distributions, or "not installed"."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine(device: torch.device) -> dict[str, str]:
    """Return the date, the device, and the versions of torch and Python."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return {
        "date": date.today().isoformat(),
        "device": name,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the largest memory that torch's CPU allocator held for a function at any time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    held = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
