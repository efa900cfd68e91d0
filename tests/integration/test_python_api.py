"""`elasticcb.Cluster` next to `keras.Model`: the same calls, with the same results, hooks and words."""

import functools
import re
import warnings
from typing import ClassVar

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import elasticcb
from deep_cases import deep_but
from elasticcb.callbacks import runs_on
from keras_calls import LABELS, Keras, Sequence, X, Y, classifier, dataset, generator, make


@pytest.fixture(scope="module")
def cluster():
    with elasticcb.Cluster(kind="inprocess", log_level="ERROR", updates="sync") as cluster:
        yield cluster


class RandomLayer(keras.layers.Layer):
    """Draws random numbers in evaluation, too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed = keras.random.SeedGenerator(5)

    def call(self, inputs):
        return inputs + keras.random.normal(keras.ops.shape(inputs), seed=self.seed)


class Growing(Sequence):
    """Its hooks change what it gives."""

    factor = 1

    def on_epoch_begin(self):
        self.factor *= 2

    def on_epoch_end(self):
        self.factor += 1

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, y * self.factor


def random_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones"), RandomLayer()])
    model.compile("sgd", "mse")
    return model


# ------------------------------------------------------------ the same results

CALLS = {
    "a last batch that is short": lambda on: on.fit(make(), X[:50], Y[:50], shuffle=False, batch_size=20),
    "pandas": lambda on: on.fit(make(), pd.DataFrame(X), pd.Series(Y[:, 0]), shuffle=False),
    "endless tf.data": lambda on: on.fit(make(), dataset().repeat(), steps_per_epoch=3, epochs=3),
    "generator": lambda on: on.fit(make(), generator(), steps_per_epoch=4),
    "hooks of PyDatasets": lambda on: on.fit(make(), Growing(), validation_data=Growing(), epochs=3, shuffle=False),
    "validation_split": lambda on: on.fit(make(), X, Y, shuffle=False, validation_split=0.25, epochs=2),
    "validation dataset": lambda on: on.fit(make(), X, Y, shuffle=False, validation_data=dataset()),
    "validation_batch_size, validation_steps": lambda on: on.fit(
        make(), X, Y, shuffle=False, validation_data=(X, Y), validation_batch_size=8, validation_steps=3
    ),
    "validation_freq": lambda on: on.fit(
        make(), X, Y, shuffle=False, validation_data=(X, Y), epochs=5, validation_freq=2
    ),
    "list of validation_freq": lambda on: on.fit(
        make(), X, Y, shuffle=False, validation_data=(X, Y), epochs=3, validation_freq=[1, 3]
    ),
    "initial_epoch": lambda on: on.fit(make(), X, Y, shuffle=False, epochs=4, initial_epoch=2),
    "nothing left to do": lambda on: on.fit(make(), X, Y, shuffle=False, epochs=2, initial_epoch=2),
    "no epochs": lambda on: on.fit(make(), X, Y, epochs=0),
    "steps_per_epoch with arrays": lambda on: on.fit(make(), X, Y, shuffle=False, steps_per_epoch=1, epochs=2),
    "metrics whose names come behind val_": lambda on: on.fit(
        make(metrics=("mae",), weighted_metrics=["mae"]), X, Y, shuffle=False, validation_split=0.25
    ),
    "random numbers in every step": lambda on: on.fit(random_model(), X, Y, shuffle=False, validation_data=(X, Y)),
    "class_weight": lambda on: on.fit(classifier(), X, LABELS, shuffle=False, class_weight={0: 1.0, 1: 3.0}),
    "sample_weight": lambda on: on.fit(make(), X, Y, shuffle=False, sample_weight=np.arange(64) / 64),
    "one callback": lambda on: on.fit(
        make(), X, Y, shuffle=False, epochs=9, callbacks=keras.callbacks.EarlyStopping("mae", patience=0, min_delta=9)
    ),
    "evaluate, as a dict": lambda on: on.evaluate(make(), dataset(), return_dict=True, steps=2),
    "evaluate, loss alone": lambda on: on.evaluate(make(metrics=()), X, Y),
    "evaluate, with weights": lambda on: on.evaluate(make(), X, Y, sample_weight=np.arange(64) / 64),
    "predict without compile": lambda on: on.predict(make(compiled=False), dataset().map(lambda x, y: x)),
    "predict, some steps": lambda on: on.predict(make(), X, batch_size=8, steps=3),
}


KEPT = (
    "a last batch that is short", "endless tf.data", "generator", "hooks of PyDatasets", "validation_split",
    "list of validation_freq", "metrics whose names come behind val_", "random numbers in every step", "class_weight",
    "one callback", "evaluate, as a dict", "predict, some steps",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("name", deep_but(CALLS, *KEPT))
def test_call_gives_what_keras_gives(name, cluster):
    expected, given = CALLS[name](Keras()), CALLS[name](cluster)
    if isinstance(expected, keras.callbacks.History):
        assert given.epoch == expected.epoch
        assert [(key, len(values)) for key, values in given.history.items()] == [
            (key, len(values)) for key, values in expected.history.items()
        ]
        assert {key: given.params[key] for key in expected.params} == expected.params
        expected, given = expected.history, given.history
    keras.tree.map_structure(
        lambda new, old: np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-6), given, expected
    )


def parse(lines, mode="training", metadata=None):
    *numbers, total = tf.io.decode_csv(lines, [0.0] * 5)
    features = tf.stack(numbers, -1)
    return features if mode == "prediction" else (features, total[..., None])


def test_files_give_what_their_arrays_give_by_line_and_by_batch(cluster, tmp_path):
    rows = np.concatenate([X, Y], 1).tolist()
    (tmp_path / "sums.csv").write_text("".join(",".join(map(repr, row)) + "\n" for row in rows))
    read = functools.partial(elasticcb.data.read, tmp_path / "sums.csv")
    weights = []
    for data in (read(feed_batch=parse), read(feed=lambda lines, mode, _: lines.map(lambda line: parse(line, mode)))):
        ours, theirs = make(), make()
        given = cluster.fit(ours, data, batch_size=20, epochs=3, shuffle=False, validation_data=data, verbose=0)
        expected = theirs.fit(X, Y, batch_size=20, epochs=3, shuffle=False, validation_data=(X, Y), verbose=0)
        for name, values in expected.history.items():
            np.testing.assert_allclose(given.history[name], values, rtol=1e-4)
        np.testing.assert_allclose(cluster.predict(ours, data, verbose=0), theirs.predict(X, verbose=0), rtol=1e-4)
        weights.append(ours.get_weights())
    for by_batch, by_line in zip(*weights, strict=True):
        np.testing.assert_array_equal(by_batch, by_line)


def test_shuffled_fit_sees_each_record_once_per_epoch_in_another_order_each_time(cluster):
    class Seen:
        batches: ClassVar[list] = []

    def keep(labels, predictions):
        Seen.batches.append(labels.numpy().ravel().tolist())
        return tf.reduce_mean(tf.square(labels - predictions), -1)

    rows = np.arange(64, dtype="float32")[:, None]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), keep, run_eagerly=True)
    cluster.fit(model, rows, rows, epochs=2, batch_size=16, verbose=0)
    batches = [batch for batch in Seen.batches if len(batch) == 16]
    first, second = np.concatenate(batches[-8:-4]), np.concatenate(batches[-4:])
    assert sorted(first) == sorted(second) == rows[:, 0].tolist()
    assert first.tolist() != second.tolist() != rows[:, 0].tolist()


def test_same_seed_gives_the_same_shuffled_training(cluster):
    histories = []
    for _ in range(2):
        model = make()
        histories.append(cluster.fit(model, X, Y, epochs=2, batch_size=16, verbose=0).history)
    np.testing.assert_allclose(histories[0]["loss"], histories[1]["loss"], rtol=1e-5)


# ------------------------------------------------------------ the same output


def shown(text):
    """Lines as a terminal leaves them, without times and digits that depend on rounding."""
    text = re.sub(r"\x1b\[[\d;]*m|\x08", "", text)
    # A bar is drawn anew as often as time allows; the last one stays.
    text = "\n".join(line.rpartition("\r")[2] for line in text.split("\n"))
    text = re.sub(r"\d+(ms|us|s)(/step|/epoch)?", "TIME", text)
    lines = [re.sub(r"(\d\.\d{2})\d+", r"\1", line).strip() for line in text.splitlines()]
    return [line for line in lines if line.startswith("Epoch") or re.match(r"(\d+)/\1 ", line)]


@pytest.mark.parametrize("verbose", deep_but([0, 1, 2, "auto"], 1, 2))
def test_output_is_that_of_keras(verbose, cluster, capsys):
    outputs = []
    for on in (Keras(), cluster):
        model = make()
        on.fit(model, X, Y, epochs=2, shuffle=False, validation_split=0.25, verbose=verbose)
        on.evaluate(model, X, Y, verbose=verbose)
        on.predict(model, X, verbose=verbose)
        outputs.append(capsys.readouterr().out)
    expected, given = map(shown, outputs)
    assert bool(outputs[0]) == bool(outputs[1]) == bool(verbose)
    assert given == expected


# ------------------------------------------------------------ the same hooks


@runs_on("master")
class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.hooks = []
        for name in ("train", "epoch", "test"):
            for end in ("begin", "end"):
                hook = f"on_{name}_{end}"
                setattr(self, hook, lambda *args, hook=hook, **kwargs: self.hooks.append(hook))


HOOKED = {
    "every second epoch": {"epochs": 4, "validation_freq": 2},
    "some epochs": {"epochs": 3, "validation_freq": [1, 3]},
    "no epoch": {"epochs": 2, "initial_epoch": 2},
    "stopped": {"epochs": 3, "callbacks": [keras.callbacks.EarlyStopping("loss", patience=0, baseline=-1.0)]},
}


@pytest.mark.parametrize("name", deep_but(HOOKED, "some epochs", "stopped"))
def test_hooks_of_epochs_and_rounds_come_in_the_order_of_keras(name, cluster):
    arguments, seen = HOOKED[name], []
    for trainer in (Keras(), cluster):
        recorder = Recorder()
        callbacks = [recorder, *arguments.get("callbacks", ())]
        options = {**arguments, "callbacks": callbacks, "validation_data": (X[:16], Y[:16]), "verbose": 0}
        trainer.fit(make(), X, Y, **options)
        seen.append(recorder.hooks)
    assert seen[0] == seen[1]


def test_epoch_without_a_batch_is_warned_about_and_logged_as_by_keras(cluster):
    def once():
        batches = generator()
        spec = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))
        return tf.data.Dataset.from_generator(lambda: batches, output_signature=spec)

    histories, warned = [], []
    for trainer in (Keras(), cluster):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            histories.append(trainer.fit(make(), once(), epochs=3, verbose=0).history)
        warned.append(any("ran out of data" in str(each.message) for each in given))
    assert warned[0] == warned[1]
    assert histories[1]["loss"][1:] == histories[0]["loss"][1:] == [0.0, 0.0]
    assert len(histories[1]["mae"]) == 3


def test_generator_that_ends_before_its_steps_is_warned_about_as_by_keras(cluster):
    for trainer in (Keras(), cluster):
        with pytest.warns(UserWarning, match="ran out of data"):
            trainer.fit(make(), generator(), steps_per_epoch=5, verbose=0)


@keras.saving.register_keras_serializable()
class Traced(keras.Sequential):
    """Writes a byte to the file `traces` whenever its step is traced."""

    def train_step(self, *args, **kwargs):
        with open(self.traces, "ab") as file:
            file.write(b"x")
        return super().train_step(*args, **kwargs)


def test_step_is_traced_no_more_often_the_longer_the_training_is(tmp_path):
    traces = []
    for epochs in (1, 4):
        file = tmp_path / str(epochs)
        model = Traced([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        model.traces = str(file)
        model.compile("adam", "mse")
        with elasticcb.Cluster(num_workers=1, num_ps=2, kind="inprocess", log_level="ERROR") as cluster:
            cluster.fit(model, X, Y, batch_size=8, epochs=epochs, verbose=0)
        traces.append(file.stat().st_size)
    assert traces[0] == traces[1] > 0
