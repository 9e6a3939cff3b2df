"""Count the iterations of conjugate gradients on exact Fisher matrices, by preconditioner.

python benchmarks/solving.py digits
python benchmarks/solving.py cifar10 --batch 256

The network is trained by KFC for some updates first. Then (F + δI) x = ∇h is solved on one batch,
for several dampings δ. The table shows iterations and seconds to the tolerance.
"""

import argparse
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import nn

import kfc
from kfc.lab.data import Inputs, load
from kfc.lab.networks.architectures import cuda_convnet, digits, initialise

CHOICES = {
    "none": None,
    "diagonal": "diagonal",
    "KFC": kfc.Kronecker(inverse="eigen"),
    "KFC, factored damping": "kfc",
}
DAMPINGS = (1e-1, 1e-2, 1e-3, 1e-4)


def trained(name: str, updates: int, batch: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a network after some updates, and a batch that it was not trained on."""
    data = load(name)
    inputs = Inputs.normalised(data.train)
    images = inputs(data.train.images[:])
    labels = torch.tensor(data.train.labels[:]).long()
    model = digits(1, 10) if name == "digits" else cuda_convnet(3, 10)
    initialise(model, "kaiming")
    optimizer = kfc.KFC(model, seed=0)
    order = torch.randperm(len(labels) - batch, generator=torch.Generator().manual_seed(0))
    size = min(512, len(order) // 4)
    for update in range(updates):
        chosen = order.roll(-update * size)[:size]
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    optimizer.close()
    return model.eval(), images[-batch:], labels[-batch:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", choices=["digits", "cifar10"])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--max-iterations", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    print(f"| seed | damping | {' | '.join(CHOICES)} |")
    print("|---" * (2 + len(CHOICES)) + "|")
    for seed in options.seeds:
        torch.manual_seed(seed)
        model, images, labels = trained(options.data, options.updates, options.batch)
        loss = F.cross_entropy(model(images), labels)
        names = [name for name, _ in model.named_parameters()]
        gradient = dict(zip(names, torch.autograd.grad(loss, model.parameters()), strict=True))
        for damping in DAMPINGS:
            cells = []
            for choice in CHOICES.values():
                start = perf_counter()
                found = kfc.solve_fisher(
                    model,
                    images,
                    gradient,
                    damping=damping,
                    preconditioner=choice,
                    tolerance=options.tolerance,
                    max_iterations=options.max_iterations,
                )
                mark = "" if found.converged else "> "
                seconds = perf_counter() - start
                cells.append(f"{mark}{len(found.residuals) - 1} ({seconds:.1f} s)")
            print(f"| {seed} | {damping:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
