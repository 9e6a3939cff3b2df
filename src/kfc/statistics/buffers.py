"""Copies of a model's buffers, to undo the forward passes of a skipped step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kfc._helpers import moved
from kfc.fisher.calls import is_writable

# Buffers of at most this many entries are copied in every step, whether they change or not.
SMALL = 4096
# The largest number of steps between two searches for changes among the other buffers.
SEARCH_PERIOD = 1024

# A module and the name of its buffer.
Place = tuple[nn.Module, str]


@dataclass(slots=True)
class _Kept:
    """One buffer before the first forward pass of the step.

    Attributes:
        buffer: the tensor itself; ``None`` if there was none.
        version: its version counter.
        copy: a copy of its values; ``None`` if passes are not known to change them.
        last: the tensor in its place after the last pass, and its version counter.
    """

    place: Place
    buffer: Tensor | None
    version: int
    copy: Tensor | None
    last: tuple[Tensor | None, int]

    def now(self) -> Tensor | None:
        module, name = self.place
        return module._buffers.get(name)

    def put(self, value: Tensor | None) -> None:
        module, name = self.place
        module._buffers[name] = value

    def before(self) -> Tensor | None:
        """Return the values before the first pass, if they are known."""
        if self.copy is not None or _version(self.buffer) != self.version:
            return self.copy
        return self.buffer

    def see(self) -> None:
        """Record the tensor that a pass has left."""
        now = self.now()
        self.last = now, _version(now)

    def was_disturbed(self) -> bool:
        """Return whether the buffer has changed since the end of the last pass."""
        now = self.now()
        return now is not self.last[0] or _version(now) != self.last[1]


class BufferGuard:
    """Keeps the buffers of a model as they were before the forward passes of a step.

    Small buffers, such as running statistics, are copied in every step. Large ones are copied if a
    pass was seen to change them, which masks and tables of positions never do. Changes are seen by
    the version counter in every pass, and by the values in some steps, because changes by
    ``.data`` and those by ``F.batch_norm`` are not counted. A buffer that is replaced by another
    tensor needs no copy.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._kept: dict[Place, _Kept] = {}
        self._changing: set[Place] = set()
        self._memory: dict[Place, Tensor] = {}  # of the copies, reused from step to step
        self._steps = 0
        self._next_search = 1
        self._searching = False

    def before_pass(self, *, may_wait: bool, is_unused: bool) -> None:
        """Keep the buffers if this is the first forward pass since the last step.

        Args:
            may_wait: whether the host may wait for the device in this step.
            is_unused: whether the earlier passes since the last step may be without consequence.
                If the buffers were changed after them, for instance loaded, the new values are
                kept.
        """
        if self._kept:
            if is_unused:
                self._keep([k.place for k in self._kept.values() if k.was_disturbed()])
            return
        self._steps += 1
        self._searching = self._steps == 1 or (may_wait and self._steps >= self._next_search)
        if self._searching:
            self._next_search = self._steps + min(self._steps, SEARCH_PERIOD)
            self._modules = [module for module in self._model.modules() if module._buffers]
            self._memory.clear()
        if self._modules:
            self._keep((module, name) for module in self._modules for name in module._buffers)

    @torch.no_grad()
    def _keep(self, places: Iterable[Place]) -> None:
        copies, buffers = [], []
        for place in places:
            buffer = place[0]._buffers.get(place[1])
            version, copy = _version(buffer), None
            if buffer is not None and self._needs_copy(place, buffer):
                copy = self._room_for_copy(place, buffer)
                copies.append(copy)
                buffers.append(buffer)
            self._kept[place] = _Kept(place, buffer, version, copy, (buffer, version))
        if copies:
            torch._foreach_copy_(copies, buffers)

    def _needs_copy(self, place: Place, buffer: Tensor) -> bool:
        return _is_plain(buffer) and (self._searching or self._may_change(place, buffer))

    def _may_change(self, place: Place, buffer: Tensor) -> bool:
        return buffer.numel() <= SMALL or place in self._changing

    def _room_for_copy(self, place: Place, buffer: Tensor) -> Tensor:
        room = self._memory.get(place)
        if room is None or not _are_alike(room, buffer):
            room = torch.empty_like(buffer)
            if self._may_change(place, buffer):
                self._memory[place] = room
        return room

    def after_pass(self) -> None:
        """Notice which buffers a forward pass has changed; call it if the pass failed, too."""
        for kept in self._kept.values():
            kept.see()
            if kept.copy is None and _version(kept.buffer) != kept.version:
                self._changing.add(kept.place)

    def end_step(self, bad: Tensor | None) -> None:
        """End a step, and restore the buffers if ``bad``, a boolean scalar, is true.

        The host does not wait, except in the steps that search for changes.
        """
        self._search()
        if bad is not None:
            self._restore(bad)

    def undo_step(self) -> None:
        """Restore the buffers as they were before the first forward pass of the step."""
        self._search()
        self._restore(None)

    @torch.no_grad()
    def _restore(self, bad: Tensor | None) -> None:
        """Restore the buffers if a boolean scalar is true or ``None``."""
        in_place: list[tuple[Tensor, Tensor]] = []
        for kept in self._kept.values():
            now, before = kept.now(), kept.before()
            if kept.buffer is None and bad is None and now is kept.last[0]:
                kept.put(None)
            # A buffer of another shape depends on the size of the input; it is left alone.
            if now is None or before is None or not _are_alike(now, before):
                continue
            if now is not kept.buffer:
                # functional_call, for instance, puts tensors there only for the time of the pass.
                if now is kept.last[0]:
                    # A new tensor, because the one that is there may be the user's batch.
                    kept.put(before.clone() if bad is None else _chosen(bad, before, now))
            elif kept.copy is not None and self._may_change(kept.place, kept.copy):
                # If no change was counted, the buffer may be constant, and this is none either.
                counted = _version(now) != kept.version
                in_place.append((now if counted else now.data, kept.copy))
        _restore_in_place(in_place, bad)

    @torch.no_grad()
    def _search(self) -> None:
        """Compare large buffers with their copies if that is due; the host waits."""
        if not self._searching:
            return
        self._searching = False
        places, flags = [], []
        for kept in self._kept.values():
            copy, buffer = kept.copy, kept.buffer
            if copy is not None and buffer is not None and not self._may_change(kept.place, copy):
                changed = not _are_alike(copy, buffer) or (copy != buffer).any()
                places.append(kept.place)
                flags.append(torch.as_tensor(changed))
        if flags:
            home = flags[0].device
            changes = torch.stack([moved(flag, home) for flag in flags]).tolist()
            self._changing.update(p for p, changed in zip(places, changes, strict=True) if changed)

    def forget(self) -> None:
        """Drop what was kept: the next forward pass is the first of a step."""
        self._kept = {}
        self._searching = False


def _version(buffer: Tensor | None) -> int:
    # Inference tensors have no version; they cannot be changed in place.
    return 0 if buffer is None or buffer.is_inference() else buffer._version


def _is_plain(buffer: Tensor) -> bool:
    """Return whether a buffer can be copied and written, also several of them in one call."""
    if is_lazy(buffer) or buffer.layout != torch.strided or buffer.is_quantized:
        return False
    return is_writable(buffer)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _chosen(bad: Tensor, before: Tensor, now: Tensor) -> Tensor:
    return torch.where(moved(bad, now.device), before, now)


def _restore_in_place(pairs: Sequence[tuple[Tensor, Tensor]], bad: Tensor | None) -> None:
    """Copy the second of each pair into the first if a boolean scalar is true or ``None``."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        groups.setdefault((pair[0].device, pair[0].dtype), []).append(pair)
    for group in groups.values():
        buffers, values = [now for now, _ in group], [before for _, before in group]
        if bad is not None:
            # Joined, because a selection has no variant for lists of tensors.
            joined = [torch.cat([t.reshape(-1) for t in each]) for each in (values, buffers)]
            parts = _chosen(bad, *joined).split([t.numel() for t in buffers])
            values = [part.view(t.shape) for part, t in zip(parts, buffers, strict=True)]
        torch._foreach_copy_(buffers, values)
