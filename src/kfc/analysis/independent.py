"""Blocks that assume that activations are independent of derivatives (IAD), without factors."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from kfc.analysis.blocks import Block, KroneckerBlock
from kfc.analysis.krylov import conjugate_gradients
from kfc.analysis.passes import Activations
from kfc.analysis.recording import LayerRecord
from kfc.curvature import options
from kfc.curvature.kronecker import Factors

# As in training, but never with the diagonal in place of a wide factor.
KFC = options.Kronecker(max_factor_size=sys.maxsize)


def kronecker(approximation: options.Kronecker, record: LayerRecord) -> KroneckerBlock:
    """Return the block Ω ⊗ Γ of training."""
    factors = record.curvature(approximation).factors()
    assert factors is not None
    return KroneckerBlock(Factors(*(f if f.dim() == 3 else f.diag_embed() for f in factors)))


def kfc_block(record: LayerRecord) -> KroneckerBlock:
    """Return KFC's block, which several approximations need; it is computed once for a record."""
    known = record.blocks
    if "kfc" not in known:
        known["kfc"] = kronecker(KFC, record)
    found = known["kfc"]
    assert isinstance(found, KroneckerBlock)
    return found


def is_single(record: LayerRecord) -> bool:
    """Return whether the layer has one location and group, so that IAD alone leads to KFC."""
    return record.rows_per_example == 1 and record.shape[0] == 1


def independent(record: LayerRecord) -> Block:
    """Return the block that assumes IAD alone."""
    return kfc_block(record) if is_single(record) else IndependentBlock(record)


def uncorrelated_over_space(record: LayerRecord) -> Block:
    """Return the block that assumes IAD and SUD."""
    return kfc_block(record) if is_single(record) else LocationBlock(record)


class _ByProducts(Block):
    """A block from recorded activations and derivatives; systems are solved by iteration."""

    def __init__(self, record: LayerRecord) -> None:
        super().__init__(record.shape, record.like)
        self.record = record
        self.activations = Activations(record)

    def product(self, vector: Tensor) -> Tensor:
        rows = self.shape[1]
        several = vector.reshape(-1, *self.shape)
        count = len(several)
        stacked = several.transpose(0, 1).flatten(1, 2)  # (groups, k · I, n)
        total = torch.zeros_like(stacked)
        for part in self.record.chunks(8 * self.elements_per_example(count)):
            images = self.activations.images(stacked, part).unflatten(-1, (count, rows))
            images = self.transformed(images).flatten(-2)
            total += self.activations.adjoint(images, part)
        by_vector: Tensor = total.unflatten(1, (count, rows)).transpose(0, 1)
        return by_vector.reshape(vector.shape)

    def elements_per_example(self, vectors: int) -> int:
        """Return the size of the images of one example."""
        groups, rows, _ = self.shape
        return groups * self.record.rows_per_example * rows * vectors

    def transformed(self, images: Tensor) -> Tensor:
        """Return the images V a_t multiplied by the moments of derivatives.

        Args:
            images: (examples, groups, |T|, k, I).
        """
        raise NotImplementedError

    def solve(self, vector: Tensor, damping: float, tolerance: float = 1e-6) -> Tensor:
        """Solve by conjugate gradients, preconditioned by KFC's block with the right trace."""
        block = kfc_block(self.record)
        scale = self.trace() / (block.trace() or math.inf)
        if not scale > 0:
            return super().solve(vector, damping, tolerance)
        solutions = [
            conjugate_gradients(
                lambda v: self.product(v) + damping * v,
                right,
                tolerance=tolerance,
                preconditioner=lambda v: block.solve(v, damping / scale) / scale,
            )
            for right in vector.reshape(-1, *self.shape)
        ]
        return torch.stack(solutions).reshape(vector.shape)


class IndependentBlock(_ByProducts):
    """Σ_t Σ_t′ E[a_t a_t′ᵀ] ⊗ E[Ds_t Ds_t′ᵀ]: activations independent of derivatives (Lemma 1).

    This is the second moment of the gradients Σ_t Ds_t (1, a_t) with the activations and the
    derivatives of all pairs of examples.
    """

    def __init__(self, record: LayerRecord) -> None:
        super().__init__(record)
        # (draws · examples, groups · |T| · I)
        everything = slice(0, record.examples)
        self._derivatives = record.derivative_rows(everything).flatten(0, 1).flatten(1)

    def transformed(self, images: Tensor) -> Tensor:
        by_vector = images.permute(3, 0, 1, 2, 4)  # (k, examples, groups, |T|, I)
        back = (by_vector.flatten(2) @ self._derivatives.mT) @ self._derivatives
        back = back.reshape(by_vector.shape).permute(1, 2, 3, 0, 4)
        return back / self.record.examples**2

    def elements_per_example(self, vectors: int) -> int:
        return super().elements_per_example(vectors) + vectors * len(self._derivatives)

    def trace(self) -> float:
        """Return Σ_t Σ_t′ E[a_t · a_t′] E[Ds_t · Ds_t′]."""
        locations = self.record.rows_per_example
        activation = self.like.new_zeros(self.shape[0], locations, locations)
        derivative = torch.zeros_like(activation)
        for _, activations, derivatives in self.record.row_chunks():
            # (groups, |T|, examples · n) and (groups, |T|, draws · examples · I)
            by_location = activations.permute(1, 2, 0, 3).flatten(2)
            activation += by_location @ by_location.mT
            by_location = derivatives.permute(2, 3, 0, 1, 4).flatten(2)
            derivative += by_location @ by_location.mT
        return float((activation * derivative).sum()) / self.record.examples**2


class LocationBlock(_ByProducts):
    """Σ_t E[a_t a_tᵀ] ⊗ E[Ds_t Ds_tᵀ]: IAD and derivatives uncorrelated over space (SUD).

    Unlike KFC, it does not assume that all locations have the same moments (SH), and it has the
    derivatives of all groups in one moment.
    """

    def __init__(self, record: LayerRecord) -> None:
        super().__init__(record)
        groups, rows, _ = record.shape
        locations, maps = record.rows_per_example, groups * rows
        # Γ_t, (|T|, maps, maps), and E‖(1, a_t)‖², (groups, |T|)
        self.moments = self.like.new_zeros(locations, maps, maps)
        self._energies = self.like.new_zeros(groups, locations)
        for _, activations, derivatives in record.row_chunks():
            # (|T|, draws · examples, groups · I)
            by_location = derivatives.permute(3, 0, 1, 2, 4).flatten(1, 2).flatten(2)
            self.moments += by_location.mT @ by_location
            self._energies += activations.square().sum((0, 3))
        self.moments /= record.examples
        self._energies /= record.examples

    def transformed(self, images: Tensor) -> Tensor:
        by_location = images.permute(0, 2, 3, 1, 4)  # (examples, |T|, k, groups, I)
        back = by_location.flatten(3) @ self.moments / self.record.examples
        return back.reshape(by_location.shape).permute(0, 3, 1, 2, 4)

    def trace(self) -> float:
        variances = self.moments.diagonal(dim1=-2, dim2=-1)
        by_group = variances.unflatten(1, (self.shape[0], -1)).sum(-1)  # (|T|, groups)
        return float((self._energies * by_group.mT).sum())
