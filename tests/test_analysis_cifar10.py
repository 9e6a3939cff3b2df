"""Tests of the findings of section 5.1 on networks trained on CIFAR-10."""

import pytest
import torch

import kfc.analysis as analysis
from kfc.lab.config import make_config
from kfc.lab.data import DataError, load
from kfc.lab.training import Trainer

CONVOLUTIONS = ("conv1", "conv2", "conv3")


def trained(net, data, folder):
    """Return the network after an epoch of SGD."""
    options = {"data": "cifar10", "net": net, "init": "kaiming", "optimizer": "sgd", "lr": 0.003}
    options |= {"batch_size": 128, "epochs": 1.0, "evaluation_examples": 1000}
    trainer = Trainer.start(folder, make_config(**options), data, name=net)
    trainer.advance()
    trainer.close()
    assert trainer.last_evaluation["averaged_test_error"] < 75
    return trainer.components


def neighbours(offsets):
    """Return the mean magnitude of the correlation between neighbouring locations."""
    middle = offsets.shape[1] // 2
    places = [(middle, middle + 1), (middle + 1, middle)]
    return torch.stack([offsets[:, i, j].abs().mean() for i, j in places]).mean()


@pytest.mark.slow
def test_max_pooling_makes_derivatives_spatially_uncorrelated(tmp_path):
    """As in figures 1 (a) and (c); in both networks, activations are correlated (figure 2)."""
    try:
        data = load("cifar10")
    except DataError as error:
        pytest.skip(str(error))
    found = {}
    for pooling in ("max", "avg"):
        components = trained(f"cuda-convnet-{pooling}", data, tmp_path / pooling)
        images = components.inputs(data.train.images[:128])
        model = components.model.eval()
        found[pooling] = {
            layer: analysis.correlations(analysis.record_layer(model, images, layer, samples=4))
            for layer in CONVOLUTIONS
        }
    for layer in CONVOLUTIONS:
        by_max, by_mean = (neighbours(found[p][layer].derivative_offsets) for p in ("max", "avg"))
        assert by_max < 0.7 * by_mean, layer
        assert by_mean > 0.3, layer
        assert neighbours(found["max"][layer].activation_offsets) > by_max, layer
