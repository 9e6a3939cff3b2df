"""What every rank of a test imports sooner or later, for processes that are forked to be ranks."""

import hypothesis.strategies  # noqa: F401
import pytest  # noqa: F401
import torch
import torch.distributed
import torch.nn.parallel
import torch.utils.serialization

import kfc.distributed  # noqa: F401
import ranks  # noqa: F401

# The first optimizer makes torch load a good deal more.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
