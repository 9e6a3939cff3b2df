"""Make torchvision importable with a build of torch that its compiled operators do not fit.

PyPI has torchvision for CUDA only. With a CPU build of torch, its compiled operators do not load,
and the import fails because two of them are given fake implementations all the same. Declaring
them is enough for models that do not call them, which are all but those of object detection.
"""

from importlib.util import find_spec
from pathlib import Path

import torch


def declare_operators() -> None:
    """Declare the operators that torchvision needs when it is imported, if they do not load."""
    package = find_spec("torchvision")
    if package is None or package.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(package.origin).with_name("_C.so")))
    except OSError:
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", schema)
