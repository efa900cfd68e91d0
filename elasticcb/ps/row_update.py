"""Updates some rows of a variable with the user's Keras optimizer, at a cost independent of the table's size.

The rows and their slots are gathered into a small variable, on which a clone of the optimizer runs, and are scattered
back. Rows without a gradient stay unchanged, including momentum and weight decay ("lazy" updates);
docs/parameter_servers.md describes how that differs from a dense update.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import keras
import tensorflow as tf

from elasticcb.optimizers.traits import multiply_learning_rate
from elasticcb.ps.optimizer import ServerOptimizer
from elasticcb.tf.row_variables import make_free_rows

_ROWS = 2  # rows of a clone's initial variable: not 1, which is also the shape of non-row state


class RowClone:
    """A clone of an optimizer on a variable with only the rows to update.

    Attributes:
        slots: initial row of each slot, [dim] or another width, by name.
        shared: the clone's state of no single row, by key of `OptimizerState.shared`.
    """

    def __init__(
        self,
        optimizer: ServerOptimizer,
        index: int,
        shape: tuple[int, ...],
        dtype: str,
        path: str,
        rate_multiplier: float = 1.0,
    ) -> None:
        with tf.init_scope(), tf.device("/CPU:0"):
            self._rows = keras.Variable(
                tf.zeros([_ROWS, *shape[1:]], dtype), dtype=dtype, trainable=True, name=path.rpartition("/")[2]
            )
            self._rows._path = path
            clone = optimizer.clone(index, self._rows)
            self.slots = {slot.name: slot.value.numpy()[0] for slot in clone.slots}
            self._slots = [slot.value for slot in clone.slots]
            for each in (self._rows, *self._slots):
                make_free_rows(each)
        self.has_extras = bool(clone.extras)
        self._optimizer = clone.optimizer
        if rate_multiplier != 1:
            multiply_learning_rate(self._optimizer, rate_multiplier)
        # A schedule needs no copy: it is a function of the iterations.
        self._originals = {optimizer.prefix + name: value for name, value in optimizer.shared.items()}
        self.shared = {optimizer.prefix + name: clone.shared[name] for name in optimizer.shared}

    def copy_shared(self, given: Mapping[str, tf.Tensor] = MappingProxyType({})) -> None:
        """Copies iterations and learning rate to the clone: the original's, or those given. Called while a function is
        traced."""
        for key, clone in self.shared.items():
            clone.assign(given.get(key, self._originals[key].value))

    def copy_shared_back(self) -> None:
        """Copies the iterations back from the clone if nothing else has advanced them."""
        for key, clone in self.shared.items():
            self._originals[key].assign(clone.value)

    def apply(self, gradients: tf.Tensor, rows: tf.Tensor, *slots: tf.Tensor) -> list[tf.Tensor]:
        """New rows and slots, inside a compiled function: [n, …] each, slots in the order of `self.slots`."""
        self._rows.value.assign(rows)
        for slot, values in zip(self._slots, slots, strict=True):
            slot.value.assign(values)
        # The optimizer may store the gradient in a variable, but its memory belongs to the push.
        self._optimizer.apply([tf.raw_ops.DeepCopy(x=gradients)], [self._rows])
        return [tf.identity(variable.value) for variable in (self._rows, *self._slots)]


class RowUpdate:
    """The rows of one variable."""

    def __init__(self, server: ServerOptimizer, index: int, variable: keras.Variable) -> None:
        self.clone = RowClone(server, index, tuple(variable.shape), variable.dtype, variable.path)
        main = {slot.name: slot.value for slot in server.slots if slot.variable == index}
        self._tables = [variable.value, *(main[name].value for name in self.clone.slots)]

    def run(self, ids: tf.Tensor, values: tf.Tensor) -> None:
        """Updates the rows `ids` (int64 [n], unique) with the gradients `values` [n, …]."""
        updated = self.clone.apply(values, *(tf.gather(table, ids) for table in self._tables))
        for table, rows in zip(self._tables, updated, strict=True):
            table.scatter_update(tf.IndexedSlices(rows, ids))
