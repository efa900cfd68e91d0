"""Writes the exports of a `PeriodicExport` while training continues, in a thread of its own.

The servers write what has changed since the last export, and now and then also everything, of the same moment, from
which another process makes a full export. A server that does not know the last export, because it was replaced, or its
weights were set, says so: then no delta leads on from there, and the next export is a full one.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elasticcb.callbacks.periodic_export import PeriodicExport
from elasticcb.callbacks.saved_model_exporter import without_weights
from elasticcb.callbacks.serving_signature import serving_inputs
from elasticcb.checkpoint.shard_file import SavedFile
from elasticcb.checkpoint.versions import server_file
from elasticcb.clients.ps_servers import KnownServer
from elasticcb.errors import CallbackError, CheckpointError, ElasticCBError, StoreError, UsageError, describe
from elasticcb.master.keras_host import ModelHost
from elasticcb.master.master_server import MasterServer
from elasticcb.master.ps_admin import PSControl
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.serving.export_folder import SNAPSHOT, ExportFolder
from elasticcb.serving.exports import CURRENT, Current, Export, unneeded, version_of, way_to
from elasticcb.serving.full_export import FullExport
from elasticcb.settings import JobSettings

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5  # at the process that writes a full export
_RETRY_SECONDS = 30.0  # after a full export that failed
_DAY_SECONDS = 86_400.0
_END_SECONDS = 5.0  # for the thread to clean up


@dataclass(frozen=True)
class _Point:
    """An export that the next one can add to.

    Attributes:
        marks: names of the servers' files, by which they know it.
    """

    version: int
    marks: Sequence[str]


@dataclass(frozen=True)
class _Full:
    """A full export that is being written."""

    export: Export
    process: FullExport
    snapshot: str  # its folder


class PeriodicExports:
    """The exports of one callback, in one job. `begin` starts the thread.

    Args:
        settings: of the job, whose name is that of the model.
        resumes: whether an earlier master of the job has trained.

    Raises:
        CallbackError: the model can't be exported, or the folder can't be written to.
        UsageError: another training writes there.
    """

    def __init__(
        self,
        callback: PeriodicExport,
        host: ModelHost,
        ps: PSControl,
        master: MasterServer,
        settings: JobSettings,
        resumes: bool,
    ) -> None:
        self._callback, self._host, self._ps, self._master = callback, host, ps, master
        self._name, self._job = settings.name, settings.store or settings.directory
        serving_inputs(host.model, host.features_spec)
        self._model = without_weights(host.model, host.features_spec)
        self._folder = ExportFolder(callback.folder)
        self._is_open = False
        self._earlier: dict[str, float] = {}  # like `_own`, of earlier exporters
        self._newest = 0  # version in a name
        self._exporter = secrets.token_hex(8)
        self._own: dict[str, float] = {}  # when each finished export was written, by name
        self._base: _Point | None = None  # None: only a full export can follow
        self._full: _Full | None = None
        self._full_version = 0  # of the last full export that was begun
        self._full_due = self._due = 0.0
        self._current, self._version = "", 0  # what current.json says
        self._troubles: dict[str, str] = {}  # why what can't be written
        self._leftovers: list[str] = []  # folders that could not be removed
        self._untold: list[str] = []  # finished exports that current.json does not lead to yet
        self._told: deque[tuple[int, str]] = deque()  # for `on_export_end`
        self._failure: CallbackError | None = None
        self._changed = threading.Condition()
        self._closing = self._finishing = False
        self._thread = threading.Thread(target=self._run, name="exports", daemon=True)
        try:
            self._open()
        except StoreError as error:
            if not resumes:  # else training continues, and the thread tries again
                self._folder.leave()
                raise CallbackError(
                    f"PeriodicExport can't write to its folder: {error} Choose another folder, or make it writable."
                ) from error

    def _open(self) -> None:
        """Raises `StoreError` when the folder can't be used now."""
        if problem := self._callback.problem():
            raise StoreError(f"{self._folder.place} {problem}")
        self._folder.own(self._ps.run, self._job, self._master.print)
        self._earlier, self._newest = self._folder.begin_again()
        self._is_open = True

    def begin(self) -> None:
        """The first export is due."""
        self._thread.start()

    def turn(self) -> None:
        """Calls the hooks that are due. Raises `CallbackError` when the model turns out not to be exportable."""
        while self._told:
            self._host.callbacks.call_own(self._callback, "on_export_end", *self._told.popleft())
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Exports the last version."""
        with self._changed:
            self._finishing = True
            self._changed.notify()
        while self._thread.is_alive():
            self.turn()
            with self._master.state():
                self._master.tend()
                self._master.wait_a_tick()
        self.turn()
        if self._untold or self._is_behind(self._base) or "Exports" in self._troubles:
            self._master.print(f"The last version of the model is not exported: {' '.join(self._troubles.values())}")

    def close(self) -> None:
        """Exports nothing any more."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)
        self._folder.leave()

    # -------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while not self._ends:
                self._take_full()
                if time.monotonic() >= self._due:
                    self._due = max(self._due + self._callback.every, time.monotonic())
                    self._export()
                self._wait(_LOOK_SECONDS if self._full else self._due - time.monotonic())
            if not self._closing:
                self._take_full()
                self._export()
            while self._full is not None and not self._closing and self._waits_for(self._full.export):
                self._wait(_LOOK_SECONDS)
                self._take_full()
                if self._base is None and self._full is None:
                    self._export()
        except CallbackError as error:
            self._failure = error
        except UsageError as error:
            self._master.print(f"{error} This job exports nothing any more.")
        finally:
            if self._full is not None:
                self._full.process.close()
                for name in (self._full.snapshot, self._full.export.name):
                    self._remove(name)

    @property
    def _ends(self) -> bool:
        return self._closing or self._finishing

    def _waits_for(self, full: Export) -> bool:
        """Whether the last version can't be reached without it, or only exported after it."""
        return self._base is None or bool(self._untold) or self._is_behind(full)

    def _is_behind(self, newest: Export | _Point | None) -> bool:
        """Whether current.json does not lead to the newest version."""
        return newest is None or self._version < newest.version

    def _wait(self, seconds: float) -> None:
        ended = self._finishing
        with self._changed:
            for_now = max(0.0, min(seconds, _DAY_SECONDS))  # Python can't wait for any time
            self._changed.wait_for(lambda: self._closing or self._finishing > ended, for_now)

    @contextlib.contextmanager
    def _forgiving(self, what: str) -> Iterator[None]:
        """Says once that something can't be written, and that it can again; training continues."""
        try:
            yield
        except (CallbackError, UsageError):
            raise
        except Exception as error:
            is_known = isinstance(error, (ElasticCBError, OSError))
            logger.warning("%s: %s", what, error, exc_info=not is_known)
            reason = str(error) if is_known else f"{describe(error)}."
            if what not in self._troubles and not self._closing:
                self._master.print(f"{what} can't be written now: {reason} Training continues.")
            self._troubles[what] = reason
        else:
            if self._troubles.pop(what, ""):
                self._master.print(f"{what} can be written again.")

    # -------------------------------------------------------------- one export

    def _export(self) -> None:
        """Exports what has changed, and everything if that is due."""
        with self._forgiving("Exports"):
            if not self._is_open:
                self._open()
            self._folder.check_owner()
            self._publish()  # if the store was away
            base, is_last = self._base, self._finishing and not self._current
            is_due = is_last or time.monotonic() >= self._full_due
            full = self._full is None and (base is None or (is_due and base.version > self._full_version))
            if base is not None or full:
                self._save(base, full)
            if base is not None and self._base is None and self._full is None:
                self._save(None, True)
            self._publish()

    def _save(self, base: _Point | None, full: bool) -> None:
        """Makes the servers write what has changed since `base`, if they know it, and everything for a full export."""
        with self._ps.saving:  # their number does not change meanwhile
            servers, map_version = list(self._ps.servers.known), self._ps.servers.shard_map.version
        if base is not None and len(base.marks) != len(servers):
            self._base = None
            return
        version, token = max(self._master.version, self._newest + 1), secrets.token_hex(4)
        since = None if base is None else base.version
        export = Export(version, since, self._exporter, self._name, 0, time.time())
        snapshot = f"{SNAPSHOT}{version:08d}-{token}"
        unfinished = [name for name, is_wanted in ((export.name, base is not None), (snapshot, full)) if is_wanted]
        places = [self._folder.begin(name) for name in unfinished]
        point = _Point(version, [server_file(server.index, len(servers), f"-{token}") for server in servers])

        def save(server: KnownServer, unchanged: bool = False) -> Any:
            mark = point.marks[server.index]
            request = pb.SaveRequest(
                path=f"{places[0]}/{mark}",
                after="" if base is None else base.marks[server.index],
                map_version=map_version,
                serving=True,
                whole=f"{places[-1]}/{mark}" if full else "",
                unchanged=unchanged,
            )
            return self._ps.servers.call(server, "Save", request).header

        def parts_in(files: Sequence[pb.SaveResponse], version: int) -> dict[str, Any]:
            saved = [[SavedFile(each.file, each.bytes, each.sha256, each.version)] for each in files]
            parts = [server.slices for server in servers]
            return {"version": version, "specs": self._ps.servers.specs, "parts": parts, "files": saved}

        try:
            answers = self._ps.servers.each(save, servers)
            if all(answer.after for answer in answers):
                if not any(answer.file for answer in answers):
                    return
                answers = [
                    answer if answer.file else save(server, unchanged=True)
                    for server, answer in zip(servers, answers, strict=True)
                ]
            self._newest, self._base = version, None
            export = replace(export, model_version=min(answer.version for answer in answers))
            if all(answer.after for answer in answers):
                content = parts_in(answers, export.model_version)
                self._base = base  # if this fails
                self._folder.finish(export.name, **content, extra=export.to_extra())
                self._finished(export, unfinished)
            if full or self._base is not None:
                self._base = point
            if full:
                content = parts_in([answer.whole for answer in answers], export.model_version)
                self._folder.finish(snapshot, **content)
                self._begin_full(replace(export, since=None), snapshot)
                unfinished.remove(snapshot)
        finally:
            for name in unfinished:
                self._remove(name)

    def _finished(self, export: Export, unfinished: list[str]) -> None:
        unfinished.remove(export.name)
        self._own[export.name] = export.written
        self._untold.append(export.name)

    def _remove(self, name: str) -> None:
        """Removes a folder that is not finished, later if the store is away."""
        try:
            self._folder.remove(name)
        except StoreError:
            self._leftovers.append(name)

    # -------------------------------------------------------------- full exports

    def _begin_full(self, export: Export, snapshot: str) -> None:
        place = self._folder.place
        process = FullExport(self._model, f"{place}/{snapshot}", f"{place}/{export.name}")
        self._full = _Full(export, process, snapshot)
        self._full_version, self._full_due = export.version, time.monotonic() + self._callback.full_every

    def _take_full(self) -> None:
        """The full export that is being written, if it is done."""
        full = self._full
        if full is None or not full.process.has_ended:
            return
        self._full = None
        unfinished = [full.export.name]
        with self._forgiving("Full exports"):
            try:
                export = replace(full.export, files=tuple(self._files_of(full)))
                specs = self._ps.servers.specs
                self._folder.finish(
                    export.name,
                    version=export.model_version, specs=specs, parts=(), files=(), extra=export.to_extra(),
                )  # fmt: skip
                self._finished(export, unfinished)
            finally:
                if unfinished:  # tried again
                    self._full_version, self._full_due = 0, time.monotonic() + _RETRY_SECONDS
                full.process.close()
                for name in (full.snapshot, *unfinished):
                    self._remove(name)
            self._publish()

    def _files_of(self, full: _Full) -> Sequence[SavedFile]:
        try:
            return full.process.files()
        except CallbackError as error:
            if not self._current:
                raise
            raise CheckpointError(str(error)) from error  # the model has been exported: it is not the model

    def _publish(self) -> None:
        """Lets current.json lead to the newest version that can be reached, and removes old exports."""
        way = way_to(list(self._own))
        if not way:
            return
        version, written = version_of(way[-1]), self._own[way[-1]]
        current = Current(version, self._exporter, self._name, way[0], tuple(way[1:]), written).to_json()
        if current != self._current:
            self._folder.check_owner()
            self._folder.put(CURRENT, current.encode())
            self._current, self._version = current, version
            self._master.exported(version, self._folder.place)
        untold = sorted((version_of(name), name) for name in self._untold)
        self._told.extend((of, f"{self._folder.place}/{name}") for of, name in untold if of <= version)
        self._untold = [name for of, name in untold if of > version]
        while self._leftovers:
            self._folder.remove(self._leftovers[-1])
            self._leftovers.pop()
        for name in unneeded(self._earlier | self._own, way, time.time() - self._callback.keep):
            self._folder.remove(name)
            self._earlier.pop(name, None)
            self._own.pop(name, None)
