"""Commands from the master to the parameter servers of a job."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from elasticcb.clients.ps import PSClient
from elasticcb.clients.ps_rows import Ids
from elasticcb.clients.ps_servers import KnownServer, ServerReplacedError
from elasticcb.clients.ps_tables import table_pieces
from elasticcb.errors import CheckpointError, ElasticCBError
from elasticcb.master.initial_model import InitialModel
from elasticcb.optimizers.state import ModelState, Optimizers, OptimizerState
from elasticcb.optimizers.state_messages import from_tensors, join_states
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array, Frame
from elasticcb.sharding.flat_blocks import pack_weights, unpack_weights
from elasticcb.sharding.table_state import gathered

logger = logging.getLogger(__name__)

_SUMMARY_SECONDS = 5.0  # timeout for a server's count of refused calls

_RESTORE_PATIENCE_SECONDS = 5.0  # short: the server may also be lost, and its replacement is tried next


class Restored(NamedTuple):
    """What the replacement of a lost server holds.

    Attributes:
        source: where it came from, as text.
        complete: whether it has everything that the lost server had acknowledged.
    """

    version: int
    source: str
    learning_rate: float
    complete: bool = False


class PSControl:
    """Commands to the parameter servers of a job.

    Attributes:
        members: returns the ids of the workers that train. A server whose rounds did not wait for all of them could
            come before the others, and each would wait for the other's workers.
    """

    def __init__(self, client: PSClient, run: str, optimizers: Optimizers | None = None) -> None:
        self.client, self.servers, self.run = client, client.servers, run
        self._optimizers = optimizers or Optimizers()
        self.members: Callable[[], Sequence[int]] = tuple
        self._export_id = 0

    def initialize(self, source: InitialModel) -> None:
        """Sends the model to all servers."""
        servers = self.servers
        answers = servers.each(
            lambda server: servers.send(server, self._beginning(server, source), "Initialize"), servers.known
        )
        servers.free_memory()
        self.client.version, self.client.learning_rate = answers[0].header.version, answers[0].header.learning_rate

    def restore(
        self,
        index: int,
        address: str,
        id: int,
        version: int,
        source: Callable[[], InitialModel],
        evaluation_round: int,
        learning_rate: float | None,
    ) -> Restored:
        """Restores the model on the replacement of a lost server: from recovery files, or else from `source`.

        Args:
            source: returns the model to use when there are no recovery files.
            evaluation_round: running round, for which the server snapshots its state; 0: none.
            learning_rate: base rate to set; None: keep the server's.
        """
        link, server = self.servers.link(index, address, id, _RESTORE_PATIENCE_SECONDS), self.servers.known[index]
        try:
            try:
                beginning = self._beginning(server, InitialModel(version=version), True)
                answer = link.call("Initialize", beginning).header
                restored = Restored(
                    answer.recovered_version, "its recovery files", answer.learning_rate, answer.complete
                )
            except CheckpointError as error:
                given = source()
                words = given.checkpoint or "the initial weights"
                logger.warning("Parameter server %d starts from %s: %s", index, words, error)
                beginning = self._beginning(server, given._replace(version=version))
                answer = link.call("Initialize", beginning).header
                held = answer.recovered_version if given.checkpoint else given.version
                restored = Restored(held, words, answer.learning_rate)
            rate = restored.learning_rate
            if learning_rate is not None and learning_rate not in (rate, np.float32(rate)):
                link.call("SetLearningRate", Frame(pb.SetLearningRateRequest(learning_rate=learning_rate), {}))
            if evaluation_round:
                link.call("Snapshot", Frame(pb.SnapshotRequest(evaluation_round=evaluation_round), {}))
            return restored
        finally:
            link.close()

    def _beginning(self, server: KnownServer, source: InitialModel, recover: bool = False) -> Frame[Any]:
        """The initialization request of a server."""
        servers = self.servers
        header = self._model()
        header.index, header.checkpoint, header.version = server.index, source.checkpoint, source.version
        header.recover = recover
        tensors: dict[str, Array] = {}
        if not source.checkpoint and not recover:
            tensors = source.part(servers, server.index)
        return Frame(header, tensors)

    def _model(self) -> pb.InitializeRequest:
        """The model without its weights."""
        optimizers, shard_map = self._optimizers, self.servers.shard_map
        return pb.InitializeRequest(
            variables=[spec.to_message() for spec in self.servers.specs],
            num_ps=shard_map.servers,
            split=self.servers.split,
            optimizers=optimizers.names,
            periods=optimizers.periods,
            learning_rate=optimizers.learning_rate,
            run=self.run,
            map_version=shard_map.version,
            members=self.members(),
        )

    def export(self) -> ModelState:
        """Everything that the servers hold. Training may continue."""
        while True:
            try:
                with contextlib.suppress(ServerReplacedError):
                    return self._exported()
            finally:
                self._end_export(self._export_id)

    def _exported(self) -> ModelState:
        servers = self.servers
        answers = self._hold_export()
        states = [
            from_tensors(answer.tensors, answer.header.optimizers if index == 0 else ())
            for index, answer in enumerate(answers)
        ]
        state = ModelState(
            version=int(answers[0].header.version),
            weights=unpack_weights([{**answer.tensors} for answer in answers], servers.specs, servers.partition),
            optimizer=join_states(states, servers.specs, servers.partition),
        )
        for table in answers[0].header.rows:
            rows = sum(answer.header.rows[table] for answer in answers)
            whole = gathered(rows, table_pieces(servers, table, export_id=self._export_id))
            state.weights[table], state.ids[table] = whole.rows, whole.ids
            if whole.used is not None:
                state.used[table] = whole.used
            state.optimizer.slots |= {(table, name): slot for name, slot in whole.slots.items()}
        servers.free_memory()
        return state

    def _hold_export(self) -> list[Frame[Any]]:
        """Makes all servers hold their state for an export; their answers contain the dense part."""
        self._export_id = secrets.randbits(62) + 1
        servers, id = self.servers, self._export_id
        return servers.each(lambda server: servers.call(server, "Export", pb.ExportRequest(id=id)), servers.known)

    def release_held(self) -> None:
        """Releases what the servers hold for exports and checkpoints of a killed master."""
        self._end_export(0)

    def _end_export(self, id: int) -> None:
        for link in self.servers.links:
            request = pb.ExportRequest(id=id, release=True)
            with contextlib.suppress(ElasticCBError):  # a lost server holds nothing
                link.call("Export", Frame(request, {}), patience_seconds=0.0)

    def load_state(
        self, weights: Sequence[Array] | None, optimizer_state: OptimizerState | None, ids: Ids | None = None
    ) -> int:
        """Sets weights, optimizer state, or both; returns the new version.

        Args:
            weights: of the whole model; None: unchanged.
            optimizer_state: missing parts, or None, stay unchanged. The state of embedding tables is set only together
                with weights.
            ids: as in `ModelState`.

        Raises `ElasticCBError` when the state is of other optimizers.
        """
        state = optimizer_state or OptimizerState()
        model = InitialModel(weights or (), optimizer_state=state, ids=ids)
        change = secrets.randbits(62) + 1

        def load(server: KnownServer) -> int:
            header = pb.LoadStateRequest(id=change, optimizers=state.optimizers)
            frame = Frame(header, model.part(self.servers, server.index))
            return int(self.servers.send(server, frame, "LoadState").header.version)

        self.client.version = self.servers.each(load, self.servers.known)[0]
        self.servers.free_memory()
        return self.client.version

    def snapshot(self, evaluation_round: int, weights: Sequence[Array] | None = None) -> int:
        """Makes every server snapshot its weights, or `weights`, for the round; returns the version."""
        servers = self.servers
        if weights is None:
            request = pb.SnapshotRequest(evaluation_round=evaluation_round)
            return int(servers.on_all("Snapshot", request)[0].version)

        def keep(server: KnownServer) -> int:
            header = pb.SnapshotRequest(evaluation_round=evaluation_round)
            frame = Frame(header, pack_weights(weights, servers.specs, server.slices))
            return int(servers.send(server, frame, "Snapshot").header.version)

        return servers.each(keep, servers.known)[0]

    def release_snapshot(self, evaluation_round: int) -> None:
        """Releases the servers' snapshots of the round."""
        self.servers.on_all("Snapshot", pb.SnapshotRequest(evaluation_round=evaluation_round, release=True))

    def save(self, directory: str) -> list[Any]:
        """Makes every server write its part of a checkpoint; returns their `SaveResponse`s.

        Args:
            directory: an empty, never used folder, because a server may still be writing for an earlier call.
        """
        return self.servers.on_all("Save", pb.SaveRequest(directory=directory))

    def finish_training(self) -> int:
        """Merges pending movements; returns the new version."""
        return int(self.servers.on_all("FinishTraining", pb.FinishTrainingRequest())[0].version)

    def persist(self, forget_older: bool = False) -> None:
        """Returns once all servers have written what has changed to their recovery files.

        Args:
            forget_older: they have all done so by the present map; files of older ones are removed.

        Raises:
            CheckpointError: a server can't write.
            ConnectionLostError: a server is lost, and is not replaced in time.
        """
        self.servers.on_all("Persist", pb.PersistRequest(forget_older=forget_older))

    def refused_calls(self) -> list[dict[str, int]]:
        """How many calls each server has refused, by reason (text); empty for an unresponsive server."""
        calls: list[dict[str, int]] = []
        for link in self.servers.links:
            calls.append({})
            with contextlib.suppress(ElasticCBError):
                frame = Frame(pb.RefusedCallsRequest(), {})
                calls[-1].update(link.call("RefusedCalls", frame, 0.0, _SUMMARY_SECONDS).header.calls)
        return calls

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the base rate on every server."""
        self.servers.on_all("SetLearningRate", pb.SetLearningRateRequest(learning_rate=learning_rate))
