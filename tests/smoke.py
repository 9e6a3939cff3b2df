"""Train three steps with each optimizer: what an installed kfc must do with torch alone.

``tests/release.py`` runs this file with the interpreter of a clean environment, outside of the
repository.
"""

import importlib.metadata
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import kfc
import kfc.analysis

assert Path(kfc.__file__).is_relative_to(sys.prefix), f"{kfc.__file__} is not the installed one"
assert importlib.metadata.version("kfc-torch") == kfc.__version__
assert (Path(kfc.__file__).parent / "py.typed").exists()
images, labels = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
for name in ("KFC", "KFAC", "WhitenedAdam", "Preconditioner"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10)
    )
    optimizer = getattr(kfc, name)(model)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)  # applies what a Preconditioner leaves

    def closure(model=model) -> torch.Tensor:
        return F.cross_entropy(model(images), labels)

    first = closure().item()
    for _ in range(3):
        if name == "KFAC":
            optimizer.step(closure)
            continue
        sgd.zero_grad()
        closure().backward()
        optimizer.step()
        if name == "Preconditioner":
            sgd.step()
    last = closure().item()
    assert last < first, f"{name}: the loss went from {first} to {last}"
quality = kfc.analysis.compare_approximations(model, images[:8], ["0"])["0"].approximations["kfc"]
assert 0 < quality.decrease <= 1.000001
print(f"kfc {kfc.__version__}, torch {torch.__version__}: three steps of each optimizer")
