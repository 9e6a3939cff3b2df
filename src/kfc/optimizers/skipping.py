"""The count of steps skipped because the batch gave values that are not finite."""

import warnings

import torch
from torch import Tensor


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

    def add(self, step: int, cause: str) -> None:
        """Count a step that the host knows to be bad; warn the first time.

        Args:
            cause: what gave the bad values; if empty, there is no warning.
        """
        self._known += 1
        if cause:
            self._warn(f"step {step} was", cause)

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

    def _warn(self, what: str, cause: str = "the batch") -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{what} skipped: {cause} gave gradients, statistics or a Fisher norm that are not "
            "finite. Parameters and buffers are unchanged; further skipped steps are only counted, "
            "in diagnostics['skipped_steps'].",
            stacklevel=2,
        )
