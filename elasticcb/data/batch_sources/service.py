"""tf.data's own service, in the process that calls `fit`: batches of what has no index go to whoever asks next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from elasticcb.data.batch_sources import keras_data
from elasticcb.data.batch_sources.encoding import Layout
from elasticcb.errors import describe, user_traceback

_SERVICE = tf.data.experimental.service


@dataclass(frozen=True)
class Served:
    """Where batches are served, for workers."""

    target: str
    graph: bytes  # a GraphDef that calls into the process that serves: epoch -> what `_SharedBatches.next` returns
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class DataService:
    """A dispatcher and one data worker of tf.data's service.

    It listens on all interfaces, since TensorFlow offers no other way, and without authentication: use it on
    machines that only trusted ones reach.
    """

    def __init__(self) -> None:
        self._dispatcher = _SERVICE.DispatchServer(_SERVICE.DispatcherConfig(protocol="grpc"))
        address = self._dispatcher.target.split("://")[1]
        self._worker = _SERVICE.WorkerServer(_SERVICE.WorkerConfig(dispatcher_address=address, protocol="grpc"))
        # With the function, since a graph that calls Python is only good as long as that is referred to.
        self._registered: dict[Served, tuple[_SharedBatches, Any]] = {}

    def register(self, passes: Iterator[Iterator[Any]], layout: Layout, *, by_epoch: bool) -> Served:
        """Serves batches, each to one process.

        Args:
          passes: one iterator over batches after the other.
          by_epoch: an epoch is a pass; else epochs take what comes next, and one pass follows on the other.
        """
        shared = _SharedBatches(passes, layout, by_epoch)

        @tf.function(input_signature=[tf.TensorSpec((), tf.int64)], autograph=False)
        def next_batch(epoch: Any) -> Any:
            return tf.numpy_function(shared.next, [epoch], [tf.bool, tf.string, *layout.dtypes], stateful=True)

        function = next_batch.get_concrete_function()
        served = Served(
            self._dispatcher.target,
            function.graph.as_graph_def().SerializeToString(),
            tuple(tensor.name for tensor in function.inputs),
            tuple(tensor.name for tensor in function.outputs),
        )
        self._registered[served] = shared, function
        return served

    def release(self, served: Served) -> None:
        """Serves these batches no more, and frees them."""
        shared, _ = self._registered.pop(served, (None, None))
        if shared is not None:
            shared.close()

    def close(self) -> None:
        """Stops the servers; what was registered is served no more."""
        for served in list(self._registered):
            self.release(served)
        self._worker.stop()
        self._dispatcher.stop()


class _SharedBatches:
    """The iterator of each epoch, which all processes draw from."""

    def __init__(self, passes: Iterator[Iterator[Any]], layout: Layout, by_epoch: bool) -> None:
        self._passes = passes
        self._layout = layout
        self._by_epoch = by_epoch
        self._iterators: dict[int, Iterator[Any]] = {}
        self._error = ""  # for all who ask after it, since a generator that raised has ended
        self._lock = threading.Lock()

    def next(self, epoch: Any) -> list[Any]:
        """Whether there is a batch; if not because of an error, its text; the arrays that the batch consists of."""
        with self._lock:
            if not self._error:
                try:
                    batch = self._next(int(epoch) if self._by_epoch else 0)
                    if batch is not None:
                        return [np.True_, b"", *self._layout.arrays(keras_data.to_batch(batch))]
                except Exception as error:  # whatever the user's code raises, of which TensorFlow would keep the text
                    self._error = f"{describe(error)}\n\n{user_traceback(error)}"
            return [np.False_, self._error, *(np.empty(0, dtype.as_numpy_dtype) for dtype in self._layout.dtypes)]

    def close(self) -> None:
        # Without the lock: the user's code may hold it for long.
        self._error = "an error: the call that it was given to has ended"
        self._passes, self._iterators = iter(()), {}

    def _next(self, epoch: int) -> Any:
        if epoch not in self._iterators:
            self._iterators[epoch] = next(self._passes)
            for old in self._iterators:
                if old < epoch - 1:
                    self._iterators[old] = iter(())  # what nobody asked for is freed
        batch = next(self._iterators[epoch], None)
        if batch is None and not self._by_epoch:
            self._iterators[epoch] = next(self._passes)
            batch = next(self._iterators[epoch], None)
        return batch


def served_batches(served: Served, epoch: int, count: int) -> tf.data.Dataset:
    """The next `count` batches of an epoch, as tuples: whether there is one, the text of an error, its arrays.

    Each iterator of the dataset takes batches of its own. Exactly `count` are drawn for it, so none is lost in the
    buffer of a process that needs no more.
    """
    graph = tf.compat.v1.GraphDef.FromString(served.graph)

    def next_batch(epoch: Any) -> Any:
        inputs = dict.fromkeys(served.inputs, epoch)
        return tuple(tf.graph_util.import_graph_def(graph, inputs, list(served.outputs), name=""))

    dataset = tf.data.Dataset.from_tensors(np.int64(epoch)).repeat(count)
    options = tf.data.Options()
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    # There is nothing to tune, and the end of the service would wait for the tuner, which looks up once a minute.
    options.autotune.enabled = False
    return (
        dataset.map(next_batch)
        .with_options(options)
        .apply(_SERVICE.distribute(_SERVICE.ShardingPolicy.OFF, served.target, compression=None))
        .take(count)
    )
