"""The results of a benchmark: times, ratios and scores from the records of its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kfc.lab.suite.halving import rank
from kfc.lab.suite.methods import METHODS
from kfc.lab.suite.scoring import (
    Table,
    bounded_ratios,
    geometric_mean,
    median_time,
    of_method,
    ratios_to_best,
    score,
)
from kfc.lab.suite.search import settings_of
from kfc.lab.suite.store import TUNED, BenchmarkSettings, Record, finite
from kfc.lab.suite.workloads import Workload


@dataclass(frozen=True)
class Ruleset:
    """The results of one ruleset.

    Attributes:
        times: median seconds to the target, by workload and method; workloads without a complete
            round are left out.
        seeds: the number of complete rounds of each workload.
        chosen: the records of the best trial of each method, by workload and method, one per seed.
    """

    name: str
    times: Table
    seeds: Mapping[str, int]
    chosen: Mapping[str, Mapping[str, Sequence[Record]]]
    limits: Mapping[str, float]

    @property
    def ratios(self) -> dict[str, dict[str, float]]:
        return ratios_to_best(self.times)

    def score(self, method: str) -> float:
        return score(of_method(self.ratios, method))

    def reached(self, method: str) -> int:
        """Return the number of workloads whose target the method reached."""
        return sum(math.isfinite(time) for time in of_method(self.times, method))

    def mean_ratio(self, method: str) -> float:
        """Return the geometric mean of the ratios, a lower bound if a target was not reached.

        It is ∞ if no method reached any target.
        """
        ratios = of_method(bounded_ratios(self.times, self.limits), method)
        return geometric_mean(ratios) if ratios else math.inf

    def is_bound(self, method: str) -> bool:
        """Return whether the method missed a target that another one reached."""
        known = {n: row for n, row in self.times.items() if math.isfinite(min(row.values()))}
        return any(math.isinf(time) for time in of_method(known, method))


@dataclass(frozen=True)
class Results:
    """The results of a benchmark, complete or not."""

    settings: BenchmarkSettings
    workloads: Sequence[Workload]
    spent: float
    complete: bool
    records: Sequence[Record]

    @property
    def rulesets(self) -> list[Ruleset]:
        """The rulesets with at least one complete round."""
        found = [self._ruleset(name) for name in self.settings.rulesets]
        return [ruleset for ruleset in found if ruleset.times]

    def diverged(self) -> list[Record]:
        return [record for record in self.records if record.outcome.end == "diverged"]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values, None for ∞."""
        methods = self.settings.methods
        content = {
            "settings": vars(self.settings),
            "spent_seconds": self.spent,
            "complete": self.complete,
            "workloads": {
                each.name: {
                    "title": each.title,
                    "goal": each.goal,
                    "metric": each.metric,
                    "target": each.target,
                    "limit_seconds": each.seconds,
                    "batch_size": each.batch_size,
                }
                for each in self.workloads
            },
            "rulesets": {
                ruleset.name: {
                    "seeds": ruleset.seeds,
                    "times": ruleset.times,
                    "ratios": ruleset.ratios,
                    "scores": {method: ruleset.score(method) for method in methods},
                    "mean_ratios": {method: ruleset.mean_ratio(method) for method in methods},
                }
                for ruleset in self.rulesets
            },
            "runs": [
                {
                    **{k: v for k, v in vars(record.entry).items() if k != "setting"},
                    "setting": str(record.entry.setting),
                    "seconds_to_target": record.outcome.time,
                    "loss_growth": record.outcome.loss_growth,
                    **vars(record.outcome),
                }
                for record in self.records
            ],
        }
        plain: dict[str, Any] = finite(content)
        return plain

    def _ruleset(self, name: str) -> Ruleset:
        limits = {workload.name: workload.seconds for workload in self.workloads}
        times, seeds, chosen = {}, {}, {}
        for workload in limits:
            rounds = [
                self._round(name, workload, seed, limits[workload])
                for seed in range(self.settings.seeds)
            ]
            complete = [each for each in rounds if each is not None]
            if not complete:
                continue
            seeds[workload] = len(complete)
            chosen[workload] = {m: [each[m] for each in complete] for m in self.settings.methods}
            times[workload] = {
                method: median_time([record.outcome.time for record in records])
                for method, records in chosen[workload].items()
            }
        return Ruleset(name, times, seeds, chosen, limits)

    def _round(
        self, ruleset: str, workload: str, seed: int, limit: float
    ) -> dict[str, Record] | None:
        """Return each method's best record of a round; ``None`` if a run has not ended."""
        best = {}
        for method in self.settings.methods:
            wanted = ruleset, workload, seed, method
            own = [
                each
                for each in self.records
                if (each.entry.ruleset, each.entry.workload, each.entry.seed, each.entry.method)
                == wanted
            ]
            if len(own) < self._expected(ruleset, seed, method):
                return None
            best[method] = min(own, key=lambda each: rank(each.outcome, limit))
        return best

    def _expected(self, ruleset: str, seed: int, method: str) -> int:
        """Return the number of runs of a method in a round."""
        tries = ruleset == TUNED and seed == 0
        return len(settings_of(METHODS[method], self.settings.trials)) if tries else 1
