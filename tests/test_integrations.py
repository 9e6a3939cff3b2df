"""The programs of docs/integrations.md, and more uses of the libraries that they show.

`make integrations` runs these tests in an environment with the libraries.
"""

import copy
import os
import re
import subprocess
import sys
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import vision
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import kfc

ROOT = Path(__file__).parent.parent
TEXTS = (ROOT / "docs" / "integrations.md").read_text().split("\n## ")
SECTIONS = {text.split("\n")[0]: text for text in TEXTS if "```python" in text}
PROGRAMS = {name: re.findall(r"```python\n(.*?)```", text, re.S) for name, text in SECTIONS.items()}
LIBRARIES = ("accelerate", "lightning", "peft", "timm", "transformers")
KINDS = [partial(kfc.KFC, seed=0), kfc.WhitenedAdam]
# With what each program is run.
START = """
import runpy, sys, vision
vision.declare_operators()
runpy.run_path(sys.argv[1], run_name="__main__")
"""
vision.declare_operators()  # libraries import torchvision, if it is there


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_every_integration_has_one_program():
    names = ("Plain PyTorch", "Mixed precision", "torch.compile", "DistributedDataParallel")
    assert list(PROGRAMS)[:4] == list(names)
    assert {"Lightning", "Accelerate", "Hugging Face Trainer", "timm", "peft"} < set(PROGRAMS)
    assert all(len(programs) == 1 for programs in PROGRAMS.values())


def run_program(text: str, folder: Path, ranks: int | None = None) -> subprocess.CompletedProcess:
    """Run a program to its end, under torchrun if there are ranks."""
    path = folder / "train.py"
    path.write_text(text)
    start = ["-c", START, path]
    if ranks is not None:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", path]
    folders = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *map(str, start)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"},
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["WhitenedAdam", "KFC"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_and_lower_the_loss(name, method, tmp_path):
    (program,) = PROGRAMS[name]
    for library in LIBRARIES:
        if re.search(rf"^(?:import|from) {library}\b", program, re.M) and not find_spec(library):
            pytest.skip(f"{library} is not installed; run `make integrations`")
    if method == "KFC":
        assert "kfc.WhitenedAdam(" in program
        averages = ", averaging_timescale=20" if "averaged_parameters" in program else ""
        program = re.sub(r"kfc\.WhitenedAdam\((\s*[\w.]+)", rf"kfc.KFC(\1{averages}", program)
    done = run_program(program, tmp_path, ranks=2 if "torchrun" in SECTIONS[name] else None)
    assert done.returncode == 0, done.stderr
    first, last = re.search(r"^loss ([\d.]+) -> ([\d.]+)$", done.stdout, re.M).groups()
    assert float(last) < 0.8 * float(first), done.stdout


# Lightning


def data() -> TensorDataset:
    torch.manual_seed(0)
    inputs = torch.randn(96, 20)
    return TensorDataset(inputs, (inputs @ torch.randn(20, 5)).argmax(dim=1))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 5))


def plain_loop(model, optimizer, dtype, clip) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype == torch.float16)
    for x, y in DataLoader(data(), batch_size=16):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_lightning_does_what_a_plain_loop_does(kind, precision, clip, tmp_path):
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, index):
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self):
            return kind(self.network)

    plugins, dtype = None, {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    if precision == "16-mixed":  # on the CPU, Lightning itself would take bfloat16 instead
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        plugins, precision = [MixedPrecision(precision, "cpu", scaler)], None
    module = Classifier()
    trainer = lightning.Trainer(
        max_epochs=1,
        precision=precision,
        plugins=plugins,
        gradient_clip_val=clip,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*num_workers.*|.*srun.*|.*litlogger.*")
        trainer.fit(module, DataLoader(data(), batch_size=16))
    expected = network()
    plain_loop(expected, kind(expected), dtype, clip)
    assert_close(list(module.network.parameters()), list(expected.parameters()))
    assert not torch.equal(expected[0].weight, network()[0].weight)


@pytest.mark.slow
def test_lightning_on_two_processes(tmp_path):
    """The program of the document under torchrun; both ranks end with the same parameters."""
    pytest.importorskip("lightning")
    (program,) = PROGRAMS["Lightning"]
    program = program.replace("Trainer(", 'Trainer(accelerator="cpu", devices=2, strategy="ddp", ')
    program += "print('sum', model.network[0].weight.double().sum().item())\n"
    done = run_program("import vision\nvision.declare_operators()\n" + program, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    sums = re.findall(r"sum (\S+)", done.stdout)
    assert len(sums) == 2
    assert sums[0] == sums[1]
    for first, last in re.findall(r"loss ([\d.]+) -> ([\d.]+)", done.stdout):
        assert float(last) < 0.8 * float(first)


# Accelerate


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_accelerate_accumulates_what_a_plain_loop_accumulates(kind):
    accelerate = pytest.importorskip("accelerate")
    model, expected = network(), network()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    run, optimizer, loader = accelerator.prepare(
        model, kind(model), DataLoader(data(), batch_size=16)
    )
    for x, y in loader:
        with accelerator.accumulate(run):
            accelerator.backward(F.cross_entropy(run(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(run.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    optimizer = kind(expected)
    for x, y in DataLoader(data(), batch_size=32):
        optimizer.zero_grad()
        for part in range(2):
            rows = slice(16 * part, 16 * part + 16)
            (F.cross_entropy(expected(x[rows]), y[rows]) / 2).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
        optimizer.step()
    assert_close(list(model.parameters()), list(expected.parameters()))


# Hugging Face


def bert():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


def sentences() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(20, (64, 6))
    return [{"input_ids": t, "labels": (t[0] < 10).long()} for t in tokens]


def trainer(model, folder, **options):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=16,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    return transformers.Trainer(model, arguments, train_dataset=sentences(), **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_to_give_the_trainer_an_optimizer_are_the_same(kind, tmp_path):
    one, other = bert(), bert()
    start = copy.deepcopy(one.state_dict())
    trainer(one, tmp_path, optimizers=(kind(one), None)).train()
    kind, options = (kfc.KFC, {"seed": 0}) if isinstance(kind, partial) else (kind, {})
    given = kind, {"model": other, **options}
    trainer(other, tmp_path, optimizer_cls_and_kwargs=given).train()
    assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert not torch.equal(one.classifier.weight, start["classifier.weight"])


@pytest.mark.slow
def test_the_trainer_without_a_model_for_the_optimizer_is_told_what_to_write(tmp_path):
    model = bert()
    with pytest.raises(TypeError, match=r"optimizers=\(optimizer, None\)"):
        trainer(model, tmp_path, optimizer_cls_and_kwargs=(kfc.KFC, {"lr": 1e-3})).train()
