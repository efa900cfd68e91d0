"""A server's files of snapshots, in a local folder or below a URL."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterator
from pathlib import Path

from elasticcb.errors import CheckpointError
from elasticcb.storage.job_store import JobStore
from elasticcb.storage.remote_files import is_url
from elasticcb.storage.temporary import TemporaryFolder


@contextlib.contextmanager
def writable(place: str, scratch: Path | None) -> Iterator[Path]:
    """The path at which to write the file for `place`; for a URL, a temporary one, which is then copied there.

    Args:
        scratch: folder for temporary files; None: the system's.

    Raises `CheckpointError` if it can't be copied.
    """
    if not is_url(place):
        yield Path(place)
        return
    folder, name = posixpath.split(place)
    with _temporary(scratch) as here, contextlib.closing(JobStore(folder)) as store:
        yield here / name
        store.put_file(name, here / name)


def _temporary(scratch: Path | None) -> TemporaryFolder:
    try:
        return TemporaryFolder(scratch)
    except OSError as error:
        raise CheckpointError(f"No folder for files on their way to or from a URL can be made: {error}.") from error


class Files:
    """The files in a folder, while they are read: a context manager. Those of a URL are copied when they are needed."""

    def __init__(self, folder: str, scratch: Path | None) -> None:
        self.name = folder
        self._until_end = contextlib.ExitStack()
        self._store: JobStore | None = None
        if is_url(folder):
            self._store = self._until_end.enter_context(contextlib.closing(JobStore(folder)))
            self._here = self._until_end.enter_context(_temporary(scratch))
        else:
            self._here = Path(folder)

    def path(self, name: str) -> Path:
        """Where the file is here. Raises `CheckpointError` if it can't be copied."""
        path = self._here / name
        if self._store is not None and not path.exists():
            try:
                self._store.get_file(name, path)
            except FileNotFoundError:
                raise CheckpointError(f"The file {self.name}/{name} is missing.") from None
        return path

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        self._until_end.close()
