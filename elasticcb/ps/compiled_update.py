"""One compiled update function for pushes of the same kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from elasticcb.ps.joined import Run, add_run, concatenated
from elasticcb.ps.optimizer_set import OptimizerSet
from elasticcb.ps.row_update import RowUpdate
from elasticcb.sharding.partition import PlacedSlice
from elasticcb.sharding.push import Push, Rows
from elasticcb.tf.concrete_call import quick_call


class CompiledUpdate:
    """Applies pushes of the same variables; called with flat gradients by dtype, and pairs of ids and rows.

    Args:
        places: positions of its variables with dense gradients among all such variables, by index.
        row_updates: updates of variables whose rows are updated sparsely, by index; the gradients of others are made
            dense.
    """

    def __init__(
        self,
        push: Push,
        places: Mapping[int, PlacedSlice],
        optimizers: OptimizerSet,
        row_updates: Mapping[int, RowUpdate],
        jit_compile: bool,
    ) -> None:
        self._places, self._row_updates, self._jit_compile = places, row_updates, jit_compile
        self._order = {dtype: place for place, dtype in enumerate(push.blocks)}
        self._rows = list(push.rows)
        self._made_dense = [index for index in push.rows if index not in row_updates]
        targets = [*places, *self._made_dense]
        updating = optimizers.updating(push.updated)
        # Optimizers without a dense gradient: they advance by a clone that updates rows, or by a no-op step.
        others = [part for part in updating if part.updates.isdisjoint(targets)]
        self._by_clone = [next(iter(sorted(part.updates & row_updates.keys())), None) for part in others]
        self._idle = [part for part, index in zip(others, self._by_clone, strict=True) if index is None]
        # For each optimizer, what it updates: (indices, one variable for them).
        self._known = [(part, part.grouped([index for index in targets if index in part.updates])) for part in updating]
        self._has_dense = bool(targets or self._idle)
        blocks = [tf.TensorSpec(block.shape, block.dtype) for block in push.blocks.values()]
        # With several threads, XLA compiles `tf.concat` to slow elementwise code: with two threads, Adam on a small
        # model takes 4.8 instead of 0.8 ms. So tensors are concatenated beforehand.
        together = [group for _, groups in self._known for group, _ in groups if group[0] in places]
        if not push.rows and all(len(self._runs_of(group, blocks)) == 1 for group in together):
            self._call = quick_call(self._update_dense, blocks, jit_compile)
        else:
            self._compiled = tf.function(self._apply, jit_compile=jit_compile, autograph=False)
            rows = [spec for each in push.rows.values() for spec in _signature(each)]
            self._call = quick_call(self._update, [*blocks, *rows])

    def __call__(self, blocks: Sequence[tf.Tensor], rows: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> None:
        self._call([*blocks, *(tensor for pair in rows for tensor in pair)])

    def _runs_of(self, group: tuple[int, ...], blocks: Sequence[Any]) -> list[Run]:
        runs: list[Run] = []
        for index in group:
            part, dtype, offset = self._places[index]
            add_run(runs, Run(blocks[self._order[dtype]], offset, offset + part.elements))
        return runs

    def _gradients_of(self, blocks: Sequence[tf.Tensor], rows: Mapping[int, Any]) -> list[tf.Tensor]:
        return [
            tf.scatter_nd(rows[group[0]][0][:, None], rows[group[0]][1], variable.shape)
            if group[0] in self._made_dense
            else tf.reshape(concatenated(self._runs_of(group, blocks)), variable.shape)
            for _, groups in self._known
            for group, variable in groups
        ]

    def _apply(self, gradients: list[tf.Tensor]) -> tf.Tensor:
        if not self._jit_compile:
            # Assigning a gradient to a variable would keep the push's memory, which is only valid during the call. Code
            # compiled by XLA copies it.
            gradients = [tf.raw_ops.DeepCopy(x=gradient) for gradient in gradients]
        given = iter(gradients)
        for part, groups in self._known:
            if groups:
                part.optimizer.apply([next(given) for _ in groups], [variable for _, variable in groups])
        for part in self._idle:
            part.advance()
        return tf.zeros([])  # to wait for

    def _update_dense(self, *blocks: tf.Tensor) -> tf.Tensor:
        return self._apply(self._gradients_of(blocks, {}))

    def _update(self, *tensors: tf.Tensor) -> None:
        blocks, pairs = tensors[: len(self._order)], iter(tensors[len(self._order) :])
        given = {index: (next(pairs), next(pairs)) for index in self._rows}
        # All clones start from the iterations and learning rate before this update.
        for row_update in self._row_updates.values():
            row_update.clone.copy_shared()
        done = [self._compiled(self._gradients_of(blocks, given))] if self._has_dense else []
        # Rows are written only afterwards: if XLA can't compile the update, nothing has changed.
        with tf.control_dependencies(done):
            for index, row_update in self._row_updates.items():
                row_update.run(*given[index])
            for clone in self._by_clone:
                if clone is not None:
                    self._row_updates[clone].clone.copy_shared_back()


def _signature(rows: Rows) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    return (
        tf.TensorSpec([None], tf.int64),
        tf.TensorSpec([None, *rows.values.shape[1:]], tf.as_dtype(rows.values.dtype)),
    )
