"""The recovery files from which a killed parameter server is restored.

A folder has one file with the server's full state at some time, and files with later changes: the whole dense part, and
the embedding rows trained since the previous file. `log.json`, which is replaced atomically, lists the valid files in
order.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from elasticcb.checkpoint.parts import Written, put_together
from elasticcb.checkpoint.saved_table import SavedTable
from elasticcb.checkpoint.shard_file import Part, SavedFile, check_file, read_part, write_part
from elasticcb.errors import CheckpointError, ElasticCBError
from elasticcb.sharding.partition import Slice, VariableSpec, partition
from elasticcb.sharding.shard_map import ShardMap
from elasticcb.storage import durable

logger = logging.getLogger(__name__)

_LOG = "log.json"
SET_ASIDE = "set-aside-"  # prefix of folders that are no longer read
_FORMAT = 5  # 1 to 3: rows were spread over servers in other ways; 4: without versions
# Changes are merged into a new full file once they are as large as the full one, and at least this large.
_SMALLEST_TOTAL = 64 << 20  # bytes


class Saved(NamedTuple):
    """Data to write, or that was read.

    Attributes:
        part: content of the server; of tables possibly only some rows.
        answered: by worker, the sequence number of the last push included, so that no retry is applied twice.
        final: the server had answered its last call before.
    """

    part: Part
    answered: Mapping[int, int]
    final: bool = False


class RecoveryLog:
    """The recovery files of one server in one training.

    Args:
        run: name of the training; files of others are ignored.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder, run
        self._entries: list[dict[str, Any]] = []
        self._next = 0
        self._is_begun = False
        self._token = secrets.token_hex(4)  # makes file names unique to this process
        self._own: tuple[int, int] | None = None  # identity of the log last written by this process

    def _begin(self) -> None:
        """Discards existing files; moves those of this training aside if some are damaged.

        Raises `CheckpointError` when the folder can't be created.
        """
        try:
            if self._is_of_another_training():
                shutil.rmtree(self._folder, ignore_errors=True)
            else:
                aside = self._folder.with_name(f"{SET_ASIDE}{self._folder.name}-{secrets.token_hex(4)}")
                self._folder.rename(aside)
                logger.warning("Unused recovery files were moved to %s", aside)
            self._folder.mkdir(parents=True, mode=0o700)
            self._is_begun = True
        except OSError as error:
            raise CheckpointError(f"The recovery folder {self._folder} can't be made: {error}.") from error

    def _is_of_another_training(self) -> bool:
        try:
            return bool(durable.read_document(self._folder / _LOG)["run"] != self._run)
        except FileNotFoundError:
            return True  # also true if the first file was never completed
        except (OSError, ValueError, KeyError):
            return False

    @property
    def needs_whole(self) -> bool:
        """Whether the next file should contain everything."""
        sizes = [entry["bytes"] for entry in self._entries]
        return not sizes or sum(sizes[1:]) > max(sizes[0], _SMALLEST_TOTAL)

    def write(self, saved: Saved, whole: bool) -> None:
        """Adds a file. Raises `CheckpointError` on failure; existing files stay valid.

        Args:
            whole: it contains everything, and replaces all previous files.
        """
        if not self._is_begun:
            self._begin()
        self._check_is_ours()
        file = write_part(self._folder / f"{self._next:08d}-{self._token}.safetensors", saved.part)
        self._next += 1
        before = self._entries
        answered = {str(worker): last for worker, last in saved.answered.items()}
        entry = asdict(file) | {"version": saved.part.version, "answered": answered, "final": saved.final}
        entries = [entry] if whole else [*before, entry]
        self._write_log(entries)
        for old in before if whole else ():
            (self._folder / old["name"]).unlink(missing_ok=True)

    def _write_log(self, entries: list[dict[str, Any]]) -> None:
        self._check_is_ours()
        path = self._folder / _LOG
        try:
            durable.write_document(path, {"format": _FORMAT, "run": self._run, "files": entries})
            self._own = _identity(path)
        except OSError as error:
            raise CheckpointError(f"The recovery files in {self._folder} can't be written: {error}.") from error
        self._entries = entries

    def _check_is_ours(self) -> None:
        found = _identity(self._folder / _LOG)  # None: missing or unreachable, which writing will report
        if self._own is not None and found is not None and found != self._own:
            raise CheckpointError(
                f"Another parameter server has replaced this one and writes the files in {self._folder}."
            )

    def take_over(self) -> Saved:
        """Like `read`; a previous server process, if alive, can't write any more, and files are added to these."""
        saved = self.read()
        last = self._entries[-1] | {"final": False}  # the server answers again
        try:
            durable.drop_unfinished(self._folder)
            self._write_log([*self._entries[:-1], last])
        except (CheckpointError, OSError) as error:  # nor can the previous process
            logger.warning("%s", error)
        self._is_begun = True
        return saved

    def read(self) -> Saved:
        """The combined content of the files, up to the first damaged one. Tables stay on disk until they are read.

        Raises `CheckpointError` when nothing can be read.
        """
        files = self.find()
        part = read_part(files[-1])
        tables = {number: SavedTable(number, files) for number in part.tables}
        return self.described(replace(part, tables=tables))

    def described(self, part: Part) -> Saved:
        """The content of the files that were found, with what is known of it; sets its version."""
        last = self._entries[-1]
        answered = {int(worker): number for worker, number in last["answered"].items()}
        return Saved(replace(part, version=last["version"]), answered, last["final"])

    def find(self) -> list[Path]:
        """The files, up to the first damaged one. Raises `CheckpointError` when there is none."""
        path = self._folder / _LOG
        try:
            log = durable.read_document(path, _FORMAT)
            found, run, entries = log["format"], log["run"], log["files"]
        except durable.NewerFormatError as error:
            raise CheckpointError(str(error)) from error
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"No readable recovery files: {path}: {error!r}.") from error
        if (found, run) != (_FORMAT, self._run):
            raise CheckpointError(f"The recovery files in {self._folder} belong to another training or release.")
        files: list[Path] = []
        for entry in entries:
            try:
                check_file(self._folder / entry["name"], SavedFile.of(entry))
            except CheckpointError as error:
                if not files:
                    raise
                logger.warning("%s Using what was saved before it.", error)
                break
            files.append(self._folder / entry["name"])
        self._entries = entries[: len(files)]
        self._next = 1 + max(int(Path(entry["name"]).stem.partition("-")[0]) for entry in entries)
        if len(files) < len(entries):
            self._entries[-1] = self._entries[-1] | {"final": False}
        return files


class RecoveryWriter:
    """Writes what has changed since the last file.

    Args:
        take: returns the server's content, in full or as changed after a version.
    """

    def __init__(self, log: RecoveryLog, take: Callable[[int | None], Saved]) -> None:
        self._log, self._take = log, take
        self._version = -1  # version in the files
        self._replaced = True  # rows may have changed in other ways than training since `_version`
        self._writing = threading.Lock()

    def continue_from(self, version: int) -> None:
        """The files contain the server's state at `version`."""
        self._version, self._replaced = version, False

    def write(self, replaced: bool = False, final: bool = False) -> None:
        """Writes changes now. Raises `CheckpointError` on failure.

        Args:
            replaced: everything may have changed, in other ways than training.
            final: the server has answered its last call.
        """
        with self._writing:
            self._replaced = self._replaced or replaced
            whole = self._replaced or self._log.needs_whole
            saved = self._take(None if whole else self._version)
            try:
                if self._replaced or final or saved.part.version != self._version:
                    self._log.write(saved._replace(final=final), whole)
                    self._version, self._replaced = saved.part.version, False
            finally:
                saved.part.release()

    def close(self) -> None:
        """Returns once no file is being written."""
        with self._writing:
            pass


def _identity(path: Path) -> tuple[int, int] | None:
    """Identity of an existing file; the inode of a removed file may be reused."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def log_folder(root: Path, index: int, map_version: int) -> Path:
    """Folder of server `index` under one map."""
    return root / (f"ps-{index}-map-{map_version}" if map_version else f"ps-{index}")


def forget_older(root: Path, map_version: int) -> None:
    """Removes files written under older maps."""
    for folder in root.glob("ps-*"):
        _, _, version = folder.name.partition("-map-")
        if int(version or 0) < map_version:
            shutil.rmtree(folder, ignore_errors=True)


def read_by_older_map(
    root: Path,
    run: str,
    specs: Sequence[VariableSpec],
    split: bool,
    slices: Sequence[Slice],
    index: int,
    shard_map: ShardMap,
) -> Saved:
    """Content written under the map before `shard_map`, for its server `index`: of variables `slices`, of tables all
    rows.

    Raises `CheckpointError` when files of a server are missing or damaged.
    """
    before = shard_map.version - 1
    logs: list[RecoveryLog] = []
    while (folder := log_folder(root, len(logs), before)).is_dir():
        logs.append(RecoveryLog(folder, run))
    if not logs:
        raise CheckpointError(f"There are no recovery files of map {before} in {root}.")
    held = partition(specs, len(logs), split)
    written = [Written(own, log.find()) for own, log in zip(held, logs, strict=True)]
    try:
        part = put_together(written, ShardMap(len(logs)), specs, slices, index, shard_map)
    except ElasticCBError as error:
        raise CheckpointError(f"The recovery files in {root} can't be used: {error}") from error
    saved = [log.described(part) for log in logs]
    answered: dict[int, int] = {}
    for each in saved:
        answered |= {worker: max(last, answered.get(worker, 0)) for worker, last in each.answered.items()}
    version = min(each.part.version for each in saved)
    return Saved(replace(part, version=version), answered, final=all(each.final for each in saved))
