"""Data sets: fetch, verify and decode them once, map them into memory, and draw batches."""

from kfc.lab.data.batches import Batches, Inputs
from kfc.lab.data.catalogue import NAMES
from kfc.lab.data.datasets import DataError, Dataset, Split
from kfc.lab.data.loading import data_folder, load

__all__ = ["NAMES", "Batches", "DataError", "Dataset", "Inputs", "Split", "data_folder", "load"]
