"""The callbacks that Keras ships do in `Cluster.fit` what they do in `model.fit`: with one worker, the same."""

import csv

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

import elasticcb
from deep_cases import deep_but

RECORDS, BATCH = 160, 16


@pytest.fixture(scope="module")
def cluster():
    with elasticcb.Cluster(num_workers=1, num_ps=2, kind="inprocess") as cluster:
        yield cluster


def data():
    x = np.random.default_rng(0).normal(size=(RECORDS, 4)).astype("float32")
    return x, np.sin(x.sum(1, keepdims=True)).astype("float32")


def new_model(**optimizer):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(6, activation="tanh", name="inner"), keras.layers.Dense(1, name="outer")]
    model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    metrics = ["mae", keras.metrics.RootMeanSquaredError()]  # the second is no mean of its values by batch
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9, **optimizer), loss="mse", metrics=metrics)
    return model


def both(cluster, folder, callbacks, epochs=4, **optimizer):
    """Trains with Keras and with the cluster; answers models, histories and folders of the two."""
    x, y = data()
    found = []
    for name in ("keras", "elasticcb"):
        own = folder / name
        own.mkdir(exist_ok=True)
        model = new_model(**optimizer)
        fit = model.fit if name == "keras" else lambda *args, model=model, **more: cluster.fit(model, *args, **more)
        history = fit(
            x, y, batch_size=BATCH, epochs=epochs, verbose=0, shuffle=False,
            validation_data=(x[:64], y[:64]), callbacks=callbacks(own),
        )  # fmt: skip
        found.append((model, history, own))
    return found


def assert_same(first, second, rtol=1e-4, atol=1e-5):
    for one, other in zip(first, second, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def rows_of(path):
    with open(path) as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def assert_same_rows(first, second):
    assert [row.keys() for row in first] == [row.keys() for row in second]
    assert_same([[*row.values()] for row in first], [[*row.values()] for row in second])


def test_logs_rates_checkpoints_and_the_best_weights_are_those_of_keras(cluster, tmp_path):
    k = keras.callbacks
    lines = []

    def callbacks(folder):
        return [
            # The third epoch and those after it make the model worse.
            k.LearningRateScheduler(lambda epoch, rate: 0.05 if epoch < 2 else -0.02),
            k.EarlyStopping(patience=2, restore_best_weights=True),
            k.CSVLogger(str(folder / "log.csv")),
            k.ModelCheckpoint(str(folder / "{epoch}-{batch}.keras"), save_freq=7),
            k.ModelCheckpoint(str(folder / "best.keras"), save_best_only=True),
            k.LambdaCallback(on_epoch_end=lambda epoch, logs: lines.append((epoch, sorted(logs)))),
            k.TerminateOnNaN(),
        ]

    (model, history, folder), (own, own_history, own_folder) = both(cluster, tmp_path, callbacks, epochs=9)
    assert history.epoch == own_history.epoch == [0, 1, 2, 3]
    assert_same_rows(rows_of(folder / "log.csv"), rows_of(own_folder / "log.csv"))
    assert lines[:4] == lines[4:]
    assert_same(model.get_weights(), own.get_weights())  # those of the second epoch
    names = sorted(path.name for path in folder.glob("*.keras"))
    assert names == sorted(path.name for path in own_folder.glob("*.keras"))
    best, own_best = (keras.saving.load_model(each / "best.keras") for each in (folder, own_folder))
    assert int(best.optimizer.iterations) == int(own_best.optimizer.iterations) == 2 * RECORDS // BATCH
    assert_same([v.numpy() for v in best.optimizer.variables], [v.numpy() for v in own_best.optimizer.variables])


def test_plateau_lowers_the_rate_as_in_keras(cluster, tmp_path):
    last_logs = []

    def callbacks(folder):
        plateau = keras.callbacks.ReduceLROnPlateau(factor=0.1, patience=1, min_delta=10.0)
        last = keras.callbacks.LambdaCallback(on_train_end=lambda logs: last_logs.append(list(logs)))
        return [plateau, keras.callbacks.CSVLogger(str(folder / "log.csv")), last]

    (model, _, folder), (own, _, own_folder) = both(cluster, tmp_path, callbacks)
    assert_same_rows(rows_of(folder / "log.csv"), rows_of(own_folder / "log.csv"))
    assert float(own.optimizer.learning_rate) == pytest.approx(float(model.optimizer.learning_rate))
    assert last_logs[0] == last_logs[1]  # without the rate, which is for the callbacks of an epoch's end


def test_program_is_warned_of_a_monitored_metric_that_does_not_exist(cluster):
    with pytest.warns(UserWarning, match="conditioned on metric `val_auc` which is not available"):
        cluster.fit(new_model(), *data(), verbose=0, callbacks=[keras.callbacks.EarlyStopping("val_auc", mode="max")])


def test_tensorboard_has_the_tags_steps_and_values_of_keras(cluster, tmp_path):
    def callbacks(folder):
        return [keras.callbacks.TensorBoard(str(folder), update_freq=5, histogram_freq=2, write_graph=False)]

    boards = []
    for _, _, folder in both(cluster, tmp_path, callbacks):
        events = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
        boards.append(
            {
                (run, tag): {event.step: tf.make_ndarray(event.tensor_proto) for event in events.Tensors(run, tag)}
                for run, tags in events.Runs().items()
                for tag in tags["tensors"]
            }
        )
    of_keras, own = boards
    assert of_keras.keys() == own.keys()
    for name, values in of_keras.items():
        assert values.keys() == own[name].keys(), name
        for step, value in values.items():
            np.testing.assert_allclose(own[name][step], value, rtol=1e-3, atol=1e-4, err_msg=f"{name}, step {step}")


def test_hooks_of_batches_on_the_master_get_the_metrics_of_keras(cluster, tmp_path):
    seen = {}

    def callbacks(folder):
        @elasticcb.callbacks.runs_on("master")
        class Keeps(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.setdefault(folder.name, []).append((batch, dict(logs)))

            def on_test_batch_end(self, batch, logs=None):
                seen.setdefault(f"{folder.name} test", []).append((batch, dict(logs)))

        return [Keeps()]

    both(cluster, tmp_path, callbacks, epochs=2)
    for kind in ("", " test"):
        for (batch, logs), (own_batch, own) in zip(seen[f"keras{kind}"], seen[f"elasticcb{kind}"], strict=True):
            assert own_batch == batch
            assert {name: own[name] for name in logs} == pytest.approx(logs, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("swap_on_epoch", deep_but([False, True], True))
def test_averaged_weights_are_evaluated_saved_and_left_as_in_keras(cluster, tmp_path, swap_on_epoch):
    def callbacks(folder):
        return [
            keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch),
            keras.callbacks.ModelCheckpoint(str(folder / "{epoch}.keras")),
        ]

    (model, history, folder), (own, own_history, own_folder) = both(
        cluster, tmp_path, callbacks, use_ema=True, ema_momentum=0.8
    )
    assert_same(history.history["val_loss"], own_history.history["val_loss"])
    assert_same(model.get_weights(), own.get_weights())
    for epoch in (1, 2, 3):
        saved, own_saved = (keras.saving.load_model(each / f"{epoch}.keras") for each in (folder, own_folder))
        assert_same(saved.get_weights(), own_saved.get_weights())


def test_backup_and_restore_goes_on_with_the_epoch_it_came_to(cluster, tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise OSError("the power is out")

    x, y = data()

    def backup(folder):
        return keras.callbacks.BackupAndRestore(str(folder / "backup"))

    for name in ("keras", "elasticcb"):
        model = new_model()
        fit = model.fit if name == "keras" else lambda *args, model=model, **more: cluster.fit(model, *args, **more)
        (tmp_path / name).mkdir()
        with pytest.raises(OSError, match="the power is out"):
            fit(
                x, y, batch_size=BATCH, epochs=4, shuffle=False, verbose=0, callbacks=[backup(tmp_path / name), Fails()]
            )
    (model, history, _), (own, own_history, own_folder) = both(cluster, tmp_path, lambda folder: [backup(folder)])
    assert history.epoch == own_history.epoch == [2, 3]
    assert_same(model.get_weights(), own.get_weights())
    assert int(own.optimizer.iterations) == int(model.optimizer.iterations) == 4 * RECORDS // BATCH
    assert not (own_folder / "backup").exists()
