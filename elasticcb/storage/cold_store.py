"""Disk storage of a parameter server for rows of embedding tables that don't fit in its memory.

The files are a cache of this process and not read by any other. A server that replaces it starts from recovery files or
a checkpoint, as usual, and removes them.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from elasticcb.errors import ElasticCBError, TableError
from elasticcb.process.system import missing_module
from elasticcb.storage.local_folders import TemporaryFolder, abandoned_folders

_LIBRARY = "rocksdict"
# A tree of sorted files, from which single rows are read in random order.
_BUFFER_BYTES = 64 << 20  # size of the write buffer in memory
_CACHE_BYTES = 64 << 20  # size of the read cache; the system caches more blocks
_BLOCK_BYTES = 4 << 10
_BUFFER_BLOOM = 0.05  # share of the buffer, for the same purpose
_BLOOM_BITS = 10  # per key: a missing id is searched in one of a hundred files


def missing_library() -> str:
    """Message about what must be installed; "": nothing."""
    return missing_module("it", "disk", _LIBRARY)


class ColdStore:
    """Byte records by byte keys: RocksDB in its own folder, which is created with the first record.

    Args:
        parent: folder in which to create it; None: the system's temporary folder. Folders of killed processes there are
            removed.

    Raises `ElasticCBError` if the library is missing.
    """

    def __init__(self, parent: Path | None) -> None:
        missing = missing_library()
        if missing:
            raise ElasticCBError(f"Rows of embedding tables can't go to disk: {missing}")
        self._library = importlib.import_module(_LIBRARY)
        self._parent = parent
        self._folder: TemporaryFolder | None = None
        self._opened: Any = None
        self._closed = False
        self._spaces = 0
        self._lock = threading.Lock()
        if parent is not None:
            for folder in abandoned_folders(parent):
                shutil.rmtree(folder, ignore_errors=True)

    def new_space(self) -> int:
        """A unique number for prefixes of keys."""
        with self._lock:
            self._spaces += 1
            return self._spaces

    def write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = ()) -> None:
        """Sets and removes records atomically."""
        with self._errors("written to"):
            batch = self._library.WriteBatch(raw_mode=True)
            put, delete = batch.put, batch.delete
            for key, record in puts:
                put(key, record)
            for key in deletes:
                delete(key)
            self._database.write(batch)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._errors("read from"):
            found: list[bytes | None] = self._database.get(keys)
            return found

    def snapshot(self) -> Any:
        """A snapshot; `get_at` reads its records."""
        with self._errors("read from"):
            return self._database.snapshot()

    def get_at(self, snapshot: Any, keys: Sequence[bytes]) -> list[bytes | None]:
        def get(key: bytes) -> bytes | None:
            try:
                record: bytes = snapshot[key]
            except Exception as error:
                if str(error) != "key not found":
                    raise
                return None
            return record

        with self._errors("read from"):
            return [get(key) for key in keys]

    def items(self, first: bytes, end: bytes, keys_only: bool = False) -> Iterator[Any]:
        """Yields a snapshot of (key, record) from `first` on, before `end`; or only the keys."""
        with self._errors("read from"):
            options = self._library.ReadOptions()
            options.set_iterate_upper_bound(end)
            read = self._database.keys if keys_only else self._database.items
            found: Iterator[Any] = read(from_key=first, read_opt=options)
        return self._guarded(found, options)

    def _guarded(self, found: Iterator[Any], options: Any) -> Iterator[Any]:
        # `options` owns the bound that `found` uses.
        with self._errors("read from"):
            yield from found

    def drop(self, first: bytes, end: bytes) -> None:
        """Removes the keys from `first` on, before `end`, which are no longer needed."""
        with contextlib.suppress(Exception):  # when it is closed they are gone
            if self._opened is not None:
                self._opened.delete_range(first, end)

    def close(self) -> None:
        """Removes all files. Nothing can be read afterwards."""
        with self._lock:
            self._closed = True
            opened, folder = self._opened, self._folder
        if opened is not None:
            with contextlib.suppress(Exception):
                opened.cancel_all_background(False)
                opened.close()
        if folder is not None:
            folder.remove()

    @property
    def _database(self) -> Any:
        if self._opened is None:
            with self._lock:
                if self._opened is None and not self._closed:
                    self._opened = self._open()
        if self._closed:
            raise self._library.DbClosedError("it is closed because the server ends")
        return self._opened

    def _open(self) -> Any:
        library = self._library
        if self._parent is not None:
            self._parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = TemporaryFolder(self._parent)
        blocks = library.BlockBasedOptions()
        blocks.set_block_size(_BLOCK_BYTES)
        blocks.set_bloom_filter(_BLOOM_BITS, False)
        blocks.set_block_cache(library.Cache(_CACHE_BYTES))
        options = library.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_block_based_table_factory(blocks)
        options.set_compression_type(library.DBCompressionType.none())  # trained floats can't be compressed
        options.set_write_buffer_size(_BUFFER_BYTES)
        options.set_keep_log_file_num(1)
        options.set_memtable_whole_key_filtering(True)  # filter for missing keys
        options.set_memtable_prefix_bloom_ratio(_BUFFER_BLOOM)
        # In a subfolder: the outer folder's time shows when it was created.
        database = library.Rdict(str(self._folder.path / "rows"), options)
        unlogged = library.WriteOptions()
        unlogged.memtable_insert_hint_per_batch = True  # keys come in order
        unlogged.disable_wal = True  # nobody reads the files after this process has ended
        database.set_write_options(unlogged)
        return database

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Converts errors of the library and the file system to a `TableError`; if the server is ending, to an
        `ElasticCBError`."""
        try:
            yield
        except Exception as error:
            if type(error) is not Exception and not isinstance(error, (OSError, self._library.DbClosedError)):
                raise  # not an error of the library, which has no error class
            if isinstance(error, self._library.DbClosedError):
                raise ElasticCBError(f"Rows of embedding tables can't be {what} disk: {error}.") from error
            folder = self._folder.path if self._folder is not None else self._parent
            raise TableError(
                f"Rows of embedding tables that don't fit in memory can't be {what} {folder}: {error}. Free space on "
                "that disk, allow more memory for them, or start more parameter servers; then "
                " start the job again from its last checkpoint."
            ) from error
