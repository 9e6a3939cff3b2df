"""What a benchmark ran on."""

from __future__ import annotations

import platform
from collections.abc import Callable
from datetime import date
from importlib import metadata

import torch
from torch.profiler import ProfilerActivity, profile


def processor() -> str:
    """What the system calls it; Linux tells in a file."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def versions(packages: list[str]) -> dict[str, str]:
    """Of installed distributions; "not installed" for the others."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return {
        "date": date.today().isoformat(),
        "device": name,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that torch's CPU allocator holds at a time of what the run allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    held = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def wait_for(device: torch.device) -> None:
    """Until the device has done all it was told; a clock read before that tells nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
