"""Training on a worker's own weights, and merging their movement into the servers' model: after how many batches, based
on the duration of a merge; and at which learning rate: the servers' base rate, and changes by callbacks here.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from elasticcb.clients.progress_reporter import ProgressReporter
from elasticcb.clients.ps import PSClient
from elasticcb.compute.backend import LocalModel, StepResult
from elasticcb.optimizers.state import OptimizerState, to_tensors
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.optimizers.traits import learning_rate_variable, not_cached
from elasticcb.process.stats import STALENESS, Measures
from elasticcb.process.wording import how_many
from elasticcb.rpc.tensors import Array, all_finite
from elasticcb.settings import JobSettings
from elasticcb.sharding.array_names import WEIGHTS, of_kind
from elasticcb.sharding.flat_blocks import Blocks, PlacedBlocks, state_moves
from elasticcb.sharding.partition import Slice, VariableSpec, layout, pack
from elasticcb.sharding.push import Movement

_MOST_OF_TIME = 0.05  # maximum share of training time spent merging
_LEAST, _MOST = 4, 64  # batches; within these, windows give equally good models (docs/updates.md)
_BATCHES_KEPT, _MERGES_KEPT = 33, 9


class WindowLength:
    """The length of windows: fixed, or such that merging takes a twentieth of the training time.

    Durations are medians of the last batches and merges. A merge includes waiting for other workers: random differences
    between workers grow slower than the window, and a worker faster than the others waits less if its own windows are
    longer.
    """

    def __init__(self, given: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._given, self._clock = given, clock
        self.batches = given or _LEAST
        self._batch_seconds: deque[float] = deque(maxlen=_BATCHES_KEPT)
        self._merge_seconds: deque[float] = deque(maxlen=_MERGES_KEPT)
        self._slot_seconds: deque[float] = deque(maxlen=_MERGES_KEPT)  # of merges with slots
        self._slots_merged = 0.0  # time of the last one

    def note_batch(self, seconds: float) -> None:
        """A batch took `seconds` to train."""
        self._batch_seconds.append(seconds)

    @property
    def slots_are_due(self) -> bool:
        """Whether also merging the optimizers' slots would take at most a twentieth of the time."""
        if not self._slot_seconds:
            return True
        return self._clock() - self._slots_merged >= min(self._slot_seconds) / _MOST_OF_TIME

    def note_merge(self, seconds: float, with_slots: bool = False) -> None:
        """A merge took `seconds`; the next window begins."""
        if with_slots:
            self._slot_seconds.append(seconds)
            self._slots_merged = self._clock()
        else:
            self._merge_seconds.append(seconds)
        if self._given is None and self._batch_seconds and self._merge_seconds:
            wanted = median(self._merge_seconds) / (_MOST_OF_TIME * max(median(self._batch_seconds), 1e-6))
            self.batches = min(max(math.ceil(wanted), _LEAST), _MOST)


Moves = Callable[..., tuple[list[dict[str, Array]], list[dict[str, Array]]]]  # as `state_moves`

_WATCHED = 20  # steps; a check reads all non-trainable variables


class LocalUpdates:
    """A worker that trains for some batches, and then merges the movement of its weights into the servers' model.

    The servers weight a movement by its share of all batches since the worker's last merge. A worker without others
    continues with its own weights, which then are those of the servers, so it trains bit-identically to `fit`.

    Args:
        model: the model here.
        ps: the servers.
        length: length of the windows of batches that are merged.
        measures: get how many batches of others were merged since the worker's last merge.
        finalizes: whether the optimizers' slots become weights at the end, so that the servers always need them.
        moves: determines how changes of non-trainable variables count.

    Attributes:
        may_go_back: whether `go_back` may be called.
        is_resting: whether rounds do not wait for this worker.
        epoch: whose tasks are handed out now.
        peers: ids of workers for which the first round of the epoch waits.
    """

    def __init__(
        self,
        model: LocalModel,
        ps: PSClient,
        length: WindowLength,
        measures: Measures,
        finalizes: bool = False,
        moves: Moves = state_moves,
    ) -> None:
        self._model, self._ps, self.length, self._moves = model, ps, length, moves
        self._measures, self._finalizes = measures, finalizes
        self._base = PlacedBlocks((), ())  # the servers' weights after the last merge
        self._versions: Sequence[int] = ()  # version of these, by server
        self._slots_versions: Sequence[int] = ()  # of the optimizer state, by server
        self._batches = 0  # batches trained since
        self.may_go_back = False
        self.is_resting = True
        self.epoch = 0
        self.peers: Sequence[int] = ()
        self._optimizers = OptimizerState()  # state after the last merge, if it may go back
        self._is_alone = True  # whether no other worker has changed the model since the last merge
        self._slots_sent = False

    @property
    def version(self) -> int:
        """Version of the model as known to this worker, including unmerged batches."""
        return (self._versions[0] if self._versions else self._ps.version) + self._batches

    @property
    def is_behind(self) -> bool:
        """Whether the model here must be updated before training continues."""
        return not self._versions or self.is_resting

    def follow(self, overwritten: bool = False) -> None:
        """Adopts the servers' weights where they differ from what this worker last merged, and takes part in rounds.

        Args:
            overwritten: the model here holds other weights meanwhile.
        """
        self._ps.pull(joins=True, epoch=self.epoch, peers=self.peers)
        self.is_resting = False
        if overwritten or self._ps.versions != self._versions or self._has_new_slots:
            optimizers = self._ps.pull_with_optimizers()
            takes_all = not self._versions or self._has_new_slots
            self._take(optimizers if takes_all else OptimizerState(shared=optimizers.shared))

    @property
    def _has_new_slots(self) -> bool:
        """Whether a callback of the master has set the optimizers' state."""
        return self._ps.slots_versions != self._slots_versions

    def rest(self, tells_again: bool = False) -> None:
        """This worker has no batches to train on: the others shall not wait for it."""
        if not self.is_resting or tells_again:
            self._ps.rest(self.epoch)
            self.is_resting = True

    def forget(self) -> None:
        """Discards unmerged work: others repeat it."""
        self._batches, self._versions = 0, ()

    def go_back(self) -> None:
        """Goes back to the last merge, or its current result; later batches are discarded."""
        kept = self._optimizers
        self.forget()
        self.follow()
        self._model.set_optimizer_state(OptimizerState(kept.slots, kept.extras))  # the servers may lack these
        self._keep()

    def _keep(self) -> None:
        if self.may_go_back:
            self._optimizers = self._model.optimizer_state()

    def _take(self, optimizers: OptimizerState | None) -> None:
        """Sets the model and its optimizers to the servers' state; None: they already have it."""
        if optimizers is not None:
            self._model.set_optimizer_state(optimizers)
            self._model.set_weights(self._ps.blocks)
        self._base, self._versions, self._batches = self._ps.blocks, self._ps.versions, 0
        self._slots_versions = self._ps.slots_versions
        self._keep()

    def count(self) -> None:
        """The model was trained on one more batch."""
        self._batches += 1

    @property
    def is_finite(self) -> bool:
        """Whether what this worker has trained could be merged."""
        try:
            self._movement(with_slots=False)
        except NotFiniteError:
            return False
        return True

    def rows(self, result: StepResult) -> Movement:
        """A push of gradients of embedding rows, which servers apply at once.

        They use the rate and steps that the optimizers had here.
        """
        shared = to_tensors(OptimizerState(shared=dict(result.shared)))
        return Movement.of_rows(result.rows, shared, self._ps.servers.partition)

    def merge(self, ends_task: bool) -> None:
        """Merges the movement since the last merge, and continues from the result.

        The optimizer slots are merged too by the first merge and at the end of a task, for checkpoints and new workers;
        this worker continues with its own. They take as many bytes as the weights, or more, so workers that share a
        slow network skip this at times.

        Raises `NotFiniteError`, and has sent nothing, if the weights here are not finite.
        """
        if not self._batches:
            return
        begun, version = time.perf_counter(), self.version
        is_due = self._finalizes or self._is_alone or self.length.slots_are_due
        with_slots = not self._slots_sent or (ends_task and is_due)
        movement, is_current = self._movement(with_slots), self._ps.versions == self._versions
        answer = self._ps.push(movement, self._versions)
        self.is_resting = False
        self._slots_sent = True
        self._is_alone = answer.optimizers is None
        if is_current and not self._has_new_slots:
            self._take(answer.optimizers)
        else:  # other weights were pulled meanwhile, as when the number of servers changes
            self.follow(overwritten=True)
        self.length.note_merge(time.perf_counter() - begun, with_slots)
        self._measures.histograms[STALENESS].observe(max(0, answer.version - version))

    def _movement(self, with_slots: bool) -> Movement:
        base, specs = self._base, self._ps.servers.specs
        present, placed = self._model.weights(), list(zip(base, base.partition, strict=True))
        moved = [_differences(present, of_kind(WEIGHTS, before), specs, slices) for before, slices in placed]
        decays = {index: decay**self._batches for index, decay in self._model.decays.items()}
        own = [pack(present, specs, slices, False) for slices in base.partition]
        state, shares = self._moves(base, own, specs, base.partition, decays)
        for values, share, slices in zip(state, shares, base.partition, strict=True):
            _check_finite(values, specs, slices, False, share)
        shared = OptimizerState(shared=dict(self._model.shared_optimizer_state()))
        held = self._model.optimizer_state() if with_slots else shared
        return Movement(
            self._batches, base.partition, moved, state, shares, optimizers=to_tensors(_trained(held, specs))
        )


class NotFiniteError(Exception):
    """The weights of this worker hold NaN or infinity."""


def _check_finite(
    blocks: Mapping[str, Array],
    specs: Sequence[VariableSpec],
    slices: Sequence[Slice],
    trainable: bool,
    shares: Mapping[str, Array] | None = None,
) -> None:
    """Raises `NotFiniteError` for NaN or infinity, except in elements with a share of 0."""
    if all(map(all_finite, blocks.values())):
        return
    for part, dtype, offset in layout(specs, slices, trainable):
        if dtype in blocks:
            here = slice(offset, offset + part.elements)
            values = blocks[dtype][here]
            if not all_finite(values if shares is None else values[shares[dtype][here] > 0]):
                raise NotFiniteError(f"The new value of {specs[part.variable].path!r} holds NaN or infinity")


def _differences(
    present: Sequence[Array], before: Mapping[str, Array], specs: Sequence[VariableSpec], slices: Sequence[Slice]
) -> dict[str, Array]:
    """How far weights moved, as one server's flat blocks: not at all where NaN or infinity did not change, as in
    variables that no step uses.
    """
    moved = {dtype: np.empty_like(block) for dtype, block in before.items()}
    for part, dtype, offset in layout(specs, slices, True):
        here = slice(offset, offset + part.elements)
        now = present[part.variable].reshape(-1)[part.start : part.stop]
        np.subtract(now, before[dtype][here], out=moved[dtype][here])
    if not all(map(all_finite, moved.values())):
        for dtype, now in pack(present, specs, slices, True).items():
            old = before[dtype]
            moved[dtype][(now == old) | (np.isnan(now) & np.isnan(old))] = 0
        _check_finite(moved, specs, slices, True)
    return moved


def _trained(state: OptimizerState, specs: Sequence[VariableSpec]) -> OptimizerState:
    """Without state of variables that servers don't train as a whole."""

    def own(arrays: dict[tuple[int, str], Array]) -> dict[tuple[int, str], Array]:
        return {key: each for key, each in arrays.items() if specs[key[0]].trainable and not specs[key[0]].table}

    return OptimizerState(own(state.slots), own(state.extras), state.shared)


class StateChanges:
    """Determines how the changes of non-trainable variables by one of several workers count, and warns once of those
    that one process would compute otherwise.

    Attributes:
        is_first: whether this worker is the first of those that are up.
    """

    def __init__(self, settings: JobSettings, progress: ProgressReporter) -> None:
        cluster = settings.cluster
        self._left = 0 if (cluster.autoscale.most or cluster.num_workers) < 2 else _WATCHED
        self._progress = progress
        self.is_first = True

    def moves(
        self,
        blocks: Blocks,
        state: Sequence[Mapping[str, Array]],
        specs: Sequence[VariableSpec],
        parts: Sequence[Sequence[Slice]],
        decays: Mapping[int, float],
    ) -> tuple[list[dict[str, Array]], list[dict[str, Array]]]:
        """See `state_moves`."""
        values, shares = state_moves(blocks, state, specs, parts, decays, self.is_first)
        if self._left:
            self._left -= 1
            self._look_at(shares, specs, parts)
        return values, shares

    def _look_at(
        self, shares: Sequence[Mapping[str, Array]], specs: Sequence[VariableSpec], parts: Sequence[Sequence[Slice]]
    ) -> None:
        found = []
        for slices, share in zip(parts, shares, strict=True):
            for part, dtype, offset in layout(specs, slices, False):
                spec, here = specs[part.variable], slice(offset, offset + part.elements)
                if not spec.aggregation and dtype in share and (share[dtype][here] == 1).any():
                    found.append(spec.path)
        if found:
            self._left = 0
            others = f" and {how_many(len(found) - 1, 'other variable')}" if found[1:] else ""
            self._progress.warn(
                "variables that steps change on several workers",
                f"Steps on several workers change {found[0]!r}{others}, each from a value that lacks what the others "
                "change meanwhile. The values that they set are averaged, which is right for averages, such as a copy "
                "that follows the weights, but differs from training in one process for counts, sums and queues. "
                "Create such a variable with add_weight(..., aggregation='sum') to add up the changes, "
                "'only_first_replica' to ignore all workers but the first, or 'mean' if averaging is right, which ends "
                "this warning; or use one worker.",
            )


class WorkerRate:
    """Follows the base rate, and detects when the model's own rate differs."""

    def __init__(self, model: Any, ps: PSClient) -> None:
        self._model, self._ps = model, ps
        self._base: float | None = None
        self._version = -1  # of the base rate
        self._changed: float | None = None
        self._is_known = False  # reading it takes half a millisecond

    def adopt_base(self) -> None:
        """Adopts a new base rate (from a checkpoint, or set on the master)."""
        version = self._ps.learning_rate_version
        if version != self._version and self._rate() is not None:
            self._base = self._ps.learning_rate
            self._model.optimizer.learning_rate = not_cached(self._base)
            self._version = version
            self._is_known = False

    def may_have_changed(self) -> None:
        """A callback runs, and may change the rate."""
        self._is_known = False

    def changed(self) -> float | None:
        """The optimizer's learning rate if a callback, or a step of the model's own, changed it."""
        if not self._is_known:
            rate = self._rate()
            self._changed = None if rate == self._base else rate
            self._is_known = not is_overridden(self._model, "train_step")
        return self._changed

    def _rate(self) -> float | None:
        """None with a schedule."""
        rate = learning_rate_variable(getattr(self._model, "optimizer", None))
        return None if rate is None else float(rate.numpy())
