"""Small networks for tests of inspections."""

from collections import OrderedDict

import torch
from torch import nn

from kfc.lab.components import TASKS
from kfc.lab.inspection.networks import InspectedNetwork
from kfc.lab.inspection.results import InspectionSettings
from kfc.lab.inspection.runner import inspect_network

POOLING = {"max": nn.MaxPool2d, "average": nn.AvgPool2d}


def small_network(pooling="max", first="conv1"):
    """Two convolutions and a linear layer, for 8x8 images and 4 classes."""
    torch.manual_seed(0)
    layers = OrderedDict()
    layers[first] = nn.Conv2d(1, 4, 3, padding=1)
    layers["relu"] = nn.ReLU()
    layers["pool"] = POOLING[pooling](2)
    layers["conv2"] = nn.Conv2d(4, 5, 3, padding=1)
    layers["flat"] = nn.Flatten()
    layers["fc"] = nn.Linear(80, 4)
    return nn.Sequential(layers)


class SequenceFirst(nn.Module):
    """A network whose first layer gets an input of (8, M, 5): image rows before examples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.fc = nn.Linear(5, 3), nn.Linear(24, 4)

    def forward(self, images):
        sequences = self.first(images[:, 0, :, :5].transpose(0, 1))
        return self.fc(sequences.transpose(0, 1).flatten(1))


class ConstantRows(nn.Module):
    """A network whose first layer makes weights from 8 constant rows, not from the examples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.constant, self.fc = nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, images):
        return self.fc((images[:, 0, 0] @ self.constant(torch.ones(8, 5))).tanh())


def network_of(model, label="network", size=(1, 8, 8), examples=12):
    """Return a network to inspect, with random images and labels."""
    torch.manual_seed(1)
    images, labels = torch.randn(examples, *size), torch.randint(4, (examples,))
    description = {"net": "small", "data": "noise"}
    return InspectedNetwork(
        label, description, None, model.eval(), TASKS["classification"], images, labels
    )


def inspect_small(network, progress=None, **settings):
    """Inspect a network in three batches; ``settings`` override the defaults."""
    batches = settings.get("batches", 3)
    examples = len(network.images) // batches
    settings = {"examples": examples, "batches": batches, "reach": 3, **settings}
    return inspect_network(network, InspectionSettings(**settings), progress)
