"""Small networks to inspect."""

from collections import OrderedDict

import torch
from torch import nn

from kfc.experiments.findings import InspectionSettings
from kfc.experiments.inspection import inspect_network
from kfc.experiments.subjects import Subject
from kfc.experiments.tasks import TASKS

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
    """Its first layer runs on (8, M, 5), the rows of images before the examples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.fc = nn.Linear(5, 3), nn.Linear(24, 4)

    def forward(self, images):
        sequences = self.first(images[:, 0, :, :5].transpose(0, 1))
        return self.fc(sequences.transpose(0, 1).flatten(1))


class ConstantRows(nn.Module):
    """Its first layer makes weights from 8 rows, whatever the examples are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.constant, self.fc = nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, images):
        return self.fc((images[:, 0, 0] @ self.constant(torch.ones(8, 5))).tanh())


def subject_of(model, label="network", size=(1, 8, 8), examples=12):
    torch.manual_seed(1)
    images, labels = torch.randn(examples, *size), torch.randint(4, (examples,))
    what = {"net": "small", "data": "noise"}
    return Subject(label, what, None, model.eval(), TASKS["classification"], images, labels)


def inspect_small(subject, progress=None, **wishes):
    wishes = {"examples": len(subject.images), "samples": 2, "reach": 3, **wishes}
    return inspect_network(subject, InspectionSettings(**wishes), progress)
