"""A check that a resumed run continues bit for bit."""

import copy

import torch


def assert_resumes(new, train, before, after):
    """Train, save, train on; and compare with a new run that continues from what was saved.

    Args:
        new: returns a new model and its optimizer.
        train: trains a model with its optimizer on batches with the given numbers.
        before, after: the numbers of the batches before and after saving.
    """
    model, optimizer = new()
    train(model, optimizer, before)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, after)
    other, resumed = new()
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(other, resumed, after)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    return optimizer
