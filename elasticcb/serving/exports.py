"""The folder of a periodic export: full exports, deltas between them, and which of them is current.

    current.json               the newest version, written last
    full-00001000/             a SavedModel, and a manifest
    delta-00001000-00001010/   a manifest, and a file of each server: dense weights, changed rows, removed ids

The manifests are those of snapshots (elasticcb/checkpoint/manifest.py); that of a full export lists no servers. A
folder without a manifest is not finished. A version is the model's, but never smaller than an earlier one in the same
folder: after a job has gone back to what it had saved, counting continues.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elasticcb.checkpoint.shard_file import SavedFile
from elasticcb.errors import CheckpointError

CURRENT = "current.json"
_FORMAT = 1

# Collections of variables of the SavedModel of a full export, in the order of the manifest's variables.
WEIGHTS = "elasticcb_weights"  # all weights; of a table, its rows
IDS = "elasticcb_ids"  # the ids of the rows, int64 [n] ascending, of each table without a fixed number of rows

_FULL, _DELTA = re.compile(r"full-(\d{8,})"), re.compile(r"delta-(\d{8,})-(\d{8,})")


@dataclass(frozen=True)
class Export:
    """What the manifest of a full export or of a delta says besides its variables, under "extra".

    Attributes:
        version: of the export.
        since: the version that a delta adds to; None: a full export.
        exporter: random name of the exporter's run; only deltas and full exports of the same one fit together.
        model: the name of the model.
        model_version: of the model; it may go back when a job continues from what it had saved.
        written: seconds since 1970, by the clock of the exporter.
        files: of a full export, its files; their names are paths in its folder.
    """

    version: int
    since: int | None
    exporter: str
    model: str
    model_version: int
    written: float
    files: tuple[SavedFile, ...] = ()

    @property
    def name(self) -> str:
        """The name of its folder."""
        if self.since is None:
            return f"full-{self.version:08d}"
        return f"delta-{self.since:08d}-{self.version:08d}"

    def to_extra(self) -> dict[str, Any]:
        return {"export": asdict(self)}

    @classmethod
    def of(cls, manifest: Mapping[str, Any], folder: str) -> Export:
        """Raises `CheckpointError` if the manifest of `folder` is not that of an export."""
        try:
            given = dict(manifest["extra"]["export"])
            return cls(**given | {"files": tuple(SavedFile.of(file) for file in given["files"])})
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"The manifest of {folder} is not that of a full export or a delta: {error!r}. Expected a folder "
                "that PeriodicExport has written."
            ) from error


@dataclass(frozen=True)
class Current:
    """What `current.json` says: the newest version, and the shortest way to it.

    Attributes:
        full: name of the newest full export.
        deltas: names of the deltas since then, in order.
    """

    version: int
    exporter: str
    model: str
    full: str
    deltas: tuple[str, ...] = ()
    written: float = 0.0

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def of(cls, text: str | bytes, place: str) -> Current:
        """Raises `CheckpointError` if the text in `place` is not that of a `current.json` of this release."""
        try:
            given = json.loads(text)
            if given.pop("format") != _FORMAT:
                raise CheckpointError(
                    f"{place} has another format than {_FORMAT}, which this release of ElasticCB reads and writes."
                )
            return cls(**given | {"deltas": tuple(given["deltas"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{place} can't be read: {error!r}.") from error


def way_to(names: Sequence[str], version: int | None = None) -> list[str]:
    """The names of a full export and of the deltas that lead from it to a version: the newest (None), or the newest up
    to `version`. The fewest deltas; empty: there is no way.

    Args:
        names: of the finished exports in a folder; others are ignored.
    """
    fulls = {int(found[1]): name for name in names if (found := _FULL.fullmatch(name))}
    steps = {int(found[2]): (int(found[1]), name) for name in names if (found := _DELTA.fullmatch(name))}
    for wanted in sorted({*fulls, *steps}, reverse=True):
        if version is not None and wanted > version:
            continue
        at, back = wanted, list[str]()
        while at not in fulls and at in steps:
            at, name = steps[at]
            back.append(name)
        if at in fulls:
            return [fulls[at], *reversed(back)]
    return []


def bridge(names: Sequence[str], version: int, goals: set[int]) -> list[str]:
    """The names of the deltas that lead from a version to one of `goals`; empty: there are none."""
    steps: dict[int, str] = {}
    for name in sorted(names, key=version_of):
        if found := _DELTA.fullmatch(name):
            steps[int(found[1])] = name
    way: list[str] = []
    while version not in goals:
        if version not in steps:
            return []
        way.append(steps[version])
        version = version_of(steps[version])
    return way


def unneeded(written: Mapping[str, float], way: Sequence[str], oldest: float) -> list[str]:
    """The names of the finished exports to remove, in this order: those written before `oldest`, except what the
    current version needs, and the deltas from the oldest full export that stays.

    Args:
        written: when each was written, in seconds since 1970.
        way: to the current version.
    """
    fulls = {name for name in written if _FULL.fullmatch(name) and (written[name] >= oldest or name in way)}
    first = min(map(version_of, fulls), default=0)
    steps = {name for name in written if (found := _DELTA.fullmatch(name)) and int(found[1]) >= first}
    left = written.keys() - fulls - steps - {*way}
    return sorted(left, key=lambda name: (version_of(name), not _DELTA.fullmatch(name)))


def version_of(name: str) -> int:
    """The version in the name of an export; -1: it is not such a name."""
    found = _FULL.fullmatch(name) or _DELTA.fullmatch(name)
    return int(found[found.lastindex or 1]) if found else -1
