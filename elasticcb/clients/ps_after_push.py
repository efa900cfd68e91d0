"""Computes the servers' state after a push when no other push came in between, instead of fetching it."""

from __future__ import annotations

from collections.abc import Mapping

from elasticcb.clients.ps_servers import KnownServer, ServerGroup
from elasticcb.optimizers.state_messages import from_tensors
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.array_names import GRADIENTS, STATE, WEIGHTS, named, of_kind
from elasticcb.sharding.flat_blocks import moved_state
from elasticcb.sharding.push import Gradients


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
