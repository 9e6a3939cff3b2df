"""The state of an engine: what a resumed run needs to continue bit for bit."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from kfc._helpers import require_keys, require_number, require_whole, shown
from kfc.curvature.model import ModelCurvature
from kfc.curvature.saved import in_entry
from kfc.distributed.asynchronous import InverseRefresher
from kfc.optimizers.allowance import Allowance
from kfc.optimizers.divergence import Divergence
from kfc.optimizers.fallback import Fallback
from kfc.optimizers.skipping import SkippedSteps
from kfc.schedule import Schedule
from kfc.statistics.collector import Collector

KEYS = (
    *("steps", "skipped_steps", "generator", "losses", "expected", "replaces_guess", "divergence"),
    *("budget", "allowance", "curvature", "inverses", "without_statistics"),
)


class EngineState(ABC):
    """Saves, checks and restores the parts of an engine.

    Attributes:
        steps: the number of completed steps.
    """

    steps: int
    skipped_steps: SkippedSteps
    divergence: Divergence
    collector: Collector
    schedule: Schedule
    allowance: Allowance
    curvature: ModelCurvature
    refresher: InverseRefresher
    fallback: Fallback
    # Whether the next statistics replace those of the first step; whether this is the first step
    # since the start, or since a state was loaded.
    _replaces_guess: bool = False
    _is_first: bool = True

    @abstractmethod
    def _prepare_next(self) -> None:
        """Prepare for the next step."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs to continue bit for bit; call it between steps.

        Inverses that one of several ranks keeps for itself are computed again after loading.
        """
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps.count(),
            "generator": self.collector.draws.generator.state_dict(),
            "losses": self.collector.losses.state_dict(),
            "expected": self.collector.known.expected(),
            "replaces_guess": self._replaces_guess,
            "divergence": self.divergence.state_dict(),
            "budget": self.schedule.state_dict(),
            "allowance": self.allowance.state_dict(),
            "curvature": self.curvature.state_dict(),
            "inverses": self.refresher.state_dict(),
            "without_statistics": self.fallback.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` that names the entry if a state cannot be loaded here."""
        require_keys("preconditioner state", state, KEYS)
        for counter in ("steps", "skipped_steps"):
            require_whole(f"the state's {counter}", state[counter], low=0)
        if not isinstance(state["replaces_guess"], bool):
            found = shown(state["replaces_guess"])
            raise ValueError(f"the state's replaces_guess must be true or false, got {found}")
        expected = state["expected"]
        require_keys("state's entry expected", expected, self.collector.known.expected())
        if expected["examples"] is not None:
            require_whole("the state's expected examples", expected["examples"])
        require_number("the state's expected loss_scale", expected["loss_scale"], positive=True)
        checks: dict[str, Callable[[Any], None]] = {
            "divergence": Divergence.check_state,
            "budget": Schedule.check_state,
            "allowance": lambda own: Allowance.check_state(own, self.curvature),
            "generator": self.collector.draws.generator.check_state,
            "losses": self.collector.losses.check_state,
            "curvature": self.curvature.check_state,
            "inverses": lambda own: self.refresher.check_state(own, state["steps"]),
            "without_statistics": self.fallback.check_state,
        }
        for name, check in checks.items():
            with in_entry(name):
                check(state[name])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; the model's own parameters are loaded separately.

        Raises:
            ValueError: an entry does not fit; nothing has changed.
        """
        self.check_state(state)
        self.restore_state(state)

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that ``check_state()`` has accepted."""
        expected = state["expected"]
        self.skipped_steps.restore(state["skipped_steps"])
        self.collector.draws.generator.load_state_dict(state["generator"])
        self.collector.losses.load_state_dict(state["losses"])
        self.collector.known.expect(expected["examples"], expected["loss_scale"])
        self._replaces_guess = state["replaces_guess"]
        self.divergence.load_state_dict(state["divergence"])
        self.schedule.load_state_dict(state["budget"])
        self.allowance.load_state_dict(state["allowance"], self.curvature)
        self.fallback.restore(state["without_statistics"])
        self.curvature.load_state_dict(state["curvature"])
        self.refresher.load_state_dict(state["inverses"])
        self.steps = state["steps"]
        self._is_first = True
        self._prepare_next()
