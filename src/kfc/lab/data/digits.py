"""scikit-learn's 1,797 handwritten digits of 8x8 pixels, which are part of its package."""

from __future__ import annotations

import numpy as np

from kfc.lab.data.datasets import Split, Splits

TRAINING_FRACTION = 0.8


def decode() -> Splits:
    """Return pixels 0 to 16. The test split is the last part, which other people wrote."""
    from sklearn.datasets import load_digits  # slow to import, and only this data set needs it

    digits = load_digits()
    images = digits.images.astype(np.uint8)[:, None]
    labels = digits.target.astype(np.int64)
    cut = round(len(labels) * TRAINING_FRACTION)
    return Splits(Split(images[:cut], labels[:cut]), Split(images[cut:], labels[cut:]))
