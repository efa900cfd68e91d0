"""The examples in the help of the job commands run as they are."""

from __future__ import annotations

import re
import shlex

import pytest
from zoo_jobs import ZOO

from elasticcb.cli.main import main
from elasticcb.cli.run import evaluate, predict, train
from elasticcb.errors import ExitCode

_QUICKLY = ("--cluster=inprocess", "--num_workers=1")  # threads of this process


def examples(command):
    """The command lines in the help of a command, as arguments of `elasticcb`."""
    text = command.help.replace("\\\n", "")
    lines = re.findall(r"^ *elasticcb (.+)$", text.partition("Examples")[2], re.MULTILINE)
    assert lines
    return [shlex.split(line, comments=True) for line in lines]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The working directory, as a checkout of the repository."""
    (tmp_path / "model_zoo").symlink_to(ZOO, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(arguments, *more):
    assert main([*arguments, *_QUICKLY, *more]) == ExitCode.DONE, shlex.join(arguments)


def test_first_example_of_train_leaves_what_those_of_evaluate_and_predict_take(checkout):
    output = f"--output={checkout / 'saved_model'}"  # beside the repository
    run(examples(train)[0], "--num_epochs=1", output)
    for arguments in (*examples(evaluate), *examples(predict)):
        run(arguments)
    assert (checkout / "predictions.csv").read_text().count("\n") == 1 + 360
    assert (checkout / "predictions.parquet").exists()


@pytest.mark.deep
def test_other_examples_of_train_run(checkout):
    for arguments in examples(train)[1:]:
        given = any(argument.startswith("--output=") for argument in arguments)
        run(arguments, "--num_epochs=2", *([] if given else [f"--output={checkout / 'saved_model'}"]))
