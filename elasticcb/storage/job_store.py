"""The folder of a job below a URL: what another machine needs to continue the job.

An object of a store can't be appended to, and may be replaced by an owner that does not know yet that it is not the
owner any more. So names contain the term of the master that wrote them, and owners are found by conditional writes.
"""

from __future__ import annotations

import contextlib
import posixpath
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elasticcb.errors import StoreError, describe
from elasticcb.process.system import is_full
from elasticcb.storage import durable
from elasticcb.storage.durable import TEMPORARY
from elasticcb.storage.remote_files import opened, protocols_of

_WITH_FOLDERS = {"sftp", "ssh", "file", "local", "memory", "smb"}  # protocols; to others, a name is all that counts

# How to open a file that nobody else has created, by protocol. There, fsspec's `pipe_file(mode="create")` looks first
# and writes then, so that two could be the first; and what is written appears bit by bit.
_EXCLUSIVE = {"file": "xb", "local": "xb", "sftp": "wxb", "ssh": "wxb"}

# How s3fs uploads: pieces in memory at the same time, of which there are at most 10,000; by default 500 MB.
_IN_PIECES = {"chunksize": 16 << 20, "max_concurrency": 4}

OWNERS, LOGS = "owners", "logs"  # folders there
HOLDER_FILE = "store.json"  # in a local folder: which copy it belongs to, and a name that no other folder has
_MAKE_TRIES = 5  # to make a folder


def _exclusive_mode(files: Any) -> str:
    """Of `_EXCLUSIVE`; "": none."""
    return next((_EXCLUSIVE[each] for each in protocols_of(files) if each in _EXCLUSIVE), "")


def finished_name(name: str) -> str:
    """The name that an unfinished file will have; that of a finished one is its own."""
    return name.removeprefix(TEMPORARY).partition("-")[2] if name.startswith(TEMPORARY) else name


def holder_of(folder: Path) -> dict[str, str]:
    """Which copy a local folder belongs to: its URL ("store"), and its name there ("holder"); empty if none."""
    with contextlib.suppress(OSError, ValueError):
        return durable.read_document(folder / HOLDER_FILE)
    return {}


class JobStore:
    """Reads and writes below a URL that fsspec supports; a context manager. Names are relative paths with `/`. Not
    thread-safe.

    Every method raises `StoreError` when the store does not answer, or refuses.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._connection = contextlib.ExitStack()
        self._files: Any = None  # None: not connected
        self._root = ""

    @contextlib.contextmanager
    def _connected(self, what: str) -> Iterator[Any]:
        """The file system; a new connection after an error."""
        try:
            if self._files is None:
                self._files, self._root = self._connection.enter_context(opened(self.url))
            yield self._files
        except Exception as error:  # each file system has its own error types
            if what == "read" and isinstance(error, FileNotFoundError):
                raise
            self.close()
            raise StoreError(f"{self.url} can't be {what}: {describe(error)}.") from error

    def _at(self, name: str) -> str:
        return posixpath.join(self._root, name)

    def put(self, name: str, content: bytes) -> None:
        """Writes a file, or replaces it, at once."""
        with self._connected("written to") as files:
            self._write(name, lambda place: files.pipe_file(place, content))

    def put_file(self, name: str, path: Path) -> None:
        """Copies a local file there, like `put`. Raises `FileNotFoundError` if it is gone."""
        sent = path.stat().st_size
        with self._connected("written to") as files:
            pieces = _IN_PIECES if "s3" in protocols_of(files) else {}
            self._write(name, lambda place: files.put_file(str(path), place, **pieces))
            files.invalidate_cache()
            arrived = files.info(self._at(name))["size"]
            if arrived != sent:
                raise OSError(f"{arrived} bytes of {name} arrived, {sent} were sent")

    def _write(self, name: str, write: Callable[[str], None]) -> None:
        """Calls `write` with a path there, so that others find the old file or the new one, also after a crash."""
        self._make_parent(name)
        if not _exclusive_mode(self._files):
            write(self._at(name))
            return
        folder, base = posixpath.split(name)
        unfinished = self._at(posixpath.join(folder, f"{TEMPORARY}{secrets.token_hex(4)}-{base}"))
        try:
            write(unfinished)
            with contextlib.suppress(OSError):
                self._files.mv(unfinished, self._at(name))
                return
            write(self._at(name))  # an SFTP server that replaces no file by renaming another
            self._files.rm_file(unfinished)
        except BaseException:
            with contextlib.suppress(Exception):
                self._files.rm_file(unfinished)
            raise

    def _make_parent(self, name: str) -> None:
        if _WITH_FOLDERS & {*protocols_of(self._files)}:
            folder = posixpath.dirname(self._at(name))
            for left in reversed(range(_MAKE_TRIES)):
                try:
                    self._files.makedirs(folder, exist_ok=True)
                    return
                except OSError:  # another process may have made it, or a folder above, at the same time
                    self._files.invalidate_cache()
                    if not left:
                        raise

    def create(self, name: str, content: bytes) -> bool:
        """Writes a file that nobody has written, with content that nobody else writes; returns whether this was the
        first, also if the store's answer is lost and it is asked again. Raises `StoreError` if it can't tell."""
        with self._connected("written to") as files:
            self._make_parent(name)
            mode = _exclusive_mode(files)
            try:
                if mode:
                    with files.open(self._at(name), mode) as file:
                        file.write(content)
                else:
                    files.pipe_file(self._at(name), content, mode="create")
            except OSError as error:  # of an SFTP server, it does not say why
                files.invalidate_cache()
                if is_full(error) or not files.exists(self._at(name)):
                    raise
                return bool(files.cat_file(self._at(name)) == content)
            return True

    def tells_who_was_first(self) -> bool:
        """Whether it has conditional writes, so that two can't own the same."""
        name = f"probe-{secrets.token_hex(4)}"
        try:
            is_atomic = self.create(name, b"1") and not self.create(name, b"2")
            # Of the others, those of object stores have a call for it.
            return is_atomic and (bool(_exclusive_mode(self._files)) or bool(getattr(self._files, "async_impl", False)))
        except StoreError as error:
            if not isinstance(error.__cause__, (NotImplementedError, TypeError, ValueError)):
                raise
            return False
        finally:
            with contextlib.suppress(StoreError):  # the other one says why
                self.remove(name)

    def get(self, name: str) -> bytes:
        """Raises `FileNotFoundError` if there is no such file."""
        with self._connected("read") as files:
            return bytes(files.cat_file(self._at(name)))

    def get_document(self, name: str) -> dict[str, Any]:
        """The JSON object in a file; its checksum is verified if it has one. Raises `FileNotFoundError` if there is no
        such file, and `StoreError` if it is damaged."""
        try:
            return durable.document_in(self.get(name), f"{self.url}/{name}")
        except durable.DamagedFileError as error:
            raise StoreError(f"{error}. Restore a copy of the file, or start a new job in another folder.") from error

    def get_file(self, name: str, path: Path) -> None:
        """Copies a file from there. Raises `FileNotFoundError` if there is no such file."""
        with self._connected("read") as files:
            files.get_file(self._at(name), str(path))

    def names(self, folder: str, unfinished: bool = False) -> list[str]:
        """The names of the files in a folder, sorted, without the folder; none if it does not exist. `unfinished`: also
        those that are being written, or were when their process was killed (`finished_name`)."""
        with self._connected("read") as files:
            files.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                found = files.ls(self._at(folder).rstrip("/"), detail=False)
                names = sorted(posixpath.basename(path.rstrip("/")) for path in found)
                return [name for name in names if unfinished or not name.startswith(TEMPORARY)]
            return []

    def remove(self, name: str) -> None:
        """Removes a file; it need not exist."""
        with self._connected("written to") as files, contextlib.suppress(FileNotFoundError):
            files.rm_file(self._at(name))

    def remove_all(self, folder: str = "") -> None:
        """Removes all files, or those in a folder; there need not be any."""
        with self._connected("written to") as files, contextlib.suppress(FileNotFoundError):
            files.invalidate_cache()
            files.rm(self._at(folder).rstrip("/"), recursive=True)

    def changed(self, name: str) -> float:
        """When a file was written, by the clock of the store, in seconds since 1970. Raises `FileNotFoundError`."""
        with self._connected("read") as files:
            files.invalidate_cache()
            return float(files.modified(self._at(name)).timestamp())

    def now(self) -> float:
        """The clock of the store."""
        name = f"clock-{secrets.token_hex(4)}"
        self.put(name, b"")
        try:
            return self.changed(name)
        finally:
            self.remove(name)

    def close(self) -> None:
        """Ends the connection; a later call makes another."""
        self._files = None
        with contextlib.suppress(Exception):
            self._connection.close()

    def __enter__(self) -> JobStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
