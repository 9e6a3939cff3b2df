"""Random states: the CPU's, and a CUDA device's; of other accelerators nothing is kept."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor


def forked_random_state(device: torch.device) -> AbstractContextManager[None]:
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def seeded_random_state(device: torch.device, seed: int) -> list[Tensor]:
    with forked_random_state(device):
        torch.manual_seed(seed)
        return get_random_state(device)


def get_random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
