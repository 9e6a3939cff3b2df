"""Schedule-free averaging (Defazio et al. 2024): a constant learning rate instead of a schedule.

A sequence z makes the steps v, and x is its running average with weights t³:

    z ← z + v,    x ← x + c (z - x) with c = 4t / (t + 1)²,    y = β x + (1 - β) z.

The parameters are y, at which gradients are computed. Because y is close to the average x, the
noise of single steps hardly affects it, and no falling learning rate is needed. Of a step v, the
share 1 - β + β c moves y at once, and the rest does so later, through the average. x itself, which
follows from y and z, is a little better still, and meant for evaluation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kfc._helpers import at_least_float32, moved, require_keys, require_number, widest

# z of a parameter, in the optimizer's state.
FAST = "fast"
# y of a parameter in half precision, in float32: rounding would add up over the steps.
WIDE = "wide"
# The learning rate rises linearly over the first steps, in which v̂ rests on few gradients.
WARM_UP = 20


class ScheduleFree:
    """Counts updates, and moves parameters y and sequences z.

    The count stays on the device: the host does not wait.
    """

    def __init__(self) -> None:
        self._count: Tensor | float = 0.0

    def _number(self, device: torch.device) -> Tensor:
        """Return t, the number of the current update, which begins at 1."""
        count = torch.as_tensor(self._count, dtype=widest(device))
        return moved(count, device) + 1

    def warm_up(self, device: torch.device) -> Tensor:
        """Return the factor of the learning rate in the current update, min(1, t / 20)."""
        return (self._number(device) / WARM_UP).clamp(max=1)

    def average_weight(self, device: torch.device) -> Tensor:
        """Return c, the weight of z in the average at the current update."""
        number = self._number(device)
        return 4 * number / (number + 1) ** 2

    def share_at_once(self, beta: float, device: torch.device) -> Tensor:
        """Return 1 - β + β c, the share of a step that moves the parameters at once."""
        return 1 - beta + beta * self.average_weight(device)

    def move_(
        self,
        parameters: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        steps: list[Tensor],
        beta: float,
        bad: Tensor | None,
    ) -> None:
        """Add steps v to z, and move the parameters y.

        Args:
            states: the state of each parameter.
            steps: v, float32 at least; overwritten.
            bad: a boolean scalar; if true, nothing moves. ``None``: the steps are known to be good.
        """
        for parameter, state in zip(parameters, states, strict=True):
            if FAST not in state:
                state[FAST] = at_least_float32(parameter.detach()).clone()
        wide = [_wide(p, state) for p, state in zip(parameters, states, strict=True)]
        weight = self.average_weight(steps[0].device)
        if bad is not None:
            weight = torch.where(bad, 0.0, weight)
            for step in steps:
                step.masked_fill_(bad, 0)
        # With the new z: y ← y + c (z - (1 - β) v - y) + (1 - β) v.
        fast = [state[FAST] for state in states]
        torch._foreach_add_(fast, steps)
        torch._foreach_mul_(steps, 1 - beta)
        gaps = list(torch._foreach_sub(fast, steps))
        torch._foreach_sub_(gaps, wide)
        torch._foreach_mul_(gaps, weight)
        torch._foreach_add_(steps, gaps)
        torch._foreach_add_(wide, steps)
        for parameter, value in zip(parameters, wide, strict=True):
            if value is not parameter:
                parameter.copy_(value)

    @staticmethod
    def average(parameter: Tensor, state: Mapping[str, Any], beta: float) -> Tensor:
        """Return x = (y - (1 - β) z) / β of a parameter y."""
        wide, fast = state.get(WIDE, parameter.detach()), state[FAST]
        average: Tensor = (wide - (1 - beta) * fast) / beta
        return average

    def count_(self, bad: Tensor | None) -> None:
        """Count an update, unless it was bad."""
        if bad is None:
            self._count = self._count + 1
        else:
            self._count = self._number(bad.device) - bad.to(widest(bad.device))

    def state_dict(self) -> dict[str, float]:
        return {"updates": float(self._count)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless the state is one that ``state_dict()`` returns."""
        require_keys("state of the iterates", state, self.state_dict())
        require_number("the state's updates", state["updates"])
        if state["updates"] != int(state["updates"]):
            raise ValueError(f"the state's updates must be whole, got {state['updates']}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count = float(state["updates"])


def _wide(parameter: Tensor, state: dict[str, Any]) -> Tensor:
    """Return y in float32 at least: the parameter, or a copy that does not lose small steps."""
    if at_least_float32(parameter) is parameter:
        return parameter
    if WIDE not in state:
        state[WIDE] = parameter.detach().float()
    # A value that someone else has set is kept.
    same = state[WIDE].to(parameter.dtype) == parameter
    state[WIDE] = torch.where(same, state[WIDE], parameter.detach().float())
    wide: Tensor = state[WIDE]
    return wide
