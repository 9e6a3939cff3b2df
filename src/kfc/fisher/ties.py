"""Agreement of readings of weights that were rounded to bfloat16 or float16.

At this precision, neighbours among many different readings agree by chance. Those of equal weights
are told apart by two properties: almost no other readings are a little further away, and they vary
less than the derivatives that they were read from, which also depend on the outputs.
"""

import torch
from torch import Tensor

# The part of the readings that agree with another one, if targets are 0 or 1.
TIED = 0.9
# The number of readings that are compared: among many some agree by chance.
SAMPLE = 200
# The part of a row that is looked at, because many readings may be unknown.
LONGEST = 4000
# The number of readings that is enough if they are compared along one dimension.
FEWEST = 6
# Of the readings within WIDE times the tie, as many as this part must be within the tie.
WIDE, NEAR = 4, 0.5
# The largest part of the variance of derivatives that remains in the readings.
LEFT = 0.05


def are_weights(readings: Tensor, derivative: Tensor, tie: float) -> bool:
    """Return whether readings agree as weights do: with all others, or along one dimension.

    Weights per label are the same along the examples, those of examples along the labels. They may
    depend on the target, as with ``pos_weight``.

    Args:
        readings: one for each element, zero where unknown.
        derivative: what they were read from; its sign tells the target.
        tie: the relative difference of readings that agree.
    """
    info = torch.finfo(derivative.dtype)
    # Subnormal numbers have less precision: they differ by at least this product.
    is_known = derivative.abs().double() * tie >= info.tiny * info.eps
    signs = is_known & torch.stack([derivative < 0, derivative > 0])
    r, g = signs * readings, derivative.abs().expand(signs.shape)
    for axis in range(derivative.dim() + 1):
        # The first time all readings with the same sign, then those along one dimension.
        rows = [x.flatten(1) if axis == 0 else x.movedim(axis, -1).flatten(0, -2) for x in (r, g)]
        if _agree(*_sample(*rows), tie, info.eps, fewest=FEWEST if axis else 2):
            return True
    return False


def _sample(readings: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logarithms of readings and of sizes, row by row, and the rows that they are from."""
    steps = max(1, len(readings) // SAMPLE), max(1, readings.shape[1] // LONGEST)
    readings, sizes = (x[:: steps[0], :: steps[1]] for x in (readings, sizes))
    row, column = readings.nonzero().unbind(1)
    counts = torch.bincount(row, minlength=len(readings))
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    kept = place % (counts // SAMPLE).clamp_min(1)[row] == 0
    row, column = row[kept], column[kept]
    return readings[row, column].double().log(), sizes[row, column].double().log(), row


def _agree(
    readings: Tensor, sizes: Tensor, rows: Tensor, tie: float, rounding: float, *, fewest: int
) -> bool:
    # Rows are so far apart that no reading is close to one of another row.
    keys = (readings + 1e4 * rows).sort().values
    others, wide, near = (
        torch.searchsorted(keys, keys + d, right=True) - torch.searchsorted(keys, keys - d) - 1
        for d in (1e3, WIDE * tie, tie)
    )
    tied = ((near > 0) & (near >= NEAR * wide))[others > 0]
    if len(tied) < fewest or not bool(tied.double().mean() >= TIED):
        return False
    change, expected = readings.diff(), sizes.diff()
    pairs = (rows.diff() == 0) & (change.abs() <= tie)
    left, before = (x[pairs].square().mean() for x in (change, expected))
    # Each of two derivatives has a relative rounding error of at most half of this.
    return bool(left <= LEFT * before + rounding**2 / 2)
