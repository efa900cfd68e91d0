"""Training on a worker's own weights, and merging their movement into the servers' model."""

from __future__ import annotations

import time
from collections.abc import Sequence

from elasticcb.clients.ps import PSClient, PushResult
from elasticcb.compute.backend import LocalComputation, Prepared, StepResult, TableRows
from elasticcb.optimizers.state import OptimizerState
from elasticcb.optimizers.state_messages import to_tensors
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array, all_finite
from elasticcb.sharding.array_names import STATE, WEIGHTS, of_kind
from elasticcb.sharding.flat_blocks import PlacedBlocks, first_non_finite, state_moves
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.push import Gradients
from elasticcb.worker.trainer import Moves
from elasticcb.worker.window_length import WindowLength


class LocalUpdates:
    """A worker that trains for some batches, and then merges the movement of its weights into the servers' model.

    The servers weight a movement by its share of all batches since the worker's last merge. A worker without others
    continues with its own weights, which then are those of the servers, so it trains bit-identically to `fit`.

    Args:
        computation: computation of the model.
        ps: the servers.
        length: length of the windows of batches that are merged.
        moves: determines how changes of non-trainable variables count.

    Attributes:
        may_go_back: whether `go_back` may be called.
    """

    def __init__(
        self, computation: LocalComputation, ps: PSClient, length: WindowLength, moves: Moves = state_moves
    ) -> None:
        self._computation, self._ps, self.length, self._moves = computation, ps, length, moves
        self._base = PlacedBlocks((), ())  # the servers' weights after the last merge
        self._versions: Sequence[int] = ()  # version of these, by server
        self._batches = 0  # batches trained since
        self.may_go_back = False
        self._optimizers = OptimizerState()  # state after the last merge, if it may go back
        self._is_alone = True  # whether no other worker has changed the model since the last merge

    @property
    def version(self) -> int:
        """Version of the model as known to this worker, including unmerged batches."""
        return (self._versions[0] if self._versions else self._ps.version) + self._batches

    @property
    def is_behind(self) -> bool:
        """Whether the model here must be updated before training continues."""
        return not self._versions

    def follow(self, overwritten: bool = False) -> None:
        """Adopts the servers' weights where they differ from what this worker last merged.

        Args:
            overwritten: the model here holds other weights meanwhile.
        """
        self._ps.pull()
        if overwritten or self._ps.versions != self._versions:
            _, optimizers = self._ps.pull_with_optimizers()
            self._take(optimizers if self.is_behind else OptimizerState(shared=optimizers.shared))

    def forget(self) -> None:
        """Discards unmerged work: others repeat it."""
        self._batches, self._versions = 0, ()

    def go_back(self) -> None:
        """Goes back to the last merge, or its current result; later batches are discarded."""
        kept = self._optimizers
        self.forget()
        self.follow()
        self._computation.set_optimizer_state(OptimizerState(kept.slots, kept.extras))  # the servers may lack these
        self._keep()

    def _keep(self) -> None:
        if self.may_go_back:
            self._optimizers = self._computation.optimizer_state()

    def _take(self, optimizers: OptimizerState | None) -> None:
        """Sets the model and its optimizers to the servers' state; None: they already have it."""
        if optimizers is not None:
            self._computation.set_optimizer_state(optimizers)
            self._computation.set_weights(self._ps.blocks)
        self._base, self._versions, self._batches = self._ps.blocks, self._ps.versions, 0
        self._keep()

    def train(self, batch: Prepared, rows: TableRows) -> StepResult:
        """Trains on a batch, which is counted once its result is known to be usable."""
        return self._computation.train(batch, rows)

    def count(self) -> None:
        """The model was trained on one more batch."""
        self._batches += 1

    @property
    def is_finite(self) -> bool:
        """Whether this worker's trained weights are finite."""
        weights = self._computation.weights(self._base.partition)
        return all(all_finite(block) for server in weights for block in of_kind(WEIGHTS, server).values())

    def rows(self, result: StepResult) -> Gradients:
        """A push of gradients of embedding rows, which servers apply at once.

        They use the rate and steps that the optimizers had here.
        """
        servers = self._ps.servers.partition
        nothing: list[dict[str, Array]] = [{} for _ in servers]
        shared = to_tensors(OptimizerState(shared=dict(result.shared)))
        return Gradients(
            nothing, (), result.rows, nothing, nothing, result.loss, partition=servers, batches=0, optimizers=shared
        )

    def merge(self, loss: float, ends_task: bool) -> PushResult:
        """Merges the movement since the last merge, and continues from the result.

        The optimizer slots are merged too at the end of a task, for checkpoints and new workers; this worker continues
        with its own. They take as many bytes as the weights, or more, so workers that share a slow network skip this at
        times.
        """
        begun = time.perf_counter()
        with_slots = ends_task and (self._is_alone or self.length.slots_are_due)
        push, is_current = self._movement(loss, with_slots), self._ps.versions == self._versions
        answer = self._ps.push(push, None, pull=True)
        if answer.status == pb.NON_FINITE:
            self.forget()
            return answer
        self._is_alone = answer.optimizers is None
        if is_current or answer.optimizers is not None:
            self._take(answer.optimizers)
        else:  # other weights were pulled meanwhile, as when the number of servers changes
            self.follow(overwritten=True)
        self.length.note_merge(time.perf_counter() - begun, with_slots)
        return answer

    def _movement(self, loss: float, with_slots: bool) -> Gradients:
        base, specs = self._base, self._ps.servers.specs
        present = self._computation.weights(base.partition)
        moved = []
        for before, now in zip(base, present, strict=True):
            old = of_kind(WEIGHTS, before)
            moved.append({dtype: block - old[dtype] for dtype, block in of_kind(WEIGHTS, now).items()})
        decays = {index: decay**self._batches for index, decay in self._computation.decays.items()}
        state, shares = self._moves(base, [of_kind(STATE, now) for now in present], specs, base.partition, decays)
        shared = OptimizerState(shared=dict(self._computation.shared_optimizer_state()))
        held = self._computation.optimizer_state() if with_slots else shared
        return Gradients(
            moved,
            tuple(index for index, spec in enumerate(specs) if spec.trainable and not spec.table),
            {},
            state,
            shares,
            loss,
            _non_finite(moved, present, specs),
            base.partition,
            self._batches,
            to_tensors(_trained(held, specs)),
        )


def _trained(state: OptimizerState, specs: Sequence[VariableSpec]) -> OptimizerState:
    """Without state of variables that servers don't train as a whole."""

    def own(arrays: dict[tuple[int, str], Array]) -> dict[tuple[int, str], Array]:
        return {key: each for key, each in arrays.items() if specs[key[0]].trainable and not specs[key[0]].table}

    return OptimizerState(own(state.slots), own(state.extras), state.shared)


def _non_finite(moved: Sequence[dict[str, Array]], present: PlacedBlocks, specs: Sequence[VariableSpec]) -> str:
    """The part of the model with NaN or infinity; "" if there is none."""
    for blocks, slices in zip(moved, present.partition, strict=True):
        path = first_non_finite(blocks, specs, slices, True)
        if path:
            return f"the new value of {path!r}"
    return ""
