"""What docs/callbacks.md says: its examples run in jobs, and its tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import keras
import numpy as np
import pytest

from code_blocks import code_blocks
from deep_cases import deep_but
from elasticcb import callbacks as package
from elasticcb.callbacks.placement import STOCK, TABLE
from elasticcb.settings import Command
from jobs import job_settings, run_job, write_model_file

PAGE = Path(__file__).parents[2] / "docs" / "callbacks.md"
DOCS = PAGE.read_text()
EXAMPLES = code_blocks(PAGE)
RECORDS = 160

MODEL = """
import keras as _keras


def custom_model():
    _keras.utils.set_random_seed(0)
    model = _keras.Sequential([_keras.Input((4,)), _keras.layers.Dense(1)])
    model.compile(_keras.optimizers.SGD(0.01, momentum=0.9), loss="mse", metrics=["accuracy"])
    return model


"""


def job(folder: Path, text: str, command: Command, name: str, **data: str):
    path = write_model_file(folder, MODEL + text, name)
    settings = job_settings(
        path, folder / "job", command=command, minibatch_size=8, num_minibatches_per_task=5, num_epochs=2, **data
    )
    return run_job(settings)[0]


@pytest.mark.parametrize("number", deep_but(range(len(EXAMPLES)), 0, 2, 9))
def test_example_of_the_documentation_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(RECORDS, 4)).astype("float32")
    np.savez("data.npz", x=x, y=x.sum(1, keepdims=True))
    np.savez("features.npz", x=x)
    name, text = f"example_{number}", EXAMPLES[number]
    if "redict" in text:
        summary = job(tmp_path, text, Command.PREDICT, name, prediction="features.npz")
        assert summary.records_predicted == RECORDS
        files = list(tmp_path.glob("predictions-*.csv"))
        assert sum(len(file.read_text().splitlines()) for file in files) == RECORDS
    else:
        summary = job(tmp_path, text, Command.TRAIN, name, training="data.npz", validation="data.npz")
        assert summary.records_evaluated == RECORDS
        assert sum(summary.records_per_epoch) >= RECORDS or summary.stopped_early


def test_every_hook_has_an_example() -> None:
    examples = "\n".join(EXAMPLES)
    assert not [name for name in TABLE if f"def {name}(" not in examples]


def test_every_callback_of_the_package_is_documented_and_importable() -> None:
    for name in package.__all__:
        value = getattr(package, name)
        if isinstance(value, type) and issubclass(value, keras.callbacks.Callback):
            assert f"`{name}`" in DOCS, name
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="Nothing"):
        _ = package.Nothing


def test_table_of_keras_callbacks_is_that_of_the_code() -> None:
    rows = dict(re.findall(r"^\| `([A-Z]\w+)` \| (\w[\w ]*?) \|", DOCS, re.MULTILINE))
    assert rows == {name: row.place.value for name, row in STOCK.items()} | {"LambdaCallback": "by hook"}
