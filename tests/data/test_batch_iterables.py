"""Datasets, generators and functions that make datasets, as sources of batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from batch_helpers import Caller, all_batches, assert_same_batches, caller, copy_of, rows_in

from elasticcb.clients.master import MasterClient
from elasticcb.data.batch_sources.adapt import adapt
from elasticcb.data.batch_sources.dataset_fn import DatasetFactory, DatasetFnSource
from elasticcb.data.batch_sources.iterables import ServedSource, StoredSource
from elasticcb.errors import ConnectionLostError, DataError
from elasticcb.security.credentials import Access
from elasticcb.serialization import carry

pytestmark = pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")


@pytest.fixture(name="fit", scope="module")
def caller_of_fit() -> Iterator[Caller]:
    with caller() as fit:
        yield fit


def fit_source(x: Any, folder: Path, fit: Caller, **options: Any) -> Any:
    return adapt(x, purpose="fit", folder=folder, seed=1, service=fit.service, **options)


def evaluated(x: Any, folder: Path, **options: Any) -> Any:
    return adapt(x, purpose="evaluate", folder=folder, seed=1, **options)


def numbers(count: int, batch_size: int = 2) -> tf.data.Dataset:
    return tf.data.Dataset.range(count).batch(batch_size).map(lambda x: (x, tf.cast(x, tf.float32)))


def generator(count: int) -> Iterator[Any]:
    for i in range(count):
        yield np.array([[i]]), np.array([float(i)])


KINDS = {
    "dense": lambda: tf.data.Dataset.from_tensor_slices(({"a": np.eye(5)}, np.arange(5))).batch(2),
    "strings": lambda: tf.data.Dataset.from_tensor_slices([["a", "é"], ["", "b"]]).batch(1),
    "ragged": lambda: tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1, 2], [], [3]])).batch(2),
    "ragged strings": lambda: tf.data.Dataset.from_tensor_slices(tf.ragged.constant([["a"], [], ["b"]])).batch(2),
    "sparse": lambda: tf.data.Dataset.from_tensor_slices(tf.sparse.from_dense(np.eye(5))).batch(2),
    "none": lambda: tf.data.Dataset.from_tensor_slices(np.arange(4)).batch(2).map(lambda x: (x, None, x)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_datasets_arrive_as_they_are(kind: str, tmp_path: Path, fit: Caller) -> None:
    expected = list(KINDS[kind]())
    served = fit_source(KINDS[kind](), tmp_path, fit)
    assert isinstance(served, ServedSource)
    assert_same_batches([served.first_batch()], expected[:1])
    assert_same_batches(all_batches(fit.copy_of(served)), expected)
    stored = evaluated(KINDS[kind](), tmp_path)
    assert isinstance(stored, StoredSource)
    assert_same_batches(all_batches(copy_of(stored)), expected)


def test_each_batch_of_a_dataset_goes_to_one_worker(tmp_path: Path, fit: Caller) -> None:
    source = fit_source(numbers(100), tmp_path, fit)
    assert source.num_batches == 50
    assert rows_in(list(source.batches(0, 0, 1))) == [0, 1]
    one, other = fit.copy_of(source), fit.copy_of(source)
    for epoch in range(2):
        taken = []
        for start in range(0, 50, 10):  # one asks in every other turn, and never reads to the end
            taken += list((one, other)[start // 10 % 2].batches(epoch, start, start + 10))
        assert rows_in(taken) == list(range(100))
        assert list(one.batches(epoch, 0, 10)) == []


def test_a_loader_of_pytorch_is_read_again_in_each_epoch(tmp_path: Path, fit: Caller) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Changing(torch.utils.data.Dataset):
        added = 0

        def __len__(self) -> int:
            return 10

        def __getitem__(self, place: int) -> Any:
            return torch.tensor([place + self.added]), torch.tensor([0.0])

    data = Changing()
    source = fit.copy_of(fit_source(torch.utils.data.DataLoader(data, 2, shuffle=True), tmp_path, fit))
    orders = [rows_in(all_batches(source, epoch)) for epoch in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(10))
    data.added = 100  # as by a hook
    assert sorted(rows_in(all_batches(source, 2))) == list(range(100, 110))


def test_a_dataset_of_unknown_length_ends_its_epoch_early(tmp_path: Path, fit: Caller) -> None:
    source = fit_source(numbers(10).filter(lambda x, _: x[0] > 3), tmp_path, fit)
    assert source.num_batches is None
    copy = fit.copy_of(source)
    assert rows_in(list(copy.batches(0, 0, 2))) == [4, 5, 6, 7]
    assert rows_in(list(copy.batches(0, 2, 4))) == [8, 9]
    assert rows_in(list(copy.batches(1, 0, 4))) == [4, 5, 6, 7, 8, 9]


def test_steps_of_a_dataset_go_on_where_the_last_epoch_ended(tmp_path: Path, fit: Caller) -> None:
    copy = fit.copy_of(fit_source(numbers(10), tmp_path, fit, steps=3))
    assert copy.num_batches == 3
    assert [rows_in(all_batches(copy, epoch)) for epoch in range(3)] == [
        [0, 1, 2, 3, 4, 5], [6, 7, 8, 9], [0, 1, 2, 3, 4, 5],
    ]  # fmt: skip


def test_steps_of_a_generator_end_with_it(tmp_path: Path, fit: Caller) -> None:
    source = fit_source(generator(5), tmp_path, fit, steps=3)
    assert rows_in([source.first_batch()]) == [0]
    copy = fit.copy_of(source)
    assert [rows_in(all_batches(copy, epoch)) for epoch in range(3)] == [[0, 1, 2], [3, 4], [0, 1]]


def test_a_generator_without_steps_gives_all_its_batches_in_every_epoch(tmp_path: Path, fit: Caller) -> None:
    source = fit.copy_of(fit_source(generator(3), tmp_path, fit))
    assert [rows_in(all_batches(source, epoch)) for epoch in range(2)] == [[0, 1, 2], [0, 1, 2]]


def test_an_error_in_a_generator_reaches_every_worker_with_the_users_lines(tmp_path: Path, fit: Caller) -> None:
    def failing() -> Iterator[Any]:
        yield from generator(3)
        raise KeyError("what the user's code says")

    source = fit_source(failing(), tmp_path, fit, steps=10)
    for copy in (fit.copy_of(source), fit.copy_of(source)):
        with pytest.raises(DataError, match=r"raised KeyError: .*what the user's code says[^$]*line \d+, in failing"):
            list(copy.batches(0, 0, 10))


def test_a_batch_unlike_the_first_is_refused(tmp_path: Path, fit: Caller) -> None:
    def changing() -> Iterator[Any]:
        yield from generator(2)
        yield np.zeros((1, 1)), np.zeros(1)

    with pytest.raises(ValueError, match="All batches must have the same structure and dtypes"):
        evaluated(changing(), tmp_path)
    with pytest.raises(DataError, match="All batches must have the same structure and dtypes"):
        list(fit.copy_of(fit_source(changing(), tmp_path, fit, steps=3)).batches(0, 0, 3))


def test_a_closed_source_is_served_no_more(tmp_path: Path, fit: Caller) -> None:
    source = fit_source(numbers(4), tmp_path, fit)
    copy = fit.copy_of(source)
    source.close()
    with pytest.raises(DataError, match="the call that they belong to has ended"):
        list(copy.batches(0, 0, 1))


def test_batches_for_evaluation_are_kept_in_order_and_read_by_number(tmp_path: Path) -> None:
    source = copy_of(evaluated(generator(6), tmp_path))
    assert source.num_batches == 6
    assert rows_in(list(source.batches(0, 4, 6))) == [4, 5]
    assert rows_in(list(source.batches(1, 1, 3))) == [1, 2]
    assert rows_in(all_batches(evaluated(numbers(10).repeat(), tmp_path, steps=2))) == [0, 1, 2, 3]
    with pytest.warns(UserWarning, match="ran out of data"):
        assert evaluated(numbers(4), tmp_path, steps=5).num_batches == 2


def test_each_worker_goes_on_in_the_dataset_that_it_made(tmp_path: Path, fit: Caller) -> None:
    calls = []

    def dataset_fn() -> tf.data.Dataset:
        calls.append(1)
        return numbers(6)

    source = fit_source(dataset_fn, tmp_path, fit, steps=4)
    assert isinstance(source, DatasetFnSource)
    one, other = copy_of(source), copy_of(source)
    assert rows_in([one.first_batch()]) == [0, 1]
    assert rows_in(list(one.batches(0, 0, 2))) == [0, 1, 2, 3]
    assert rows_in(list(other.batches(0, 2, 4))) == [0, 1, 2, 3]
    assert rows_in(list(one.batches(1, 0, 3))) == [4, 5, 0, 1, 2, 3]


def test_a_dataset_fn_may_take_an_input_context(tmp_path: Path, fit: Caller) -> None:
    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return numbers(6).shard(context.num_input_pipelines, context.input_pipeline_id)

    source = fit_source(DatasetFactory(dataset_fn), tmp_path, fit, steps=2)
    assert rows_in(all_batches(copy_of(source))) == [0, 1, 2, 3]


def test_a_dataset_fn_is_evaluated_record_by_record(tmp_path: Path) -> None:
    assert rows_in(all_batches(evaluated(lambda: numbers(6), tmp_path))) == list(range(6))
    assert rows_in(all_batches(evaluated(lambda: numbers(6).repeat(), tmp_path, steps=1))) == [0, 1]


def test_what_a_dataset_fn_must_be_is_told_in_the_manner_of_keras(tmp_path: Path, fit: Caller) -> None:
    with pytest.raises(TypeError, match=r"`callable`. Received: 3"):
        DatasetFactory(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`steps_per_epoch` must be provided in `fit`"):
        fit_source(lambda: numbers(2), tmp_path, fit)
    with pytest.raises(TypeError, match=r"must return a tf.data.Dataset. It returns 3"):
        fit_source(lambda: 3, tmp_path, fit, steps=1).first_batch()
    with pytest.raises(ValueError, match="is empty"):
        fit_source(lambda: numbers(0), tmp_path, fit, steps=1).first_batch()


@pytest.mark.parametrize("purpose", ["fit", "validation", "evaluate", "predict"])
def test_endless_data_needs_steps(purpose: Any, tmp_path: Path) -> None:
    name = {"fit": "steps_per_epoch", "validation": "validation_steps"}.get(purpose, "steps")
    with pytest.raises(ValueError, match=f"infinitely repeating dataset, please specify a `{name}` value"):
        adapt(numbers(4).repeat(), purpose=purpose, folder=tmp_path, seed=1)


def test_who_asks_for_a_batch_again_gets_the_same_one_and_not_the_next(tmp_path: Path, fit: Caller) -> None:
    source = fit_source(numbers(8), tmp_path, fit)
    asked: list[Any] = []

    def whose_first_answer_is_lost(request: Any) -> Any:
        fit.client.next_batch(request)
        answer = fit.client.next_batch(request)
        if asked:
            fit.client.next_batch(asked[-1])  # a try that took its time
        asked.append(request)
        return answer

    copy = copy_of(source)
    copy.connect(whose_first_answer_is_lost)
    assert rows_in(all_batches(copy)) == list(range(8))
    assert [request.number for request in asked] == [1, 2, 3, 4]


def test_large_batches_arrive_whole(tmp_path: Path, fit: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticcb.rpc.shared_frames._LARGEST", 1 << 20)
    large = np.arange(1 << 20, dtype=np.float64).reshape(4, -1)
    dataset = tf.data.Dataset.from_tensor_slices((large, np.array(["a", "é", "", "b"]))).batch(2)
    assert_same_batches(all_batches(fit.copy_of(fit_source(dataset, tmp_path, fit))), list(dataset))


@pytest.mark.parametrize("token", ["", "another job's"])
def test_a_stranger_gets_no_batch(token: str, tmp_path: Path, fit: Caller) -> None:
    source = copy_of(fit_source(numbers(4), tmp_path, fit))
    stranger = MasterClient(fit.server.address, access=Access(token))
    source.connect(stranger.next_batch)
    with pytest.raises(ConnectionLostError, match="UNAUTHENTICATED"):
        list(source.batches(0, 0, 1))
    stranger.close()


def test_the_callers_data_does_not_travel(tmp_path: Path, fit: Caller) -> None:
    big = tf.data.Dataset.from_tensor_slices(np.zeros((100_000, 4))).batch(1)
    assert len(carry.dumps(fit_source(big, tmp_path, fit), "a source")) < 10_000
