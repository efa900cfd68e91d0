"""The files from which lost parameter servers are restored: a snapshot that the master adds to.

Each server has a file with everything, and files with later changes: the whole dense part, and the embedding rows
trained since the file before. The manifest, which is replaced atomically, lists the valid files in order.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elasticcb.checkpoint.manifest import MANIFEST, read_manifest, write_manifest, written_parts
from elasticcb.checkpoint.shard_file import SavedFile
from elasticcb.errors import CheckpointError
from elasticcb.master.job_copy import RecoveryCopy
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.sharding.partition import Slice, VariableSpec
from elasticcb.storage import durable

logger = logging.getLogger(__name__)

# Changes are merged into a new full file once they are as large as the full one, and at least this large.
_SMALLEST_TOTAL = 64 << 20  # bytes


class RecoveryFiles:
    """What the servers of a training have saved. Thread-safe.

    Args:
        folder: created with its first file.
        run: name of the training; files of others are not used.
        specs: all variables of the model.
        copy: of the folder below a URL, if the job has one. Then servers write there, and the folder has only the
            manifest and notes, which are copied.

    Attributes:
        place: folder or URL of the servers' files.
    """

    def __init__(self, folder: Path, run: str, specs: Sequence[VariableSpec], copy: RecoveryCopy | None = None) -> None:
        self.folder, self._copy = folder, copy
        self.place = str(folder) if copy is None else copy.url
        self._run, self._specs = run, specs
        self._lock = threading.RLock()
        self._parts: list[list[Slice]] = []  # of the servers that save now
        self._files: list[list[SavedFile]] = []  # theirs
        self._valid: set[str] = set()  # names of all files that the manifest lists
        self._asked: dict[int, str] = {}  # the file that each server was last asked for, and may be writing
        self._numbers, self._token = itertools.count(1), secrets.token_hex(4)
        with contextlib.suppress(CheckpointError):
            manifest = self.manifest()
            written = written_parts(manifest, folder)
            self._parts, self._files = [part.slices for part in written], [part.files for part in written]
            self._valid = self._names()

    def manifest(self) -> dict[str, Any]:
        """The manifest of the valid files. Raises `CheckpointError` when there are none of this training."""
        with self._lock, contextlib.suppress(CheckpointError):
            if self._names() != self._valid:  # a lost server has saved, and others are still saving
                self._write()
        if not (self.folder / MANIFEST).exists():
            raise CheckpointError("The servers have saved nothing yet.")
        manifest = read_manifest(self.folder)
        if manifest["extra"].get("run") != self._run:
            raise CheckpointError(f"The files in {self.folder} belong to another training.")
        return manifest

    def request(self, index: int, parts: Sequence[Sequence[Slice]], map_version: int) -> pb.SaveRequest:
        """The request to server `index` of those with these `parts` to save what has changed."""
        with self._lock:
            slices = [list(part) for part in parts]
            if slices != self._parts:  # their number has changed; until all have saved, the files of before are used
                self._parts, self._files = slices, [[] for _ in slices]
            files, number = self._files[index], next(self._numbers)
            keep = set() if self._copy is not None else self._valid | {each.name for each in files}
            sizes = [each.bytes for each in files]
            is_whole = not files or sum(sizes[1:]) > max(sizes[0], _SMALLEST_TOTAL)
            name = self._asked[index] = f"ps-{index}-{number:08d}-{self._token}.safetensors"
        path, after = os.path.join(self.place, name), "" if is_whole else files[-1].name
        return pb.SaveRequest(path=path, after=after, keep=sorted(keep), map_version=map_version)

    def note(self, index: int, saved: pb.SaveResponse, parts: Sequence[Sequence[Slice]]) -> bool:
        """Adds a server's answer, of those with these `parts`; returns whether it fits the files before it."""
        with self._lock:
            if [list(part) for part in parts] != self._parts or index >= len(parts):
                return False
            files = self._files[index]
            if saved.after and (not files or files[-1].name != saved.after):
                return False
            if saved.file:
                file = SavedFile(saved.file, saved.bytes, saved.sha256, saved.version)
                self._files[index] = [*files, file] if saved.after else [file]
            return True

    def write(self) -> None:
        """Makes what was noted valid, if all servers have saved. Raises `CheckpointError` on failure."""
        with self._lock:
            self._write()

    def check_is_shared(self) -> None:
        """Raises `CheckpointError` when this process does not see the files, as servers of another number would not."""
        if self._copy is not None:
            return
        for name in self._valid:
            if not (self.folder / name).is_file():
                raise CheckpointError(
                    f"A parameter server has written {name}, but it is not in {self.folder} here. The number of "
                    "servers can change only if all processes share the job's folder."
                )

    def take_last(self, index: int, saved: pb.SaveResponse) -> None:
        """Adds what a server has saved after its last answer."""
        with self._lock:
            if not self.note(index, saved, self._parts):
                return
            try:
                self._write()
                durable.write(self._last(index), self._files[index][-1].name.encode())
                if self._copy is not None:
                    self._copy.put(self._last(index))
            except (CheckpointError, OSError) as error:
                logger.warning("%s", error)

    def restored(self, index: int, file: str) -> bool:
        """Whether a server that was restored, from files up to this one, has everything that it had acknowledged; it
        answers calls from now on."""
        with self._lock:
            try:
                name = self._last(index).read_text()
                self._last(index).unlink()  # which also a full disk allows
                if self._copy is not None:
                    self._copy.remove(self._last(index).name)
            except (OSError, CheckpointError):
                return False
            return file == name  # else the last file is damaged

    def _last(self, index: int) -> Path:
        """Has the name of the file that a server wrote after its last answer, until another server takes its place."""
        return self.folder / f"last-{index}"

    def _write(self) -> None:
        if not self._files or not all(self._files):
            return
        try:
            self.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            write_manifest(
                self.folder,
                version=self._files[0][-1].version,
                specs=self._specs,
                parts=self._parts,
                files=self._files,
                extra={"run": self._run},
                mode=durable.PRIVATE,
            )
        except OSError as error:
            raise CheckpointError(f"The recovery files in {self.folder} can't be written: {error}.") from error
        if self._copy is not None:
            self._copy.put_manifest(self.folder / MANIFEST)
            self._copy.remove_others(self._names() | {*self._asked.values()}, self._valid)
        self._valid = self._names()

    def _names(self) -> set[str]:
        return {file.name for files in self._files for file in files}
