"""The Fisher block of one layer: its running statistics and its damped inverse."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kfc.curvature.damping import UNKNOWN, Damping
from kfc.curvature.factor import diagonal
from kfc.curvature.kronecker import Factors, Inverse
from kfc.curvature.saved import as_if_trained
from kfc.curvature.statistics import LayerStatistics, MomentLayout
from kfc.layers import Layer
from kfc.moments.folding import Shape

# The largest ranks of the inverses of Ω and Γ; 0 for an exact inverse.
Columns = tuple[int, int]


class LayerState(NamedTuple):
    """What is known about a layer's block; replaced as a whole, never changed.

    Attributes:
        roles: the parameters that were trained when ``running`` was gathered.
        running: the running averages of the statistics.
        inverse: the inverse of the block damped by ``damping``; usually older than ``running``.
    """

    roles: tuple[str, ...] = ()
    running: tuple[Tensor, ...] | None = None
    inverse: Inverse | None = None
    damping: Damping = UNKNOWN


class Block(NamedTuple):
    """What an inverse is computed from: running averages, damping, and the trained parameters."""

    running: tuple[Tensor, ...]
    damping: Damping
    roles: tuple[str, ...]


class LayerCurvature(ABC):
    """The approximate Fisher block of one layer.

    Subclasses say which statistics they average, how the block is inverted, and how the inverse is
    applied to the layer's gradients.

    Attributes:
        layer: the layer's geometry.
        state: the running averages and the inverse.
    """

    #: How ``describe`` names the approximation.
    treatment: ClassVar[str]
    #: The kind of inverse.
    inverse_class: type[Inverse]

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.state = LayerState()
        self._may_round = True

    # What an approximation defines

    @abstractmethod
    def new_statistics(self, inverse: Inverse | None) -> LayerStatistics:
        """Return empty statistics for one forward pass.

        Args:
            inverse: the current inverse, if it belongs to the parameters trained now.
        """

    @abstractmethod
    def running_shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of the running averages, for the parameters trained now."""

    def may_be_rounded(self, inverse: Inverse | None) -> tuple[bool, ...]:
        """Return whether each running average may be kept in bfloat16, given the inverse in use."""
        return (False,) * len(self.running_shapes())

    def measured_shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of what statistics measure for an inverse, beside the averages."""
        return ()

    @abstractmethod
    def invert(
        self, running: tuple[Tensor, ...], damping: Damping, previous: Inverse | None = None
    ) -> Inverse:
        """Return the inverse of the block with these averages, damped by δ = λ + γ.

        If only the weight or only the bias is trained, both parts of the damping are equal.

        Args:
            previous: an earlier inverse of the block, which may help to find this one.
        """

    def redamped(self, damping: Damping) -> Inverse:
        """Return the inverse of the same block with another damping."""
        running, inverse = self.state.running, self.state.inverse
        assert running is not None
        assert inverse is not None
        damping = damping.restricted(self.state.roles)
        same_ratio = damping.bias_ratio == self.state.damping.bias_ratio
        cheap = inverse.redamped(damping.weight) if same_ratio else None
        return cheap or self.invert(running, damping, inverse)

    def has_variable_inverse(self) -> bool:
        """Return whether the inverse determines the shapes of its tensors: two widths."""
        return False

    def limit_columns(self, columns: Columns | None) -> None:  # noqa: B027 - nothing by default
        """Limit the ranks of the inverses of factors; 0 for an exact inverse, ``None``: default."""

    def inverse_widths(self, columns: Columns | None = None) -> tuple[int, ...]:
        """Return what ``widths_of()`` returns for the inverse in use, or for the expected one.

        Args:
            columns: the limits of the expected one; by default those in force.
        """
        inverse = self.state.inverse
        if inverse is None:
            return self.expected_widths(columns)
        return inverse.widths_of(inverse.tensors)

    def expected_widths(self, columns: Columns | None) -> tuple[int, ...]:
        """Return what ``widths_of()`` is expected to return; empty if there is only one shape."""
        return ()

    def inverse_shapes(self, widths: tuple[int, ...] = ()) -> dict[str, Shape]:
        """Return the shapes of an inverse's tensors, for the parameters trained now.

        Args:
            widths: what the inverse's ``widths_of()`` returns; if empty, the shapes of an exact
                inverse.
        """
        return {"inverse": self.running_shapes()[0]}

    @abstractmethod
    def apply_inverse(self, inverse: Inverse, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return an inverse times the gradients of the trained parameters, by role."""

    def factors(self) -> Factors | None:
        """Return Ω and Γ, batched over groups, if the block consists of them."""
        return None

    def activation_factor(self) -> Tensor | None:
        """Return Ω, batched over groups, if the block has one and there are statistics."""
        factors = self.factors()
        return None if factors is None else factors.activation

    def note(self) -> str:
        """Return what ``describe`` adds to the treatment's name."""
        return ""

    def summary(self) -> dict[str, Any]:
        """Return numbers about the running averages for ``diagnostics``."""
        assert self.state.running is not None
        return {"block_trace": diagonal(self.state.running[0]).sum().item()}

    # Statistics

    def trained_roles(self) -> tuple[str, ...]:
        return self.layer.trained_roles()

    def is_current(self) -> bool:
        """Return whether the state belongs to exactly the parameters trained now."""
        roles = self.trained_roles()
        return bool(roles) and self.state.roles == roles

    def lacks_statistics(self) -> bool:
        return bool(self.trained_roles()) and not (self.is_current() and self.state.running)

    def lacks_inverse(self) -> bool:
        """Return whether there are averages to invert, but no inverse yet."""
        state = self.state
        return state.running is not None and state.inverse is None and self.is_current()

    def statistics(self, *, fresh: bool) -> LayerStatistics:
        """Return empty statistics for one forward pass.

        Args:
            fresh: the statistics will replace all that is known, including the inverse.
        """
        return self.new_statistics(self._usable_inverse(fresh))

    def moment_layout(self, *, fresh: bool) -> MomentLayout:
        """Return the layout of the moments that ``statistics()`` will gather."""
        measured = () if self._usable_inverse(fresh) is None else self.measured_shapes()
        layer, shapes = self.layer, self.running_shapes() + measured
        return MomentLayout(shapes, layer.dtype, layer.weight.device)

    def _usable_inverse(self, fresh: bool) -> Inverse | None:
        return self.state.inverse if self.is_current() and not fresh else None

    def average_in_(
        self, means: tuple[Tensor, ...], decay: float, *, may_round: bool = True
    ) -> None:
        """Update the running averages (eqn 33); the first statistics set them.

        The new averages take the memory of ``means``, unless they are rounded to bfloat16; the old
        ones stay as they were.

        Args:
            may_round: whether averages may be rounded at all: only if all ranks have the inverse,
                which decides about it.
        """
        self._may_round, state = may_round, self.state
        if state.roles != self.trained_roles():
            state = LayerState(self.trained_roles(), damping=state.damping)
        count = len(state.running or self.running_shapes())
        running, inverse = means[:count], state.inverse
        if inverse is not None:
            for moments in means[count:]:
                inverse = inverse.averaged(moments, decay)
        if state.running is not None:
            for old, new in zip(state.running, running, strict=True):
                torch.lerp(old.to(new.dtype), new, 1 - decay, out=new)
        self.state = state._replace(running=self._rounded(running, inverse), inverse=inverse)

    def _rounded(self, running: tuple[Tensor, ...], inverse: Inverse | None) -> tuple[Tensor, ...]:
        """Return averages in bfloat16 where the inverse in use allows it."""
        if not self._may_round:
            return running
        may_be_rounded = self.may_be_rounded(inverse)
        pairs = zip(running, may_be_rounded, strict=True)
        return tuple(average.bfloat16() if rounds else average for average, rounds in pairs)

    # Inverses

    def block(self, damping: Damping) -> Block:
        """Return what an inverse with this damping is computed from."""
        running, roles = self.state.running, self.state.roles
        assert running is not None
        return Block(running, damping.restricted(roles), roles)

    def adopt_inverse(self, inverse: Inverse, damping: Damping) -> None:
        """Replace the inverse by a newer one, on the layer's device."""
        inverse = self._at_home(inverse)
        if self.state.inverse is not None:
            inverse = inverse.continuing(self.state.inverse)
        running = self.state.running and self._rounded(self.state.running, inverse)
        self.state = self.state._replace(running=running, inverse=inverse, damping=damping)

    def _at_home(self, inverse: Inverse) -> Inverse:
        home = self.layer.weight.device
        # Flags and numbers stay on the host, which reads them.
        away = {k: t for k, t in inverse.tensors.items() if t.dim() > 1 and t.device != home}
        if not away:
            return inverse
        here = {key: tensor.to(home) for key, tensor in away.items()}
        return self.inverse_class({**inverse.tensors, **here})

    def restore(self, state: LayerState) -> None:
        """Replace the state, usually by an earlier one."""
        self.state = state

    def solve(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the damped inverse times gradients, by role.

        A trained parameter without a gradient counts as one with a gradient of zero.
        """
        inverse, dtype = self._inverse_in_dtype(), self.layer.dtype
        assert inverse is not None
        by_role = {
            role: gradients[role].to(dtype)
            if role in gradients
            else torch.zeros_like(parameter, dtype=dtype)
            for role, parameter in self.layer.trained().items()
        }
        return self.apply_inverse(inverse, by_role)

    def _inverse_in_dtype(self) -> Inverse | None:
        """Return the inverse in the dtype of the model, which may have changed since."""
        inverse, dtype = self.state.inverse, self.layer.dtype
        tensors = {} if inverse is None else inverse.tensors
        if any(t.is_floating_point() and t.dtype != dtype for t in tensors.values()):
            inverse = self.inverse_class({key: t.to(dtype) for key, t in tensors.items()})
            self.state = self.state._replace(inverse=inverse)
        return inverse

    # Checkpoints

    def state_dict(self, *, with_inverse: bool) -> dict[str, Any]:
        """Return copies of the averages and, if asked for, of the inverse."""
        roles, running, inverse, damping = self.state
        tensors = {} if inverse is None or not with_inverse else inverse.tensors
        return {
            "roles": list(roles),
            "running": [tensor.clone() for tensor in running or ()],
            "inverse": {key: tensor.clone() for key, tensor in tensors.items()},
            "damping": damping._asdict(),
        }

    def shapes_differ(self, saved: Mapping[str, Any]) -> tuple[object, object] | None:
        """Return the (saved, expected) shapes if a saved state does not fit this layer.

        If other parameters were trained than now, the state is kept for when they are again.
        """
        if not saved["roles"]:
            return None
        found = (
            [tuple(tensor.shape) for tensor in saved["running"]],
            {key: tuple(tensor.shape) for key, tensor in saved["inverse"].items()},
        )
        widths = self.inverse_class.widths_of(saved["inverse"])
        with as_if_trained(self, saved["roles"]):
            expected = (
                list(self.running_shapes()) if saved["running"] else [],
                self.inverse_shapes(widths) if saved["inverse"] else {},
            )
        return (found, expected) if found != expected else None

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        def own(tensor: Tensor) -> Tensor:
            device, dtype = self.layer.weight.device, self.layer.dtype
            return tensor.detach().to(device, dtype, copy=True)

        inverse = None
        if saved["inverse"]:
            inverse = self.inverse_class({k: own(t) for k, t in saved["inverse"].items()})
        running = tuple(own(tensor) for tensor in saved["running"]) or None
        damping = Damping(**saved["damping"])
        self.state = LayerState(tuple(saved["roles"]), running, inverse, damping)
