"""The parameter servers of a job as its master commands them."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from elasticcb.clients.ps import Ids, KnownServer, PSClient, ServerReplacedError
from elasticcb.clients.ps_link import Link
from elasticcb.errors import CheckpointError, ElasticCBError
from elasticcb.optimizers.state import ModelState, OptimizerState
from elasticcb.optimizers.state_messages import cut_state, from_tensors, join_states, to_tensors
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array, Frame
from elasticcb.security.credentials import OPEN
from elasticcb.sharding.flat_blocks import pack_weights, unpack_weights
from elasticcb.sharding.table_state import TableState, gathered
from elasticcb.sharding.table_state import to_tensors as tables_to

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_TAKES = 3  # of what must be of one version
_SUMMARY_SECONDS = 5.0  # for a server to say what it has refused

_PERSIST_SECONDS = 2.0  # for a server to say that it will write; it only makes a note of that

_RESTORE_PATIENCE_SECONDS = 5.0  # little: the server may be lost in its turn, and then another is asked


class InitialModel(NamedTuple):
    """Where servers have the model from: weights in the order of the specs, or the folder of a checkpoint version.

    Attributes:
        optimizer_state: what the optimizers start with, beside weights; what it lacks starts afresh.
        version: of the model, beside weights.
        ids, used: as in `ModelState`.
    """

    weights: Sequence[Array] = ()
    checkpoint: str = ""
    optimizer_state: OptimizerState | None = None
    version: int = 0
    ids: Ids | None = None
    used: Mapping[int, Array] | None = None


class Restored(NamedTuple):
    """What a server that took the place of a lost one holds.

    Attributes:
        version: that its state had when it was written.
        source: in words.
        learning_rate: its base rate.
        complete: whether it has all that the lost one had acknowledged.
    """

    version: int
    source: str
    learning_rate: float
    complete: bool = False


class PSControl(PSClient):
    """All parameter servers of a job as one.

    Args:
        run: names the training, in the servers' recovery files; "": a new one.
        term: of this master, among those of the training: servers that have heard of a later one refuse it.

    The other arguments are those of `PSClient`.
    """

    def __init__(self, *args: Any, run: str = "", term: int = 1, **kwargs: Any) -> None:
        self.run = run or secrets.token_hex(8)
        kwargs["access"] = replace(kwargs.get("access", OPEN), term=(self.run, term))
        super().__init__(*args, **kwargs)
        self._export_id = 0

    def neighbour(self, index: int) -> int:
        """The server that keeps what the recovery files of server `index` lack, where there are replicas."""
        return (index + 1) % len(self._servers)

    def initialize(self, source: InitialModel) -> None:
        """Gives all servers the model.

        Raises `ElasticCBError` when the state is of other optimizers.
        """
        answers = list(
            self._pool.map(lambda server: self._call_frame(server, *self._beginning(server, source)), self._servers)
        )
        self._free_memory()
        self.version, self.learning_rate = answers[0].header.version, answers[0].header.learning_rate

    def restore(
        self,
        index: int,
        address: str,
        id: int,
        version: int,
        source: Callable[[], InitialModel],
        evaluation_round: int,
        learning_rate: float | None,
        neighbour: str = "",
    ) -> Restored:
        """Gives the model to a server that took the place of a lost one: as the recovery files hold it, or else anew.

        Args:
            index: of the server.
            address, id: of the process.
            version: of the model, from which on the server counts.
            source: gives what the server gets when there are no recovery files.
            evaluation_round: that is under way, whose snapshot it takes of what it has then; 0: none.
            learning_rate: the base rate; None: that which the server has then.
            neighbour: where its neighbour is; "": that is lost, too.
        """
        link, server = Link(index, address, id, _RESTORE_PATIENCE_SECONDS, self.access), self._servers[index]
        try:
            try:
                frame, method = self._beginning(server, InitialModel(version=version), True, neighbour)
                answer = link.call(method, frame).header
                words = f"its recovery files{' and its replica' if answer.complete else ''}"
                restored = Restored(answer.recovered_version, words, answer.learning_rate, answer.complete)
            except CheckpointError as error:
                given = source()
                words = given.checkpoint or "the first weights"
                logger.warning("Parameter server %d begins from %s: %s", index, words, error)
                frame, method = self._beginning(server, given._replace(version=version), neighbour=neighbour)
                answer = link.call(method, frame).header
                held = answer.recovered_version if given.checkpoint else given.version
                restored = Restored(held, words, answer.learning_rate)
            if learning_rate is not None and learning_rate != np.float32(restored.learning_rate):
                link.call("SetLearningRate", Frame(pb.SetLearningRateRequest(learning_rate=learning_rate), {}))
            if evaluation_round:
                link.call("Snapshot", Frame(pb.SnapshotRequest(evaluation_round=evaluation_round), {}))
            return restored
        finally:
            link.close()

    def set_neighbour(self, index: int, address: str, id: int, neighbour: str) -> None:
        """Tells a server, which is the process `id` at `address`, where its neighbour is now."""
        link = self._link(index, (address, id))
        try:
            link.call("SetNeighbour", Frame(pb.SetNeighbourRequest(address=neighbour), {}), patience_seconds=0.0)
        except ElasticCBError as error:
            # It is lost, too, and hears of it with the model, or serves no model yet.
            logger.info("Parameter server %d does not hear of its neighbour: %s", index, error)
        finally:
            link.close()

    def _beginning(
        self, server: KnownServer, source: InitialModel, recover: bool = False, neighbour: str | None = None
    ) -> tuple[Frame[Any], str]:
        if neighbour is None:
            neighbour = self._servers[self.neighbour(server.index)].link.address
        state = source.optimizer_state or OptimizerState()
        header = pb.InitializeRequest(
            variables=[spec.to_message() for spec in self.specs],
            num_ps=len(self._servers),
            index=server.index,
            split=self.split,
            checkpoint=source.checkpoint,
            ps_addresses=[each.link.address for each in self._servers],
            version=source.version,
            optimizers=state.optimizers,
            run=self.run,
            recover=recover,
            buckets=self.buckets.to_bytes(),
            map_version=self.buckets.version,
            neighbour=neighbour,
        )
        tensors: dict[str, Array] = {}
        if not source.checkpoint and not recover:
            tables = self._tables(source.weights, state, source.ids, source.used)
            tensors = self._packed(server.index, source.weights, state, tables)
        return Frame(header, tensors), "Initialize"

    def in_step(self, take: Callable[[], Sequence[Answer]], version_of: Callable[[Answer], int]) -> Sequence[Answer]:
        """What `take` gives of all servers, by index; in synchronous mode of one version of the model.

        Servers give what they hold then, unless one was asked again: it may have more by then. All are asked again.

        Raises `CheckpointError` when the versions differ still.
        """
        for _ in range(_TAKES):
            answers = take()
            versions = [version_of(answer) for answer in answers]
            if not self._staged or len(set(versions)) == 1:
                return answers
            logger.warning("The servers gave parts of the versions %s, which do not belong together", versions)
        raise CheckpointError(
            f"The parameter servers gave parts of the model's versions {', '.join(map(str, versions))}, by index, "
            f"which do not belong together, {_TAKES} times. In synchronous mode they must be of one version."
        )

    def export(self) -> ModelState:
        """Everything that the servers hold, as `in_step` gives it. Training may go on."""
        while True:
            try:
                with contextlib.suppress(ServerReplacedError):
                    return self._exported()
            finally:
                self._end_export(self._export_id)

    def _exported(self) -> ModelState:
        answers = self.in_step(self._hold_export, lambda answer: int(answer.header.version))
        states = [
            from_tensors(answer.tensors, answer.header.optimizers if index == 0 else ())
            for index, answer in enumerate(answers)
        ]
        state = ModelState(
            version=int(answers[0].header.version),
            weights=unpack_weights([{**answer.tensors} for answer in answers], self.specs, self.partition),
            optimizer=join_states(states, self.specs, self.partition),
        )
        for table in answers[0].header.rows:
            rows = sum(answer.header.rows[table] for answer in answers)
            whole = gathered(rows, self._table_pieces(table, export_id=self._export_id))
            state.weights[table], state.ids[table] = whole.rows, whole.ids
            if whole.used is not None:
                state.used[table] = whole.used
            state.optimizer.slots |= {(table, name): slot for name, slot in whole.slots.items()}
        self._free_memory()
        return state

    def _hold_export(self) -> list[Frame[Any]]:
        """Has all servers hold what they have; their answers bring the dense part."""
        self._export_id = secrets.randbits(62) + 1
        id = self._export_id
        self._call(self._servers[0], "Export", pb.ExportRequest(id=id, hold=True))
        return list(self._pool.map(lambda server: self._call(server, "Export", pb.ExportRequest(id=id)), self._servers))

    def release_held(self) -> None:
        """Lets the servers forget what they hold for exports and checkpoints of a master that was killed."""
        self._end_export(0)

    def _end_export(self, id: int) -> None:
        for server in self._servers:
            request = pb.ExportRequest(id=id, release=True)
            with contextlib.suppress(ElasticCBError):  # one that is lost holds nothing
                server.link.call("Export", Frame(request, {}), patience_seconds=0.0)

    def load_state(
        self, weights: Sequence[Array] | None, optimizer_state: OptimizerState | None, ids: Ids | None = None
    ) -> int:
        """Sets weights, or the state of optimizers, or both; returns the version that this makes.

        Gradients that wait for more, and are now too old by the rules of synchronous mode, are dropped.

        Args:
            weights: of the whole model; None leaves them.
            optimizer_state: None, and what it lacks, is left. Of embedding tables it is set beside weights only.
            ids: as in `ModelState`.

        Raises `ElasticCBError` when the state is of other optimizers.
        """
        state = optimizer_state or OptimizerState()
        tables = {} if weights is None else self._tables(weights, state, ids)
        change = secrets.randbits(62) + 1

        def load(index: int) -> int:
            header = pb.LoadStateRequest(id=change, optimizers=state.optimizers)
            frame = Frame(header, self._packed(index, weights, state, tables))
            return int(self._call_frame(self._servers[index], frame, "LoadState").header.version)

        # In synchronous mode the first one makes the others set what they got.
        list(self._pool.map(load, range(1, len(self._servers))))
        self.version = load(0)
        self._free_memory()
        return self.version

    def _free_memory(self) -> None:
        for server in self._servers:
            server.link.free_memory()

    def _packed(
        self, index: int, weights: Sequence[Array] | None, state: OptimizerState, tables: Mapping[int, TableState]
    ) -> dict[str, Array]:
        """One server's part of weights and state, as it travels."""
        slices = self._servers[index].slices
        tensors = {} if weights is None else pack_weights(weights, self.specs, slices)
        parts = {table: whole.part(index, self.buckets) for table, whole in tables.items()}
        return tensors | to_tensors(cut_state(state, self.specs, slices)) | tables_to(parts)

    def _tables(
        self,
        weights: Sequence[Array],
        state: OptimizerState,
        ids: Ids | None,
        used: Mapping[int, Array] | None = None,
    ) -> dict[int, TableState]:
        tables = {}
        for index, spec in enumerate(self.specs):
            if spec.table:
                slots = {name: slot for (variable, name), slot in state.slots.items() if variable == index}
                rows = weights[index]
                own = ids[index] if ids and index in ids else np.arange(len(rows), dtype=np.int64)
                tables[index] = TableState(own, rows, slots, used=(used or {}).get(index))
        return tables

    def snapshot(self, evaluation_round: int, weights: Sequence[Array] | None = None) -> int:
        """Makes every server keep its present weights for the round, or `weights`; returns their version."""
        if weights is not None:

            def keep(server: KnownServer) -> int:
                header = pb.SnapshotRequest(evaluation_round=evaluation_round)
                frame = Frame(header, pack_weights(weights, self.specs, server.slices))
                return int(self._call_frame(server, frame, "Snapshot").header.version)

            versions = list(self._pool.map(keep, self._servers))
            return versions[0]
        return self._first_then_others("Snapshot", lambda: pb.SnapshotRequest(evaluation_round=evaluation_round))

    def release_snapshot(self, evaluation_round: int) -> None:
        """Lets the servers forget the weights kept for the round."""
        self._on_all("Snapshot", lambda: pb.SnapshotRequest(evaluation_round=evaluation_round, release=True))

    def save(self, directory: str) -> list[Any]:
        """Makes every server write its part of a checkpoint; returns their `SaveResponse`s.

        Args:
            directory: exists, is empty, and was never given before, since a server may still write for an earlier call.
        """
        self._call(self._servers[0], "Save", pb.SaveRequest(directory=directory, hold=True))
        return self._on_all("Save", lambda: pb.SaveRequest(directory=directory))

    def finish_training(self, finalize: bool = True) -> int:
        """Applies gradients that wait for more, and lets the optimizers finalize; returns the version after it."""
        return self._first_then_others("FinishTraining", lambda: pb.FinishTrainingRequest(finalize=finalize))

    def persist(self) -> None:
        """Has the servers write their recovery files soon, beside training. One that does not answer is left out."""

        def ask(server: KnownServer) -> None:
            with contextlib.suppress(ElasticCBError):
                server.link.call("Persist", Frame(pb.PersistRequest(), {}), 0.0, _PERSIST_SECONDS)

        list(self._pool.map(ask, self._servers))

    def refused_calls(self) -> list[dict[str, int]]:
        """How many calls each server has refused, by reason in words; none for a server that does not answer."""
        calls: list[dict[str, int]] = []
        for server in self._servers:
            calls.append({})
            with contextlib.suppress(ElasticCBError):
                frame = Frame(pb.RefusedCallsRequest(), {})
                calls[-1].update(server.link.call("RefusedCalls", frame, 0.0, _SUMMARY_SECONDS).header.calls)
        return calls

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the base rate on every server."""
        self._on_all("SetLearningRate", lambda: pb.SetLearningRateRequest(learning_rate=learning_rate))

    def _first_then_others(self, method: str, header: Callable[[], Any]) -> int:
        """For what the first server passes on to the others; returns the version that it answers with."""
        first, *others = self._servers
        answer = self._call(first, method, header()).header
        list(self._pool.map(lambda server: self._call(server, method, header()), others))
        return int(answer.version)

    def _on_all(self, method: str, header: Callable[[], Any]) -> list[Any]:
        answers = self._pool.map(lambda server: self._call(server, method, header()), self._servers)
        return [answer.header for answer in answers]
