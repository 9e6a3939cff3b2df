"""Imports that the forked ranks of all tests share."""

import hypothesis.strategies  # noqa: F401
import pytest  # noqa: F401
import torch
import torch.distributed
import torch.nn.parallel
import torch.utils.serialization

import kfc.distributed  # noqa: F401
import ranks  # noqa: F401

# The first optimizer makes torch load many more modules.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
