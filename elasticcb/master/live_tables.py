"""The content of a running job's embedding tables, as reported by its parameter servers."""

from __future__ import annotations

import time

import numpy as np

from elasticcb.clients.ps_servers import ServerGroup
from elasticcb.errors import ConnectionLostError, UsageError
from elasticcb.master.job_machine import JobMachine
from elasticcb.master.master_server import MasterServer
from elasticcb.master.members import ServedCluster
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import to_message
from elasticcb.sharding.partition import Places, ShardMap

_PATIENCE_SECONDS = 2.0  # with an unresponsive server
_RESTORE_SECONDS = 30.0  # for the replacement of a lost server


class LiveTables:
    """Queries the servers of the current job, independently of the driving thread."""

    def __init__(self, master: MasterServer) -> None:
        self._master = master

    def ask(self, top: int, id: int | None, seconds: float = _RESTORE_SECONDS) -> pb.TablesResponse:
        """The content of all tables, or the rows of one id.

        Args:
            top: how many of the most frequently looked-up ids to return.
            id: the id whose rows to return; None: report on the tables.

        Raises `UsageError` when servers are missing.
        """
        give_up = time.monotonic() + seconds
        while True:
            with self._master.state():
                left = max(0.0, give_up - time.monotonic())
                state = self._master.wait_for(lambda state: state.serves(0) or _is_over(state), left)
                cluster, why_not = state.cluster, _why_not(state)
                memory_bytes = 0 if state.settings is None else state.settings.embedding.memory_bytes
            if why_not or cluster is None:
                raise UsageError(f"The embedding tables can't be read now: {why_not}.")
            try:
                return self._answer(cluster, top, id, memory_bytes)
            except ConnectionLostError as error:
                if time.monotonic() > give_up:
                    raise UsageError(f"A parameter server may just have been lost: {error} Try again.") from error

    def _answer(self, cluster: ServedCluster, top: int, id: int | None, memory_bytes: int) -> pb.TablesResponse:
        answer = pb.TablesResponse(memory_bytes=memory_bytes)
        answer.variables.extend(spec.to_message() for spec in cluster.variables)
        places = Places(tuple(cluster.servers), ShardMap(len(cluster.servers), cluster.map_version))
        servers = ServerGroup(places, cluster.variables, cluster.split, _PATIENCE_SECONDS, self._master.access)
        try:
            if id is None:
                answer.counts.extend(servers.on_all("CountTables", pb.CountTablesRequest(top=top)))
            else:
                self._find(answer, servers, id)
        finally:
            servers.close()
        return answer

    def _find(self, answer: pb.TablesResponse, servers: ServerGroup, id: int) -> None:
        answer.server = int(servers.shard_map.server_of(np.array([id], np.int64))[0])
        frame = servers.call(servers.known[answer.server], "FindRow", pb.FindRowRequest(id=id))
        del frame.header.tensors[:]
        answer.found.CopyFrom(frame.header)
        answer.found.tensors.extend(to_message(array, name) for name, array in frame.tensors.items())


def _is_over(state: JobMachine) -> bool:
    return state.closing or state.over


def _why_not(state: JobMachine) -> str:
    """Why the servers can't be queried; "": they can."""
    if _is_over(state):
        return "the job is over"
    if state.cluster is None:
        return "the job is starting, and its parameter servers have no model yet. Try again once it trains"
    lost = [index for index in state.lost_ps if index < state.servers_in_use]
    if lost:
        return (
            f"parameter server {', '.join(map(str, lost))} was lost and is not restored yet. Try again in a few seconds"
        )
    return ""
