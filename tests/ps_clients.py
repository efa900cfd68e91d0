"""Clients of parameter servers, as tests make them."""

from __future__ import annotations

from typing import Any

from elasticcb.clients.ps import PSClient
from elasticcb.clients.ps_places import Places, ServerPlace
from elasticcb.clients.ps_servers import ServerGroup
from elasticcb.master.ps_admin import PSControl
from elasticcb.settings import WireDtype
from elasticcb.sharding.shard_map import ShardMap


def client_of(
    addresses: Any,
    specs: Any,
    split: bool,
    client_id: int = 0,
    patience_seconds: float = 30.0,
    ids: Any = (),
    wire_dtype: WireDtype = WireDtype.SAME,
    **group: Any,
) -> PSClient:
    """A worker's client; `group` as of `ServerGroup`."""
    servers = ServerGroup(places_at(addresses, ids), specs, split, patience_seconds, **group)
    return PSClient(servers, client_id, wire_dtype=wire_dtype)


def places_at(addresses: Any, ids: Any = (), shard_map: Any = None) -> Places:
    servers = [ServerPlace(*each) for each in zip(addresses, ids or [0] * len(addresses), strict=True)]
    return Places(servers, shard_map or ShardMap(len(servers)))


class TrainingControl(PSControl):
    """A master's control that tests train by, too: what it lacks its client has, or its servers have."""

    def __init__(self, *given: Any, run: str = "training", optimizers: Any = None, **group: Any) -> None:
        super().__init__(client_of(*given, **group), run, optimizers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client if hasattr(self.client, name) else self.servers, name)
