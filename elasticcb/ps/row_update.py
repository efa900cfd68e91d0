"""Updates some rows of a variable with the user's own optimizer, at a cost that the table's size does
not enter.

The rows and their slots are gathered into a small variable, on which a clone of the optimizer runs,
and are scattered back. Rows without a gradient stay as they are, momentum and weight decay included
("lazy" updates); docs/parameter_servers.md says where that differs from a dense update.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from elasticcb.ps.optimizer import ServerOptimizer


class RowUpdate:
    """The rows of one variable.

    Args:
        server: the optimizer that holds the variable's slots.
        index: of the variable in the model.
        variable: this server's part of it, of rank 1 or more.
    """

    def __init__(self, server: ServerOptimizer, index: int, variable: keras.Variable) -> None:
        self._server = server
        self._table = variable
        with tf.init_scope(), tf.device("/CPU:0"):
            self._bucket = keras.Variable(
                tf.zeros([1, *variable.shape[1:]], variable.dtype),
                dtype=variable.dtype,
                trainable=True,
                name=variable.name,
            )
            self._bucket._path = variable.path
            _free_rows(self._bucket)
            self._clone = server.clone(index, self._bucket)
            for slot in self._clone.slots:
                _free_rows(slot.value)
        main = {slot.name: slot.value for slot in server.slots if slot.variable == index}
        self._slots = [(main[slot.name], slot.value) for slot in self._clone.slots]
        # A schedule needs no copy: it is a function of the iterations.
        self._shared = [(value, self._clone.shared[name]) for name, value in server.shared.items()]

    def copy_shared(self) -> None:
        """Gives the clone the iterations and the learning rate. Called while a function is traced."""
        for main, clone in self._shared:
            clone.assign(main.value)

    def copy_shared_back(self) -> None:
        """Takes the iterations over from the clone, when nothing else has advanced them."""
        for main, clone in self._shared:
            main.assign(clone.value)

    def run(self, ids: tf.Tensor, values: tf.Tensor) -> None:
        """Updates the rows `ids` (int64 [n], unique) with the gradients `values` [n, …]."""
        table = self._table.value
        self._bucket.value.assign(tf.gather(table, ids))
        for main, clone in self._slots:
            clone.value.assign(tf.gather(main.value, ids))
        self._clone.optimizer.apply([values], [self._bucket])
        table.scatter_update(tf.IndexedSlices(tf.identity(self._bucket.value), ids))
        for main, clone in self._slots:
            main.value.scatter_update(tf.IndexedSlices(tf.identity(clone.value), ids))


def _free_rows(variable: keras.Variable) -> None:
    """Lets the number of rows change from update to update."""
    shape = tf.TensorShape([None, *variable.shape[1:]])
    variable._value = tf.Variable(
        variable.value.read_value(),
        dtype=variable.dtype,
        shape=shape,
        name=variable.name,
        trainable=variable.trainable,
    )
