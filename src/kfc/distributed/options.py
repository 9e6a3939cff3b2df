"""The value object for training on several processes or with asynchronous inverses."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch.distributed as dist

from kfc._helpers import require_choice, require_whole

# As text: torch may have been built without process groups.
Group: TypeAlias = "dist.ProcessGroup | Literal['auto'] | None"
PlacementKind = Literal["auto", "shared", "replicated", "gradients"]
PLACEMENTS = get_args(PlacementKind)


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Options for dividing the work between ranks, and for asynchronous inverses.

    Args:
        group: the process group of the ranks that train the model together, each on its part of
            the batch. ``"auto"``: the group of ``DistributedDataParallel`` if the model is wrapped
            in it, else torch's default group if there is one. ``None``: this process alone.
        placement: which rank computes a layer's inverse. ``"shared"``: one rank, which sends it to
            the others; ``"replicated"``: every rank; ``"gradients"``: one rank, which keeps it and
            sends natural gradients; ``"auto"``: the cheapest of these for each layer.
        asynchronous: compute inverses in a thread on the CPU; a later step applies them.
        max_staleness: the largest age in steps of asynchronous inverses when they are applied. A
            step waits for inverses that would become older. By default the current inverse period.
        deterministic: apply asynchronous inverses exactly ``max_staleness`` steps after they were
            due. This is always the case with several ranks.
        consistency_period: the number of steps between checks that all ranks have the same
            parameters, factors and inverses, bit for bit. ``None``: check parameters and gradients
            in the first step only, and in the first step after loading a state dict.
    """

    group: Group = "auto"
    placement: PlacementKind = "auto"
    asynchronous: bool = False
    max_staleness: int | None = None
    deterministic: bool = False
    consistency_period: int | None = None

    def __post_init__(self) -> None:
        require_choice("placement", self.placement, PLACEMENTS)
        if not (
            self.group is None
            or self.group == "auto"
            or (dist.is_available() and isinstance(self.group, dist.ProcessGroup))
        ):
            raise ValueError(
                f'group must be a torch.distributed process group, "auto" or None, got '
                f"{self.group!r}"
            )
        if self.max_staleness is not None:
            require_whole("max_staleness", self.max_staleness, low=0)
        if self.consistency_period is not None:
            require_whole("consistency_period", self.consistency_period)
        if not self.asynchronous and (self.max_staleness is not None or self.deterministic):
            raise ValueError(
                "max_staleness and deterministic have no effect without asynchronous=True"
            )
        if self.group is None and (self.placement != "auto" or self.consistency_period is not None):
            raise ValueError(
                "placement and consistency_period have no effect with group=None, which trains in "
                "this process alone"
            )
