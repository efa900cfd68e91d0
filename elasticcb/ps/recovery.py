"""The files by which a parameter server that was killed comes back.

A folder holds one file with everything that the server held at some time, and files with what changed since: the dense
part whole, of embedding tables the rows trained since the file before. `log.json`, which is replaced at once, names the
files that count, in their order.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from elasticcb.checkpoint import Part, SavedFile, read_part, write_part
from elasticcb.errors import CheckpointError
from elasticcb.table_state import overlaid

logger = logging.getLogger(__name__)

_LOG = "log.json"
_FORMAT = 1
# Files with changes are put together into a whole one when they are as large as that, and at least so large.
_SMALLEST_TOTAL = 64 << 20  # bytes
# Writing takes no more than this part of the time, however large the model.
_BUSY_SHARE = 0.2


class Saved(NamedTuple):
    """What is to be written, or was read.

    Attributes:
        part: what the server held; of tables perhaps only some rows.
        answered: by worker, the sequence number of the last push that it contains, so that no retry is applied twice.
    """

    part: Part
    answered: Mapping[int, int]


class RecoveryLog:
    """The files of one server in one training.

    Args:
        folder: of this server alone; it is made.
        run: names the training; files of another are not read.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder, run
        self._entries: list[dict[str, Any]] = []
        self._next = 0

    def begin(self) -> None:
        """Forgets what is there. Raises `CheckpointError` when the folder can't be made."""
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._folder.mkdir(parents=True, mode=0o700)
        except OSError as error:
            raise CheckpointError(f"The recovery folder {self._folder} can't be made: {error}.") from error

    @property
    def needs_whole(self) -> bool:
        """Whether the next file should hold everything."""
        sizes = [entry["bytes"] for entry in self._entries]
        return not sizes or sum(sizes[1:]) > max(sizes[0], _SMALLEST_TOTAL)

    def write(self, saved: Saved, whole: bool) -> None:
        """Adds a file. Raises `CheckpointError` when that is not possible; what was there still counts then.

        Args:
            whole: it holds everything, and replaces all before it.
        """
        file = write_part(self._folder / f"{self._next:08d}.safetensors", saved.part)
        self._next += 1
        before = self._entries
        entry = asdict(file) | {"answered": {str(worker): last for worker, last in saved.answered.items()}}
        entries = [entry] if whole else [*before, entry]
        unfinished = self._folder / f".tmp-{_LOG}"
        try:
            with unfinished.open("w", encoding="utf-8") as log:
                json.dump({"format": _FORMAT, "run": self._run, "files": entries}, log)
                log.flush()
                os.fsync(log.fileno())
            unfinished.rename(self._folder / _LOG)
        except OSError as error:
            raise CheckpointError(f"The recovery files in {self._folder} can't be written: {error}.") from error
        self._entries = entries
        for old in before if whole else ():
            (self._folder / old["name"]).unlink(missing_ok=True)

    def read(self) -> Saved:
        """What the files hold together; where one is damaged, what those before it hold.

        Raises `CheckpointError` when there is nothing that can be read.
        """
        path = self._folder / _LOG
        try:
            log = json.loads(path.read_text(encoding="utf-8"))
            found, run, entries = log["format"], log["run"], log["files"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"There are no recovery files that can be read: {path}: {error!r}.") from error
        if (found, run) != (_FORMAT, self._run):
            raise CheckpointError(f"The recovery files in {self._folder} are of another training, or release.")
        parts: list[Part] = []
        for entry in entries:
            try:
                parts.append(read_part(self._folder / entry["name"], SavedFile.of(entry)))
            except CheckpointError as error:
                if not parts:
                    raise
                logger.warning("%s What was saved before it is used.", error)
                break
        self._entries = entries[: len(parts)]
        self._next = 1 + max(int(Path(entry["name"]).stem) for entry in entries)
        tables = {table: overlaid([part.tables[table] for part in parts]) for table in parts[0].tables}
        answered = {int(worker): last for worker, last in self._entries[-1]["answered"].items()}
        return Saved(replace(parts[-1], tables=tables), answered)


class RecoveryWriter:
    """Writes what changed, at intervals and in a thread of its own.

    Args:
        log: of this server.
        take: gives what the server holds, in full or as far as it changed after a version.
        interval_seconds: between two files.
    """

    def __init__(self, log: RecoveryLog, take: Callable[[int | None], Saved], interval_seconds: float) -> None:
        self._log, self._take, self._interval = log, take, interval_seconds
        self._version = -1  # that the files hold
        self._replaced = True  # the server holds other rows than those that were trained since `_version`
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recovery", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def continue_from(self, version: int) -> None:
        """The files hold all that the server held at `version`."""
        self._version, self._replaced = version, False

    def write(self, replaced: bool = False) -> None:
        """Writes what changed, now. Raises `CheckpointError` when that is not possible.

        Args:
            replaced: everything may have, by other ways than training.
        """
        with self._writing:
            self._replaced = self._replaced or replaced
            whole = self._replaced or self._log.needs_whole
            saved = self._take(None if whole else self._version)
            if saved.part.version == self._version and not self._replaced:
                return
            self._log.write(saved, whole)
            self._version, self._replaced = saved.part.version, False

    def _run(self) -> None:
        told = False
        pause = 0.0
        while not self._stop.wait(pause):
            begun = time.monotonic()
            try:
                self.write()
                told = False
            except CheckpointError as error:
                if not told:
                    logger.warning("%s If this server is lost now, it comes back as it was before.", error)
                told = True
            pause = max(self._interval, (time.monotonic() - begun) / _BUSY_SHARE)

    def close(self) -> None:
        """Ends the writing; a file that is being written is finished first."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
