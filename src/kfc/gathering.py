"""Statistics from forward passes: targets, one backward to the pre-activations, batch moments."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kfc.budget import now
from kfc.capture import ModelCall
from kfc.checks import all_finite
from kfc.curvature import Curvature
from kfc.distributed import Workers
from kfc.distributed.exchange import Exchange
from kfc.fisher import Output, select_output
from kfc.generator import OwnGenerator
from kfc.layers import Statistics, mixes_examples
from kfc.layers.synchronised import mixes_ranks
from kfc.likelihoods import Likelihood
from kfc.session import Session, without_autocast

FisherKind = Literal["sampled", "exact", "empirical"]
FISHER_KINDS = ("sampled", "exact", "empirical")

# The exact Fisher takes one backward pass per column.
MAX_EXACT_COLUMNS = 1024


class Gathering:
    """Listens to a model's hooks and adds to its curvature's pending statistics.

    Every rank gathers from its own part of the batch; what they gathered adds up on the way, while
    the user's backward pass goes on.

    Args:
        seed: of the targets that are drawn; the same on all ranks, which draw different ones.

    Attributes:
        step: the one that comes next, from 1.
        due: whether the coming forward passes should give statistics of every layer.
        estimating: whether what is gathered will take the place of all that is known.
        calls: the last forward pass in training mode since the last step, and its examples.
        keeps_calls: have all passes since the last step in ``calls``, and the random state in which
            each began.
        spent: seconds of gathering since the last step.
        seconds: what the last gathering took, over all micro-batches of its step.
        total_seconds: what all of them took.
        clock_device: the device to wait for when looking at the clock, while parts are measured.
        started: when the first forward pass since the last step began.
        bad_ranks: those known to have had something that is not finite in this step.
    """

    def __init__(
        self,
        model: nn.Module,
        curvature: Curvature,
        likelihood: Likelihood,
        fisher: FisherKind,
        output: Output | None,
        seed: int,
        workers: Workers,
    ) -> None:
        self.model = model
        self.curvature = curvature
        self.likelihood = likelihood
        self.fisher = fisher
        self.output = output
        self.generator = OwnGenerator(seed)
        self.workers = workers
        self.step = 1
        self.due = True
        self.estimating = False
        self.calls: list[tuple[ModelCall, int]] = []
        self.keeps_calls = False
        self.spent = 0.0
        self.seconds = 0.0
        self.total_seconds = 0.0
        self.clock_device: torch.device | None = None
        self.started: float | None = None
        self.bad_ranks: list[int] = []
        self._open_sessions: list[tuple[Session, Tensor]] = []
        self._pending_examples = 0
        self._under_way: list[Exchange] = []
        self._output_is_bad: Tensor | None = None

    def wanted_layers(self) -> Collection[str]:
        if self.started is None:
            self.started = now(self.clock_device)
            self.workers.at(self.step)
        return self._wanted()

    def _wanted(self) -> Collection[str]:
        if self.due:
            return [name for name, handler in self.curvature.handlers.items() if handler.trained()]
        # A layer that ran for the first time, or was thawed, cannot wait until statistics are due.
        return [name for name in self.curvature.handlers if not self.curvature.is_known(name)]

    def statistics_of(self, layer: str) -> Statistics:
        return self.curvature.statistics_of(layer, afresh=self.estimating)

    def observe(self, call: ModelCall, output: Any, session: Session | None) -> None:
        selected = select_output(output, self.output)
        self.likelihood.validate(selected)
        if not self.keeps_calls:
            self.calls.clear()
        self.calls.append((call, selected.shape[0]))
        if session is not None:
            if session.calls and selected.requires_grad:
                self._gather(selected, session)
            if self._sends_at_once():
                self._send(self._wanted())
        if self.workers.size > 1:
            self._watch_output(selected)

    def _gather(self, selected: Tensor, session: Session) -> None:
        if self.workers.size == 1 and mixes_ranks(self.model):
            raise ValueError(
                "the model's SyncBatchNorm joins the examples of several ranks, but its optimizer "
                "was made for one process alone; give it the ranks' process_group"
            )
        session.examples = selected.shape[0]
        if self.fisher == "empirical":
            # The calls' hooks do the rest; their edges would hold the graph in a cycle.
            session.calls.clear()
            self._open_sessions.append((session, selected.detach()))
            return
        start = now(self.clock_device)
        with torch.no_grad(), without_autocast(selected.device):
            together = not (mixes_examples(self.model) or session.shares_rows())
            # As if of one example: complete knows how many there are in all. Before the backward
            # pass, which may carry derivatives to other ranks, whose batches are not as large.
            scale = math.sqrt(self.likelihood.growth(session.examples, 1))
            for derivative in self._output_derivatives(selected.detach(), together):
                session.backward(selected, scale * derivative)
            self.curvature.add(session.moments())
            self._pending_examples += session.examples
        self.spent += session.seconds + now(self.clock_device) - start

    def _output_derivatives(self, outputs: Tensor, together: bool) -> Iterator[Tensor]:
        """The draws, or exact columns, of the derivative in the outputs.

        Args:
            together: whether one column may serve all examples at once, since no layer sees two.
        """
        if self.fisher == "sampled":
            generator = self.generator.of_rank(self.workers.rank, self.workers.size, outputs.device)
            yield self.likelihood.sample_derivative(outputs, generator)
            return
        own = self.likelihood.columns_per_example(outputs) * (1 if together else len(outputs))
        turns = {self.workers.rank: own}
        if mixes_ranks(self.model):
            # A column of one rank reaches the examples of all, who have to carry it back together.
            turns = {rank: int(n) for rank, (n,) in enumerate(self.workers.gather([own]))}
        columns = sum(turns.values())
        if columns > MAX_EXACT_COLUMNS:
            behind = "" if together else " behind batch normalisation or rows that examples share"
            behind += f" of {len(turns)} ranks" if len(turns) > 1 else ""
            raise ValueError(
                f'fisher="exact" takes one backward pass for each of the {columns} columns of an '
                f"output of shape {tuple(outputs.shape)}{behind}, more than {MAX_EXACT_COLUMNS}; "
                'use fisher="sampled"'
            )
        for rank, turn in turns.items():
            if rank == self.workers.rank:
                yield from self._exact_columns(outputs, together)
            else:
                yield from (torch.zeros_like(outputs) for _ in range(turn))

    def _exact_columns(self, outputs: Tensor, together: bool) -> Iterator[Tensor]:
        for column in self.likelihood.derivative_columns(outputs):
            if together:
                yield column
                continue
            for example in range(len(outputs)):
                alone = torch.zeros_like(column)
                alone[example] = column[example]
                yield alone

    def complete(self, loss_scale: float | Tensor = 1.0) -> None:
        """Bring the pending statistics to the scale of the loss on the whole batch.

        That is the mean of the ranks' losses, as DistributedDataParallel has it.

        Args:
            loss_scale: what the user's loss was multiplied by; matters to the empirical Fisher.
        """
        if self.fisher == "empirical":
            self._close_sessions(loss_scale)
        if self.workers.size > 1:
            self._receive()
        if self._pending_examples:
            examples = self._pending_examples / self.workers.size
            self.curvature.scale_pending(self.likelihood.growth(1, examples))
        self._pending_examples = 0
        self.seconds = self.spent or self.seconds
        self.total_seconds += self.spent

    def _close_sessions(self, loss_scale: float | Tensor) -> None:
        """Empirical Fisher: the user's backward has been through these sessions.

        It had w times the log-likelihood's derivative; wanted is sqrt(w N) times that.
        """
        for session, _ in self._open_sessions:
            session.end_draw()
            self.spent += session.seconds
        gathered = [(session, out, session.moments()) for session, out in self._open_sessions]
        finished = [item for item in gathered if any(item[2].values())]
        examples = sum(session.examples for session, *_ in finished)
        for _, outputs, moments in finished:
            weight = self.likelihood.term_weight(outputs, examples) * float(loss_scale) ** 2
            # As if of one example, as in any other gathering.
            self.curvature.add(moments, examples / weight * self.likelihood.growth(examples, 1))
        self._pending_examples += examples
        self._open_sessions.clear()

    # Several ranks

    def mean_over_ranks(self, value: Tensor, examples: int) -> Tensor:
        """A product with the Fisher matrix of the whole batch, from that of this rank's part.

        Args:
            value: of the loss on this rank's examples, so many.
        """
        if self.workers.size == 1:
            return value
        own = value * (examples * self.likelihood.growth(examples, 1))
        both = self.workers.start_sum([own, own.new_tensor(float(examples))], "norms").wait()
        total, count = both
        return total * (self.likelihood.growth(1, count.item() / self.workers.size) / count)

    def _sends_at_once(self) -> bool:
        """Whether what this pass gave should be on its way during the backward that follows.

        Not if more passes are to come before gradients are averaged, if there is nothing yet, or
        if it is of layers that happen to run for the first time, which perhaps none does.
        """
        if self.workers.size == 1 or self.fisher == "empirical" or self.estimating or not self.due:
            return False
        return not self.workers.are_accumulating()

    def _send(self, names: Collection[str]) -> None:
        """What this rank has gathered of these layers; the others do so too."""
        start = now(self.clock_device)
        curvature = self.curvature
        shapes = {n: curvature.moment_shapes(n, afresh=self.estimating) for n in names}
        bad = ~all_finite(curvature.pending_traces())
        self._under_way.append(
            Exchange(
                self.workers,
                curvature.pending,
                shapes,
                {name: curvature.handlers[name] for name in names},
                self._pending_examples,
                bad,
            )
        )
        curvature.pending.clear()
        self._pending_examples = 0
        self.spent += now(self.clock_device) - start

    def _receive(self) -> None:
        names = self._wanted() if self.due else self._that_ran(self._wanted())
        if names and (self.curvature.pending or not self._under_way):
            self._send(names)
        start = now(self.clock_device)
        for exchange in self._under_way:
            gathered = exchange.wait()
            self.curvature.add(gathered.moments)
            self._pending_examples += gathered.examples
            self.bad_ranks += [r for r in gathered.bad_ranks if r not in self.bad_ranks]
        if self._under_way:
            self.spent += now(self.clock_device) - start
        self._under_way.clear()

    def _that_ran(self, names: Collection[str]) -> list[str]:
        """Those of which any rank has gathered something."""
        if not names:
            return []
        flags = self.workers.largest([float(name in self.curvature.pending) for name in names])
        return [name for name, flag in zip(names, flags, strict=True) if flag]

    def align_generators(self) -> None:
        """After unequally many passes: the generators of all ranks become rank 0's."""
        if self.workers.size > 1:
            self.generator.load_state_dict(self.workers.share(self.generator.state_dict()))

    def _watch_output(self, output: Tensor) -> None:
        """Note if this rank's loss has a derivative that is not finite: gradients do not tell."""
        self._note_bad(output.detach())
        if output.requires_grad:
            output.register_hook(self._note_bad)

    def _note_bad(self, values: Tensor) -> None:
        bad = ~torch.isfinite(torch.linalg.vector_norm(values.detach(), math.inf))
        before = self._output_is_bad
        self._output_is_bad = bad if before is None else before | bad.to(before.device)

    def find_bad_ranks(self) -> list[int]:
        """Those that had something not finite in this step; all ranks ask, or none."""
        own = self._output_is_bad is not None and bool(self._output_is_bad)
        flags = self.workers.gather([float(own)])
        return sorted({*self.bad_ranks, *(r for r, (flag,) in enumerate(flags) if flag)})

    def drop(self) -> None:
        """Forget what was gathered since the last step."""
        for exchange in self._under_way:
            exchange.wait()  # the other ranks do, and would wait for this one
        self._under_way.clear()
        self._output_is_bad, self.bad_ranks = None, []
        self._open_sessions.clear()
        self._pending_examples = 0
        self.curvature.pending.clear()
        self.calls.clear()
        self.spent, self.started = 0.0, None
