"""Arrays that callbacks on the master save, such as `EarlyStopping`'s best weights: in a file next to the journal."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from elasticcb.checkpoint.shard_file import Part, SavedFile, check_file, read_part, write_part
from elasticcb.errors import CheckpointError
from elasticcb.rpc.tensors import Array

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 30  # maximum total size
_PATTERN = "callbacks-*.safetensors"


class CallbackArrays:
    """Writes arrays to a new file whenever they change. The journal names the current file.

    Args:
        entry: return value of `keep` under an earlier master; None: nothing was saved.
    """

    def __init__(self, folder: Path, entry: Mapping[str, Any] | None, say: Callable[[str], None]) -> None:
        self._folder, self._entry, self._say = folder, None if entry is None else dict(entry), say
        self._warned = False

    def load(self) -> dict[str, Array]:
        """Saved arrays by name; empty (with a warning to the user) if the file is missing or damaged."""
        if self._entry is None:
            return {}
        saved = SavedFile.of(self._entry)
        path = self._folder / saved.name
        try:
            check_file(path, saved)
            return read_part(path).shared
        except CheckpointError as error:
            self._say(f"The arrays that callbacks had saved are lost: {error}")
            self._entry = None
            return {}

    def keep(self, arrays: Mapping[str, Array]) -> dict[str, Any] | None:
        """Writes `arrays` unless they are unchanged; returns an entry for the journal.

        None when there are none, or they can't be saved: disk full, or too large.
        """
        size, digest = sum(array.nbytes for array in arrays.values()), _digest(arrays)
        if not arrays:
            self._entry = None
        elif size > MOST_BYTES:
            self._entry = None
            self._warn(f"{size / 2**30:.1f} GiB exceed the limit of {MOST_BYTES / 2**30:.0f} GiB")
        elif self._entry is None or self._entry["digest"] != digest:
            self._entry = self._write(arrays, digest)
        return self._entry

    def _write(self, arrays: Mapping[str, Array], digest: int) -> dict[str, Any] | None:
        numbers = [int(path.stem.partition("-")[2]) for path in self._folder.glob(_PATTERN)]
        path = self._folder / _PATTERN.replace("*", str(max(numbers, default=0) + 1))
        try:
            self._folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            saved = write_part(path, Part(0, shared=dict(arrays)))
        except (OSError, CheckpointError) as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self._warn(str(error))
            return None
        return {**asdict(saved), "digest": digest}

    def drop_others(self) -> None:
        """Removes outdated files; call it after the journal names the new one."""
        kept = None if self._entry is None else self._entry["name"]
        for path in self._folder.glob(_PATTERN):
            if path.name != kept:
                path.unlink(missing_ok=True)

    def _warn(self, reason: str) -> None:
        logger.warning("Arrays of callbacks are not saved: %s", reason)
        if not self._warned:
            self._warned = True
            self._say(
                f"Arrays of callbacks on the master are not saved, and would be lost if the master died: {reason}. "
                "Training continues."
            )


def _digest(arrays: Mapping[str, Array]) -> int:
    digest = 0
    for name, array in sorted(arrays.items()):
        digest = zlib.crc32(f"{name} {array.dtype.name} {array.shape}".encode(), digest)
        digest = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, digest)
    return digest
