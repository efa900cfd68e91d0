"""The folder by which a program that was killed goes on when it is run again: what it keeps of each `fit`."""

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
from elasticcb.settings import JOURNAL_FILE
from elasticcb.storage import durable
from elasticcb.storage.folder_lock import FolderLock

_FIT_FILE = "fit.json"  # what a fit was begun with; it marks a folder as one of ours


class JobFolder:
    """The `job_dir` of a cluster, with a folder for each of its fits: `fit-1`, `fit-2`, …

    Args:
        path: is made when it is first used.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._ended = 0  # fits
        self._under_way = False  # a fit, or the last one failed
        self._lock = FolderLock(self.path, f"job_dir={str(self.path)!r}")

    def open(self) -> None:
        """Keeps others away from it until `close`. Raises `UsageError` when another one uses it."""
        try:
            make_private(self.path)
            self._lock.take()
        except OSError as error:
            raise UsageError(f"job_dir={str(self.path)!r} can't be used: {error}. Name another folder.") from None

    @contextlib.contextmanager
    def next_fit(self) -> Iterator[KeptFit]:
        """What is kept of the first fit that has not ended; one that returns has."""
        fit = KeptFit(self.path / f"fit-{self._ended + 1}")
        self._under_way = True
        try:
            yield fit
        finally:
            fit.journal.close()
        self._under_way = False
        self._ended += 1

    def close(self, done: bool) -> None:
        """Lets others use it.

        Args:
            done: the program needs no fits that have ended any more; when it is run again, it trains anew, unless its
                last one has failed.
        """
        if not self._lock.is_held:
            return
        done, number = done and not self._under_way, 1
        while done and (self.path / f"fit-{number}" / _FIT_FILE).is_file():
            shutil.rmtree(self.path / f"fit-{number}", ignore_errors=True)
            number += 1
        self._ended, self._under_way = 0, False
        self._lock.release()


class KeptFit:
    """What is kept of one fit, while the caller works on it.

    Attributes:
        journal: of its job.
        seed: that its data were shuffled with; None: it has not begun yet.

    Raises:
        UsageError: what is there can't be used.
        JobFailedError: the journal can't be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begun_with: dict[str, Any] = {}
        try:
            make_private(folder)
        except OSError as error:
            raise UsageError(f"{folder} can't be made: {error}. Name another job_dir.") from None
        self.journal = Journal(folder / JOURNAL_FILE)
        if self.has_begun:
            try:
                self._begun_with = durable.read_document(folder / _FIT_FILE)
                self.seed: int | None = self._begun_with.pop("seed")
            except (OSError, ValueError, KeyError) as error:
                self.journal.close()
                raise UsageError(
                    f"{folder / _FIT_FILE}, which says what the fit was begun with, can't be read ({error!r}). Remove "
                    f"{folder} to begin anew."
                ) from None
        else:
            self.seed = None

    @property
    def has_begun(self) -> bool:
        """Whether an earlier run of the program has begun it."""
        return self.journal.memory.queue is not None

    @property
    def has_ended(self) -> bool:
        """Whether an earlier run of the program has brought it to its end."""
        return self.journal.memory.over

    @property
    def story(self) -> str:
        """What an earlier run has done, for people."""
        memory = self.journal.memory
        where = f"{self.folder.name} of {self.folder.parent}"
        if self.has_ended:
            return f"{where} had ended before: model and History are taken from there. Remove it to train anew."
        done = (memory.queue or {}).get("accounting", {}).get("records_trained", {}).get(str(memory.ended_epochs), 0)
        return f"{where} goes on: {memory.ended_epochs} epochs had ended, and {done} batches of the next were done."

    def begin(self, given: Mapping[str, Any], seed: int) -> None:
        """Writes down what the fit begins with; or compares it, if it had begun.

        Args:
            given: by name in words, JSON values.

        Raises `UsageError` when something is not as it was.
        """
        if self.has_begun:
            for name, value in given.items():
                self._compare(name, self._begun_with.get(name), value)
            return
        try:
            durable.write_document(self.folder / _FIT_FILE, {**given, "seed": seed})
        except OSError as error:
            raise UsageError(f"{self.folder / _FIT_FILE} can't be written: {error}.") from None

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
            f"{self.folder.name} of {self.folder.parent} was begun by another program. {name[0].upper()}{name[1:]}: "
            f"{before} then, {now} now. Run it as it was, or name another job_dir to begin anew."
        )
