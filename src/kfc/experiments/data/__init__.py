"""Data sets: fetched, verified, decoded once, mapped into memory, and dealt out in batches."""

from kfc.experiments.data.batches import Batches
from kfc.experiments.data.catalogue import NAMES
from kfc.experiments.data.inputs import Inputs
from kfc.experiments.data.loading import data_folder, load
from kfc.experiments.data.sets import DataError, Dataset, Split

__all__ = [
    "NAMES",
    "Batches",
    "DataError",
    "Dataset",
    "Inputs",
    "Split",
    "data_folder",
    "load",
]
