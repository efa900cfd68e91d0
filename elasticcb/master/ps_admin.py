"""Commands from the master to the parameter servers of a job."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from elasticcb.checkpoint.manifest import written_parts
from elasticcb.checkpoint.shard_file import SavedFile
from elasticcb.checkpoint.versions import server_file
from elasticcb.clients.ps import Ids, PSClient, table_pieces
from elasticcb.clients.ps_servers import KnownServer, ServerReplacedError
from elasticcb.errors import CheckpointError, ElasticCBError, StoreError
from elasticcb.master.recovery_files import RecoveryFiles
from elasticcb.optimizers.state import ModelState, Optimizers, OptimizerState, from_tensors, join_states
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array, Frame
from elasticcb.sharding.flat_blocks import pack_weights, unpack_weights
from elasticcb.sharding.table_state import gathered

logger = logging.getLogger(__name__)

_SUMMARY_SECONDS = 5.0  # timeout for a server's count of refused calls

_RESTORE_PATIENCE_SECONDS = 5.0  # short: the server may also be lost, and its replacement is tried next


RECOVERY_FILES = "its recovery files"


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

    @property
    def is_older(self) -> bool:
        """Whether updates are lost that had been saved: their records are not known any more."""
        return self.source != RECOVERY_FILES


class PSControl:
    """Commands to the parameter servers of a job.

    Attributes:
        members: returns the ids of the workers that train. A server whose rounds did not wait for all of them could
            come before the others, and each would wait for the other's workers.
        recovery: from which lost servers are restored; None: from the model that they were given.
        saving: held while servers save for recovery, which waits while a lost one is replaced.
    """

    def __init__(
        self, client: PSClient, run: str, optimizers: Optimizers | None = None, recovery: RecoveryFiles | None = None
    ) -> None:
        self.client, self.servers, self.run, self.recovery = client, client.servers, run, recovery
        self.saving = threading.RLock()
        self._optimizers = optimizers or Optimizers()
        self.members: Callable[[], Sequence[int]] = tuple
        self._export_id = 0

    def initialize(self, source: ModelState) -> None:
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
        source: Callable[[], ModelState],
        evaluation_round: int,
        learning_rate: float | None,
    ) -> Restored:
        """Restores the model on the replacement of a lost server: from recovery files, or else from `source`.

        Args:
            source: returns the model to use when there are no recovery files.
            evaluation_round: running round, for which the server snapshots its state; 0: none.
            learning_rate: base rate to set; None: keep the server's.

        Raises `StoreError` if the recovery files are below a URL that can't be read now.
        """
        link, server = self.servers.link(index, address, id, _RESTORE_PATIENCE_SECONDS), self.servers.known[index]
        try:
            try:
                if self.recovery is None:
                    raise CheckpointError("This job keeps no recovery files.")
                manifest = self.recovery.manifest()
                files = ModelState(version=version, checkpoint=self.recovery.place)
                answer = link.call("Initialize", self._beginning(server, files, json.dumps(manifest))).header
                complete, held = self.recovery.restored(index, answer.file), answer.recovered_version
                is_damaged = held < self._saved_version(manifest, index)
                words = f"{RECOVERY_FILES} before a damaged one" if is_damaged else RECOVERY_FILES
                restored = Restored(held, words, answer.learning_rate, complete)
            except StoreError:
                raise
            except CheckpointError as error:
                given = source()
                words = given.checkpoint or "the initial weights"
                logger.warning("Parameter server %d starts from %s: %s", index, words, error)
                beginning = self._beginning(server, replace(given, version=version))
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

    def _saved_version(self, manifest: Mapping[str, Any], index: int) -> int:
        """What a server has, at least, when it has read undamaged files."""
        assert self.recovery is not None
        versions = [part.files[-1].version for part in written_parts(manifest, self.recovery.folder)]
        return versions[index] if len(versions) == self.servers.shard_map.servers else min(versions)

    def _beginning(self, server: KnownServer, source: ModelState, manifest: str = "") -> Frame[Any]:
        """The initialization request of a server."""
        servers, optimizers, shard_map = self.servers, self._optimizers, self.servers.shard_map
        header = pb.InitializeRequest(
            variables=[spec.to_message() for spec in servers.specs],
            num_ps=shard_map.servers,
            index=server.index,
            split=servers.split,
            checkpoint=source.checkpoint,
            version=source.version,
            manifest=manifest,
            optimizers=optimizers.names,
            periods=optimizers.periods,
            learning_rate=optimizers.learning_rate,
            map_version=shard_map.version,
            members=self.members(),
        )
        return Frame(header, {} if source.checkpoint else self._part(source, server.index))

    def _part(self, state: ModelState, index: int) -> dict[str, Array]:
        servers = self.servers
        return state.part(servers.specs, servers.partition[index], servers.shard_map, index)

    def export(self) -> ModelState:
        """Everything that the servers hold. Training may continue."""
        while True:
            try:
                with contextlib.suppress(ServerReplacedError):
                    return self._exported()
            finally:
                self._end_export(self._export_id)

    def _exported(self) -> ModelState:
        self._export_id = secrets.randbits(62) + 1
        servers, request = self.servers, pb.ExportRequest(id=self._export_id)
        answers = servers.each(lambda server: servers.call(server, "Export", request), servers.known)
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
        model = ModelState(list(weights or ()), state, ids=dict(ids or {}))
        recovery, loaded = self.recovery, dict[int, int]()  # ids of the servers, by index

        def load(server: KnownServer) -> int:
            header = pb.LoadStateRequest(optimizers=state.optimizers)
            if recovery is not None:  # workers can't repeat it, so that it must be kept before it is answered
                header.save.CopyFrom(recovery.request(server.index, parts, self.servers.shard_map.version))
            frame = Frame(header, self._part(model, server.index))
            answer = self.servers.send(server, frame, "LoadState").header
            if recovery is not None and answer.HasField("saved"):
                recovery.note(server.index, answer.saved, parts)
            loaded[server.index] = server.link.id
            return int(answer.version)

        with self.saving:
            parts, left = self.servers.partition, self.servers.known
            while left:
                versions = self.servers.each(load, left)
                if left[0].index == 0:
                    self.client.version = versions[0]
                # One that was replaced meanwhile may be restored from files of before.
                left = [server for server in self.servers.known if server.link.id != loaded[server.index]]
            if recovery is not None:
                with contextlib.suppress(CheckpointError):  # then with the next files
                    recovery.write()
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

    def save(self, folder: str, suffix: str = "") -> list[SavedFile]:
        """Makes every server write its part of a checkpoint; returns their files.

        Args:
            folder: a path or URL. A server may still be writing for an earlier call: the folder, or the suffix of the
                files' names, must never have been used.
        """
        servers = self.servers

        def save(server: KnownServer) -> SavedFile:
            path = f"{folder}/{server_file(server.index, len(servers.known), suffix)}"
            request = pb.SaveRequest(path=path, map_version=servers.shard_map.version)
            saved = servers.call(server, "Save", request).header
            return SavedFile(saved.file, saved.bytes, saved.sha256, saved.version)

        return servers.each(save, servers.known)

    def finish_training(self) -> int:
        """Merges pending movements; returns the new version."""
        return int(self.servers.on_all("FinishTraining", pb.FinishTrainingRequest())[0].version)

    def persist(self, call: Callable[[KnownServer, Any], Any] | None = None) -> None:
        """Returns once the recovery files have what has changed on all servers.

        Args:
            call: returns a server's answer to a `SaveRequest`; None: of its replacement if it is lost.

        Raises `ElasticCBError` if not; what others have written is in the files. `CheckpointError`: only because
        servers can't write.
        """
        recovery, servers = self.recovery, self.servers
        if recovery is None:
            return
        failures: list[ElasticCBError] = []

        def save(server: KnownServer) -> None:
            try:
                request = recovery.request(server.index, parts, servers.shard_map.version)
                answer = servers.call(server, "Save", request).header if call is None else call(server, request)
                if not recovery.note(server.index, answer, parts):
                    raise ServerReplacedError(f"Parameter server {server.index} was replaced while it saved.")
            except ElasticCBError as error:  # the others may still be saving
                failures.append(error)

        with self.saving:
            parts = servers.partition
            servers.each(save, servers.known)
            recovery.write()
        if failures:
            raise next((each for each in failures if not isinstance(each, CheckpointError)), failures[0])

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
