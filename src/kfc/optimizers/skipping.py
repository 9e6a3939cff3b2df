"""The count of steps that were skipped because values were not finite."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kfc.optimizers.divergence import bad_values


class SkippedSteps:
    """Counts skipped steps without waiting for the device in every step.

    If nothing else makes the host wait, only the device notices a bad step: the update is set to
    zero, and a counter on the device, read later, is increased.
    """

    def __init__(self) -> None:
        self._known = 0
        self._warned = False
        # (skipped steps, those that need a warning), not read yet
        self._on_device: Tensor | None = None

    def add(self, step: int, cause: Callable[[], str] | None) -> None:
        """Count a step that the host knows to be bad; warn the first time.

        Args:
            cause: returns which values are bad, as a clause; ``None``: there is no warning.
        """
        self._known += 1
        if cause is not None and not self._warned:
            self._warn(f"step {step} was", cause())

    def add_on_device(self, bad: Tensor, quietly: Tensor | None) -> None:
        """Count a step if ``bad`` is true, without a warning if ``quietly`` is; boolean scalars."""
        loud = bad if quietly is None else bad & ~quietly.to(bad.device)
        both = torch.stack([bad, loud]).long()
        self._on_device = both if self._on_device is None else self._on_device.to(both).add_(both)

    def count(self) -> int:
        """Return the number of skipped steps; waits for the device."""
        if self._on_device is not None:
            steps, loud = self._on_device.tolist()
            self._on_device = None
            self._known += steps
            if loud:
                self._warn(
                    f"{loud} of the last steps were" if loud > 1 else "one of the last steps was"
                )
        return self._known

    def restore(self, count: int) -> None:
        self._known, self._on_device = count, None

    def _warn(self, what: str, cause: str = "gradients or a Fisher norm were not finite") -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{what} skipped: {cause}. Parameters and buffers are unchanged; further skipped steps "
            "are only counted, in diagnostics['skipped_steps'].",
            stacklevel=2,
        )


def cause(model: nn.Module, ranks: str) -> str:
    """Return which values of a step are not finite, as a clause of a sentence.

    Args:
        ranks: the ranks that gave them; empty in one process.
    """
    if ranks:
        return f"{ranks} gave gradients, statistics or a Fisher norm that are not finite"
    return bad_values(model)
