"""A training run that can stop and resume: `python resume_run.py FOLDER FIRST LAST`."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import kfc


def run(path: Path, first: int, last: int, inverse: str) -> None:
    """Run steps first to last, from the checkpoint at path if first is not 0."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Conv2d(4, 4, 2, groups=2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )
    data = [(torch.randn(8, 1, 6, 6), torch.randint(3, (8,))) for _ in range(20)]
    optimizer = kfc.KFC(
        model,
        lr=0.05,
        schedule=kfc.Periods(2, 3),
        curvature=kfc.Kronecker(inverse=inverse),
        weight_decay=1e-3,
        averaging_timescale=5.0,
        clip=0.01,
        # The generator of the checkpoint counts, not the seed.
        seed=1 if first == 0 else 99,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    if first:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["random"])
    for x, y in data[first:last]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": torch.get_rng_state(),
    }
    torch.save(state, path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, start, stop = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for kind in ("factored", "eigen"):
        run(folder / f"{kind}.pt", start, stop, kind)
