"""Pushes to and pulls from all parameter servers of a job; used by workers and by the master."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticcb.clients.ps_rounding import Rounding
from elasticcb.clients.ps_rows import Ids, WantedRows
from elasticcb.clients.ps_servers import KnownServer, MapChangedError, ServerGroup
from elasticcb.clients.ps_tables import table_pieces, whole_table
from elasticcb.optimizers.state import OptimizerState
from elasticcb.optimizers.state_messages import from_tensors, join_states
from elasticcb.process.stats import LOOKUP, PULL, PUSH, Measures
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.shared_memory import aligned_copy
from elasticcb.rpc.tensors import Array, Frame
from elasticcb.sharding.array_names import GRADIENTS, STATE, TABLE, WEIGHTS, by_index, named, of_kind
from elasticcb.sharding.flat_blocks import Blocks, PlacedBlocks, moved_state, unpack_weights
from elasticcb.sharding.push import Gradients, knows_result


@dataclass
class PushResult:
    """The servers' answer to a push.

    Attributes:
        rows: requested rows of embedding tables, by variable: [n, dim] each.
        optimizers: after a movement, the steps and rates of the servers' optimizers; None: nobody else has changed the
            model since the worker's last exchange, so it already has them.
    """

    status: int
    reason: str
    version: int
    rows: dict[int, Array] = field(default_factory=dict)
    optimizers: OptimizerState | None = None


class PSClient:
    """The model held by all parameter servers of a job.

    Args:
        client_id: id of the worker, part of the name of each push.
        synchronous: whether pushes to several servers are staged, and decided on by the first server.
        measures: statistics of call durations and looked-up rows.
        rounding: how arrays are rounded for transport; None: not at all.

    Attributes:
        version: version of the model on the first server.
        staged: pushes go to the other servers first, and the first one decides.
        learning_rate_version: increases when the master sets the base rate.
        snapshot_version: version of the weights last fetched by `pull_snapshot`.

    Its methods raise the errors of `ServerGroup`.
    """

    def __init__(
        self,
        servers: ServerGroup,
        client_id: int = 0,
        synchronous: bool = False,
        measures: Measures | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        self.servers = servers
        self._rounding = rounding or Rounding()
        self._measures = measures or Measures()
        self.version = 0
        self.learning_rate = 0.0
        self.learning_rate_version = -1
        self.snapshot_version = 0
        self._client_id = client_id
        self._exchanging = threading.RLock()  # a worker may push in one thread and pull in another
        self.staged = synchronous and len(servers.known) > 1
        self._sequence = 0

    @property
    def blocks(self) -> PlacedBlocks:
        """The newest pulled weights."""
        return self.servers.blocks

    @property
    def weights_version(self) -> int:
        """Version of the newest weights pulled from the first server; -1: none from its current process."""
        return self.servers.known[0].version

    @property
    def versions(self) -> list[int]:
        """Versions of the newest pulled weights, by server."""
        return [server.version for server in self.servers.known]

    def _measured(self, call: str, function: Callable[[], Any]) -> Any:
        """Like `by_present_map`, and measures the duration."""
        begun = time.perf_counter()
        answer = self.servers.by_present_map(function)
        self._measures.histograms[call].observe(time.perf_counter() - begun)
        return answer

    def pull(self, exact: bool = False) -> PlacedBlocks:
        """Fetches weights that are newer than the current ones.

        Args:
            exact: fetch weights that were rounded for transport again, unrounded.
        """
        with self._exchanging:
            self._measured(PULL, lambda: self._pull(exact=exact))
            return self.blocks

    def pull_with_optimizers(self) -> tuple[PlacedBlocks, OptimizerState]:
        """Like `pull`, with the optimizer state except that of embedding tables."""
        with self._exchanging:
            state: OptimizerState = self._measured(PULL, lambda: self._pull(with_optimizers=True))
            return self.blocks, state

    def _pull(self, with_optimizers: bool = False, exact: bool = False) -> OptimizerState:
        frames = [self._request(server, None, pull=True) for server in self.servers.known]
        for frame in frames:
            frame.header.optimizers = with_optimizers
            if exact:
                self._rounding.ask_for_exact(frame.header)
        self._exchange(self.servers.known, frames)
        return self._optimizers_found() if with_optimizers else OptimizerState()

    def _optimizers_found(self) -> OptimizerState:
        """The optimizer state of the last exchange."""
        states = [server.optimizers for server in self.servers.known]
        return join_states(states, self.servers.specs, self.servers.partition)

    def lookup(self, ids: Ids, create: bool = False, evaluation_round: int = 0, pull: bool = False) -> dict[int, Array]:
        """Rows of embedding tables, by variable: [n, dim] each.

        Args:
            ids: by variable, unique ids (int64 [n]).
            create: create missing rows, as in training.
            evaluation_round: read from the snapshot of this round; 0: current rows.
            pull: also fetch newer weights.
        """
        with self._exchanging:
            found: dict[int, Array] = self._measured(LOOKUP, lambda: self._lookup(ids, create, evaluation_round, pull))
            return found

    def _lookup(self, ids: Ids, create: bool, evaluation_round: int, pull: bool) -> dict[int, Array]:
        frames, wanted = [], WantedRows(ids, self.servers)
        for server in self.servers.known:
            header = self._request(server, None, pull, create).header
            header.snapshot = evaluation_round
            if evaluation_round:
                header.pull = False
            frames.append(Frame(header, wanted.of_server(server.index)))
        if evaluation_round:  # its version is not the current one
            for server, answer in zip(self.servers.known, self._exchanged(self.servers.known, frames), strict=True):
                server.rows = by_index(TABLE, answer.tensors)
        else:
            self._exchange(self.servers.known, frames)
        return self._found(wanted)

    def _found(self, wanted: WantedRows) -> dict[int, Array]:
        rows = wanted.found()
        self._measures.rows_looked_up += sum(map(len, rows.values()))
        return rows

    def read_table(self, variable: int, rows: int = 65_536) -> Iterator[tuple[Array, Array]]:
        """All (ids [n], rows [n, dim]) of an embedding table, in pieces of `rows` rows, as in `table_pieces`."""
        for piece in table_pieces(self.servers, variable, rows):
            yield piece.ids, piece.rows

    def weights(self, blocks: Blocks | None = None) -> tuple[list[Array], dict[int, Array]]:
        """All weights, in the order of the specs, and the ids of embedding tables, both as in `ModelState`."""
        weights = unpack_weights(self.pull() if blocks is None else blocks, self.servers.specs, self.servers.partition)
        ids: dict[int, Array] = {}
        for index, spec in enumerate(self.servers.specs):
            if spec.table:
                whole = whole_table(self.servers, index)
                ids[index], weights[index] = whole.ids, whole.rows
        return weights, ids

    def pull_snapshot(self, evaluation_round: int) -> PlacedBlocks:
        """The weights that the servers keep for an evaluation pass; sets `snapshot_version`."""

        def pull() -> PlacedBlocks:
            request = pb.ExchangeRequest(
                pull=True,
                known_version=-1,
                known_state_version=-1,
                snapshot=evaluation_round,
                map_version=self.servers.buckets.version,
            )
            answers = self._exchanged(self.servers.known, [Frame(request, {}) for _ in self.servers.known])
            self.snapshot_version = answers[0].header.version
            # They are kept while others are received.
            kept = [{name: aligned_copy(block) for name, block in answer.tensors.items()} for answer in answers]
            return PlacedBlocks(kept, self.servers.partition)

        with self._exchanging:
            return self.servers.by_present_map(pull)

    def push(
        self, push: Gradients, learning_rate: float | None, pull: bool = True, ids: Ids | None = None
    ) -> PushResult:
        """Sends the gradients of one step on `blocks`, and by default fetches the weights after it.

        Args:
            learning_rate: for this push only; None: the servers' base rate.
            ids: of embedding tables, by variable: rows to fetch after the update (created as in training); unique int64
                [n].
        """
        with self._exchanging:
            self._sequence += 1
            # Servers that applied the push under its name with the previous map don't apply it again.
            result: PushResult = self._measured(
                PUSH,
                lambda: self._push(
                    push.recut(self.servers.specs, self.servers.partition), learning_rate, pull, ids or {}
                ),
            )
            return result

    def _push(self, push: Gradients, learning_rate: float | None, pull: bool, ids: Ids) -> PushResult:
        servers, wanted = self.servers, WantedRows(ids, self.servers)
        # Staged pushes change the other servers only once the first one has decided.
        pull_along = pull and not self.staged
        # While an update propagates, a pull may find the servers at different versions.
        oldest = min(server.version for server in servers.known) if self.staged else None
        frames = []
        for index, server in enumerate(servers.known):
            header = self._request(server, push, pull_along, creates=not self.staged).header
            header.version = server.version if oldest is None else oldest
            header.staged = self.staged and index > 0
            part = push.part(index, servers.specs, server.slices, servers.buckets, server.state_base, learning_rate)
            tensors = self._rounding.sent(part.encode(header))
            if not self.staged:
                tensors |= wanted.of_server(index)
            frames.append(Frame(header, tensors))
        first = 1 if self.staged else 0
        headers = self._exchange(servers.known[first:], frames[first:])
        at_once = [True] * len(headers)
        if push.batches:
            for index, server in enumerate(servers.known):
                headers[index], at_once[index] = self._merged(server, frames[index], headers[index])
        refused = next((header for header in headers if header.status == pb.NON_FINITE), None)
        if self.staged and refused is None:
            headers = self._exchange(servers.known[:1], frames[:1])
        decided = refused or headers[0]
        if decided.status == pb.ACCEPTED and not pull and not frames[0].header.pull and push.batches is None:
            # Until the next pull, the worker continues with its own state.
            answers = [decided] * len(servers.known) if self.staged else headers
            for server, answer, state, shares in zip(servers.known, answers, push.state, push.shares, strict=False):
                server.state_base = answer.version
                note_state(server, state, shares)
        result = PushResult(decided.status, decided.reason, self.version)
        if decided.status == pb.ACCEPTED and push.batches:
            result.optimizers = self._after_movement(push, frames, at_once)
        if not self.staged:
            result.rows.update(self._found(wanted))
        elif pull and ids:
            result.rows.update(self.lookup(ids, create=True, pull=True))
        elif pull:
            self.pull()
        return result

    def _merged(self, server: KnownServer, frame: Frame[Any], pushed: Any) -> tuple[Any, bool]:
        """Waits until a server has merged a movement, which may wait for those of other workers.

        Returns:
            That header, or a new one if the movement had to be sent again; and whether no other answer came after it.
        """
        answer, pause = pushed, 0.0005
        while answer.waits or answer.unknown:
            if answer.unknown:  # the server has replaced a lost one
                (answer,) = (pushed,) = self._exchange([server], [frame])
                continue
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            request = self._request(server, None, pull=True)
            request.header.awaited = self._sequence
            (answer,) = self._exchange([server], [request])
        return pushed, answer is pushed

    def _after_movement(
        self, push: Gradients, frames: Sequence[Frame[Any]], at_once: Sequence[bool]
    ) -> OptimizerState | None:
        """The value of `PushResult.optimizers` after a movement.

        Args:
            at_once: by server, whether it merged the movement without making the worker wait. Other servers have sent
                their state.
        """
        known = [
            merged and knows_result(frame.header, server.version)
            for merged, frame, server in zip(at_once, frames, self.servers.known, strict=True)
        ]
        for server, frame, is_known in zip(self.servers.known, frames, known, strict=True):
            if is_known:
                received = self._rounding.received(frame.tensors, self.servers.specs)
                note_movement(server, self.servers, push, received)
        return None if all(known) else self._optimizers_found()

    def _request(self, server: KnownServer, push: Gradients | None, pull: bool, creates: bool = False) -> Frame[Any]:
        header = pb.ExchangeRequest(
            worker_id=self._client_id,
            pull=pull or self.servers.has_moved,
            known_version=server.version,
            known_state_version=server.state_version,
            map_version=self.servers.buckets.version,
            create_rows=creates,
        )
        self._rounding.ask(header)
        if push is not None:
            header.sequence = self._sequence
            header.loss = push.loss
            header.non_finite = push.non_finite
        return Frame(header, {})

    def _exchange(self, servers: Sequence[KnownServer], frames: Sequence[Frame[Any]]) -> list[Any]:
        answers = self._exchanged(servers, frames)
        for server, frame, answer in zip(servers, frames, answers, strict=True):
            header = answer.header
            if header.waits or header.unknown:
                continue
            if server is self.servers.known[0]:
                self.version, self.learning_rate = header.version, header.learning_rate
                self.learning_rate_version = header.base_learning_rate_version
            server.note_answer(frame.header, answer)
        return [answer.header for answer in answers]

    def _exchanged(self, servers: Sequence[KnownServer], frames: Sequence[Frame[Any]]) -> list[Frame[Any]]:
        """The answers to calls of `Exchange`."""
        if len(servers) == 1:
            answers = [self.servers.send(servers[0], frames[0])]
        else:
            answers = self.servers.each(self.servers.send, servers, frames)
        moved = [answer.header.map_version for answer in answers if answer.header.status == pb.MOVED]
        if moved:
            raise MapChangedError(max(moved))
        return self._rounding.answers(answers, self.servers.specs)


def note_state(server: KnownServer, state: Mapping[str, Array], shares: Mapping[str, Array]) -> None:
    """Updates the state of layers after a step."""
    before = of_kind(STATE, server.blocks)
    after = {dtype: moved_state(before[dtype], state[dtype], shares[dtype], 0) for dtype in shares}
    server.blocks = {**server.blocks, **named(STATE, after)}


def note_movement(
    server: KnownServer, servers: ServerGroup, movement: Gradients, received: Mapping[str, Array]
) -> None:
    """Updates everything except embedding tables, and the optimizer state, after a worker's movement.

    Args:
        received: arrays of the movement's frame as the server got them, rounded for transport.
    """
    moved = of_kind(GRADIENTS, received)
    after = {dtype: block + moved[dtype] for dtype, block in of_kind(WEIGHTS, server.blocks).items()}
    note_state(server, movement.state[server.index], movement.shares[server.index])
    server.blocks = {**server.blocks, **named(WEIGHTS, after)}
    part = movement.part(server.index, servers.specs, server.slices, servers.buckets)
    server.optimizers = from_tensors(part.optimizers)
