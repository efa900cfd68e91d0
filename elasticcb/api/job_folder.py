"""The folder from which a killed program resumes when it runs again; stores the state of each `fit`."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elasticcb.errors import ReplacedError, StoreError, UsageError
from elasticcb.master.job_copy import JobCopy, refuse_copy, refuse_path
from elasticcb.master.journal import Journal
from elasticcb.master.master import Master
from elasticcb.security.socket_folder import check_temporary, make_private
from elasticcb.settings import FIT_FILE, JOURNAL_FILE
from elasticcb.storage import durable
from elasticcb.storage.folder_lock import FolderLock
from elasticcb.storage.job_store import JobStore, holder_of
from elasticcb.storage.local_folders import TemporaryFolder
from elasticcb.storage.remote_files import is_url
from elasticcb.storage.store_lock import newest_owner, wait_until_free

logger = logging.getLogger(__name__)


class JobFolder:
    """The `job_dir` of a cluster, with a folder for each of its fits: `fit-1`, `fit-2`, …

    Args:
        path: a folder or a URL.
        directory: where to work if it is a URL; None: in a temporary folder.
    """

    def __init__(self, path: str | os.PathLike[str], directory: str | os.PathLike[str] | None) -> None:
        given = os.fspath(path)
        self._url = given.rstrip("/") if is_url(given) else ""
        self._place = directory if self._url else path  # None: a temporary folder
        self._held = contextlib.ExitStack()  # until it is closed
        self._path: Path | None = None  # None: it is closed
        self._copies: list[JobCopy] = []  # below the URL, of fits that have ended
        self._ended = 0  # fits
        self._under_way = False  # a fit is running, or the last one failed

    def open(self) -> None:
        """Locks the folder until `close`. Raises `UsageError` if another process uses it."""
        if self._path is not None:
            return
        with contextlib.ExitStack() as held:
            if self._place is None:
                check_temporary(tempfile.gettempdir())
                path = held.enter_context(TemporaryFolder()) / "job"
            else:
                path = Path(self._place).absolute()
            name = f"{'directory' if self._url else 'job_dir'}={str(path)!r}"
            if not self._url:
                refuse_copy(path)  # before the folder has a lock, which would refuse the URL
            try:
                make_private(path)
                held.enter_context(FolderLock(path, name))
            except OSError as error:
                raise UsageError(f"{name} can't be used: {error}. Choose another folder.") from None
            if self._url:
                refuse_path(self._url)
                self._refuse_others(path)
            else:
                refuse_copy(path)
            self._path, self._held = path, held.pop_all()

    def _refuse_others(self, here: Path) -> None:
        """Waits until nobody works on the newest fit below the URL. Raises `UsageError` if another program does."""
        number = 0
        while True:
            name = f"fit-{number + 1}"
            with JobStore(f"{self._url}/{name}") as store:
                if not newest_owner(store)[0]:
                    break
            number += 1
        if number:
            with JobStore(f"{self._url}/fit-{number}") as store:
                if newest_owner(store)[1].get("holder") != holder_of(here / f"fit-{number}").get("holder"):
                    wait_until_free(store, _say)

    @contextlib.contextmanager
    def next_fit(self) -> Iterator[KeptFit]:
        """The state of the first unfinished fit; a fit that returns is finished."""
        assert self._path is not None
        name = f"fit-{self._ended + 1}"
        fit = KeptFit(self._path / name, f"{self._url}/{name}" if self._url else "")
        self._under_way = True
        try:
            yield fit
        finally:
            fit.journal.close()
        self._under_way = False
        self._ended += 1
        if fit.copy is not None:
            self._copies.append(fit.copy)

    def close(self, done: bool) -> None:
        """Unlocks the folder.

        Args:
            done: the program no longer needs finished fits; the next run trains from scratch, unless its last fit
                failed.
        """
        if self._path is None:
            return
        done, number = done and not self._under_way, 1
        while done and (self._path / f"fit-{number}" / FIT_FILE).is_file():
            shutil.rmtree(self._path / f"fit-{number}", ignore_errors=True)
            number += 1
        for copy in self._copies if done else ():
            try:
                copy.remove()
            except (StoreError, ReplacedError) as error:
                logger.warning("%s Remove the folder, or the next run of the program returns its results.", error)
        self._copies, self._ended, self._under_way, self._path = [], 0, False, None
        self._held.close()


class KeptFit:
    """The stored state of one fit, while the caller works on it.

    Args:
        url: of its copy; "": none.

    Attributes:
        copy: below the URL, which has become this program's.
        seed: seed for shuffling its data; None: it has not started yet.

    Raises:
        UsageError: the stored state can't be used, or another program uses it.
        JobFailedError: the journal can't be read or written.
        StoreError: the URL can't be read or written to.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.name = f"{folder.name} of {url.rpartition('/')[0] or folder.parent}"
        self._begun_with: dict[str, Any] = {}
        try:
            make_private(folder)
        except OSError as error:
            raise UsageError(f"{folder} can't be created: {error}. Choose another job_dir.") from None
        self.copy = JobCopy.taken(url, folder, True, _say, url.rpartition("/")[0]) if url else None
        self.journal = Journal(folder / JOURNAL_FILE)
        self.journal.copy = self.copy
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
        if self.has_ended:
            return (
                f"{self.name} was completed by an earlier run: model and History are restored from it. Remove it to "
                "train again."
            )
        done = (memory.queue or {}).get("accounting", {}).get("records_trained", {}).get(str(memory.ended_epochs), 0)
        return f"Resuming {self.name}: epochs done: {memory.ended_epochs}; batches of the next: {done}."

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

    def copied(self, master: Master) -> contextlib.AbstractContextManager[None]:
        """While active, what `master` does for it is copied to the URL."""
        if self.copy is None:
            return contextlib.nullcontext()
        return self.copy.kept(master, keeps_recovery=True)

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
            f"{self.name} was started with other inputs. {name[0].upper()}{name[1:]}: "
            f"{before} then, {now} now. Run the program with the same inputs, or choose another job_dir to start from "
            "scratch."
        )


def _say(text: str) -> None:
    logger.warning("%s", text)
