"""Checks of what optimizers are given: models and state dicts."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from kfc.distributed.sharding import refuse_sharded, refuse_sharding_wrapper

STATE_VERSION = 10


def check_model(model: object) -> None:
    """Raise an error unless this is a model with parameters, which are not sharded."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise ValueError("the model has no parameters to train")
    refuse_sharding_wrapper(model)
    refuse_sharded(model.named_parameters())


def versioned(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with the current version."""
    return {"version": STATE_VERSION, **state}


def check_version(state: object) -> None:
    """Raise ``ValueError`` unless a state dict has the current version."""
    if not isinstance(state, Mapping):
        raise ValueError(f"the state dict must be a dict, got {type(state).__name__}")
    found = state.get("version")
    if found != STATE_VERSION:
        saved = "has no version: it is incomplete, or was saved by another optimizer or by an older"
        saved = saved if found is None else f"has version {found!r}: it was saved by a different"
        raise ValueError(
            f"the state dict {saved} version of kfc. This one loads version {STATE_VERSION} only; "
            "start the optimizer without it"
        )
