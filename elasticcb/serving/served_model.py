"""A model that is served while it is trained: the newest full export of a folder, and the deltas after it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from elasticcb.checkpoint.manifest import MANIFEST, read_manifest
from elasticcb.checkpoint.shard_file import check_file
from elasticcb.errors import CheckpointError, UsageError, describe
from elasticcb.rpc.tensors import Array
from elasticcb.serving.deltas import Delta, TableChange, changed, combined, overwritten, read_delta, specs_in
from elasticcb.serving.exports import IDS, WEIGHTS, Export, version_of, way_to
from elasticcb.serving.served_folder import ServedFolder, bridge
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.table_state import TableSpec
from elasticcb.tf.tensors import array_of, tensor_of

logger = logging.getLogger(__name__)

SIGNATURE = "serving_default"
_LOT_BYTES = 256 << 20  # of rows of deltas, that are applied together
_PATIENCE = 10  # durations of a failed look, before the next one begins


class Predicted(dict[str, Array]):
    """Outputs by name; `version` of the model computed them."""

    def __init__(self, outputs: Mapping[str, Array], version: int) -> None:
        super().__init__(outputs)
        self.version = version


class ServingSignature(NamedTuple):
    """A function of the SavedModel: `tf.TensorSpec` of its inputs and outputs by name."""

    inputs: Mapping[str, tf.TensorSpec]
    outputs: Mapping[str, tf.TensorSpec]


class ServedModel:
    """Serves the model that a job exports meanwhile; a context manager. Needs neither Keras nor the model's code.

    Requests read the old version until the new one is completely prepared; none sees parts of two.

    Args:
        folder: folder or URL that `PeriodicExport` writes to.
        version: serve only this one; None: the newest, or the one that `elasticcb serve rollback` has pinned.
        wait: if there is nothing usable yet, `follow` loads the first export; else, that is an error.

    Attributes:
        problem: why the wanted version is not served; "": it is.

    Raises `CheckpointError` if there is no usable export.

    Example:

        with elasticcb.ServedModel("exports/clicks") as model:
            model.follow()
            answer = model.predict({"user": [7], "item": [42]})
            answer["click"], answer.version
    """

    def __init__(self, folder: str | Path, version: int | None = None, wait: bool = False) -> None:
        self._folder, self._wanted = ServedFolder(folder), version
        self._model: _LoadedExport | None = None
        self._swapping = _Gate()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.problem = ""
        self.look()
        if self._model is None and not wait:
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
            UsageError: the features do not fit the signature, or the model refuses them.
            CheckpointError: there is no model yet.
        """
        model = self._ready()
        tensors = model.tensors_of(features, signature)
        with self._swapping.reading():
            model = self._ready()
            version = model.export.version
            try:
                outputs = model.call(signature, tensors)
            except tf.errors.InvalidArgumentError as error:
                raise UsageError(f"The model can't use these features: {_reason(error)}") from error
        return Predicted({name: output.numpy() for name, output in outputs.items()}, version)

    def _ready(self) -> _LoadedExport:
        if self._model is None:
            raise CheckpointError(f"No model is served yet. {self.problem}")
        return self._model

    def follow(self, every: float = 1.0) -> None:
        """Starts a thread that looks for new versions, and serves them, until `close`.

        Args:
            every: seconds between two looks.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, args=[every], name="follow", daemon=True)
            self._thread.start()

    def _follow(self, every: float) -> None:
        pause = every
        while not self._closed.wait(pause):
            began = time.monotonic()
            self.look()
            pause = max(every, _PATIENCE * (time.monotonic() - began)) if self.problem else every

    def look(self) -> None:
        """Looks once for what is to be served, and serves it; `problem` has what prevents that. Only one thread may
        call it."""
        try:
            self._serve(*self._way())
            problem = ""
        except (CheckpointError, UsageError) as error:
            problem = str(error)
        except Exception as error:  # TensorFlow's, a full disk
            problem = f"The exports in {self._folder.place} can't be served: {describe(error)}"
        if problem and problem != self.problem:
            logger.warning("%s Serving %s.", problem, self._shown())
        elif self.problem and not problem:
            logger.info("Serving %s, as wanted.", self._shown())
        self.problem = problem

    def _shown(self) -> str:
        return "nothing yet" if self.version is None else f"version {self.version}"

    def _way(self) -> tuple[list[str], str]:
        """The names of the full export and the deltas that lead to the wanted version, and its exporter; "": any."""
        wanted = self._folder.pinned() if self._wanted is None else self._wanted
        if wanted is not None:
            return self._folder.way_to(wanted), ""
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
            with contextlib.suppress(CheckpointError):
                if rest:
                    self._apply(self._ready(), [*rest, *way[versions.index(version_of(rest[-1])) + 1 :]])
                    return
        try:
            loaded = self._load(way[0], exporter)
        except CheckpointError:
            if here is None and exporter:
                self._serve_older(versions[0])
            raise
        try:
            self._apply(loaded, way[1:])
        finally:
            if exporter or loaded.export.version == versions[-1]:
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

    def _load(self, name: str, exporter: str = "") -> _LoadedExport:
        with self._folder.files(name) as files:
            folder = files.path(MANIFEST).parent
            manifest = read_manifest(folder)
            export = Export.of(manifest, files.name)
            if exporter not in ("", export.exporter):
                raise CheckpointError(
                    f"{files.name} was written by the run {export.exporter}, not by {exporter}, which wrote the newest "
                    "version there. Give each job that exports a folder of its own."
                )
            for saved in export.files:
                check_file(files.path(saved.name), saved)
            return _LoadedExport(folder, export, specs_in(manifest))

    def _publish(self, loaded: _LoadedExport) -> None:
        with self._swapping.writing():
            self._model = loaded
        logger.info("Serving version %d of %s", loaded.export.version, loaded.export.model)

    def _apply(self, model: _LoadedExport, names: Sequence[str]) -> None:
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

    def _swap(self, model: _LoadedExport, lot: Sequence[Delta]) -> None:
        if not lot:
            return
        values = model.prepared(lot)
        with self._swapping.writing():
            for variable, value in values:
                variable.assign(value, read_value=False)  # which shares the memory
            model.export = lot[-1].export

    def close(self) -> None:
        """Ends `follow`. The model can still be used."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self._folder.close()

    def __enter__(self) -> ServedModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _LoadedExport:
    """A SavedModel in memory.

    Raises `CheckpointError` if it has not the variables of its manifest.
    """

    def __init__(self, folder: Path, export: Export, specs: Sequence[VariableSpec]) -> None:
        self.export, self.specs = export, specs
        self._loaded = tf.saved_model.load(str(folder))
        self._weights = list(getattr(self._loaded, WEIGHTS, ()))
        tables = [number for number, spec in enumerate(specs[: len(self._weights)]) if spec.table]
        free = [number for number in tables if self._weights[number].shape[0] is None]
        self._ids = dict(zip(free, getattr(self._loaded, IDS, ()), strict=False))
        if len(self._weights) != len(specs) or len(self._ids) != len(free):
            raise CheckpointError(
                f"{folder} has {len(self._weights)} weights and the ids of {len(self._ids)} tables; its manifest lists "
                f"{len(specs)} and {len(free)}. Expected a folder that PeriodicExport has written."
            )
        self.signature_defs = _signature_defs(folder)
        self._functions = dict(self._loaded.signatures)
        self._signatures = {
            name: ServingSignature(function.structured_input_signature[1], function.structured_outputs)
            for name, function in self._functions.items()
        }

    def signature(self, name: str) -> ServingSignature:
        if name not in self._signatures:
            known = ", ".join(map(repr, self._signatures))
            raise UsageError(f"The model has no signature {name!r}. Expected one of: {known}.")
        return self._signatures[name]

    def tensors_of(self, features: Any, signature: str) -> dict[str, tf.Tensor]:
        """Raises `UsageError` if the features don't fit."""
        specs = self.signature(signature).inputs
        if not isinstance(features, Mapping):
            if len(specs) != 1:
                raise UsageError(f"Expected features by name, for each of the inputs {', '.join(map(repr, specs))}.")
            features = {next(iter(specs)): features}
        check_names(features, specs)
        tensors = {}
        for name, spec in specs.items():
            try:
                tensors[name] = tf.convert_to_tensor(features[name], spec.dtype)
            except (TypeError, ValueError, tf.errors.OpError) as error:
                raise UsageError(f"The input {name!r} is not {_described(spec)}: {_first_line(error)}") from error
            check_shape(name, tensors[name].shape, spec)
        return tensors

    def call(self, signature: str, tensors: Mapping[str, tf.Tensor]) -> Mapping[str, tf.Tensor]:
        outputs: Mapping[str, tf.Tensor] = self._functions[signature](**tensors)
        return outputs

    def rows(self) -> dict[str, int]:
        return {
            spec.path: int(variable.read_value().shape[0])
            for spec, variable in zip(self.specs, self._weights, strict=True)
            if spec.table
        }

    def prepared(self, lot: Sequence[Delta]) -> list[tuple[tf.Variable, tf.Tensor]]:
        """The variables that change, and their values after these deltas."""
        found = []
        for number, (spec, variable) in enumerate(zip(self.specs, self._weights, strict=True)):
            if not spec.table:
                found.append((variable, tf.convert_to_tensor(lot[-1].weights[number], variable.dtype)))
                continue
            change = combined([delta.changes[number] for delta in lot])
            if not len(change.ids) and not len(change.gone):
                continue
            rows = array_of(variable.read_value())
            if number in self._ids:
                before = array_of(self._ids[number].read_value())
                ids, rows = changed(before, rows, change)
                if ids is not before:
                    found.append((self._ids[number], tensor_of(ids)))
            else:
                rows = overwritten(rows, *_with_initial_rows(change, spec))
            found.append((variable, tensor_of(rows)))
        return found


def _with_initial_rows(change: TableChange, spec: VariableSpec) -> tuple[Array, Array]:
    """The ids and rows to write to a table with a fixed number of rows: removed ones get their initial values."""
    if not len(change.gone):
        return change.ids, change.rows
    table = TableSpec.from_json(spec.table)
    initial = np.zeros((len(change.gone), *spec.shape[1:]), spec.dtype)
    if table.initializer:
        from elasticcb.layers.initial_values import InitialValues  # which imports Keras

        values = InitialValues(table.initializer, table.seed, table.input_dim, spec.row_elements, spec.dtype)
        initial = values(change.gone).numpy()
    return np.concatenate([change.ids, change.gone]), np.concatenate([change.rows, initial])


def _signature_defs(folder: Path) -> dict[str, Any]:
    from tensorflow.core.protobuf import saved_model_pb2

    message = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    return dict(message.meta_graphs[0].signature_def)


def check_names(features: Mapping[str, Any], specs: Mapping[str, tf.TensorSpec]) -> None:
    """Raises `UsageError` if the features have not the names of the inputs."""
    if features.keys() != specs.keys():
        given = ", ".join(map(repr, sorted(features))) or "none"
        raise UsageError(f"Received the inputs {given}. Expected {', '.join(map(repr, sorted(specs)))}.")


def check_shape(name: str, shape: Any, spec: tf.TensorSpec) -> None:
    """Raises `UsageError` if a feature has another shape than its input."""
    if not spec.shape.is_compatible_with(shape):
        raise UsageError(f"The input {name!r} has the shape {list(shape)}. Expected {_described(spec)}.")


def _described(spec: tf.TensorSpec) -> str:
    shape = "any shape" if spec.shape.rank is None else f"the shape {spec.shape.as_list()}"
    return f"{spec.dtype.name} of {shape}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _reason(error: tf.errors.OpError) -> str:
    """What an operation says, without where it is in the graph."""
    return str(error).partition("\n\t [[")[0].strip().splitlines()[-1]


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
