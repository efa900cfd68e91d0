"""The folder from which a killed program resumes when it runs again; stores the state of each `fit`."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elasticcb.errors import UsageError
from elasticcb.master.journal import Journal
from elasticcb.security.private_folder import make_private
from elasticcb.settings import FIT_FILE, JOURNAL_FILE
from elasticcb.storage import durable
from elasticcb.storage.folder_lock import FolderLock


class JobFolder:
    """The `job_dir` of a cluster, with a folder for each of its fits: `fit-1`, `fit-2`, …"""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._ended = 0  # fits
        self._under_way = False  # a fit is running, or the last one failed
        self._lock = FolderLock(self.path, f"job_dir={str(self.path)!r}")

    def open(self) -> None:
        """Locks the folder until `close`. Raises `UsageError` if another process uses it."""
        try:
            make_private(self.path)
            self._lock.take()
        except OSError as error:
            raise UsageError(f"job_dir={str(self.path)!r} can't be used: {error}. Choose another folder.") from None

    @contextlib.contextmanager
    def next_fit(self) -> Iterator[KeptFit]:
        """The state of the first unfinished fit; a fit that returns is finished."""
        fit = KeptFit(self.path / f"fit-{self._ended + 1}")
        self._under_way = True
        try:
            yield fit
        finally:
            fit.journal.close()
        self._under_way = False
        self._ended += 1

    def close(self, done: bool) -> None:
        """Unlocks the folder.

        Args:
            done: the program no longer needs finished fits; the next run trains from scratch, unless its last fit
                failed.
        """
        if not self._lock.is_held:
            return
        done, number = done and not self._under_way, 1
        while done and (self.path / f"fit-{number}" / FIT_FILE).is_file():
            shutil.rmtree(self.path / f"fit-{number}", ignore_errors=True)
            number += 1
        self._ended, self._under_way = 0, False
        self._lock.release()


class KeptFit:
    """The stored state of one fit, while the caller works on it.

    Attributes:
        seed: seed for shuffling its data; None: it has not started yet.

    Raises:
        UsageError: the stored state can't be used.
        JobFailedError: the journal can't be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begun_with: dict[str, Any] = {}
        try:
            make_private(folder)
        except OSError as error:
            raise UsageError(f"{folder} can't be created: {error}. Choose another job_dir.") from None
        self.journal = Journal(folder / JOURNAL_FILE)
        if self.has_begun:
            try:
                self._begun_with = durable.read_document(folder / FIT_FILE)
                self.seed: int | None = self._begun_with.pop("seed")
            except (OSError, ValueError, KeyError) as error:
                self.journal.close()
                raise UsageError(
                    f"{folder / FIT_FILE}, which stores the inputs of the fit, can't be read ({error!r}). Remove "
                    f"{folder} to start from scratch."
                ) from None
        else:
            self.seed = None

    @property
    def has_begun(self) -> bool:
        """Whether an earlier run of the program started it."""
        return self.journal.memory.begun

    @property
    def has_ended(self) -> bool:
        """Whether an earlier run of the program completed it."""
        return self.journal.memory.over

    @property
    def story(self) -> str:
        """Describes the progress of an earlier run."""
        memory = self.journal.memory
        where = f"{self.folder.name} of {self.folder.parent}"
        if self.has_ended:
            return (
                f"{where} was completed by an earlier run: model and History are restored from it. Remove it to train "
                "again."
            )
        done = (memory.queue or {}).get("accounting", {}).get("records_trained", {}).get(str(memory.ended_epochs), 0)
        return f"Resuming {where}: epochs done: {memory.ended_epochs}; batches of the next: {done}."

    def begin(self, given: Mapping[str, Any], seed: int) -> None:
        """Stores the inputs of the fit, or compares them if it was started before.

        Raises `UsageError` if an input differs.
        """
        if self.has_begun:
            for name, value in given.items():
                self._compare(name, self._begun_with.get(name), value)
            return
        try:
            durable.write_document(self.folder / FIT_FILE, {**given, "seed": seed})
        except OSError as error:
            raise UsageError(f"{self.folder / FIT_FILE} can't be written: {error}.") from None

    def _compare(self, name: str, before: Any, now: Any) -> None:
        if before == now:
            return
        if isinstance(before, list) and isinstance(now, list):
            place = next((i for i, (old, new) in enumerate(zip(before, now, strict=False)) if old != new), None)
            if place is None:
                before, now = f"{len(before)} of them", f"{len(now)}"
            else:
                name, before, now = f"{name}, number {place + 1}", before[place], now[place]
        raise UsageError(
            f"{self.folder.name} of {self.folder.parent} was started with other inputs. {name[0].upper()}{name[1:]}: "
            f"{before} then, {now} now. Run the program with the same inputs, or choose another job_dir to start from "
            "scratch."
        )
