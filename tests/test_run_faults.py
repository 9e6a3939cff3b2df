"""Damaged, missing and foreign files in run folders are noticed before anything changes."""

import json
import random
import shutil
from contextlib import suppress

import pytest
import torch

from kfc.lab.checkpoints import checkpoint_files, read_sealed, write_checkpoint
from kfc.lab.data import load
from kfc.lab.diagnosis import DivergenceWatch
from kfc.lab.disk import RunError, read_checked, write_checked
from kfc.lab.runs import RunFolder, read_record
from kfc.lab.training import Trainer
from test_training import assert_same_state, checkpoint, config_of, run

SETTINGS = {"optimizer": "kfc", "epochs": 3, "evaluation_period": 0.5, "log_period": 1}


@pytest.fixture(scope="module")
def digits():
    return load("digits")


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory):
    """Return the folder of a complete run."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    run(path, digits, **SETTINGS)
    return path


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".lock"}


def flip(path, position, bit):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(bytes(content))


def resumed(path, digits, **options):
    """Resume a run and train to its end; return its folder."""
    folder = RunFolder(path)
    try:
        trainer = Trainer.resume(folder, digits, **options)
        trainer.advance()
        return folder
    finally:
        folder.close()


def rows(path):
    """Return all rows without times."""
    record = read_record(path)
    found = [*record.evaluations, *record.progress, record.end]
    return [{k: v for k, v in row.items() if "second" not in k} for row in found]


# Bit rot


def test_every_flipped_bit_of_a_checkpoint_is_noticed(whole, tmp_path):
    original = (whole / "checkpoint.pt").read_bytes()
    draws = random.Random(0)
    file = tmp_path / "checkpoint.pt"
    ends = [*range(100), *range(len(original) - 150, len(original))]
    for position in [*ends, *(draws.randrange(len(original)) for _ in range(100))]:
        file.write_bytes(original)
        flip(file, position, draws.randrange(8))
        with pytest.raises(RunError, match=r"checkpoint\.pt is damaged"):
            read_sealed(file)
    for size in (0, 1, 70, len(original) // 2, len(original) - 1):
        file.write_bytes(original[:size])
        with pytest.raises(RunError, match=r"checkpoint\.pt is damaged"):
            read_sealed(file)


def test_torch_load_reads_a_checkpoint(tmp_path):
    state = {"update": 3, "model": {"weight": torch.randn(2, 3)}}
    write_checkpoint(tmp_path, state, 1, replace_newest=False)
    for found in (checkpoint(tmp_path), read_sealed(tmp_path / "checkpoint.pt")):
        assert found["update"] == 3
        assert torch.equal(found["model"]["weight"], state["model"]["weight"])


def test_the_newest_good_checkpoint_is_used(copy, whole, digits):
    """With the metrics up to it, and with the result of a run without damage."""
    flip(copy / "checkpoint.pt", 5000, 3)
    folder = resumed(copy, digits)
    assert "checkpoint.pt is damaged" in folder.note
    assert "checkpoint-1.pt, of update 30, is used instead" in folder.note
    assert_same_state(checkpoint(copy), checkpoint(whole))
    assert rows(copy) == rows(whole)
    good = read_sealed(copy / "checkpoint-1.pt")
    assert good["update"] == 30, "the damaged one was replaced, and not the good one"


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_the_last_checkpoints_are_kept(digits, tmp_path, kept):
    run(tmp_path / "run", digits, **SETTINGS, checkpoints=kept)
    files = checkpoint_files(tmp_path / "run")
    names = ["checkpoint.pt", "checkpoint-1.pt", "checkpoint-2.pt"][:kept]
    assert [file.name for file in files] == names
    updates = [read_sealed(file)["update"] for file in files]
    assert updates == [33, 30, 24][:kept]


def test_without_a_good_checkpoint_nothing_changes(copy, digits):
    for file in checkpoint_files(copy):
        flip(file, 3000, 0)
    before = contents(copy)
    with pytest.raises(RunError, match=r"checkpoint\.pt is damaged.*-1\.pt is damaged.*--restart"):
        resumed(copy, digits)
    assert contents(copy) == before


def test_every_flipped_bit_of_the_configuration_is_noticed_or_harmless(copy, whole):
    original, expected = (whole / "config.json").read_bytes(), read_record(whole)
    draws = random.Random(1)
    for _ in range(300):
        (copy / "config.json").write_bytes(original)
        flip(copy / "config.json", draws.randrange(len(original)), draws.randrange(8))
        try:
            found = read_record(copy)
        except RunError:
            continue
        assert found.config == expected.config  # one blank became another
        assert found.environment == expected.environment


def test_every_flipped_bit_of_the_metrics_is_noticed(copy, whole):
    original = (whole / "metrics.jsonl").read_bytes()
    draws = random.Random(2)
    positions = [len(original) - 1, *(draws.randrange(len(original)) for _ in range(300))]
    for position in positions:
        (copy / "metrics.jsonl").write_bytes(original)
        flip(copy / "metrics.jsonl", position, draws.randrange(8))
        with pytest.raises(RunError, match=r"metrics\.jsonl, line \d+ is damaged"):
            read_record(copy)


def test_a_lost_row_is_noticed(copy):
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(RunError, match="line 4 is damaged: its checksum is wrong"):
        read_record(copy)


def test_lost_metrics_lead_to_the_checkpoint_before(copy, whole, digits):
    size = read_sealed(copy / "checkpoint-1.pt")["metrics_bytes"]
    with (copy / "metrics.jsonl").open("r+b") as file:
        file.truncate(size + 10)
    assert "shorter" in resumed(copy, digits).note
    assert rows(copy) == rows(whole)


# Identity


def test_the_checkpoint_of_another_run_is_refused(copy, digits, tmp_path):
    """Even of a run with the same settings, and although another checkpoint is good."""
    run(tmp_path / "other", digits, **SETTINGS)
    shutil.copy(tmp_path / "other" / "checkpoint.pt", copy)
    before = contents(copy)
    with pytest.raises(RunError, match="is not of this run"):
        resumed(copy, digits)
    assert contents(copy) == before


def test_a_checkpoint_of_other_settings_is_refused(copy, digits):
    file = copy / "config.json"
    header = read_checked(file)
    header["config"]["lr"] = 0.5
    write_checked(file, header)
    with pytest.raises(RunError, match=r"other settings .*: --lr; restore"):
        resumed(copy, digits)


def test_a_missing_checkpoint_is_not_a_new_start(copy, whole, digits):
    for file in checkpoint_files(copy):
        file.unlink()
    before = contents(copy)
    words = r"has no checkpoint\.pt, although metrics\.jsonl has rows up to update 33.*--restart"
    with pytest.raises(RunError, match=words):
        resumed(copy, digits)
    assert contents(copy) == before
    resumed(copy, digits, restart=True)
    assert_same_state(checkpoint(copy), checkpoint(whole))
    assert rows(copy) == rows(whole)


def test_a_run_has_a_checkpoint_before_its_first_update(digits, tmp_path):
    trainer = Trainer.start(tmp_path / "run", config_of(**SETTINGS), digits, name="run")
    trainer.close()
    assert checkpoint(tmp_path / "run")["update"] == 0


# Validate, then commit


def test_a_refused_checkpoint_leaves_the_metrics(copy, digits, monkeypatch):
    """Even if only the network refuses it, after rows beyond the checkpoint were written."""
    with (copy / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "progress", "upd')
    before = contents(copy)
    monkeypatch.setattr(Trainer, "_restore", fail_to_restore)
    with pytest.raises(RunError, match="does not fit"):
        resumed(copy, digits)
    assert contents(copy) == before


def fail_to_restore(trainer, state):
    raise RunError("it does not fit")


@pytest.mark.parametrize("tail", [b"nonsense\n", b'{"kind": 3}\n', b"[" * 100_000, b"\xff\xfe\n"])
def test_a_damaged_line_after_the_checkpoint_is_cut(copy, whole, digits, tail):
    size = checkpoint(copy)["metrics_bytes"]
    with (copy / "metrics.jsonl").open("r+b") as file:
        file.truncate(size)
        file.seek(size)
        file.write(tail)
    resumed(copy, digits)
    assert rows(copy) == rows(whole)


# Divergence


GROWING = """
from torch import nn
class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.passes = 0
    def forward(self, x):
        self.passes += self.training
        return x * ({})
def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Growing())
"""


@pytest.fixture
def growing(tmp_path, monkeypatch):
    """Return a function that writes a network whose outputs have a factor in every pass."""
    monkeypatch.chdir(tmp_path)

    def write(factor, name):
        (tmp_path / f"{name}.py").write_text(GROWING.format(factor))
        return f"{name}:net"

    return write


def test_a_loss_far_above_its_start_ends_the_run(digits, tmp_path, growing):
    net = growing("1e6 if self.passes > 15 else 1", "growing_loss")
    trainer = run(tmp_path / "run", digits, net=net, optimizer="sgd", lr=1e-9, log_period=1)
    assert trainer.end["reason"] == "diverged"
    assert trainer.update == 16
    for words in ("the loss is ", "at the beginning, after 16 updates", "--lr"):
        assert words in trainer.end["message"]
    assert checkpoint(tmp_path / "run")["update"] < 16


def test_a_loss_that_grows_less_does_not_end_the_run(digits, tmp_path, growing):
    net = growing("30 if self.passes > 5 else 1", "growing_less")
    trainer = run(tmp_path / "run", digits, net=net, optimizer="sgd", lr=1e-9, log_period=1)
    assert trainer.end["reason"] == "epochs"


def test_the_start_of_a_resumed_run_is_that_of_the_whole_run(digits, tmp_path, growing):
    """Or a run that is interrupted in its divergence would take the large loss for its start."""
    net = growing("1", "growing_later")
    trainer = Trainer.start(tmp_path / "run", config_of(net=net, optimizer="sgd"), digits, name="")
    trainer.close()
    again = Trainer.resume(RunFolder(tmp_path / "run"), digits)
    again.close()
    first = read_record(tmp_path / "run").evaluations[0]["train_loss"]
    assert again._watch.first_loss == first
    assert "the loss is" in again._watch.sign_in_loss(1001 * first)


@pytest.mark.filterwarnings("ignore::UserWarning:kfc")
@pytest.mark.parametrize("log_period", [1, 50])
def test_ten_skipped_steps_in_a_row_end_the_run(digits, tmp_path, growing, log_period):
    """The loss is finite, but its gradient is not."""
    net = growing("1 + 0 * (x - x.detach()).abs().sqrt()", "skipping")
    trainer = run(tmp_path / "run", digits, net=net, log_period=log_period, estimate_factors=0)
    assert trainer.end["reason"] == "diverged"
    assert trainer.update == 10
    assert "10 steps in a row were skipped" in trainer.end["message"]


@pytest.mark.filterwarnings("ignore::UserWarning:kfc")
def test_a_few_skipped_steps_in_a_row_do_not_end_the_run(digits, tmp_path, growing):
    bad = "1 + 0 * (x - x.detach()).abs().sqrt()"
    net = growing(f"({bad}) if self.passes % 12 in range(1, 5) else 1", "sometimes")
    trainer = run(tmp_path / "run", digits, net=net, log_period=1, estimate_factors=0)
    assert trainer.end["reason"] == "epochs"
    assert trainer.components.optimizer.diagnostics["skipped_steps"] > 1


def test_small_losses_may_grow():
    """A network that was trained before begins with a loss near 0."""
    watch = DivergenceWatch(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
    watch.begin(1e-6)
    assert not watch.sign_in_loss(2.3)
    assert watch.sign_in_loss(2300.0)
    assert watch.sign_in_loss(float("nan"))


# Damaged headers


@pytest.mark.parametrize("content", ["null", "[]", "3", '"a"', "{}", "[" * 100_000, "{", "\x00"])
def test_a_configuration_that_is_none(copy, content):
    (copy / "config.json").write_text(content)
    with pytest.raises(RunError, match=r"config\.json is damaged"):
        read_record(copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("config", "name", "environment", "run") for value in (None, 3)),
        ("config", []),
        ("environment", []),
        ("data_digest", {}),
        ("job", 3),
        ("more", 1),
    ],
)
def test_values_of_wrong_types(copy, key, value):
    """Although the digest is right."""
    file = copy / "config.json"
    write_checked(file, {**read_checked(file), key: value})
    with pytest.raises(RunError, match=r"config\.json is damaged"):
        read_record(copy)


def test_a_run_of_another_version(copy):
    file = copy / "config.json"
    write_checked(file, {**read_checked(file), "format": 99})
    with pytest.raises(RunError, match=r"another version of kfc: config\.json has format 99"):
        read_record(copy)


@pytest.mark.parametrize("depth", [*range(100, 1000, 100), *range(900, 1000, 7)])
def test_a_configuration_that_is_nested_as_deep_as_can_be_read(copy, depth):
    """It takes more of the stack to compute its digest, or to print it."""
    (copy / "config.json").write_text(f'{{"format": {"[" * depth}{"]" * depth}}}')
    with pytest.raises(RunError, match=r"config\.json is damaged") as caught:
        read_record(copy)
    assert len(str(caught.value)) < 400


def test_settings_of_wrong_types(copy):
    file = copy / "config.json"
    header = read_checked(file)
    values = (None, [], {}, -1, 1e999, 10**400, "x", [[]], {"a": None}, True)
    for name in header["config"]:
        for value in values:
            changed = {**header["config"], name: value}
            write_checked_unless_infinite(file, {**header, "config": changed})
            with suppress(RunError):  # any other error is a traceback
                read_record(copy)


def write_checked_unless_infinite(file, content):
    try:
        write_checked(file, content)
    except ValueError:  # JSON has no infinity
        file.write_text(json.dumps(content))
