"""SavedModels with embedding tables: TensorFlow alone serves them, and writing them takes no memory of their size."""

from __future__ import annotations

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from deep_cases import deep_but
from elasticcb.callbacks.saved_model_exporter import SavedModelExporter
from elasticcb.layers import Embedding

SERVE = """
import sys
import numpy as np
import tensorflow as tf

given = np.load("given.npz")
features = {name: tf.constant(value.astype("S") if value.dtype.kind == "U" else value) for name, value in given.items()}
expected = features.pop("expected")
outputs = tf.saved_model.load("saved").signatures["serving_default"](**features)
np.testing.assert_array_equal(outputs["score"], expected)
assert not {"elasticcb"} & sys.modules.keys()
"""


def test_exported_tables_give_the_same_vectors_also_for_ids_never_seen(tmp_path):
    ids = keras.Input((4,), dtype="int64", name="ids")
    words = keras.Input((2,), dtype="string", name="words")
    names = keras.Input((1,), dtype="string", name="names")
    shared = Embedding(3, name="shared", combiner="mean", mask_zero=True, seed=5)
    hashed = Embedding(2, 50, name="hashed", embeddings_initializer="normal")(keras.layers.Hashing(50)(words))
    looked_up = Embedding(2, 10, name="names_of")(keras.layers.StringLookup(vocabulary=["a", "b"])(names))
    parts = [shared(ids), shared(ids[:, :2]), keras.layers.Flatten()(hashed), keras.layers.Flatten()(looked_up)]
    score = keras.layers.Dense(2, name="score")(keras.layers.Concatenate()(parts))
    model = keras.Model({"ids": ids, "words": words, "names": names}, score)
    shared.set_rows([7, 3, 2**40], np.arange(9.0).reshape(3, 3))
    model.get_layer("hashed").set_rows([0, 1, 2])
    features = {
        "ids": np.array([[3, 7, 2**40, 99], [0, 0, 3, 4]]),
        "words": np.array([["ja", "nein"], ["", "ja"]]),
        "names": np.array([["a"], ["other"]]),
    }
    expected = model({name: tf.constant(value) for name, value in features.items()})
    export(model, tmp_path / "saved")
    np.savez(tmp_path / "given.npz", expected=expected, **features)
    run = subprocess.run([sys.executable, "-c", SERVE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("combiner", [None, "sum"])
def test_ragged_and_sparse_ids_can_be_exported_in_a_signature_of_the_users(combiner, tmp_path):
    layer = Embedding(3, combiner=combiner, seed=1)
    layer.set_rows([5, 1])
    ragged = tf.ragged.constant([[5], [], [1, 77]], dtype=tf.int64)
    archive = keras.export.ExportArchive()
    archive.track(layer)
    for kind, spec in (("ragged", tf.RaggedTensorSpec), ("sparse", tf.SparseTensorSpec)):
        function = tf.function(lambda ids: layer(ids), input_signature=[spec([None, None], tf.int64)])
        function.get_concrete_function()
        archive.add_endpoint(kind, function)
    archive.write_out(str(tmp_path / "saved"), verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    expected = layer(ragged)
    found = loaded.ragged(ragged)
    if combiner is None:
        expected, found = expected.to_tensor(), found.to_tensor()
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(loaded.sparse(ragged.to_sparse()), layer(ragged.to_sparse()))


EXPORT_LARGE = """
import resource
import sys

import keras
import numpy as np
from elasticcb.callbacks.saved_model_exporter import SavedModelExporter
from elasticcb.layers import Embedding
from elasticcb.layers.table_layers import install

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))

ROWS, DIM = 2_000_000, 32  # 256 MB
rows = np.memmap("rows", np.float32, "w+", shape=(ROWS, DIM))
rows[:, 0] = np.arange(ROWS)
ids = np.memmap("ids", np.int64, "w+", shape=(ROWS,))
ids[:] = np.arange(ROWS)
x = keras.Input((1,), dtype="int64")
layer = Embedding(DIM) if sys.argv[1] == "own" else keras.layers.Embedding(1, DIM)
if sys.argv[1] != "own":
    layer.build()
    layer._embeddings._shape = (ROWS, DIM)
    layer.input_dim = ROWS
model = keras.Model(x, keras.layers.Dense(1)(keras.layers.Flatten()(layer(x))))
exporter = SavedModelExporter("saved")
exporter.set_model(model)
install(model, 0, ids, rows)
before = anonymous()
exporter.on_train_end()
print(anonymous() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", deep_but(["own", "keras"], "own"))
def test_export_of_rows_in_a_file_takes_no_memory_of_their_size(kind, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", EXPORT_LARGE, kind], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout.split()[-1]) < 100


def export(model, folder):
    exporter = SavedModelExporter(folder)
    exporter.set_model(model)
    exporter.on_train_end()
