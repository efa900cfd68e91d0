"""`keras.utils.PyDataset` as a source: batches by its index, hooks as in `fit`, the same in all copies."""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from batch_helpers import all_batches, assert_same_batches, copy_of, keras_batches, rows_in

from elasticcb.data.batch_sources.adapt import adapt
from elasticcb.errors import UsageError
from elasticcb.serialization import carry


class Plain(keras.utils.PyDataset):
    def __init__(self, count: int | None = 7, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.count = count

    @property
    def num_batches(self) -> int | None:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return np.array([[2.0 * index], [2.0 * index + 1]]), np.array([0, 1])


class Reshuffled(Plain):
    """Makes a new order with both kinds of randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(7))
        self.calls: list[str] = []

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(self.order[index])

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")
        random.shuffle(self.order)
        self.order = [self.order[i] for i in np.random.permutation(7)]


class Waiting(Plain):
    three = threading.Barrier(3)

    def __getitem__(self, index: int) -> Any:
        if index < 3:
            self.three.wait(60)  # which one thread alone would not get past
        return super().__getitem__(index)


def test_batches_are_those_of_keras(tmp_path: Path) -> None:
    given: dict[str, Any] = {"class_weight": {0: 1.0, 1: 3.0}, "shuffle": False}
    source = adapt(Plain(), purpose="fit", folder=tmp_path, seed=1, **given)
    assert_same_batches(all_batches(copy_of(source)), keras_batches(Plain(), **given))


def test_batches_are_shuffled_by_the_epoch_alone(tmp_path: Path) -> None:
    source = adapt(Plain(), purpose="fit", folder=tmp_path, seed=1)
    one, other = copy_of(source), copy_of(source)
    orders = []
    for epoch in range(2):
        rows = rows_in([*one.batches(epoch, 4, 7), *other.batches(epoch, 0, 4)])
        assert sorted(rows) == list(range(14))
        orders.append(rows)
    assert orders[0] != orders[1]


def test_hooks_change_every_copy_alike_and_leave_random_states_alone(tmp_path: Path) -> None:
    dataset = Reshuffled()
    source = adapt(dataset, shuffle=False, purpose="fit", folder=tmp_path, seed=1)
    states = random.getstate(), np.random.get_state()[1].copy()
    one, other = copy_of(source), copy_of(source)
    orders = [rows_in(all_batches(one, epoch)) for epoch in range(3)]
    assert all(sorted(order) == list(range(14)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert rows_in(all_batches(other, 2)) == orders[2]
    assert rows_in(all_batches(other, 0)) == orders[0]  # a task of an old epoch that is handed out again
    assert rows_in(all_batches(source, 0)) == orders[0]
    assert dataset.calls == []
    source.was_read(2)  # the next call goes on where this one ended
    assert dataset.calls == ["end", *["begin", "end"] * 2]
    assert rows_in([dataset[index] for index in range(7)]) == orders[2]
    assert random.getstate() == states[0]
    np.testing.assert_array_equal(np.random.get_state()[1], states[1])


@pytest.mark.parametrize("purpose", ["fit", "validation", "predict"])
def test_hooks_are_called_as_keras_calls_them(purpose: Any, tmp_path: Path) -> None:

    class Watched(Reshuffled):
        def __getitem__(self, index: int) -> Any:
            return np.array([[self.calls.count("begin"), self.calls.count("end")]]), np.zeros(1)

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(loss="mse")
    watched = Watched()
    if purpose == "fit":
        model.fit(watched, shuffle=False, epochs=3, verbose=0)
    elif purpose == "predict":
        model.predict(watched, verbose=0)
    else:
        for _ in range(3):
            model.evaluate(watched, verbose=0)
    source = adapt(Watched(), shuffle=False, purpose=purpose, folder=tmp_path, seed=1)
    passes = 1 if purpose == "predict" else 3
    seen = [tuple(next(source.batches(epoch, 0, 1))[0][0]) for epoch in range(passes)]
    # The last of Keras's calls is the end of the last epoch.
    assert (watched.calls.count("begin"), watched.calls.count("end")) == (seen[-1][0], seen[-1][1] + 1)
    source.was_read(passes)
    assert source.given.calls == watched.calls


def test_the_first_epoch_reads_the_data_from_its_start(tmp_path: Path) -> None:
    source = adapt(Reshuffled(), shuffle=False, steps=3, purpose="fit", folder=tmp_path, seed=1)
    expected = [rows_in(all_batches(copy_of(source), epoch)) for epoch in range(2)]
    source.first_epoch = 4
    assert rows_in([source.first_batch()]) == expected[0][:2]
    assert [rows_in(all_batches(copy_of(source), 4 + epoch)) for epoch in range(2)] == expected


def test_a_dataset_without_an_end_counts_on(tmp_path: Path) -> None:
    source = adapt(Plain(None), steps=3, shuffle=False, purpose="fit", folder=tmp_path, seed=1)
    assert rows_in(all_batches(source, 1)) == [6, 7, 8, 9, 10, 11]
    source = adapt(Plain(None), steps=3, purpose="evaluate", folder=tmp_path, seed=1)
    assert rows_in(all_batches(source, 1)) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="please specify a `steps_per_epoch` value"):
        adapt(Plain(None), shuffle=False, purpose="fit", folder=tmp_path, seed=1)


def test_several_threads_read_ahead_and_keep_the_order(tmp_path: Path) -> None:
    source = adapt(Waiting(workers=3), shuffle=False, purpose="fit", folder=tmp_path, seed=1)
    assert rows_in(list(copy_of(source).batches(0, 0, 7))) == list(range(14))


def test_a_dataset_that_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    dataset = Plain()
    with socket.socket() as dataset.client:
        source = adapt(dataset, purpose="fit", folder=tmp_path, seed=1)
        with pytest.raises(UsageError, match=r"x\.client: a socket can't be sent to workers"):
            carry.dumps(source, {"x": source.given})


def test_an_unusable_batch_is_told_in_the_words_of_keras(tmp_path: Path) -> None:
    class Wrong(Plain):
        def __getitem__(self, index: int) -> Any:
            return 1, 2, 3, 4

    source = adapt(Wrong(), purpose="fit", folder=tmp_path, seed=1)
    with pytest.raises(ValueError, match="must return a tuple or a dict"):
        source.first_batch()
    with pytest.raises(ValueError, match="The PyDataset has length 0"):
        adapt(Plain(0), purpose="fit", folder=tmp_path, seed=1)
