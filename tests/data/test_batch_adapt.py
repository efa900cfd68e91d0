"""Arguments that Keras refuses are refused in its words; and every kind of source works in another process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from batch_helpers import (
    Caller,
    assert_same_batches,
    caller,
    copy_of,
    keras_batches,
    read_in_another_process,
    rows_in,
)

from elasticcb.data import open_reader
from elasticcb.data.batch_sources.adapt import adapt
from elasticcb.data.batch_sources.records import Records

A = np.arange(4)


@pytest.fixture(name="fit", scope="module")
def caller_of_fit() -> Iterator[Caller]:
    with caller() as fit:
        yield fit


def generator() -> Iterator[Any]:
    yield A, A
    yield A, A


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "class weights beside a generator": (generator, {"class_weight": {0: 1.0}}),
    "class weights of two outputs": (lambda: A, {"y": [A, A], "class_weight": {0: 1.0}}),
    "weights of another structure": (lambda: A, {"y": [A, A], "sample_weight": [A]}),
    "a number": (lambda: 3, {}),
    "a list of numbers": (lambda: [1.0, 2.0], {}),
    "an empty generator": (lambda: (array for array in ()), {}),
    "a generator of arrays": (lambda: (array for array in [A, A]), {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradicting_arguments_raise_what_keras_raises(case: str, tmp_path: Path) -> None:
    make, options = REFUSED[case]
    with pytest.raises((ValueError, TypeError)) as expected:
        keras_batches(make(), shuffle=False, **options)
    with pytest.raises(type(expected.value)) as raised:
        adapt(make(), shuffle=False, purpose="fit", folder=tmp_path, seed=1, **options)
    assert str(raised.value).split(" at 0x")[0] == str(expected.value).split(" at 0x")[0]


def test_an_array_of_other_objects_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Unsupported object type dict"):
        adapt(np.array([{}, {}]), purpose="fit", folder=tmp_path, seed=1)


def test_debugging_limits_of_keras_hold(tmp_path: Path) -> None:
    keras.config.set_max_steps_per_epoch(2)
    try:
        with pytest.warns(UserWarning, match="Limiting steps_per_epoch to 2"):
            source = adapt(np.arange(8), batch_size=2, shuffle=False, purpose="fit", folder=tmp_path, seed=1)
    finally:
        keras.config.set_max_steps_per_epoch(None)
    assert source.num_batches == 2


def test_a_source_is_taken_as_it_is(tmp_path: Path) -> None:
    source = adapt(A, purpose="fit", folder=tmp_path, seed=1)
    assert adapt(source, purpose="fit", folder=tmp_path, seed=1) is source


def test_sources_of_every_kind_are_read_in_another_process(tmp_path: Path, fit: Caller) -> None:
    class Local(keras.utils.PyDataset):  # which the other process can't import
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return np.array([[index]]), np.array([0.0])

    def feed(dataset: tf.data.Dataset, mode: str, metadata: Any) -> tf.data.Dataset:
        return dataset.map(lambda line: (tf.strings.to_number(line), 0))

    def dataset_fn() -> tf.data.Dataset:
        return tf.data.Dataset.range(4).batch(2)

    def endless() -> Iterator[Any]:
        number = 0
        while True:
            yield np.array([number]), np.array([0])
            number += 1

    (tmp_path / "records.csv").write_text("".join(f"{i}\n" for i in range(5)))
    ragged = tf.ragged.constant([[1, 2], [], [3], [4, 5, 6]])

    def adapted(x: Any, purpose: Any = "fit", **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return adapt(x, purpose=purpose, folder=tmp_path, seed=1, service=fit.service, **options)

    sources = {
        "arrays": (adapted({"a": np.arange(5), "b": [np.arange(5), None]}, batch_size=2), 3),
        "ragged": (adapted(ragged, batch_size=3, shuffle=False), 2),
        "py_dataset": (adapted(Local()), 3),
        "records": (adapted(Records(open_reader(str(tmp_path / "records.csv")), feed), batch_size=2), 3),
        "dataset": (adapted(tf.data.Dataset.range(6).batch(2)), 3),
        "generator": (adapted(endless(), steps=3), 3),
        "stored": (adapted(tf.data.Dataset.range(6).batch(2), "predict"), 3),
        "dataset_fn": (adapted(dataset_fn, steps=3), 3),
    }
    read = read_in_another_process(
        {name: (source, [(0, 1, count), (0, 0, 1)]) for name, (source, count) in sources.items()},
        tmp_path,
        fit.server.address,
    )
    for name in ("arrays", "ragged", "py_dataset", "records", "stored"):
        here = copy_of(sources[name][0])
        assert_same_batches(read[name], [*here.batches(0, 1, sources[name][1]), *here.batches(0, 0, 1)])
    assert rows_in(read["dataset"]) == list(range(6))
    assert rows_in(read["generator"]) == [0, 1, 2]
    assert rows_in(read["dataset_fn"]) == [0, 1, 2, 3, 0, 1]
