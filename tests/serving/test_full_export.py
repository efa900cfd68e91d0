"""The process that makes a SavedModel of what servers have written."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from waiting import wait_until

import elasticcb
from elasticcb.callbacks.saved_model_exporter import without_weights
from elasticcb.checkpoint.manifest import write_manifest
from elasticcb.checkpoint.shard_file import Part, write_part
from elasticcb.errors import CallbackError, CheckpointError
from elasticcb.model.weights import variable_specs
from elasticcb.serving.exports import IDS, WEIGHTS
from elasticcb.serving.full_export import FullExport
from elasticcb.serving.loading import load_version
from elasticcb.sharding.partition import partition
from elasticcb.sharding.table_state import TableSpec, TableState

WORDS = ["red", "green", "blue"]


def rich_model():
    """Several inputs and outputs, strings with vocabularies, tables of both kinds, combiners."""
    user = keras.Input((1,), dtype="int64", name="user")
    tags = keras.Input((3,), dtype="int64", name="tags")
    colour = keras.Input((1,), dtype="string", name="colour")
    title = keras.Input((1,), dtype="string", name="title")
    number = keras.Input((2,), name="number")
    parts = [
        keras.layers.Flatten()(elasticcb.layers.Embedding(4, name="users")(user)),
        elasticcb.layers.Embedding(4, combiner="mean", mask_zero=True, name="of_tags")(tags),
        keras.layers.StringLookup(vocabulary=WORDS, output_mode="multi_hot")(colour),
        keras.layers.GlobalAveragePooling1D()(
            keras.layers.Embedding(9, 4, name="of_words")(
                keras.layers.TextVectorization(vocabulary=WORDS, output_sequence_length=4)(title)
            )
        ),
        keras.layers.BatchNormalization()(number),
    ]
    hidden = keras.layers.Dense(8, "relu")(keras.layers.Concatenate()(parts))
    outputs = {"click": keras.layers.Dense(1)(hidden), "buy": keras.layers.Dense(2)(hidden)}
    return keras.Model({each.name: each for each in (user, tags, colour, title, number)}, outputs)


FEATURES = {
    "user": np.array([[7], [1 << 40], [3]]),
    "tags": np.array([[5, 0, 6], [0, 0, 0], [9, 9, 5]]),
    "colour": np.array([["red"], ["blue"], ["none"]]),
    "title": np.array([["Red green"], ["blue"], [""]]),
    "number": np.array([[1, 2], [3, 4], [5, 6]], np.float32),
}


def snapshot_of(model, folder, version=3):
    """Random weights and rows of a model, as a server writes them for serving; the model gets them too."""
    random = np.random.default_rng(0)
    layers = {layer.name: layer for layer in model.layers}
    tables, states, values = {}, {}, {}
    for index, variable in enumerate(model.weights):
        value = random.uniform(0.1, 1, variable.shape).astype("float32")
        owner = variable.path.split("/")[0]
        if owner in ("users", "of_tags"):
            ids = np.array([3, 5, 7, 9])
            layers[owner].set_rows(ids, random.normal(size=(4, 4)))
            tables[index], states[index] = layers[owner].table_spec(), TableState(*layers[owner].rows())
            continue
        variable.assign(value)
        if owner == "of_words":
            tables[index], states[index] = TableSpec(9), TableState(np.arange(9), value)
        else:
            values[index] = value
    specs = variable_specs(model, tables=tables)
    folder.mkdir()
    saved = write_part(folder / "server", Part(version, values, tables=states))
    write_manifest(folder, version=version, specs=specs, parts=partition(specs, 1, split=False), files=[[saved]])


def written(model, folder, spec=None):
    process = FullExport(without_weights(model, spec), str(folder / "snapshot"), str(folder / "full"))
    try:
        wait_until(lambda: process.has_ended, seconds=280)
        return process.files()
    finally:
        process.close()


def test_a_model_with_strings_several_inputs_and_outputs_and_tables_is_served_by_tensorflow_alone(tmp_path):
    model = rich_model()
    snapshot_of(model, tmp_path / "snapshot")
    files = written(model, tmp_path)
    assert {file.name for file in files} >= {"saved_model.pb", "variables/variables.index"}
    assert {file.version for file in files} == {3}
    served = tf.saved_model.load(str(tmp_path / "full"))
    features = {name: tf.constant(value) for name, value in FEATURES.items()}
    expected = model(features, training=False)
    for results in (served.signatures["serving_default"](**features), served.serve(features)):
        for name in ("click", "buy"):
            np.testing.assert_allclose(results[name], expected[name], atol=1e-6)
    weights, ids = getattr(served, WEIGHTS), getattr(served, IDS)
    for given, own in zip(weights, model.weights, strict=True):
        np.testing.assert_array_equal(given.numpy(), own.numpy())
    assert [each.numpy().tolist() for each in ids] == [[3, 5, 7, 9]] * 2


def test_what_can_not_be_exported_says_whose_fault_it_is(tmp_path):
    model = rich_model()
    with pytest.raises(CheckpointError, match=r"could not be written: CheckpointError: .*manifest"):
        written(model, tmp_path)
    snapshot_of(model, tmp_path / "snapshot")
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(CallbackError, match="belongs to another model"):
        written(other, tmp_path)


def test_the_version_of_weights_before_a_damaged_file_with_changes_is_theirs(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    specs = variable_specs(model)
    files = []
    for version in (10, 20):
        weights = {index: np.full(spec.shape, version, spec.dtype) for index, spec in enumerate(specs)}
        files.append(write_part(tmp_path / f"ps-0-{version}.safetensors", Part(version, weights)))
    write_manifest(tmp_path, version=20, specs=specs, parts=partition(specs, 1, split=False), files=[files])
    assert load_version(model, str(tmp_path)) == 20
    (tmp_path / files[1].name).write_bytes(b"")
    assert load_version(model, str(tmp_path)) == 10
    np.testing.assert_array_equal(model.weights[0], np.full((2, 1), 10.0))
