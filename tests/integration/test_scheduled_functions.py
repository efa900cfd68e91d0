"""Functions of `Cluster.schedule`: their values, errors, datasets and workers."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
import tensorflow as tf

import elasticcb
from elasticcb.errors import FunctionError, JobFailedError, UsageError

GATE = threading.Event()
CLIENT = socket.socket()


def wait_at_gate():
    assert GATE.wait(60)
    return "passed"


@pytest.fixture
def gate():
    """Holds up `wait_at_gate` until it is set; workers that are threads see it."""
    GATE.clear()
    yield GATE
    GATE.set()


@pytest.fixture(scope="module")
def cluster():
    with elasticcb.Cluster(kind="inprocess") as cluster:
        yield cluster


def raise_error(text="oh"):
    raise KeyError(text)


def test_functions_give_their_values_with_tensors_as_arrays(cluster):
    value = cluster.schedule(lambda a, *, b: {"sum": tf.constant(a) + b, "text": "x"}, 1, b=2)
    values = [cluster.schedule(lambda i: i * i, i) for i in range(20)]
    assert cluster.fetch(values) == [i * i for i in range(20)]
    fetched = cluster.fetch({"first": value})["first"]
    assert fetched == {"sum": 3, "text": "x"}
    assert isinstance(fetched["sum"], np.int32)
    cluster.join()
    assert cluster.done()


def test_value_may_be_an_argument_of_a_later_function_before_it_is_there(cluster):
    value = cluster.schedule(lambda: 1)
    for _ in range(5):
        value = cluster.schedule(lambda pair: sum(pair), [value, value])
    assert value.fetch() == 32


def test_tf_function_is_traced_once_for_all_its_calls(cluster):
    @tf.function
    def add(x):
        return x + 1.0

    def call(x):
        add(tf.constant(x))
        return add.experimental_get_tracing_count()

    values = [cluster.schedule(call, float(i)) for i in range(5)]
    assert cluster.fetch(values) == [1] * 5


def test_error_cancels_what_does_not_run_yet_and_is_raised_by_join(gate):
    with elasticcb.Cluster(num_workers=2, kind="inprocess") as cluster:
        held = cluster.schedule(wait_at_gate)
        failing = cluster.schedule(raise_error)
        later = cluster.schedule(str, held)
        with pytest.raises(FunctionError, match=r"str\(\) was cancelled because raise_error\(\) failed"):
            later.fetch()
        gate.set()
        with pytest.raises(FunctionError, match=r"raise_error\(\) failed on worker [01] .*KeyError: 'oh'") as caught:
            cluster.join()
        assert isinstance(caught.value.__cause__, KeyError)
        assert "raise KeyError(text)" in caught.value.user_traceback
        assert held.fetch() == "passed"  # it was running
        with pytest.raises(FunctionError, match="'oh'"):
            failing.fetch()
        assert cluster.schedule(lambda: 5).fetch() == 5


def test_error_is_raised_by_the_next_schedule_which_then_works_again(cluster):
    value = cluster.schedule(raise_error)
    with pytest.raises(FunctionError):
        value.fetch()
    with pytest.raises(FunctionError, match="'oh'"):
        cluster.schedule(lambda: 1)
    assert cluster.schedule(lambda: 1).fetch() == 1
    with pytest.raises(FunctionError, match="'oh'"):
        cluster.schedule(lambda x: x, value)


def test_end_of_with_waits_for_functions_and_raises_an_error_that_nobody_has_seen():
    with pytest.raises(FunctionError, match="'oh'"), elasticcb.Cluster(kind="inprocess") as cluster:
        cluster.schedule(raise_error)
    with elasticcb.Cluster(kind="inprocess") as cluster:
        value = cluster.schedule(lambda: 1)
    assert value.fetch() == 1
    with elasticcb.Cluster(kind="inprocess") as cluster, pytest.raises(FunctionError):
        cluster.schedule(raise_error).fetch()


def test_what_a_function_returns_and_can_not_be_sent_is_an_error_of_it(cluster):
    cluster.schedule(socket.socket)
    with pytest.raises(FunctionError, match=r"What \w+\(\) returned: a socket can't be sent"):
        cluster.join()


def test_iterator_goes_on_through_the_dataset_of_its_worker(cluster):
    dataset = cluster.create_per_worker_dataset(lambda: tf.data.Dataset.range(100).batch(2))
    first, second = iter(dataset), iter(dataset)

    def take(iterator):
        return next(iterator).numpy().tolist()

    values = [cluster.schedule(take, iterator) for iterator in (first, first, second)]
    assert cluster.fetch(values) == [[0, 1], [2, 3], [0, 1]]
    compiled = tf.function(lambda iterator: next(iterator))
    assert cluster.schedule(compiled, first).fetch().tolist() == [4, 5]


def test_dataset_is_made_once_on_each_worker(gate):
    with elasticcb.Cluster(num_workers=2, kind="inprocess") as cluster:
        iterator = iter(cluster.create_per_worker_dataset(lambda: range(10)))

        def take(iterator, wait):
            return next(iterator), wait()

        blocked = cluster.schedule(take, iterator, wait_at_gate)
        values = [cluster.schedule(take, iterator, int) for _ in range(3)]
        assert cluster.fetch(values) == [(0, 0), (1, 0), (2, 0)]
        gate.set()
        assert blocked.fetch() == (0, "passed")


def test_mistakes_are_told_before_anything_is_sent(cluster):
    with pytest.raises(UsageError, match=r"`schedule` takes a function\. Received: 5"):
        cluster.schedule(5)
    with pytest.raises(UsageError, match=r"Argument 2 of max\(\): a socket can't be sent"):
        cluster.schedule(max, 1, CLIENT)
    client = CLIENT

    def connected():
        return client

    with pytest.raises(UsageError, match=r"The function connected\.client: a socket can't be sent"):
        cluster.schedule(connected)
    with pytest.raises(UsageError, match="takes a function that creates a dataset"):
        cluster.create_per_worker_dataset(tf.data.Dataset.range(3))
    with pytest.raises(UsageError, match="Pass the iterator to a function"):
        next(iter(cluster.create_per_worker_dataset(list)))
    with pytest.raises(UsageError, match="`fetch` takes a value returned by `schedule`"):
        cluster.fetch([1])
    cluster.join()


def test_value_of_another_cluster_is_refused(cluster):
    value = cluster.schedule(lambda: 1)
    with elasticcb.Cluster(kind="inprocess") as other:
        with pytest.raises(UsageError, match="belongs to another Cluster"):
            other.fetch(value)
        with pytest.raises(UsageError, match="A value of a Cluster was passed to a function of another Cluster"):
            other.schedule(str, value)


def test_closed_cluster_schedules_nothing_until_it_is_started_again(cluster):
    cluster.close()
    with pytest.raises(UsageError, match="The cluster is closed"):
        cluster.schedule(lambda: 1)
    cluster.start()
    assert cluster.schedule(lambda: 1).fetch() == 1


@pytest.mark.deep  # test_custom_loops.py kills a worker
def test_function_that_kills_its_workers_fails_and_the_next_ones_get_new_processes():
    def die():
        import os

        os._exit(3)

    with elasticcb.Cluster(recovery=elasticcb.RecoveryOptions(max_worker_restarts=0)) as cluster:
        value = cluster.schedule(die)
        with pytest.raises(JobFailedError, match=r"die\(\) could not be run: .*exit code 3"):
            cluster.join()
        with pytest.raises(JobFailedError):
            value.fetch()
        assert cluster.schedule(lambda: 5).fetch() == 5
