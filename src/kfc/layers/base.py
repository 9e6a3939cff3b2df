"""The geometry that every kind of layer describes, and linear layers, the simplest kind."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfc.moments.folding import whole
from kfc.moments.patches import row_moment


class Layer(ABC):  # noqa: B024 - its subclasses are abstract
    """One layer: a module, or several modules of the same configuration with tied parameters.

    A layer knows how its inputs, derivatives and parameters become rows and matrices. It holds no
    statistics: those belong to its curvature (``kfc.curvature``).
    """

    #: The covered parameters, in the order of the block's coordinates.
    roles: ClassVar[tuple[str, ...]] = ()
    #: The names of the module's parameters, by role, where they differ from the roles.
    names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    #: Whether the module calls a function with the parameters, such as ``F.linear``, and does more
    #: than that; calls of the function, not of the module, are then calls of the layer.
    functional: bool = False

    def __init__(self, module: nn.Module) -> None:
        self.modules: tuple[nn.Module, ...] = (module,)

    def tie(self, modules: tuple[nn.Module, ...]) -> None:
        """Treat several modules that share their parameters as calls of this layer."""
        self.modules = modules

    def use_function(self) -> None:
        """Treat calls of a function as calls of this layer; see ``functional``."""
        self.functional = True

    @property
    def module(self) -> nn.Module:
        return self.modules[0]

    @property
    def weight(self) -> nn.Parameter:
        return cast(nn.Parameter, self.module._parameters[self.names.get("weight", "weight")])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of statistics and inverses: at least float32."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters, by role, in the order of ``roles``."""
        own, names = self.module._parameters, self.names
        parameters = {role: own.get(names.get(role, role)) for role in self.roles}
        return {role: p for role, p in parameters.items() if p is not None}

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are not frozen, by role, in the order of ``roles``."""
        return {role: p for role, p in self.parameters().items() if p.requires_grad}

    def trained_roles(self) -> tuple[str, ...]:
        """Return the roles of the parameters that are not frozen; called often in every step."""
        own, names = self.module._parameters, self.names
        found = [(role, own.get(names.get(role, role))) for role in self.roles]
        return tuple([role for role, p in found if p is not None and p.requires_grad])


class MatrixLayer(Layer):
    """A layer that multiplies rows of its input by one matrix (bias, weight), I x (1 + J|D|).

    Every method returns a leading dimension for the groups (1 for most layers). The parameters are
    the module's ``weight`` and ``bias``; the bias belongs to the homogeneous coordinate, which
    comes first.
    """

    roles: ClassVar[tuple[str, ...]] = ("bias", "weight")
    #: Whether inputs are indices of one-hot rows, so that Ω is diagonal.
    one_hot: ClassVar[bool] = False
    #: Whether Ω is a difference of larger moments, so that products for it must not be rounded.
    centred: ClassVar[bool] = False

    @property
    def groups(self) -> int:
        return 1

    @property
    def offsets(self) -> int:
        """|D|, the number of pixels in a kernel."""
        return 1

    def row_source(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Return the tensor that rows are cut from: the inputs, unless the layer changes them."""
        return inputs

    @abstractmethod
    def activation_moment(self, source: Tensor, *, homogeneous: bool, diagonal: bool) -> Tensor:
        """Return Σ rowᵀ row, (groups, n, n), or only its ``diagonal``, (groups, n), over all rows.

        A wide moment may be folded, see ``kfc.moments.folding``.
        The source is what ``row_source()`` returns; rows start with a 1 if ``homogeneous``.
        ``kfc.moments.patches.row_moment`` has both options.
        """

    def block_moment(self, source: Tensor, blocks: int, *, homogeneous: bool) -> Tensor:
        """Return Σ rowᵀ row within blocks of J/B input maps each, (groups · B, n_B, n_B).

        Each block has its own leading 1 if ``homogeneous``. By default, blocks are cut out of
        ``activation_moment()``. A subclass of a built-in layer that overrides that method must
        override this one too.

        Args:
            blocks: B, a divisor of J.
        """
        moment = whole(self.activation_moment(source, homogeneous=homogeneous, diagonal=False))
        places = torch.arange(homogeneous, moment.shape[-1], device=moment.device).view(blocks, -1)
        places = F.pad(places, (int(homogeneous), 0))  # the leading 1 has place 0
        return moment[:, places.unsqueeze(-1), places.unsqueeze(-2)].flatten(0, 1)

    def activation_rows(self, source: Tensor) -> Tensor:
        """Return the rows, (groups, rows, J|D|), one per output location.

        ``activation_moment()`` usually has a cheaper way; gradients of single examples need the
        rows themselves.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define activation_rows, which gradients of single "
            "examples need"
        )

    @abstractmethod
    def derivative_rows(self, derivatives: Tensor) -> Tensor:
        """Return the derivatives at each output location, (groups, rows, I)."""

    def padding_mask(self, inputs: Tensor) -> Tensor | None:
        """Return 1 for every row that is not padding, (rows,); ``None`` if none can be."""
        return None

    def rows_first(self, values: Tensor, examples: int) -> Tensor:
        """Return inputs or derivatives with the rows of each example next to each other."""
        return values

    def example_gradients(
        self, source: Tensor | None, derivatives: Tensor, examples: int
    ) -> Tensor:
        """Return Σ_t Ds_t (1, a_t) of each example, (examples, groups, I, n).

        The source is what ``row_source()`` returns, example by example; it may be ``None`` if the
        weight is not trained.
        """
        trained = self.trained()
        columns = self.derivative_rows(derivatives.to(self.dtype))
        # (groups, examples · locations, I) -> (examples, groups, locations, I)
        columns = columns.unflatten(1, (examples, -1)).transpose(0, 1)
        parts = [columns.sum(2).unsqueeze(-1)] if "bias" in trained else []
        if "weight" in trained:
            assert source is not None
            rows = self.activation_rows(source.to(self.dtype)).unflatten(1, (examples, -1))
            parts.append(columns.mT @ rows.transpose(0, 1))
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def pixel_rows(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Return the activations at each input location, (groups, pixels, J)."""
        return self.activation_rows(self.row_source(inputs, outputs))

    def boundary_counts(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Return the boundary counts β summed over a call's rows, (1 + |D|, 1 + |D|).

        Entry (d, d′) counts the rows that see a pixel at both kernel offsets; see
        ``kfc.moments.stationary``. By default there is one offset, which always sees one.
        """
        rows = self.derivative_rows(outputs).shape[1]
        return inputs.new_full((2, 2), rows, dtype=self.dtype)

    @abstractmethod
    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        """Return a tensor shaped like the weight as matrices, (groups, I, J|D|)."""

    @abstractmethod
    def weight_from_matrix(self, matrix: Tensor) -> Tensor:
        """Invert ``weight_to_matrix()``."""

    def is_channels_last(self, weight: Tensor) -> bool:
        """Return whether the maps J come last in the memory of a tensor like the weight.

        ``to_matrix()`` then need not copy it if the columns of the matrix have the same order.
        """
        return False

    def channels_last_order(self) -> Tensor:
        """Return the places of the columns of (bias, weight) in the order of channels_last."""
        trained = self.trained_roles()
        places = torch.arange(self.factor_sizes()[0], device=self.weight.device)
        head, rest = places.tensor_split([int("bias" in trained)])
        return torch.cat([head, rest.reshape(-1, self.offsets).mT.flatten()])

    def to_matrix(self, tensors: dict[str, Tensor], *, channels_last: bool = False) -> Tensor:
        """Return tensors shaped like the bias and the weight, by role, as (groups, I, n).

        Args:
            channels_last: return columns in the order of ``channels_last_order()``.
        """
        parts = []
        if "bias" in tensors:
            parts.append(tensors["bias"].reshape(self.groups, -1, 1))
        if "weight" in tensors:
            weight = tensors["weight"]
            if channels_last:
                parts.append(weight.movedim(1, -1).reshape(self.groups, -1, weight[0].numel()))
            else:
                parts.append(self.weight_to_matrix(weight))
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]

    def from_matrix(self, matrix: Tensor, *, channels_last: bool = False) -> dict[str, Tensor]:
        """Invert ``to_matrix()`` for the trained parameters."""
        trained, result = self.trained(), {}
        if "bias" in trained:
            result["bias"] = matrix[:, :, 0].reshape(-1)
            matrix = matrix[:, :, 1:]
        if "weight" in trained and channels_last:
            shape = self.weight.movedim(1, -1).shape
            result["weight"] = matrix.reshape(shape).movedim(-1, 1)
        elif "weight" in trained:
            result["weight"] = self.weight_from_matrix(matrix)
        return result

    def factor_sizes(self) -> tuple[int, int]:
        """Return (n, I), the widths of Ω and Γ, for the parameters trained now."""
        shape_only = torch.empty(self.weight.shape, device="meta")
        _, rows, columns = self.weight_to_matrix(shape_only).shape
        trained = self.trained()
        return ("bias" in trained) + ("weight" in trained) * columns, rows


class LinearLayer(MatrixLayer):
    """``nn.Linear``: all dimensions between the first and the last count as locations."""

    def activation_rows(self, source: Tensor) -> Tensor:
        return source.reshape(1, -1, source.shape[-1])

    def activation_moment(self, source: Tensor, *, homogeneous: bool, diagonal: bool) -> Tensor:
        rows = self.activation_rows(source)
        return row_moment(rows, homogeneous=homogeneous, diagonal=diagonal, fold=True)

    def block_moment(self, source: Tensor, blocks: int, *, homogeneous: bool) -> Tensor:
        rows = self.activation_rows(source).unflatten(2, (blocks, -1)).transpose(1, 2)
        return row_moment(rows.flatten(0, 1), homogeneous=homogeneous, diagonal=False)

    def rows_first(self, values: Tensor, examples: int) -> Tensor:
        if values.dim() == 1:
            return values.unsqueeze(0)
        return values.transpose(0, 1) if is_sequence_first(values.shape[:-1], examples) else values

    def derivative_rows(self, derivatives: Tensor) -> Tensor:
        return derivatives.reshape(1, -1, derivatives.shape[-1])

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        return weight.unsqueeze(0)

    def weight_from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.squeeze(0)


class TransposedLinearLayer(LinearLayer):
    """A linear layer with a weight of shape (inputs, outputs), as ``Conv1D`` of Transformers."""

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        return weight.mT.unsqueeze(0)

    def weight_from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.squeeze(0).mT


class NormalisationLayer(Layer):
    """A layer that computes scale · x̂ + shift per channel."""

    roles: ClassVar[tuple[str, ...]] = ("weight", "bias")

    @abstractmethod
    def normaliser(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that computes x̂ from a call's inputs, as the module did in that call.

        The function receives the inputs again and does not hold them. x̂ is computed from the input
        rather than divided out of the output, because the scale may be zero.
        """

    @abstractmethod
    def channel_rows(self, values: Tensor, examples: int) -> Tensor:
        """Return values shaped like the inputs as (rows, locations, channels).

        A row belongs to one example.
        """


def is_sequence_first(leading: torch.Size, examples: int) -> bool:
    """Return whether leading dimensions are (length, N, ...), as in recurrent layers.

    Frames folded into the batch in front of a dimension that happens to be N look the same, but
    are rarer. If the length equals N, the first dimension is taken to be that of the examples.
    """
    return len(leading) > 1 and leading[0] != examples and leading[1] == examples
