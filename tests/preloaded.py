"""What a run imports sooner or later, for processes that are forked to test runs."""

import sklearn.datasets  # noqa: F401
import torch
from tensorboard.summary.writer import event_file_writer  # noqa: F401

import kfc.lab.cli  # noqa: F401

# The first optimizer makes torch load a good deal more.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
