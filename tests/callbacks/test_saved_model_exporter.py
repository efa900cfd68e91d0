from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticcb.callbacks import Dispatcher, Place, SavedModelExporter
from elasticcb.callbacks.serving_signature import serving_inputs
from elasticcb.errors import CallbackError

# Runs where TensorFlow alone is used: reads features from in.npz, writes outputs to out.npz.
SERVE = """
import sys

sys.modules.update({"keras": None, "tf_keras": None, "elasticcb": None})  # importing them fails

import numpy as np
import tensorflow as tf

for folder in sys.argv[1:]:
    features = {name: tf.constant(value) for name, value in np.load(f"{folder}/in.npz").items()}
    model = tf.saved_model.load(f"{folder}/model")
    signature = model.signatures["serving_default"]
    assert set(signature.structured_input_signature[1]) == set(features), signature
    np.savez(f"{folder}/out.npz", **{name: value.numpy() for name, value in signature(**features).items()})
"""


@keras.saving.register_keras_serializable()
class Census(keras.Model):
    """Subclass model with strings, a table of its own and preprocessing layers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
        self.hash = keras.layers.Hashing(num_bins=8)
        self.embed = keras.layers.Embedding(8, 3)
        self.scale = keras.layers.Normalization(mean=2.0, variance=4.0, axis=None)
        self.scale.build((None,))  # else Keras builds it while tracing, and its mean is lost with the graph
        self.weights_of = {"table": tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [10.0]), 0.0)}
        self.drop = keras.layers.Dropout(0.9)
        self.dense = keras.layers.Dense(1)

    def call(self, features, training=False):
        parts = [
            self.lookup(features["work-class"]),
            self.embed(self.hash(features["city"])),
            self.scale(features["age"])[:, None],
            self.weights_of["table"].lookup(features["city"])[:, None],
        ]
        return {"income": self.dense(self.drop(keras.ops.concatenate(parts, axis=-1), training=training))}


class NoTraining(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        return self.dense(inputs[0]), self.dense(inputs[1])


def functional() -> keras.Model:
    age = keras.Input((1,), name="age")
    city = keras.Input((), name="city", dtype="string")
    encoded = keras.layers.StringLookup(vocabulary=["rome", "oslo"], output_mode="one_hot")(city)
    hidden = keras.layers.Concatenate()([keras.layers.Normalization(mean=1.0, variance=1.0)(age), encoded])
    return keras.Model({"age": age, "city": city}, {"rent": keras.layers.Dense(1)(hidden), "code": encoded})


def export(model: keras.Model, path: Path, features_spec=None) -> Path:
    params = {"saved_model_path": str(path), "features_spec": features_spec}
    dispatcher = Dispatcher([SavedModelExporter()], Place.WORKER, params, model)
    dispatcher.call("on_train_begin", {})
    dispatcher.call("on_train_end", {})
    return path


def small(value: float = 1.0) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.set_weights([np.full((2, 1), value), np.zeros(1)])
    return model


def prediction(path: Path) -> float:
    signature = tf.saved_model.load(str(path)).signatures["serving_default"]
    return float(signature(features=tf.ones((1, 2)))["predictions"][0, 0])


def test_models_of_all_kinds_serve_by_name_where_tensorflow_alone_is_used(tmp_path: Path) -> None:
    ages = np.array([1.0, 3.0, 5.0], np.float32)
    cities = np.array(["rome", "a", "nowhere"])
    cases = {}

    model = functional()
    cases["functional"] = (model, None, {"age": ages[:, None], "city": cities}, {"rent", "code"})
    spec = {
        "age": tf.TensorSpec((None, 1), tf.float32),
        "city": tf.TensorSpec((None,), tf.string),
        "unused": tf.TensorSpec((None,), tf.int64),
    }
    cases["more_features"] = (model, spec, {"age": ages[:, None], "city": cities}, {"rent", "code"})

    images = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    cases["sequential"] = (model, None, {"features": images}, {"predictions"})

    image = keras.Input((3,), name="image")
    outputs = [keras.layers.Dense(1, name="click")(image), keras.layers.Dense(1)(image)]
    cases["named"] = (keras.Model(image, outputs), None, {"image": images}, {"click", "output_1"})

    model = Census()
    features = {"work-class": np.array(["a", "b", "?"]), "city": cities, "age": ages}
    model({name: tf.constant(value) for name, value in features.items()})
    spec = {name: tf.TensorSpec((None,), tf.as_dtype(value.dtype)) for name, value in features.items()}
    served = {"work_class": features["work-class"], "city": cities, "age": ages}
    cases["subclass"] = (model, spec, served, {"income"})

    model = NoTraining()
    model((images, images))
    spec = (tf.TensorSpec((4, 3), tf.float32), tf.TensorSpec((4, 3), tf.float32))
    served = {"features_0": images, "features_1": 2 * images}
    cases["tuple"] = (model, spec, served, {"output_0", "output_1"})

    for name, (model, spec, served, _) in cases.items():
        export(model, tmp_path / name / "model", spec)
        np.savez(tmp_path / name / "in.npz", **served)
    folders = [str(tmp_path / name) for name in cases]
    result = subprocess.run([sys.executable, "-c", SERVE, *folders], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr

    for name, (model, _, served, names) in cases.items():
        batch = {key: tf.constant(value) for key, value in served.items()}
        if name == "subclass":
            batch["work-class"] = batch.pop("work_class")
        elif name not in ("functional", "more_features"):
            batch = tuple(batch.values()) if len(batch) > 1 else next(iter(batch.values()))
        expected = model(batch, training=False)
        values = list(expected.values()) if isinstance(expected, dict) else expected
        values = list(values) if isinstance(values, (list, tuple)) else [values]
        outputs = np.load(tmp_path / name / "out.npz")
        assert set(outputs) == names, name
        keys = list(expected) if isinstance(expected, dict) else sorted(names)
        for key, value in zip(keys, values, strict=True):
            np.testing.assert_allclose(outputs[key], value, rtol=1e-5, err_msg=f"{name}: {key}")


def test_endpoint_takes_features_in_the_structure_of_the_model(tmp_path: Path) -> None:
    model = functional()
    features = {"age": tf.ones((2, 1)), "city": tf.constant(["oslo", "x"])}
    loaded = tf.saved_model.load(str(export(model, tmp_path / "model")))
    outputs = loaded.serve(features)
    np.testing.assert_allclose(outputs["rent"], model(features)["rent"], rtol=1e-6)


def test_sizes_that_a_feed_leaves_open_are_those_of_the_models_inputs() -> None:
    given = {"age": tf.TensorSpec((None, None), tf.float32), "city": tf.TensorSpec((None,), tf.string)}
    assert {spec.name: spec.shape.as_list() for spec in serving_inputs(functional(), given)} == {
        "age": [None, 1],
        "city": [None],
    }
    (spec,) = serving_inputs(small(), tf.TensorSpec((None, None), tf.float32))
    assert spec.shape.as_list() == [None, 2]


def test_input_of_any_length_is_served_with_any_length(tmp_path: Path) -> None:
    model = keras.Sequential(
        [keras.Input((None,)), keras.layers.Embedding(9, 2), keras.layers.GlobalAveragePooling1D()]
    )
    path = export(model, tmp_path / "model", tf.TensorSpec((None, 5), tf.float32))  # of data of one length
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    given = tf.ones((2, 3))
    ((name, values),) = serve(given).items()
    np.testing.assert_allclose(values, model(given), rtol=1e-6, err_msg=name)


def test_target_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "model"
    export(small(1.0), path)
    for name in (".model.exporting-of-a-killed-worker", ".model.replaced-of-a-killed-worker"):
        (path.parent / name).mkdir()
    export(small(3.0), path)
    assert prediction(path) == 6.0
    assert [entry.name for entry in path.parent.iterdir()] == ["model"]


def test_two_that_export_to_the_same_place_do_not_disturb_each_other(tmp_path: Path, monkeypatch) -> None:
    write, models = SavedModelExporter._write, [small(1.0), small(3.0)]
    both = threading.Barrier(2)

    def write_together(exporter, folder):
        both.wait(60)
        write(exporter, folder)
        both.wait(60)

    monkeypatch.setattr(SavedModelExporter, "_write", write_together)
    for _ in range(3):
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda model: export(model, tmp_path / "model"), models))
    assert prediction(tmp_path / "model") in (2.0, 6.0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_two_numbered_exports_at_once_get_two_numbers(tmp_path: Path) -> None:
    exporters = [SavedModelExporter(tmp_path / "1") for _ in range(2)]
    for exporter, value in zip(exporters, (1.0, 3.0), strict=True):
        exporter.set_model(small(value))
        exporter.on_train_begin()
    folders = [exporter.export(numbered=True) for exporter in exporters]
    assert folders == [tmp_path / "1", tmp_path / "2"]
    assert [prediction(folder) for folder in folders] == [2.0, 6.0]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "2"]


def test_failed_export_leaves_the_model_before_it(tmp_path: Path) -> None:
    class Python(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs) * self.seen(inputs)

        def seen(self, inputs):
            return float(inputs[0, 0])  # works eagerly, not in a graph

    path = export(small(1.0), tmp_path / "model")
    model = Python()
    model(tf.ones((1, 2)))
    with pytest.raises(CallbackError, match="SavedModelExporter failed in on_train_end") as caught:
        export(model, path, tf.TensorSpec((None, 2), tf.float32))
    assert "self.seen(inputs)" in caught.value.user_traceback
    assert prediction(path) == 2.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_link_to_a_model_stays_a_link(tmp_path: Path) -> None:
    export(small(1.0), tmp_path / "real")
    (tmp_path / "current").symlink_to(tmp_path / "real")
    export(small(2.0), tmp_path / "current")
    assert (tmp_path / "current").is_symlink()
    assert prediction(tmp_path / "real") == 4.0


def test_folder_with_anything_but_a_model_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    params = {"saved_model_path": str(tmp_path)}
    with pytest.raises(CallbackError, match="exists and is not a SavedModel, so it is not replaced"):
        Dispatcher([SavedModelExporter()], Place.WORKER, params, small()).call("on_train_begin", {})
    assert (tmp_path / "thesis.tex").exists()


def test_empty_folder_is_filled(tmp_path: Path) -> None:
    assert prediction(export(small(1.0), tmp_path)) == 2.0


@pytest.mark.parametrize(
    ("path", "words"), [("", "has no folder to export to"), ("s3://bucket/model", "ModelUploader")]
)
def test_path_that_can_not_be_exported_to_is_told_before_training(path: str, words: str) -> None:
    dispatcher = Dispatcher([SavedModelExporter()], Place.WORKER, {"saved_model_path": path}, small())
    with pytest.raises(CallbackError, match=words):
        dispatcher.call("on_train_begin", {})


def test_path_of_the_callback_goes_before_the_jobs(tmp_path: Path) -> None:
    exporter = SavedModelExporter(tmp_path / "mine")
    params = {"saved_model_path": str(tmp_path / "jobs")}
    Dispatcher([exporter], Place.WORKER, params, small()).call("on_train_end", {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]


def test_model_without_weights_and_features_that_are_not_dense_are_told(tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match="has no weights yet"):
        export(Census(), tmp_path / "model")
    with pytest.raises(CallbackError, match="takes dense tensors"):
        export(small(), tmp_path / "model", tf.RaggedTensorSpec((None, None), tf.float32))


def test_disk_without_room_is_told_without_a_traceback(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(CallbackError, match=r"The disk is full: the model can't be exported to .*/model") as caught:
            export(small(), tmp_path / "model")
        assert caught.value.user_traceback == ""
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)
