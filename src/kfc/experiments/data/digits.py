"""scikit-learn's 1,797 handwritten digits of 8x8 pixels, embedded in its package."""

from __future__ import annotations

import numpy as np

from kfc.experiments.data.sets import Decoded, Split

TRAINING_FRACTION = 0.8


def decode() -> Decoded:
    """Pixels 0 to 16. The last part is the test set: other people wrote it than the first."""
    from sklearn.datasets import load_digits  # takes a second to import, and only this set needs it

    digits = load_digits()
    images = digits.images.astype(np.uint8)[:, None]
    labels = digits.target.astype(np.int64)
    cut = round(len(labels) * TRAINING_FRACTION)
    return Decoded(Split(images[:cut], labels[:cut]), Split(images[cut:], labels[cut:]))
