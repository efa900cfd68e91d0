"""Arrays as batches: equal to Keras's own, in any order of reading, without copies of mapped files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas
import pytest
import scipy.sparse
import tensorflow as tf
from batch_helpers import all_batches, assert_same_batches, copy_of, keras_batches, rows_in

from elasticcb.data.batch_sources.adapt import adapt, split_validation
from elasticcb.data.batches import BatchSource

N = 10
RANDOM = np.random.default_rng(0)

KINDS: dict[str, tuple[Any, ...]] = {
    "features alone": (RANDOM.random((N, 3)),),
    "labels": (RANDOM.random((N, 3)).astype("float32"), np.arange(N)),
    "sample weights": (RANDOM.random((N, 3)), np.arange(N), RANDOM.random(N)),
    "a list of inputs": ([RANDOM.random((N, 3)), np.arange(N, dtype="uint8")],),
    "dicts, lists, None": ({"a": RANDOM.random((N, 3)), "b": [np.arange(N), None]}, {"out": np.arange(N)}),
    "one weight for two outputs": (np.arange(N), {"a": np.arange(N), "b": np.arange(N)}, np.ones(N)),
    "tensors": (tf.random.uniform((N, 2), dtype=tf.float64), tf.range(N)),
    "booleans, half floats": (RANDOM.random((N, 3)) > 0.5, RANDOM.random((N, 3)).astype("float16")),
    "complex numbers": (RANDOM.random((N, 3)).astype("complex64"),),
    "a view that is not contiguous": (np.asfortranarray(RANDOM.random((N, 3)))[:, ::-1],),
    "another byte order": (RANDOM.integers(0, 9, (N, 3)).astype(">i4"),),
    "an array of string objects": (np.array([f"é{i}" for i in range(N)], object), np.arange(N)),
    "a string tensor": (tf.constant([[f"a{i}", ""] for i in range(N)]), np.arange(N)),
    "a frame and a series": (
        pandas.DataFrame({"a": RANDOM.random(N), "b": np.arange(N)}),
        pandas.Series(np.arange(N)),
    ),
    "ragged, twice": (tf.ragged.constant([[[1.0, 2.0], [3.0]] * (i % 3) for i in range(N)]), np.arange(N)),
    "ragged strings": (tf.ragged.constant([[f"a{i}"] * (i % 3) for i in range(N)]), np.arange(N)),
    "ragged rows": (tf.RaggedTensor.from_row_lengths(tf.reshape(tf.range(60), (30, 2)), [3] * N), np.arange(N)),
    "a sparse tensor": (tf.sparse.from_dense(RANDOM.integers(0, 2, (N, 4, 2))), np.arange(N)),
    "a SciPy matrix": (scipy.sparse.random(N, 5, 0.4, format="csr"), np.arange(N)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_arrays_are_those_of_keras(kind: str, tmp_path: Path) -> None:
    source = adapt(*KINDS[kind], batch_size=4, shuffle=False, purpose="fit", folder=tmp_path, seed=1)
    assert source.num_batches == 3
    assert_same_batches(all_batches(copy_of(source)), keras_batches(*KINDS[kind], batch_size=4))


@pytest.mark.parametrize("kind", KINDS)
def test_shuffled_rows_stay_together_in_arrays_of_every_kind(kind: str, tmp_path: Path) -> None:
    arrays = {"data": KINDS[kind][0], "row": np.arange(N)}
    one_by_one = adapt(arrays, batch_size=1, shuffle=False, purpose="fit", folder=tmp_path, seed=1)
    shuffled = adapt(arrays, batch_size=1, shuffle=True, purpose="fit", folder=tmp_path, seed=1)
    rows = all_batches(one_by_one)
    batches = all_batches(shuffled)
    order = [int(np.asarray(batch["row"])[0]) for batch in batches]
    assert sorted(order) == list(range(N))
    assert order != list(range(N))
    assert_same_batches(batches, [rows[i] for i in order])


@pytest.mark.parametrize("strings", [np.array([["a", "bé"]] * 3), np.array([[b"a", "bé"]] * 3, object)])
def test_arrays_of_strings_of_any_shape_are_taken(strings: Any, tmp_path: Path) -> None:
    source = adapt(strings, batch_size=2, shuffle=False, purpose="fit", folder=tmp_path, seed=1)
    expected = tf.constant([["a", "bé"]] * 3)
    assert_same_batches(all_batches(source), [expected[:2], expected[2:]])


def test_an_unordered_sparse_matrix_is_taken_by_rows(tmp_path: Path) -> None:
    matrix = scipy.sparse.random(N, 5, 0.4, format="csc", rng=RANDOM)
    source = adapt(matrix, batch_size=4, shuffle=False, purpose="fit", folder=tmp_path, seed=1)
    dense = tf.concat([tf.sparse.to_dense(batch) for batch in all_batches(source)], 0)
    np.testing.assert_array_equal(dense, matrix.toarray().astype("float32"))


def test_a_mapped_file_is_not_copied_and_is_cast_when_read(tmp_path: Path) -> None:
    array = RANDOM.random((100, 3))
    np.save(tmp_path / "a.npy", array)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")[10:]
    folder = tmp_path / "written"
    folder.mkdir()
    source = adapt(mapped, batch_size=8, shuffle=False, purpose="fit", folder=folder, seed=1)
    assert sum(path.stat().st_size for path in folder.iterdir()) == 0
    assert_same_batches(all_batches(copy_of(source)), keras_batches(array[10:], batch_size=8))


def test_changes_of_a_copy_on_write_map_are_seen(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((4, 1), "float32"))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="c")
    mapped[:] = 7
    source = adapt(mapped, shuffle=False, purpose="fit", folder=tmp_path, seed=1)
    np.testing.assert_array_equal(all_batches(source)[0], mapped)


def test_numbers_are_mapped_and_an_array_that_is_given_twice_is_written_once(tmp_path: Path) -> None:
    array = RANDOM.random((1000, 8)).astype("float32")
    source = adapt(array, array, batch_size=100, shuffle=False, purpose="fit", folder=tmp_path, seed=1)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == array.nbytes
    features, labels = next(source.batches(0, 3, 4))
    assert np.shares_memory(features, labels)
    assert not features.flags.writeable


def test_two_workers_read_every_row_once_in_an_epoch_whoever_takes_which_range(tmp_path: Path) -> None:
    source = adapt(np.arange(103), np.arange(103), batch_size=5, purpose="fit", folder=tmp_path, seed=1)
    workers = [copy_of(source), copy_of(source)]
    orders = []
    for epoch in range(2):
        ranges = [(0, 4), (15, 21), (4, 9), (9, 15)]
        batches = [list(workers[i % 2].batches(epoch, *each)) for i, each in enumerate(ranges)]
        rows = [row for part in batches for row in rows_in(part)]
        assert sorted(rows) == list(range(103))
        orders.append(rows)
    assert orders[0] != orders[1]


def test_shuffling_batches_keeps_rows_in_their_batch(tmp_path: Path) -> None:
    source = adapt(np.arange(10), batch_size=4, shuffle="batch", purpose="fit", folder=tmp_path, seed=1)
    batches = [[rows_in([batch]) for batch in all_batches(source, epoch)] for epoch in range(2)]
    for epoch in range(2):
        assert [sorted(batch) for batch in batches[epoch]] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches[0] != batches[1]


def test_epochs_of_steps_go_on_where_the_last_ended(tmp_path: Path) -> None:
    def source(steps: int) -> BatchSource:
        with pytest.warns(UserWarning, match="ran out of data"):
            return adapt(
                np.arange(6), batch_size=2, steps=steps, epochs=3, shuffle=False, purpose="fit", folder=tmp_path, seed=1
            )

    assert [rows_in(all_batches(source(2), epoch)) for epoch in range(3)] == [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3]]
    assert rows_in(list(source(2).batches(2, 1, 99))) == [2, 3]
    longer = source(4)
    assert longer.num_batches == 3
    assert rows_in(all_batches(longer, 1)) == [0, 1, 2, 3, 4, 5]


def test_the_batch_size_follows_from_steps_as_in_keras(tmp_path: Path) -> None:
    source = adapt(np.arange(10), steps=4, shuffle=False, purpose="fit", folder=tmp_path, seed=1)
    assert_same_batches(all_batches(source), keras_batches(np.arange(10), steps_per_epoch=4))


def test_evaluation_takes_no_row_twice_and_never_shuffles(tmp_path: Path) -> None:
    given: dict[str, Any] = {"batch_size": 2, "purpose": "evaluate", "folder": tmp_path, "seed": 1}
    assert rows_in(all_batches(adapt(np.arange(6), steps=2, **given), 3)) == [0, 1, 2, 3]
    with pytest.warns(UserWarning, match="ran out of data"):
        source = adapt(np.arange(6), steps=4, **given)
    assert rows_in(all_batches(source, 1)) == list(range(6))


def test_class_weights_become_sample_weights(tmp_path: Path) -> None:
    labels = np.array([0, 1, 1, 2])
    given: dict[str, Any] = {"class_weight": {0: 0.5, 1: 2.0}, "batch_size": 4}
    source = adapt(np.arange(4), labels, shuffle=False, purpose="fit", folder=tmp_path, seed=1, **given)
    assert_same_batches(all_batches(source), keras_batches(np.arange(4), labels, **given))


def test_looking_at_the_first_batch_changes_nothing(tmp_path: Path) -> None:
    source = adapt(np.arange(20), batch_size=2, purpose="fit", folder=tmp_path, seed=1)
    expected = rows_in(all_batches(copy_of(source)))
    assert rows_in([source.first_batch()]) == expected[:2]
    assert rows_in(list(source.batches(0, 0, 1))) == expected[:2]
    source.close()
    assert rows_in(all_batches(source)) == expected


def test_floats_are_cast_to_floatx(tmp_path: Path) -> None:
    keras.config.set_floatx("float64")
    try:
        array = RANDOM.random((4, 2)).astype("float32")
        source = adapt(array, shuffle=False, purpose="fit", folder=tmp_path, seed=1)
        assert_same_batches(all_batches(source), keras_batches(array))
    finally:
        keras.config.set_floatx("float32")


def test_arrays_are_split_for_validation_as_keras_splits(tmp_path: Path) -> None:
    (x, y, weights), (val_x, val_y, val_weights) = split_validation(np.arange(10), {"a": np.arange(10)}, None, 0.3)
    assert weights is None
    assert val_weights is None
    assert rows_in([x, val_x]) == list(range(10))
    assert len(val_x) == len(val_y["a"]) == 3
    assert len(y["a"]) == 7
    with pytest.raises(ValueError, match="not sufficient to split"):
        split_validation(np.arange(1), None, None, 0.3)
