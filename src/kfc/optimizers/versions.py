"""The version of state dicts."""

from collections.abc import Mapping
from typing import Any

from kfc._helpers import shown

STATE_VERSION = 14


def versioned(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with the current version."""
    return {"version": STATE_VERSION, **state}


def check_version(state: object) -> None:
    """Raise ``ValueError`` unless a state dict has the current version."""
    if not isinstance(state, Mapping):
        raise ValueError(f"the state dict must be a dict, got {type(state).__name__}")
    found = state.get("version")
    if type(found) is not int or found != STATE_VERSION:
        saved = "has no version: it is incomplete, or was saved by another optimizer or by an older"
        saved = (
            saved if found is None else f"has version {shown(found)}: it was saved by a different"
        )
        raise ValueError(
            f"the state dict {saved} version of kfc. This one loads version {STATE_VERSION} only; "
            "start the optimizer without it"
        )
