"""Clients of parameter servers, as tests make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticcb.checkpoint.manifest import read_manifest
from elasticcb.checkpoint.parts import load
from elasticcb.checkpoint.remote import Files
from elasticcb.checkpoint.shard_file import Part, write_part
from elasticcb.clients.ps import PSClient
from elasticcb.clients.ps_servers import ServerGroup
from elasticcb.master.ps_admin import PSControl
from elasticcb.master.recovery_files import RecoveryFiles
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.settings import WireDtype
from elasticcb.sharding.partition import Places, ServerPlace, ShardMap, Slice


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


def save_as_server(
    files: RecoveryFiles, part: Part, parts: Sequence[Sequence[Slice]], answered: Mapping[int, int] = {}
) -> None:
    """Adds what the only server of a training would save."""
    files.folder.mkdir(exist_ok=True)
    request = files.request(0, parts, 0)
    saved = write_part(Path(request.path), part, answered)
    answer = pb.SaveResponse(
        file=saved.name, bytes=saved.bytes, sha256=saved.sha256, version=saved.version, after=request.after
    )
    assert files.note(0, answer, parts)
    files.write()


def load_slices(folder: Path, specs: Any, slices: Sequence[Slice], index: int, shard_map: ShardMap) -> Part:
    """The part of a checkpoint for a server."""
    manifest = read_manifest(folder)
    part = load(Files(str(folder)), manifest, specs, slices, index, shard_map).part
    part.version = int(manifest["version"])
    return part


class TrainingControl(PSControl):
    """A master's control that tests train by, too: what it lacks its client has, or its servers have."""

    def __init__(
        self, *given: Any, run: str = "training", optimizers: Any = None, folder: Path | None = None, **group: Any
    ) -> None:
        client = client_of(*given, **group)
        recovery = None if folder is None else RecoveryFiles(folder, run, client.servers.specs)
        super().__init__(client, run, optimizers, recovery)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client if hasattr(self.client, name) else self.servers, name)
