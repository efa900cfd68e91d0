from __future__ import annotations

from pathlib import Path

import pytest

from elasticcb.cli.command import CommandRun, given_values
from elasticcb.cli.job import build_settings
from elasticcb.cli.main import main
from elasticcb.cli.run import evaluate, predict, train
from elasticcb.settings import Command, JobSettings

COMMANDS = {Command.TRAIN: train, Command.EVALUATE: evaluate, Command.PREDICT: predict}

MODEL_FILE = """\
import keras

def custom_model():
    return keras.Sequential([keras.layers.Dense(1)])

def loss(labels, predictions):
    return keras.ops.mean((labels - predictions) ** 2)

if keras.backend.backend() == "tensorflow":
    def optimizer():
        return keras.optimizers.SGD()

feed = my_feed = lambda dataset, mode, metadata: dataset
"""


class Workplace:
    """A folder with a model zoo, data and a checkpoint, which is the working directory of a test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("zoo/linear/linear.py", MODEL_FILE)
        self.write("zoo/table.py", MODEL_FILE + "\ndef custom_data_reader(data_origin):\n    pass\n")
        self.write("data/train.csv", "1,2\n")
        self.write("data/test.csv", "1,2\n")
        self.write("checkpoints/version-10/manifest.json", "{}")
        self.train = self.flags("--training_data=data/train.csv")
        self.evaluate = self.flags("--validation_data=data/test.csv", "--checkpoint_dir_for_init=checkpoints")
        self.predict = self.flags(
            "--prediction_data=data/test.csv", "--checkpoint_dir_for_init=checkpoints", "--output=predictions.csv"
        )

    def write(self, path: str, text: str) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    def flags(self, *more: str, model: str = "linear.linear.custom_model") -> list[str]:
        return ["--model_zoo=zoo", f"--model_def={model}", *more]

    def settings(self, *arguments: str, command: Command = Command.TRAIN) -> JobSettings:
        """What the command would run with."""
        click_command = COMMANDS[command]
        with click_command.make_context(command.value, list(arguments), obj=CommandRun()) as context:
            return build_settings(given_values(context, command))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTICCB_DEBUG", raising=False)
    return Workplace(tmp_path)


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]):
    """Runs the command line, expects wrong usage, and returns what it says."""

    def run(*arguments: str) -> str:
        code = main(list(arguments))
        captured = capsys.readouterr()
        assert code == 2, captured.err
        assert "Traceback" not in captured.err
        assert not captured.out
        return captured.err

    return run
