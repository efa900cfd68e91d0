from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from elasticcb.callbacks import SavedModelExporter, runs_on
from elasticcb.callbacks.placement import (
    STOCK,
    TABLE,
    Place,
    hooks_at,
    needs_optimizer_state,
    overridden_hooks,
    reads_model,
)
from elasticcb.errors import ModelFileError

DOCS = Path(__file__).parents[2] / "docs" / "callbacks.md"


def hooks(callback: keras.callbacks.Callback, place: Place, in_program: bool = False) -> set[str]:
    return set(hooks_at(callback, place, overridden_hooks(callback), in_program))


def test_every_hook_of_the_keras_callback_is_in_the_table() -> None:
    of_keras = {name for name in dir(keras.callbacks.Callback) if name.startswith("on_")}
    assert of_keras == TABLE.keys() | {row.alias for row in TABLE.values() if row.alias}


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


def test_in_a_program_training_as_a_whole_is_the_callers() -> None:
    class Whole(keras.callbacks.Callback):
        def on_train_begin(self, logs=None): ...
        def on_train_end(self, logs=None): ...

    class Epochs(Whole):
        def on_epoch_end(self, epoch, logs=None): ...

    class Batches(Whole):
        def on_train_batch_end(self, batch, logs=None): ...

    whole = {"on_train_begin", "on_train_end"}
    assert hooks(Whole(), Place.MASTER, in_program=True) == whole
    assert hooks(Epochs(), Place.MASTER, in_program=True) == whole | {"on_epoch_end"}
    assert hooks(Whole(), Place.WORKER, in_program=True) == hooks(Epochs(), Place.WORKER, in_program=True) == set()
    assert hooks(Batches(), Place.MASTER, in_program=True) == whole
    assert hooks(Batches(), Place.WORKER, in_program=True) == whole | {"on_train_batch_end"}
    # As before where there is no caller, and for what needs the worker.
    assert hooks(Whole(), Place.MASTER) == set()
    for in_program in (False, True):
        assert hooks(SavedModelExporter(), Place.MASTER, in_program) == set()
        assert hooks(SavedModelExporter(), Place.WORKER, in_program) == whole
        assert hooks(runs_on("worker")(Whole)(), Place.MASTER, in_program) == set()


def test_every_callback_of_keras_has_a_row_unless_it_runs_by_hook() -> None:
    of_keras = {name for name in dir(keras.callbacks) if isinstance(getattr(keras.callbacks, name), type)}
    assert of_keras - {"Callback", "CallbackList", "LambdaCallback"} <= STOCK.keys()


def test_hooks_of_stock_callbacks_run_in_one_place() -> None:
    k, master, worker = keras.callbacks, Place.MASTER, Place.WORKER
    for callback, own, other in ((k.ReduceLROnPlateau(), master, worker), (k.TerminateOnNaN(), worker, master)):
        assert hooks(callback, own) == set(overridden_hooks(callback)) != set()
        assert hooks(callback, other) == set()


def test_loggers_of_tracking_clients_run_on_the_master_and_want_batches_only_when_their_settings_do() -> None:
    mlflow = pytest.importorskip("mlflow.keras", reason="MLflow is not installed: pip install 'elasticcb[test]'")
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install 'elasticcb[test]'")
    of_wandb = pytest.importorskip("wandb.integration.keras").WandbMetricsLogger

    class Derived(mlflow.MlflowCallback):
        def on_train_begin(self, logs=None): ...

    with wandb.init(mode="disabled"):
        of_epochs = [of_wandb(), mlflow.MlflowCallback(), Derived()]
        of_batches = [of_wandb(10), mlflow.MlflowCallback(False, log_every_n_steps=10)]
    for logger in (*of_epochs, *of_batches):
        on_master = hooks(logger, Place.MASTER)
        assert "on_epoch_end" in on_master
        assert ("on_train_batch_end" in on_master) == (logger in of_batches)
        assert hooks(logger, Place.WORKER, in_program=True) == set()
        assert reads_model(logger, "on_epoch_end", 1)


def test_lambda_callback_runs_by_hook() -> None:
    callback = keras.callbacks.LambdaCallback(on_epoch_end=print, on_train_batch_end=print)
    assert hooks(callback, Place.MASTER) == {"on_epoch_end"}
    assert hooks(callback, Place.WORKER) == {"on_train_batch_end"}


def test_class_derived_from_a_stock_callback_stays_with_it(tmp_path: Path) -> None:
    class Log(keras.callbacks.CSVLogger):
        def on_train_batch_end(self, batch, logs=None): ...

    @runs_on("worker")
    class Moved(Log): ...

    path = str(tmp_path / "log.csv")
    names = {"on_train_begin", "on_train_batch_end", "on_epoch_end", "on_train_end"}
    assert hooks(Log(path), Place.MASTER) == hooks(Moved(path), Place.WORKER) == names
    assert hooks(Log(path), Place.WORKER) == hooks(Moved(path), Place.MASTER) == set()


def test_stock_callback_wants_batches_only_when_its_settings_do(tmp_path: Path) -> None:
    k = keras.callbacks

    def of_batches(callback: keras.callbacks.Callback) -> set[str]:
        return {name for name in overridden_hooks(callback) if TABLE[name].of_batch}

    of_board = {"on_train_batch_begin", "on_train_batch_end", "on_test_batch_begin"}
    path = str(tmp_path / "model.keras")
    assert of_batches(k.ModelCheckpoint(path)) == set()
    assert of_batches(k.ModelCheckpoint(path, save_freq=5)) == {"on_train_batch_end"}
    assert of_batches(k.BackupAndRestore(str(tmp_path))) == set()
    assert of_batches(k.BackupAndRestore(str(tmp_path), save_freq=5)) == {"on_train_batch_end"}
    assert of_batches(k.TensorBoard(str(tmp_path))) == set()
    assert of_batches(k.TensorBoard(str(tmp_path), update_freq=10)) == of_board
    assert of_batches(k.TensorBoard(str(tmp_path), update_freq="batch")) == of_board
    bar = k.ProgbarLogger()
    assert {"on_train_batch_end", "on_test_batch_end", "on_predict_batch_end"} == of_batches(bar)
    bar.set_params({"verbose": 0, "epochs": 1, "steps": 3})
    assert of_batches(bar) == set()

    class Own(k.ModelCheckpoint):
        def on_train_batch_end(self, batch, logs=None): ...

    assert of_batches(Own(path)) == {"on_train_batch_end"}


def test_savers_and_swappers_and_whoever_says_so_need_the_optimizers_state(tmp_path: Path) -> None:
    class Own(keras.callbacks.Callback):
        needs_optimizer_state = True

    every_epoch = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"))
    by_steps = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"), save_freq=5)
    assert needs_optimizer_state(every_epoch, "on_epoch_end")
    assert not needs_optimizer_state(by_steps, "on_epoch_end")
    assert needs_optimizer_state(by_steps, "on_train_batch_end")
    assert needs_optimizer_state(keras.callbacks.SwapEMAWeights(), "on_test_begin")
    assert needs_optimizer_state(keras.callbacks.BackupAndRestore(str(tmp_path)), "on_train_begin")
    assert not needs_optimizer_state(keras.callbacks.EarlyStopping(), "on_train_end")
    assert needs_optimizer_state(Own(), "on_test_end")


def test_whoever_saves_the_model_or_gives_it_away_needs_the_optimizers_state() -> None:
    outside = keras.Sequential([keras.layers.Dense(1)])

    class Saves(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.save("model.keras")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            pickle.dumps(obj=outside)

        def on_train_begin(self, logs: Any = None) -> None:
            keras.saving.save_model(self.model, "model.keras")

        def on_test_begin(self, logs: Any = None) -> None:
            np.save("weights.npy", self.model.get_weights()[0])

        def on_test_end(self, logs: Any = None) -> None:
            print(self.model.name, isinstance(self.model, keras.Sequential))
            self.show(self.model)

        def show(self, model: Any) -> None:
            print(model.get_weights())

    saves = Saves()
    assert all(needs_optimizer_state(saves, f"on_{each}") for each in ("epoch_begin", "epoch_end", "train_begin"))
    assert not any(needs_optimizer_state(saves, f"on_test_{each}") for each in ("begin", "end"))


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
        def on_batch_end(self, batch, logs=None): ...
        def on_predict_batch_begin(self, batch, logs=None): ...
        def on_predict_end(self, logs=None): ...

    @runs_on("worker")
    class Worker(Master):
        def on_epoch_end(self, epoch, logs=None): ...
        def on_test_end(self, logs=None): ...

    master = {"on_train_begin", "on_train_end", "on_train_batch_end", "on_predict_batch_begin", "on_predict_end"}
    assert hooks(Master(), Place.MASTER) == master
    assert hooks(Master(), Place.WORKER) == set()
    assert hooks(Worker(), Place.WORKER) == master | {"on_epoch_end", "on_test_end"}
    assert hooks(Worker(), Place.MASTER) == set()


def test_runs_on_refuses_other_places_and_what_is_no_class() -> None:
    for place in ("ps", None, "Master"):
        with pytest.raises(ModelFileError, match='runs_on takes "master" or "worker"'):
            runs_on(place)  # type: ignore[arg-type]
    with pytest.raises(ModelFileError, match="decorates the class of a callback"):
        runs_on("master")(keras.callbacks.Callback())  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("callback", "reads"),
    [
        (keras.callbacks.History(), False),
        (keras.callbacks.EarlyStopping(), False),
        (keras.callbacks.EarlyStopping(restore_best_weights=True), True),
        (keras.callbacks.ModelCheckpoint("x.keras"), True),
        (keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None), True),
    ],
)
def test_weights_are_fetched_for_callbacks_that_look_at_them(callback, reads):
    assert reads_model(callback, "on_epoch_end", 1) is reads


def test_weights_are_fetched_for_own_hooks_of_classes_derived_from_stock_callbacks() -> None:
    class History(keras.callbacks.History):
        def on_epoch_end(self, epoch, logs=None): ...

    class Saves(keras.callbacks.ModelCheckpoint):
        def on_train_batch_end(self, batch, logs=None): ...

    assert reads_model(History(), "on_epoch_end", 1)
    assert reads_model(Saves("model.keras"), "on_train_batch_end", 1)
