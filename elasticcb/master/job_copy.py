"""The copy of a job's folder below a URL, from which another machine can continue the job.

    owners/N            who had the job: each master has the next number
    job.json            the settings; of a fit of a `Cluster` fit.json, its inputs
    journal/N-G-S       of owner N, the journal in segments; each generation begins with a compacted one
    recovery/           files of the parameter servers, which they write; manifests; arrays of callbacks
    status.json         about the running job, or how it ended; history.json and logs/ are written at the end

What is done is in the local journal at once, and here about a second later. What is not here when the machine is lost
is done again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from elasticcb.checkpoint.manifest import MANIFEST
from elasticcb.clients.running_master import forget_earlier_job
from elasticcb.errors import ReplacedError, StoreError, UsageError
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.settings import FIT_FILE, HISTORY_FILE, JOB_FILE, JOURNAL_FILE, JOURNALS, RECOVERY_FOLDER, STATUS_FILE
from elasticcb.storage import durable, store_lock
from elasticcb.storage.folder_lock import LOCK_FILE
from elasticcb.storage.job_store import HOLDER_FILE, LOGS, OWNERS, JobStore, finished_name, holder_of
from elasticcb.storage.store_lock import Owner, newest_owner, wait_until_free

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
SLOW_SECONDS, PATIENCE_SECONDS = 15.0, 60.0  # without an answer, until the job says so, and until training pauses
_LAST_SECONDS = 30.0  # for what is being written when the job ends
_SEGMENTS = 200  # of a generation
_SEGMENT = re.compile(r"(\d+)-(\d+)-(\d+)")


def _fetch(store: JobStore, folder: Path, say: Callable[[str], None]) -> None:
    """Copies what another machine has left of its job to a local folder. Raises `StoreError`."""
    generations: dict[tuple[int, int], list[str]] = {}
    for name in store.names(JOURNALS):
        if match := _SEGMENT.fullmatch(name):
            generations.setdefault((int(match[1]), int(match[2])), []).append(name)
    journal, last = list[str](), ""  # of the newest one
    for _, names in sorted(generations.items()):
        journal = [name for number, name in enumerate(names) if name.endswith(f"-{number:08d}")]
        last = names[-1]
    if last and not journal:
        raise StoreError(
            f"The journal in {store.url}/{JOURNALS} is damaged: of the newest generation, whose last file is {last}, "
            "the first is missing. Restore the file, or start a new job in another folder from the newest checkpoint."
        )
    if journal and journal[-1] != last:
        say(f"{store.url}/{JOURNALS} has a hole after {journal[-1]}. What was done after it is done again.")
    if not journal:
        say(f"{store.url} has no journal: what the job had done, if it had begun, is done again.")
    recovery = folder / RECOVERY_FOLDER
    shutil.rmtree(recovery, ignore_errors=True)  # of an earlier time on this machine
    recovery.mkdir(parents=True, mode=0o700)
    names = store.names(RECOVERY_FOLDER)
    for name in [name for name in names if name.startswith(("callbacks-", "last-"))]:
        store.get_file(f"{RECOVERY_FOLDER}/{name}", recovery / name)
    manifests = [name for name in names if name.startswith("manifest-")]
    if manifests:
        store.get_file(f"{RECOVERY_FOLDER}/{manifests[-1]}", recovery / MANIFEST)
    with contextlib.suppress(FileNotFoundError):
        durable.write_document(folder / FIT_FILE, store.get_document(FIT_FILE))
    if journal:
        durable.write(folder / JOURNAL_FILE, b"".join(store.get(f"{JOURNALS}/{name}") for name in journal))


def refuse_copy(folder: Path) -> None:
    """Raises `UsageError` if a folder is that of a job, or of fits of a `Cluster`, that was given by its URL."""
    if any(any((place / OWNERS).glob("*")) for place in (folder, *folder.glob("fit-*"))):
        raise UsageError(f"{folder} is the folder of a job that was given by its URL. Give the URL, or another folder.")


def refuse_path(url: str) -> None:
    """Raises `UsageError` if the folder at a URL is that of a job, or of a `Cluster`, that was given by its path."""
    with JobStore(url) as store:
        if LOCK_FILE in store.names(""):
            raise UsageError(f"{url} is the folder of a job that was given by its path. Give the path, or another.")


def _gone(url: str, folder: Path) -> str:
    return (
        f"{url} has no files of the job in {folder} any more: they were removed, or its file system is not mounted. "
        f"Restore them; or, to start from scratch, remove {folder}."
    )


class _Running(Protocol):
    """What is needed of a `Master`."""

    server: Any

    def observe(self) -> JobSnapshot: ...


class RecoveryCopy:
    """The manifest and notes of the recovery files below a URL; of one owner. Methods raise `StoreError`.

    Attributes:
        url: of the folder, into which servers write.
    """

    def __init__(self, url: str, owner: Owner) -> None:
        self._store, self._owner = JobStore(url), owner
        self.url = f"{self._store.url}/{RECOVERY_FOLDER}"
        self._manifest = f"manifest-{owner.number:08d}.json"

    def put(self, path: Path) -> None:
        self._store.put_file(f"{RECOVERY_FOLDER}/{path.name}", path)

    def put_manifest(self, path: Path) -> None:
        self._store.put_file(f"{RECOVERY_FOLDER}/{self._manifest}", path)

    def remove(self, name: str) -> None:
        self._store.remove(f"{RECOVERY_FOLDER}/{name}")

    def remove_others(self, keep: Collection[str], replaced: Collection[str]) -> None:
        """Removes servers' files that are not in use any more, nor being written, and manifests of earlier owners. What
        a server wrote when it left may not be noted yet: it is removed only if it is `replaced`. Failures are logged.
        """
        try:
            names = self._store.names(RECOVERY_FOLDER, unfinished=True)
            if self._owner.is_replaced(self._store):  # asked after the names: they may be of the next owner
                return
            for name in names:
                finished = finished_name(name)
                old = finished.startswith("manifest-") and finished < self._manifest
                may_be_new = "-last-" in finished and finished not in replaced
                if old or (finished.startswith("ps-") and finished not in keep and not may_be_new):
                    self.remove(name)
        except StoreError as error:
            logger.warning("%s", error)


class JobCopy:
    """The copy of a job's folder, owned by this master.

    Attributes:
        owner: this master.
        was_fetched: whether the local folder has what another machine had copied.
    """

    def __init__(
        self, store: JobStore, owner: Owner, folder: Path, was_fetched: bool, say: Callable[[str], None]
    ) -> None:
        self.url, self.owner, self.was_fetched = store.url, owner, was_fetched
        self._store, self._folder, self._say = store, folder, say
        self._journal = _Segments(folder / JOURNAL_FILE, owner.number)
        self._sent: set[str] = set()  # files of the recovery folder
        self._unsent = [JOB_FILE, FIT_FILE]  # a job has one of them
        self._changed = threading.Condition()
        self._rest = f"The rest of the job's files was not copied from {folder}: elsewhere, it would be done again."
        self._closed = False
        self._reached, self._problem = time.monotonic(), ""  # when all was copied; why it has not been since

    @classmethod
    def taken(cls, url: str, folder: Path, resumed: bool, say: Callable[[str], None], program: str = "") -> JobCopy:
        """Makes the master that works in a local folder the owner of the copy. If another machine had a job that is
        resumed, its files are copied to the folder; if nobody had one, what is in the folder is forgotten. The copy of
        the folder itself, whose last master was killed, is waited for as long as training would continue without it.

        Args:
            program: of a fit, the URL of the `Cluster`; "": it is a command's job.

        Raises:
            UsageError: another master has the job, or it was given by its path.
            StoreError: the store does not answer, or has no conditional writes.
        """
        own, begun, waits = holder_of(folder), time.monotonic(), False
        while True:
            try:
                return cls._taken(url, folder, own, resumed, say, program or url)
            except StoreError as error:
                if own.get("store") != url or time.monotonic() > begun + PATIENCE_SECONDS:
                    raise
                if not waits:
                    say(f"{error} Waiting up to {PATIENCE_SECONDS:.0f} s for it.")
                    waits = True
                time.sleep(_LOOK_SECONDS)

    @classmethod
    def _taken(
        cls, url: str, folder: Path, own: Mapping[str, str], resumed: bool, say: Callable[[str], None], job: str
    ) -> JobCopy:
        store = JobStore(url)
        number, last = newest_owner(store)
        holder = own["holder"] if own.get("store") == url else secrets.token_hex(8)
        elsewhere = bool(number) and last.get("holder") != holder
        if not number:
            if resumed and own.get("store") == url:
                raise StoreError(_gone(url, folder))
            refuse_path(job)
            if not store.tells_who_was_first():
                raise StoreError(
                    f"{url} can't be a job's folder: two masters could write there at the same time, because its file "
                    "system has no conditional writes, or is that of one process. Expected another, such as s3://, "
                    "gs:// or sftp://, or a local folder; checkpoints can go to any URL (checkpoint_dir)."
                )
            forget_earlier_job(folder)
        elif elsewhere:
            wait_until_free(store, say)
            holder = secrets.token_hex(8)
            (folder / HOLDER_FILE).unlink(missing_ok=True)  # until all is fetched, the folder is not that of the job
        owner = Owner(number + 1, folder, holder)
        if not owner.take(store):
            raise UsageError(f"Another master has just taken the job in {url}. Nothing was changed.")
        if not number:
            try:
                refuse_path(job)  # whoever begins by its path, at the same time, sees the owner or is seen
            except UsageError:
                owner.withdraw(store)
                raise
        if elsewhere and resumed:
            _fetch(store, folder, say)
        durable.write_document(folder / HOLDER_FILE, {"store": url, "holder": holder})
        return cls(store, owner, folder, elsewhere and resumed, say)

    @contextlib.contextmanager
    def kept(self, master: _Running, keeps_recovery: bool = False) -> Iterator[None]:
        """While active, what is new is copied; at the end, status and logs too.

        Args:
            master: gives the status, hands out no tasks when the store is away for long, and fails if another
                master has taken the job.
            keeps_recovery: whether the recovery files are needed when the job is done.
        """
        with contextlib.suppress(StoreError):  # `_run` tries again
            self._describe()
        self._reached = time.monotonic()
        copying = threading.Thread(target=self._run, args=(master,), name="job copy", daemon=True)
        watching = threading.Thread(target=self._watch, args=(master,), name="job copy watch", daemon=True)
        copying.start()
        watching.start()
        done = False
        try:
            yield
            done = True
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            watching.join()
            copying.join(_LAST_SECONDS)
            if copying.is_alive():  # the store hangs
                self._say(f"{self.url} does not answer. {self._rest}")
            else:
                self._end(done and not keeps_recovery)

    def _is_closed_after(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._closed, seconds)

    def _run(self, master: _Running) -> None:
        beat = 0.0
        while not self._is_closed_after(_LOOK_SECONDS):
            try:
                if time.monotonic() > beat:
                    self._beat(master)
                    beat = time.monotonic() + store_lock.BEAT_SECONDS
                self._send()
                self._problem, self._reached = "", time.monotonic()
            except ReplacedError as error:
                master.server.fail(error)
                return
            except (StoreError, OSError) as error:
                self._problem = str(error)

    def _watch(self, master: _Running) -> None:
        """Tells the user when the store is away, and pauses the job when it is for long: it may also hang."""
        told = paused = False
        while not self._is_closed_after(_LOOK_SECONDS):
            away = time.monotonic() - self._reached
            hangs = f"{self.url} has not answered for {away:.0f} s." if away > SLOW_SECONDS else ""
            problem = self._problem or hangs
            if problem and not told:
                self._say(
                    f"{problem} Training continues here for up to {PATIENCE_SECONDS:g} s; if this machine is lost now, "
                    "what is done from now on is done again."
                )
            if told and not problem:
                again = " Training continues." if paused else ""
                self._say(f"The job's folder {self.url} can be written to again.{again}")
            told, too_long = bool(problem), bool(problem) and away > PATIENCE_SECONDS
            if too_long and not paused:
                self._say(
                    f"The job's folder {self.url} could not be written to for {away:.0f} s. Training pauses until it "
                    "can be. Nothing is lost while this machine runs."
                )
            paused = too_long
            master.server.pause("copy", f"{self.url} can't be written to" if paused else "")

    def _describe(self) -> None:
        for name in [name for name in self._unsent if (self._folder / name).is_file()]:
            self._store.put(name, (self._folder / name).read_bytes())
            self._unsent.remove(name)

    def _beat(self, master: _Running) -> None:
        newest, _ = newest_owner(self._store)
        if newest > self.owner.number:
            raise ReplacedError(f"Another master took over the job in {self.url}; this one exits.")
        if newest < self.owner.number:  # somebody has removed everything
            raise StoreError(_gone(self.url, self._folder))
        self.owner.beat(self._store)
        status = {**master.observe().to_json(), "written": time.time()}
        self._store.put(STATUS_FILE, json.dumps(status).encode())

    def _send(self) -> None:
        """Sends what is new. Arrays of callbacks come before the entry of the journal that names them."""
        journal = self._journal.read()
        recovery = self._folder / RECOVERY_FOLDER
        here = {path.name for path in recovery.glob("callbacks-*")}
        for name in here - self._sent:
            with contextlib.suppress(FileNotFoundError):
                self._store.put_file(f"{RECOVERY_FOLDER}/{name}", recovery / name)
                self._sent.add(name)
        if not journal:
            return
        self._describe()  # a fit writes its inputs before the first entry
        for name, content in journal:
            self._store.put(f"{JOURNALS}/{name}", content)
        self._journal.sent()
        for name in self._sent - here:
            self._store.remove(f"{RECOVERY_FOLDER}/{name}")
        self._sent &= here
        if self._journal.began:
            for name in self._store.names(JOURNALS):
                if _SEGMENT.fullmatch(name) and name < journal[0][0]:
                    self._store.remove(f"{JOURNALS}/{name}")

    def remove(self) -> None:
        """Removes the copy. Raises `ReplacedError` if another master has taken it, and `StoreError`."""
        with self._store as store:
            if self.owner.is_replaced(store):
                raise ReplacedError(f"Another program has taken {self.url}.")
            store.remove_all()

    def of_recovery(self) -> RecoveryCopy:
        """The copy of the recovery files."""
        return RecoveryCopy(self.url, self.owner)

    def _end(self, removes_recovery: bool) -> None:
        """Copies the rest: the end of the journal, status and logs. Problems are shown."""
        try:
            if self.owner.is_replaced(self._store):
                return
            self._send()
            for path in [self._folder / STATUS_FILE, self._folder / HISTORY_FILE, *self._folder.glob(f"{LOGS}/*")]:
                if path.is_file():
                    self._store.put_file(path.relative_to(self._folder).as_posix(), path)
            for name in self._store.names(RECOVERY_FOLDER) if removes_recovery else ():
                self._store.remove(f"{RECOVERY_FOLDER}/{name}")
            self.owner.beat(self._store, ended=True)
        except (StoreError, OSError) as error:
            self._say(f"{error} {self._rest}")
        finally:
            self._store.close()


class _Segments:
    """The local journal, in segments to be sent.

    Attributes:
        began: whether those that were read last begin a generation.
    """

    def __init__(self, path: Path, owner: int) -> None:
        self._path, self._owner = path, owner
        self._file: Any = None
        self._generation, self._number = 0, 0
        self._next: list[tuple[str, bytes]] = []
        self.began = False

    def read(self) -> list[tuple[str, bytes]]:
        """Names and contents of segments that have not been `sent`."""
        if self._next:
            return self._next
        try:
            replaced = self._file is None or os.fstat(self._file.fileno()).st_ino != self._path.stat().st_ino
        except FileNotFoundError:
            return []
        self.began = replaced or self._number >= _SEGMENTS
        if self.began:
            if self._file is not None:
                self._file.close()
            self._file = self._path.open("rb")
            self._generation, self._number = self._generation + 1, 0
        place = self._file.tell()
        content = self._file.read()
        whole = content.rfind(b"\n") + 1  # an entry may be about to be written
        self._file.seek(place + whole)
        if whole:
            name = f"{self._owner:08d}-{self._generation:08d}-{self._number:08d}"
            self._next = [(name, content[:whole])]
        return self._next

    def sent(self) -> None:
        """Those that were read have been sent."""
        self._number += len(self._next)
        self._next = []
