from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

from elasticcb.callbacks import runs_on
from elasticcb.callbacks.placement import ALIASES, TABLE, Place, hooks_at, overridden_hooks
from elasticcb.errors import ModelFileError

DOCS = Path(__file__).parents[2] / "docs" / "callbacks.md"


def hooks(callback: keras.callbacks.Callback, place: Place) -> set[str]:
    return set(hooks_at(callback, place, overridden_hooks(callback)))


def test_every_hook_of_the_keras_callback_is_in_the_table() -> None:
    of_keras = {name for name in dir(keras.callbacks.Callback) if name.startswith("on_")}
    assert of_keras == TABLE.keys() | ALIASES.keys()


def test_placement_is_imported_without_keras_and_tensorflow() -> None:
    code = (
        "import sys, elasticcb.callbacks.placement\n"
        "print([name for name in ('keras', 'tensorflow', 'grpc', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_documentation_shows_the_table() -> None:
    rows = {}
    for line in DOCS.read_text().splitlines():
        found = re.match(r"\| `(on_\w+)` \|(.*)\|$", line)
        if found:
            rows[found[1]] = [cell.strip() for cell in found[2].split(" | ")]
    words = {
        Place.MASTER: "master",
        Place.WORKER: "worker",
        Place.TRAIN_END_WORKER: "the worker with the TRAIN_END task",
        Place.WITH_OTHER_HOOKS: "every process that runs any other hook of the callback",
    }
    expected = {
        row.name: [
            ", ".join(words[place] for place in row.places),
            row.when,
            "; ".join(part for part in (row.arguments, f"`logs`: {row.logs}") if part),
        ]
        for row in TABLE.values()
    }
    assert rows == expected


def test_hooks_of_batches_run_on_workers_and_of_rounds_on_the_master() -> None:
    class Both(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None): ...
        def on_test_end(self, logs=None): ...

    assert hooks(Both(), Place.WORKER) == {"on_train_batch_begin"}
    assert hooks(Both(), Place.MASTER) == {"on_test_end"}


def test_on_train_begin_runs_wherever_another_hook_of_the_callback_runs() -> None:
    class OfBatches(keras.callbacks.Callback):
        def on_train_begin(self, logs=None): ...
        def on_train_batch_end(self, batch, logs=None): ...

    class OfEpochs(keras.callbacks.Callback):
        def on_train_begin(self, logs=None): ...
        def on_epoch_end(self, epoch, logs=None): ...

    class Alone(keras.callbacks.Callback):
        def on_train_begin(self, logs=None): ...

    assert "on_train_begin" in hooks(OfBatches(), Place.WORKER)
    assert "on_train_begin" not in hooks(OfBatches(), Place.MASTER)
    assert hooks(OfEpochs(), Place.WORKER) == set()
    assert hooks(OfEpochs(), Place.MASTER) == {"on_train_begin", "on_epoch_end"}
    assert hooks(Alone(), Place.WORKER) == hooks(Alone(), Place.MASTER) == {"on_train_begin"}


def test_on_train_end_runs_on_the_master_too_where_the_callback_keeps_epochs() -> None:
    class Plain(keras.callbacks.Callback):
        def on_train_end(self, logs=None): ...

    class Epochs(Plain):
        def on_epoch_begin(self, epoch, logs=None): ...

    assert hooks(Plain(), Place.WORKER) == {"on_train_end"}
    assert hooks(Plain(), Place.MASTER) == set()
    assert hooks(Epochs(), Place.WORKER) == {"on_train_end"}
    assert hooks(Epochs(), Place.MASTER) == {"on_train_end", "on_epoch_begin"}


def test_stock_keras_callbacks_of_epochs_alone_stay_on_the_master(tmp_path: Path) -> None:
    log = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    assert hooks(log, Place.MASTER) == {"on_train_begin", "on_epoch_end", "on_train_end"}
    assert hooks(log, Place.WORKER) == set()
    board = keras.callbacks.TensorBoard(str(tmp_path / "board"))
    assert {"on_train_begin", "on_train_batch_end", "on_train_end"} <= hooks(board, Place.WORKER)
    assert {"on_train_begin", "on_epoch_end", "on_train_end"} <= hooks(board, Place.MASTER)


def test_prediction_begins_and_ends_on_master_and_workers() -> None:
    class Prediction(keras.callbacks.Callback):
        def on_predict_begin(self, logs=None): ...
        def on_predict_end(self, logs=None): ...

    both = {"on_predict_begin", "on_predict_end"}
    assert hooks(Prediction(), Place.WORKER) == hooks(Prediction(), Place.MASTER) == both


def test_aliases_and_methods_set_on_the_instance_count_as_overrides() -> None:
    calls: list[tuple[str, int]] = []

    class Old(keras.callbacks.Callback):
        def on_batch_begin(self, batch, logs=None):
            calls.append(("old", batch))

    overridden_hooks(Old())["on_train_batch_begin"](4, {})
    instance = keras.callbacks.LambdaCallback(on_test_end=lambda logs: calls.append(("lambda", 0)))
    overridden_hooks(instance)["on_test_end"]({})
    assert calls == [("old", 4), ("lambda", 0)]
    assert hooks(Old(), Place.WORKER) == {"on_train_batch_begin"}
    assert hooks(instance, Place.MASTER) == {"on_test_end"}


def test_runs_on_moves_all_hooks_of_a_class_in_both_directions() -> None:
    @runs_on("master")
    class Master(keras.callbacks.Callback):
        def on_train_begin(self, logs=None): ...
        def on_train_end(self, logs=None): ...
        def on_predict_end(self, logs=None): ...

    @runs_on("worker")
    class Worker(Master):
        def on_epoch_end(self, epoch, logs=None): ...
        def on_test_end(self, logs=None): ...

    master = {"on_train_begin", "on_train_end", "on_predict_end"}
    assert hooks(Master(), Place.MASTER) == master
    assert hooks(Master(), Place.WORKER) == set()
    assert hooks(Worker(), Place.WORKER) == master | {"on_epoch_end", "on_test_end"}
    assert hooks(Worker(), Place.MASTER) == set()


def test_runs_on_master_leaves_out_inherited_hooks_of_batches(tmp_path: Path) -> None:
    @runs_on("master")
    class EpochsOnly(keras.callbacks.TensorBoard): ...

    assert hooks(EpochsOnly(str(tmp_path)), Place.WORKER) == set()
    assert not any("_batch_" in name for name in hooks(EpochsOnly(str(tmp_path)), Place.MASTER))


@pytest.mark.parametrize("place", ["ps", "", None, 3, "Master"])
def test_runs_on_refuses_other_places(place: object) -> None:
    with pytest.raises(ModelFileError, match='runs_on takes "master" or "worker"'):
        runs_on(place)  # type: ignore[arg-type]


def test_runs_on_refuses_what_is_no_class() -> None:
    with pytest.raises(ModelFileError, match="decorates the class of a callback"):
        runs_on("master")(keras.callbacks.Callback())  # type: ignore[type-var]


@pytest.mark.parametrize("name", ["on_train_batch_end", "on_batch_end"])
def test_runs_on_master_refuses_a_class_with_hooks_of_batches(name: str) -> None:
    broken = type("Broken", (keras.callbacks.Callback,), {name: lambda self, batch, logs=None: None})
    with pytest.raises(ModelFileError, match=f"Broken.*{name}.*never be called"):
        runs_on("master")(broken)
