"""Run folders with invented but realistic numbers."""

import math
from pathlib import Path

from kfc.lab.config import make_config
from kfc.lab.runs import Record, RunFolder, read_record

SECONDS_PER_UPDATE = {"kfc": 0.5, "kfac": 0.7, "sgd": 0.1, "adam": 0.12}
# Exponential decay rates of the loss, per update.
PACES = {"kfc": 0.02, "kfac": 0.025, "sgd": 0.002, "adam": 0.003}
LAYERS = ("features.0", "features.3", "features.6", "classifier")


def make_run(
    path: Path,
    name: str = "KFC",
    optimizer: str = "kfc",
    *,
    lr: float | None = None,
    pace: float | None = None,
    evaluations: int = 12,
    end: str | None = "epochs",
    **settings,
) -> Record:
    """Write the folder of a run and read it; there is an evaluation every 40 updates, an epoch."""
    config = make_config(data="digits", optimizer=optimizer, lr=lr, threads=1, **settings)
    folder = RunFolder.create(path, config, "0123456789abcdef", name)
    pace = PACES[optimizer] if pace is None else pace
    for index in range(evaluations):
        for update in range(40 * index - 30, 40 * index + 1, 10):
            if update > 0:
                folder.write(progress_row(optimizer, update, pace))
        folder.write(evaluation_row(optimizer, 40 * index, pace, end == "diverged"))
    if end is not None:
        last = 40 * max(evaluations - 1, 0)
        message = "the loss is not finite" if end == "diverged" else ""
        place = {
            "update": last,
            "epoch": last / 40,
            "seconds": last * SECONDS_PER_UPDATE[optimizer],
        }
        folder.write({"kind": "end", **place, "reason": end, "message": message})
    folder.close()
    return read_record(path)


def progress_row(optimizer: str, update: int, pace: float) -> dict:
    seconds = update * SECONDS_PER_UPDATE[optimizer]
    row = {
        "kind": "progress",
        "update": update,
        "epoch": update / 40,
        "seconds": seconds,
        "loss": 2.3 * math.exp(-pace * update),
        "images_per_second": 128 / SECONDS_PER_UPDATE[optimizer],
    }
    if optimizer == "kfc":
        norm = 2 * math.exp(-update / 150) * (1 + 0.3 * math.sin(update))
        row |= {"fisher_norm": norm, "clip_factor": min(1.0, math.sqrt(0.3 / norm))}
    if optimizer == "kfac":
        row |= adaptation(update)
    return row


def adaptation(update: int) -> dict:
    """Return the diagnostics of a KFAC step, with ρ in every second row."""
    predicted = -math.exp(-update / 100)
    ratio = 0.9 + 0.3 * math.sin(update) if update % 20 == 0 else None
    return {
        "lr": 0.1 * math.exp(update / 300),
        "momentum": 0.6 * math.cos(update),
        "model_damping": 0.1 * math.exp(-update / 100),
        "factor_damping": 0.3 * math.exp(-update / 200),
        "fisher_norm": 0.1,
        "model_change": predicted,
        "objective_change": None if ratio is None else ratio * predicted,
        "reduction_ratio": ratio,
    }


def evaluation_row(optimizer: str, update: int, pace: float, diverges: bool) -> dict:
    decay = math.exp(-pace * update) * (1 + 0.1 * math.sin(update))
    error = 0.0 if decay < 1e-3 else 90 * decay
    values = {
        "train_loss": 2.3 * decay,
        "train_error": error,
        "test_loss": 0.1 + 2.2 * decay,
        "test_error": 1.5 + 88 * decay,
    }
    if diverges and update:
        values = dict.fromkeys(values, math.nan)
    averaged = {f"averaged_{key}": 0.8 * value for key, value in values.items()}
    return {
        "kind": "evaluation",
        "update": update,
        "epoch": update / 40,
        "seconds": update * SECONDS_PER_UPDATE[optimizer],
        **values,
        **averaged,
        "processor_seconds": 0.9 * update * SECONDS_PER_UPDATE[optimizer],
        "step_seconds": step_seconds(optimizer) if update else {},
        "diagnostics": diagnostics(update) if optimizer == "kfc" else {},
    }


def step_seconds(optimizer: str) -> dict:
    parts = {"data": 0.005, "forward": 0.03, "backward": 0.055}
    if optimizer != "kfc":
        return {**parts, "optimizer": SECONDS_PER_UPDATE[optimizer] - 0.09}
    return {
        **parts,
        "optimizer": 0.01,
        "statistics": 0.12,
        "averages": 0.01,
        "inverses": 0.15,
        "check": 0.005,
        "natural gradient": 0.06,
        "clip": 0.045,
        "update": 0.01,
    }


def diagnostics(update: int) -> dict:
    balance = 2.0 + update / 1000
    layers = {
        layer: {
            "pi": [balance + part for part in (0, 2, 4)] if index == 1 else balance + index,
            "activation_trace": 100 * (index + 1) * (1 + update / 400),
            "derivative_trace": 0.1 * math.exp(-update / 200) / (index + 1),
            "damping": 1e-3,
        }
        for index, layer in enumerate(LAYERS)
    }
    layers["features.1"] = {"block_trace": 0.3 * math.exp(-update / 300), "damping": 1e-3}
    return {
        "step": update,
        "skipped_steps": 0,
        "fisher_norm": 0.5,
        "clip_factor": 0.77,
        "clip_evaluations": update // 2,
        "clip_guards": 0,
        "periods": {"statistics": 2, "inverse": 10},
        "layers": layers,
    }
