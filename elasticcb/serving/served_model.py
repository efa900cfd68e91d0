"""A model that is served while it is trained: the newest full export of a folder, and the deltas after it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticcb.checkpoint.manifest import MANIFEST, specs_in
from elasticcb.checkpoint.shard_file import check_file
from elasticcb.errors import CheckpointError, StoreError, UsageError, describe
from elasticcb.rpc.tensors import Array
from elasticcb.serving.deltas import Delta, export_manifest, read_delta
from elasticcb.serving.exports import Export, bridge, version_of, way_to
from elasticcb.serving.loaded_export import SIGNATURE, LoadedExport, ServingSignature
from elasticcb.serving.served_folder import ServedFolder

logger = logging.getLogger(__name__)

_LOT_BYTES = 256 << 20  # of rows of deltas, that are applied together
_PATIENCE = 3  # durations of a failed look, before the next one begins, unless only the store did not answer
_END_SECONDS = 5.0  # for the thread to end


class Predicted(dict[str, Array]):
    """Outputs by name; `version` of the model computed them."""

    def __init__(self, outputs: Mapping[str, Array], version: int) -> None:
        super().__init__(outputs)
        self.version = version


class ServedModel:
    """Serves the model that a job exports meanwhile; a context manager. Needs neither Keras nor the model's code.

    Requests read the old version until the new one is completely prepared; none sees parts of two.

    Args:
        folder: folder or URL that `PeriodicExport` writes to.
        version: serve only this one; None: the newest, or the one that `elasticcb serve rollback` has pinned.
        wait: `follow` loads the first export, once there is one; else, it is loaded here.
        rows_on_disk: local folder for the rows of embedding tables, in files that are mapped into memory; None: they
            are in memory.

    Attributes:
        problem: why the wanted version is not served; "": it is.

    Raises `CheckpointError` if there is no usable export.

    Example:

        with elasticcb.ServedModel("exports/clicks") as model:
            model.follow()
            answer = model.predict({"user": [7], "item": [42]})
            answer["click"], answer.version
    """

    def __init__(
        self, folder: str | Path, version: int | None = None, wait: bool = False, rows_on_disk: str | Path | None = None
    ) -> None:
        self._folder, self._wanted = ServedFolder(folder), version
        self._disk = None if rows_on_disk is None else Path(rows_on_disk)
        self._model: LoadedExport | None = None
        self._swapping = _Gate()
        self._closed, self._process = threading.Event(), os.getpid()
        self._thread: threading.Thread | None = None
        self.problem, self._patience = "", 0
        if not wait:
            self.look()
            if self._model is None:
                self.close()
                raise CheckpointError(self.problem)

    @property
    def folder(self) -> str:
        return self._folder.place

    @property
    def export(self) -> Export | None:
        """What the manifest says of the served version; None: none is served yet."""
        return None if self._model is None else self._model.export

    @property
    def version(self) -> int | None:
        """None: none is served yet."""
        return None if self.export is None else self.export.version

    @property
    def age(self) -> float | None:
        """Seconds since the served version was written, by the clocks of both machines."""
        return None if self.export is None else max(0.0, time.time() - self.export.written)

    def signature(self, name: str = SIGNATURE) -> ServingSignature:
        """Raises `UsageError` if there is no such signature."""
        return self._ready().signature(name)

    @property
    def signature_defs(self) -> Mapping[str, Any]:
        """The `SignatureDef` messages of the SavedModel, by name."""
        return self._ready().signature_defs

    @property
    def rows(self) -> dict[str, int]:
        """The number of rows of each table, by its path."""
        return {} if self._model is None else self._model.rows()

    def predict(self, features: Any, signature: str = SIGNATURE) -> Predicted:
        """Calls a signature. Any number of threads may do so.

        Args:
            features: arrays of a batch by the names of the inputs; or one array, of the only input.

        Raises:
            UsageError: the features do not fit the signature, or the model refuses them; or this process was forked.
            CheckpointError: there is no model yet.
        """
        model = self._ready()
        tensors = model.tensors_of(features, signature)
        with self._swapping.reading():
            model = self._ready()
            outputs, version = model.call(signature, tensors), model.export.version
        return Predicted({name: output.numpy() for name, output in outputs.items()}, version)

    def _check_process(self) -> None:
        if self._process != os.getpid():  # TensorFlow would wait for threads that are not there
            raise UsageError(
                "This ServedModel was made before the process was forked, after which TensorFlow can't be used. Make "
                "one in each process."
            )

    def _ready(self) -> LoadedExport:
        self._check_process()
        if self._model is None:
            raise CheckpointError(f"No model is served yet. {self.problem}")
        return self._model

    def follow(self, every: float = 1.0, then: Callable[[], None] = lambda: None) -> None:
        """Starts a thread that looks for new versions, and serves them, until `close`.

        Args:
            every: seconds between two looks.
            then: called in the thread after its first look.

        Raises `UsageError` if nobody can wait for that long, or this process was forked.
        """
        check_every(every)
        self._check_process()
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, args=[every, then], name="follow", daemon=True)
            self._thread.start()

    def _follow(self, every: float, then: Callable[[], None]) -> None:
        try:
            if self._model is None:
                self.look()
            then()
            pause = every
            while not self._closed.wait(pause):
                began = time.monotonic()
                self.look()
                pause = max(every, self._patience * (time.monotonic() - began))
        finally:
            self._folder.close()

    def look(self) -> None:
        """Looks once for what is to be served, and serves it; `problem` has what prevents that. Only one thread may
        call it."""
        self._check_process()
        problem, self._patience = "", 0
        try:
            self._serve(*self._way())
        except StoreError as error:
            problem = str(error)
        except (CheckpointError, UsageError) as error:
            problem, self._patience = str(error), _PATIENCE
        except Exception as error:  # TensorFlow's, a full disk
            problem = f"The exports in {self._folder.place} can't be served: {describe(error)}."
            self._patience = _PATIENCE
        if problem and problem != self.problem:
            logger.warning("%s Serving %s.", problem, self._shown())
        elif self.problem and not problem:
            logger.info("Serving %s, as wanted.", self._shown())
        self.problem = problem

    def _shown(self) -> str:
        return "nothing yet" if self.version is None else f"version {self.version}"

    def _way(self) -> tuple[list[str], str]:
        """The names of the exports that lead to the wanted version, a full one and deltas, or from the served version;
        and its exporter; "": any."""
        wanted = self._folder.pinned() if self._wanted is None else self._wanted
        if wanted is not None:
            here = self.export  # which the folder may have removed
            return [here.name] if here is not None and here.version == wanted else self._folder.way_to(wanted), ""
        current = self._folder.current()
        return [current.full, *current.deltas], current.exporter

    def _serve(self, way: Sequence[str], exporter: str) -> None:
        """Serves what a way leads to. Raises `CheckpointError` if it can't; if the way may be of any version (it has an
        exporter), the best that it can is served then."""
        here, versions = self.export, [version_of(name) for name in way]
        if here is not None and exporter in ("", here.exporter):
            if here.version in versions:
                self._apply(self._ready(), way[versions.index(here.version) + 1 :])
                return
            rest = bridge(self._folder.names(), here.version, {*versions}) if here.version < versions[-1] else []
            try:
                if rest:
                    self._apply(self._ready(), [*rest, *way[versions.index(version_of(rest[-1])) + 1 :]])
                    return
            except StoreError:  # then the full export can't be read either
                raise
            except CheckpointError:
                pass
        try:
            loaded = self._load(way[0], exporter)
        except CheckpointError:
            if here is None and exporter:
                self._serve_older(versions[0])
            raise
        try:
            self._apply(loaded, way[1:])
        finally:
            reached = loaded.export.version
            goes_back = here is not None and here.exporter == exporter and reached < here.version
            if reached == versions[-1] or (exporter and not goes_back):
                self._publish(loaded)

    def _serve_older(self, version: int) -> None:
        """Serves what there is before a full export that can't be read, because nothing is served yet."""
        names = self._folder.names()
        while self._model is None and (way := way_to(names, version - 1)):
            version = version_of(way[0])
            with contextlib.suppress(CheckpointError):
                loaded = self._load(way[0])
                self._publish(loaded)
                self._apply(loaded, way[1:])

    def _load(self, name: str, exporter: str = "") -> LoadedExport:
        with self._folder.files(name) as files:
            manifest, export = export_manifest(files)
            if exporter not in ("", export.exporter):
                raise CheckpointError(
                    f"{files.name} was written by the run {export.exporter}, not by {exporter}, which wrote the newest "
                    "version there. Give each job that exports a folder of its own."
                )
            for saved in export.files:
                check_file(files.path(saved.name), saved)
            return LoadedExport(files.path(MANIFEST).parent, export, specs_in(manifest), self._disk)

    def _publish(self, loaded: LoadedExport) -> None:
        with self._swapping.writing():
            self._model = loaded
        logger.info("Serving version %d of %s", loaded.export.version, loaded.export.model)

    def _apply(self, model: LoadedExport, names: Sequence[str]) -> None:
        """Applies deltas; also those before one that can't be read."""
        lot: list[Delta] = []
        for name in names:
            try:
                with self._folder.files(name) as files:
                    lot.append(read_delta(files, lot[-1].export if lot else model.export, model.specs))
            except Exception:
                self._swap(model, lot)
                raise
            if sum(delta.bytes for delta in lot) >= _LOT_BYTES:
                self._swap(model, lot)
                lot = []
        self._swap(model, lot)

    def _swap(self, model: LoadedExport, lot: Sequence[Delta]) -> None:
        if not lot:
            return
        changes = model.prepared(lot)
        with self._swapping.writing():
            model.use(changes, lot[-1].export)
        model.free(changes)

    def close(self) -> None:
        """Ends `follow`, which may wait for a store in the background for a while. The model can still be used."""
        self._closed.set()
        if self._thread is None:
            self._folder.close()
        else:
            self._thread.join(_END_SECONDS)

    def __enter__(self) -> ServedModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_every(seconds: float) -> None:
    """Raises `UsageError` if nobody can wait for that long between two looks."""
    if not 0 < seconds <= threading.TIMEOUT_MAX:  # also not a number
        raise UsageError(f"The time between two looks is {seconds} s. Expected a positive number of seconds.")


class _Gate:
    """Lets many read at the same time, or one write. Those who come while it waits to write wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers, self._writing = 0, False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self._changed:
            while self._writing:
                self._changed.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                if not self._readers:
                    self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        with self._changed:
            self._writing = True
            while self._readers:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
