"""One server's part of the model: weights, non-trainable variables and the state of the optimizers, as arrays.

Not thread-safe: the servicer serializes writers. Arrays are replaced, never written again, so readers need no lock.
Only embedding tables, and constraints, need Keras and the user's program.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from elasticcb.checkpoint.shard_file import OnlyRows, Part
from elasticcb.errors import CheckpointError, ElasticCBError, ModelFileError, WireError
from elasticcb.optimizers.state import LEARNING_RATE, Optimizers, OptimizerState, from_tensors
from elasticcb.ps.table_limits import TableLimits
from elasticcb.ps.table_snapshot import TableSnapshot
from elasticcb.ps.tables import Tables
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.sharding.array_names import SHARED, of_kind
from elasticcb.sharding.flat_blocks import ADDED, moved_state
from elasticcb.sharding.partition import ShardMap, Slice, VariableSpec, block_sizes, check_blocks, layout
from elasticcb.sharding.push import Push, Rows
from elasticcb.sharding.table_state import TableSource

if TYPE_CHECKING:
    from elasticcb.ps.table_update import MakeOptimizers

logger = logging.getLogger(__name__)
_KINDS = ("slots", "extras", "shared")


class Snapshot(NamedTuple):
    """The flat blocks, by dtype, at one version. Read-only."""

    version: int
    state_version: int
    weights: Mapping[str, Array]
    state: Mapping[str, Array]
    tables: Mapping[int, TableSnapshot] | None = None  # None: the current ones


class Parameters:
    """The part of the model given by `slices`.

    Args:
        make_optimizers: for the rows of embedding tables; None: nothing is trained.
        place: the server's index, and the map of embedding rows to servers; None: there is one server.
        limits: limits of embedding tables.
        optimizers: those with which workers train.

    Attributes:
        optimizers: their state, except that of embedding tables.
        state_version: increases when a non-trainable variable changes.
        sizes: elements of its flat blocks, by dtype, of the trainable variables, and of the others.
    """

    def __init__(
        self,
        specs: Sequence[VariableSpec],
        slices: Sequence[Slice],
        make_optimizers: MakeOptimizers | None,
        values: Mapping[int, Array],
        version: int = 0,
        place: tuple[int, ShardMap] | None = None,
        limits: TableLimits | None = None,
        optimizers: Optimizers | None = None,
    ) -> None:
        self.specs, self.slices = specs, slices
        self.version = self.state_version = version
        self._make_optimizers = make_optimizers
        self.sizes = {trainable: block_sizes(specs, slices, trainable) for trainable in (True, False)}
        self._weights, self._state = (flat(values, specs, slices, trainable) for trainable in (True, False))
        self._constraints = {} if make_optimizers is None else _constraints_of(specs, slices, make_optimizers)
        self.optimizers = _HeldOptimizers(specs, slices, optimizers or Optimizers())
        self.tables = Tables(specs, *(place or (0, ShardMap(1))), make_optimizers, limits or TableLimits())

    # -------------------------------------------------------------- reading

    def snapshot(self) -> Snapshot:
        """No copy: blocks are replaced, never modified."""
        return Snapshot(self.version, self.state_version, self._weights, self._state)

    def _arrays(self, trainable: bool) -> dict[int, Array]:
        blocks = self._weights if trainable else self._state
        return {
            part.variable: blocks[dtype][offset : offset + part.elements].reshape(part.shape(self.specs[part.variable]))
            for part, dtype, offset in layout(self.specs, self.slices, trainable)
        }

    # -------------------------------------------------------------- writing

    def checked(self, push: Push) -> Push:
        """The push as this server applies it. Checked as a whole before anything is changed: a refused push leaves no
        trace.

        Raises `WireError`, naming the variable and what was expected, for anything that does not fit this server's part
        of the model.
        """
        if push.batches < 0:
            raise WireError(f"The push has {push.batches} batches; expected 0, for rows only, or more.")
        moved = self.sizes[True] if push.batches else {}
        check_blocks(push.moved, moved, "The movements of the trainable variables")
        # Dtypes without changes are left out.
        state = {dtype: size for dtype, size in self.sizes[False].items() if dtype in push.state}
        check_blocks(push.state, state, "The non-trainable variables")
        for dtype in sorted({*state, *push.shares}):
            _check_shares(dtype, push.shares.get(dtype), state.get(dtype, 0))
        for index, given in push.rows.items():
            self._check_rows(index, given)
        # In a fixed order, whatever the worker's.
        return replace(push, moved={dtype: push.moved[dtype] for dtype in moved}, rows=dict(sorted(push.rows.items())))

    def _check_rows(self, index: int, given: Rows) -> None:
        specs = self.specs
        if not 0 <= index < len(specs) or not specs[index].table:
            raise WireError(
                f"The push has rows of variable {index}, which is none of the embedding tables among the {len(specs)} "
                "variables of the model."
            )
        spec, (ids, values) = specs[index], given
        expected = (*ids.shape[:1], *spec.shape[1:])
        if values.dtype != dtype_of(spec.dtype) or values.shape != expected:
            raise WireError(
                f"Row gradients of {spec.path!r}: expected {spec.dtype}{list(expected)}, got {_shown(values)}."
            )
        self.tables.check_ids(index, ids)

    def merge(self, pushes: Sequence[Push], workers: int = 1) -> None:
        """Merges the local training of some workers into the model; increases the version by their batches.

        Movements that started at the current version are weighted by their batches, so that the weights become the mean
        over the workers, as in local SGD (Stich 2019). Older ones are weighted less the more batches have been merged
        since, as in asynchronous federated optimization (Xie et al. 2019).

        Args:
            workers: each movement counts at most as one of this number.
        """
        if self._make_optimizers is None:
            raise ElasticCBError("This parameter server accepts no updates, because the job does not train.")
        for push in pushes:
            self.tables.update(push.rows, self.version + 1, of_kind(SHARED, push.optimizers))
        moving = [(push, push.batches, self._batches_since(push)) for push in pushes if push.batches]
        if not moving:
            return
        total, done = sum(batches for _, batches, _ in moving), 0
        self._move([(push.moved, batches / max(total + since, workers * batches)) for push, batches, since in moving])
        for push, batches, since in moving:  # sequentially, which also yields means
            others = done + since
            self.optimizers.merge(from_tensors(push.optimizers), batches, others)
            self._move_state(push, others / batches)
            done += batches
        self.version += total

    def _move(self, movements: Sequence[tuple[Mapping[str, Array], float]]) -> None:
        """Adds flat movements, by dtype, with the weight of each. A mean of weights may leave their constraints."""
        self._weights = {dtype: _frozen(_moved(block, dtype, movements)) for dtype, block in self._weights.items()}
        if self._constraints and any(share < 1 for _, share in movements):
            import keras

            arrays = self._arrays(True)
            for index, constraint in self._constraints.items():
                value = constraint(keras.ops.convert_to_tensor(arrays[index]))
                arrays[index] = keras.ops.convert_to_numpy(value).astype(arrays[index].dtype)
            self._weights = flat(arrays, self.specs, self.slices, True)

    def _batches_since(self, push: Push) -> int:
        """Versions since the one that a push is based on, as far as known."""
        return max(0, self.version - push.base) if push.base >= 0 else 0

    def _move_state(self, push: Push, lag: float) -> None:
        if any(shares.any() for shares in push.shares.values()):
            new = {
                dtype: _frozen(moved_state(self._state[dtype], values, push.shares[dtype], lag))
                for dtype, values in push.state.items()
            }
            self._state = {**self._state, **new}
            self.state_version += 1

    def load(
        self,
        values: Mapping[int, Array],
        state: OptimizerState,
        version: int,
        tables: Mapping[int, TableSource] | None = None,
    ) -> None:
        """Sets weights (all or none), a checked `state`, and the rows of tables."""
        self.tables.load(tables or {}, version)
        self.optimizers.load(state)
        if values:
            self._weights, self._state = (
                flat(values, self.specs, self.slices, trainable) for trainable in (True, False)
            )
            self.state_version += 1
        self.version = version

    # -------------------------------------------------------------- checkpoints

    def hold(self, lock: AbstractContextManager[Any], since: int | None = None) -> Part:
        """This server's part of a checkpoint, whose tables are read in pieces while training continues. Release it
        after use.

        Args:
            lock: must be held at each call of this object, but not while the tables are read.
            since: of embedding tables, only rows trained after this version, and ids of those that were removed.
        """
        self.tables.advance(self.version)  # rows that are removed from now on count as removed at this version
        gone = {} if since is None else self.tables.gone(since)
        return replace(self.dense(), held=self.tables.hold(lock, since), gone=gone)

    def hold_for_serving(self, lock: AbstractContextManager[Any], since: int | None) -> Part:
        """Like `hold`, without what only training needs."""
        part = self.hold(lock, since)
        held = {number: OnlyRows(table) for number, table in part.held.items()}
        return Part(part.version, part.weights, held=held, gone=part.gone)

    def dense(self) -> Part:
        """This server's part of a checkpoint without tables, as arrays that are never written again."""
        return Part(
            version=self.version,
            weights={**self._arrays(True), **self._arrays(False)},
            optimizers=self.optimizers.state(),
            ages=self.tables.ages(),
        )

    def restore_optimizers(self, part: Part) -> None:
        """Restores the optimizers from a checkpoint; the weights were set in the constructor.

        Raises `CheckpointError` when the state belongs to other optimizers.
        """
        if self._make_optimizers is not None:
            self.optimizers.restore(part.optimizers)


def _check_shares(dtype: str, shares: Array | None, size: int) -> None:
    if (
        shares is None
        or shares.dtype != np.float32
        or shares.shape != (size,)
        or not (((shares >= 0) & (shares <= 1)) | (shares == ADDED)).all()
    ):
        given = "nothing" if shares is None else _shown(shares)
        raise WireError(
            f"The shares by which the non-trainable variables of dtype {dtype} change are {given}; expected "
            f"float32[{size}] from 0 to 1, or {ADDED:g}."
        )


def _shown(array: Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"


def _constraints_of(
    specs: Sequence[VariableSpec], slices: Sequence[Slice], make_optimizers: MakeOptimizers
) -> dict[int, Any]:
    """The constraints of trainable variables, by index."""
    constrained = [
        part.variable for part in slices if specs[part.variable].trainable and specs[part.variable].constraint
    ]
    if not constrained:
        return {}
    import keras

    make_optimizers(1)  # opens the user's program, which registers its classes
    made = {}
    for index in constrained:
        try:
            # The user's code runs here anyway, so lambdas need no extra permission.
            made[index] = keras.saving.deserialize_keras_object(json.loads(specs[index].constraint), safe_mode=False)
        except Exception as error:
            raise ModelFileError(
                f"The constraint of {specs[index].path!r} can't be created on a parameter server: {error} Register its "
                "class or function with keras.saving.register_keras_serializable."
            ) from error
    return made


def _moved(block: Array, dtype: str, movements: Sequence[tuple[Mapping[str, Array], float]]) -> Array:
    """The block with the weighted movements added; in float32 for half precision."""
    wide = np.dtype(np.float32) if block.dtype.itemsize == 2 else block.dtype
    total = block.astype(wide) if block.dtype != wide else block
    for moved, share in movements:
        step = moved[dtype].astype(wide, copy=False)
        total = total + (step if share == 1 else step * wide.type(share))
    return total.astype(block.dtype, copy=False)


def flat(
    arrays: Mapping[int, Array], specs: Sequence[VariableSpec], slices: Sequence[Slice], trainable: bool
) -> dict[str, Array]:
    """The slices' arrays as flat blocks, by dtype; never written again."""
    sizes = block_sizes(specs, slices, trainable)
    blocks = {dtype: np.empty(size, dtype_of(dtype)) for dtype, size in sizes.items()}
    for part, dtype, offset in layout(specs, slices, trainable):
        blocks[dtype][offset : offset + part.elements] = arrays[part.variable].reshape(-1)
    return {dtype: _frozen(block) for dtype, block in blocks.items()}


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


class _HeldOptimizers:
    """The state of the workers' optimizers for the variables of `slices`.

    Servers run no optimizer on dense weights: workers do, and push what it holds. State that no worker has pushed yet,
    and no checkpoint or master has given, is missing: workers start it afresh, as Keras does.
    """

    def __init__(self, specs: Sequence[VariableSpec], slices: Sequence[Slice], optimizers: Optimizers) -> None:
        self._specs = specs
        self._parts = {part.variable: part for part in slices if specs[part.variable].trainable}
        self._names, self._periods = tuple(optimizers.names), dict(optimizers.periods)
        self._held: dict[str, dict[Any, Array]] = {kind: {} for kind in _KINDS}
        self._not_shown: dict[str, int] = {}  # steps missing in `iterations`, by its key
        rate = optimizers.learning_rate
        if rate is not None:
            dtype = np.float32 if float(np.float32(rate)) == rate else np.float64  # as that of the optimizer's variable
            self._held["shared"][LEARNING_RATE] = np.asarray(rate, dtype)

    @property
    def learning_rate(self) -> float:
        """The base rate; 0 if a schedule sets it, or each optimizer in a MultiOptimizer has its own."""
        return float(self._held["shared"].get(LEARNING_RATE, 0.0))

    def set_learning_rate(self, learning_rate: float) -> None:
        """Raises `ElasticCBError` when the optimizer has no rate of its own."""
        held = self._held["shared"].get(LEARNING_RATE)
        if held is None:
            raise ElasticCBError(
                f"The learning rate can't be set to {learning_rate}: the optimizer {', '.join(self._names)} has a "
                "schedule, or is a MultiOptimizer, which has no rate of its own. Create the optimizer with a number "
                "instead, or don't set the learning rate."
            )
        self._held["shared"][LEARNING_RATE] = np.asarray(learning_rate, held.dtype)

    def state(self, with_slots: bool = True) -> OptimizerState:
        """All of it, in the shapes of this server's parts, or only what belongs to no single variable."""
        kinds = _KINDS if with_slots else ("shared",)
        return OptimizerState(**{kind: dict(self._held[kind]) for kind in kinds}, optimizers=self._names)

    def check(self, state: OptimizerState) -> None:
        """Raises `ElasticCBError` if some part of `state` does not fit."""
        foreign = {*state.optimizers} - {*self._names} if self._names else set()
        wrong = [
            f"{self._shown(key)}, {value.dtype.name}{list(value.shape)}"
            for kind, key, value in state.items()
            if not self._fits(kind, key, value)
        ]
        if foreign or wrong:
            raise ElasticCBError(
                f"The state of optimizer {', '.join(state.optimizers) or '(unknown)'} does not fit the optimizer "
                f"{', '.join(self._names) or '(unknown)'} of this job"
                f"{': it has ' + '; '.join(wrong[:4]) if wrong else ''}. Use the optimizer and settings that produced "
                "the state."
            )

    def _fits(self, kind: str, key: Any, value: Array) -> bool:
        if kind != "shared":
            part = self._parts.get(key[0])
            if part is None or (kind == "slots" and value.shape[:1] != part.shape(self._specs[key[0]])[:1]):
                return False
        held = self._held[kind].get(key)
        return held is None or (held.shape == value.shape and np.can_cast(value.dtype, held.dtype, "same_kind"))

    def load(self, state: OptimizerState) -> None:
        """Sets the values of a checked `state`; other parts stay unchanged."""
        for kind, key, value in state.items():
            self._set(kind, key, value)

    def _set(self, kind: str, key: Any, value: Array) -> None:
        held = self._held[kind].get(key)
        # A copy: the memory of a call is used again.
        self._held[kind][key] = np.array(value, value.dtype if held is None else held.dtype)

    def merge(self, state: OptimizerState, batches: int, others: int) -> None:
        """Moves the state towards that of a worker's optimizers, by the worker's share of all batches.

        Args:
            others: batches of other workers that the state does not include.
        """
        share = batches / (batches + others)
        for kind, key, given in state.items():
            held = self._held[kind].get(key)
            if kind == "shared" and str(key).endswith(LEARNING_RATE):  # the master sets it
                if key != LEARNING_RATE:
                    self._set(kind, key, given)
            elif held is None:
                self._set(kind, key, given)
            elif given.dtype.kind in "iu":  # a step counter
                self._set(kind, key, np.asarray(self._counted(str(key), int(held), int(given), batches, others)))
            elif share < 1:
                self._held[kind][key] = (held + (given - held) * share).astype(held.dtype)
            else:
                self._set(kind, key, given)

    def _counted(self, key: str, held: int, given: int, batches: int, others: int) -> int:
        """The total number of steps of all workers, when one worker's counter is at `given`.

        Periodic actions, such as applying accumulated gradients, happen on each worker separately, so it must not lose
        its position in the period: steps of others are added only in whole periods.
        """
        period = self._periods.get(key, 1)
        if period == 1 or not others:
            return given + others
        steps = held + self._not_shown.get(key, 0) + batches
        shown = given + max(0, steps - given) // period * period
        self._not_shown[key] = max(0, steps - shown)
        return shown

    def restore(self, state: OptimizerState) -> None:
        """Restores a checkpoint's state. Raises `CheckpointError` when it belongs to other optimizers."""
        if not state.optimizers:
            logger.warning("The checkpoint has no optimizer state; %s starts fresh.", ", ".join(self._names))
            return
        if self._names and state.optimizers != self._names:
            raise CheckpointError(
                f"The checkpoint was written with the optimizer {', '.join(state.optimizers)}, but the job has "
                f"{', '.join(self._names)}. Use the same optimizer, or start only from the weights: load them into the "
                "model."
            )
        self.load(state)

    def _shown(self, key: Any) -> str:
        if isinstance(key, str):
            return key
        known = 0 <= key[0] < len(self._specs)
        return f"{key[1]} of {self._specs[key[0]].path!r}" if known else f"{key[1]} of variable {key[0]}"
