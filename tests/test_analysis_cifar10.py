"""The paper's findings of section 5.1, on networks trained on real CIFAR-10."""

import pytest

import kfc.analysis as analysis
from kfc.experiments.config import make_config
from kfc.experiments.data import DataError, load
from kfc.experiments.training import Trainer

CONVOLUTIONS = ("conv1", "conv2", "conv3")


def trained(net, data, folder):
    """The network after an epoch of SGD."""
    wishes = {"data": "cifar10", "net": net, "init": "kaiming", "optimizer": "sgd", "lr": 0.003}
    wishes |= {"batch_size": 128, "epochs": 1.0, "evaluation_examples": 1000}
    trainer = Trainer.start(folder, make_config(**wishes), data, name=net)
    trainer.advance()
    trainer.close()
    assert trainer.last_evaluation["averaged_test_error"] < 75
    return trainer.parts


def neighbours(found, name):
    return found[name].measures["neighbouring locations"]


@pytest.mark.slow
def test_max_pooling_makes_derivatives_spatially_uncorrelated(tmp_path):
    """Figure 1, (a) against (c); and figure 2: activations are correlated in either network."""
    try:
        data = load("cifar10")
    except DataError as error:
        pytest.skip(str(error))
    found = {}
    for pooling in ("max", "avg"):
        parts = trained(f"cuda-convnet-{pooling}", data, tmp_path / pooling)
        images = parts.inputs(data.train.images[:256])
        model = parts.model.eval()
        found[pooling] = {
            layer: analysis.assumptions(analysis.record_layer(model, images, layer, samples=4))
            for layer in CONVOLUTIONS
        }
    for layer in CONVOLUTIONS:
        by_max, by_mean = (neighbours(found[p][layer], "SUD") for p in ("max", "avg"))
        assert by_max.high < 0.7 * by_mean.low, layer
        assert by_mean.value > 0.3, layer
        assert neighbours(found["max"][layer], "SUA").value > by_max.value, layer
