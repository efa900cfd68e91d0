"""A full export in memory, of which values are replaced while it is called.

A variable that a graph gathers rows from is copied by TensorFlow whenever it is read or assigned, and a table is too
large for that. So a new value comes in a new variable, which takes the place of the old one among what the signatures'
functions have captured.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from elasticcb.errors import CheckpointError, UsageError
from elasticcb.rpc.tensors import Array
from elasticcb.serving.deltas import Delta, TableChange, combined, moved
from elasticcb.serving.exports import IDS, WEIGHTS, Export
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.table_state import TableSpec
from elasticcb.tf.batch_signatures import unchecked
from elasticcb.tf.tensors import array_of, tensor_of

SIGNATURE = "serving_default"
_PIECE_BYTES = 1 << 20  # of a table that is rebuilt
_LEAST_IN_FILE = 64 << 20  # bytes of a table; the C library gets so much from the system, and gives it back when freed
_MAP_FIXED = 0x10


class ServingSignature(NamedTuple):
    """A function of the SavedModel: `tf.TensorSpec` of its inputs and outputs by name."""

    inputs: Mapping[str, tf.TensorSpec]
    outputs: Mapping[str, tf.TensorSpec]
    is_of_batches: bool  # whether axis 0 of all of them is that of a batch


class Replaced(NamedTuple):
    """New variables, by those that they replace; and the ids of tables that change, by table."""

    variables: list[tuple[tf.Variable, tf.Variable]]
    ids: dict[int, Array]


class LoadedExport:
    """A SavedModel whose functions can be called.

    Args:
        disk: local folder for the rows of its tables, in files that are mapped into memory; None: they are in memory.

    Raises `CheckpointError` if it has not the variables of its manifest.
    """

    def __init__(self, folder: Path, export: Export, specs: Sequence[VariableSpec], disk: Path | None) -> None:
        self.export, self.specs, self._disk = export, specs, disk
        self._loaded = tf.saved_model.load(str(folder))
        self._weights = list(getattr(self._loaded, WEIGHTS, ()))
        tables = [number for number, spec in enumerate(specs[: len(self._weights)]) if spec.table]
        free = [number for number in tables if self._weights[number].shape[0] is None]
        self._id_variables = dict(zip(free, getattr(self._loaded, IDS, ()), strict=False))
        if len(self._weights) != len(specs) or len(self._id_variables) != len(free):
            raise CheckpointError(
                f"{folder} has {len(self._weights)} weights and the ids of {len(self._id_variables)} tables; expected "
                f"{len(specs)} and {len(free)}, as its manifest lists. Is it a folder that PeriodicExport has written?"
            )
        self._ids = {number: array_of(variable.read_value()) for number, variable in self._id_variables.items()}
        self.signature_defs = _signature_defs(folder)
        self._functions = dict(self._loaded.signatures)
        self._order = {name: _order_of(function) for name, function in self._functions.items()}
        self._calls = {name: unchecked(function) for name, function in self._functions.items()}
        self._signatures = {
            name: _signature_of(function.structured_input_signature[1], function.structured_outputs)
            for name, function in self._functions.items()
        }
        for number in tables if disk is not None else ():
            table, (count, *width) = self._weights[number], specs[number].shape
            count = len(self._ids[number]) if number in free else count
            nothing = np.empty((0, *width), table.dtype.as_numpy_dtype)
            on_disk = Replaced([(table, self._rebuilt(table, np.arange(count), np.empty(0, np.int64), nothing))], {})
            self._put(on_disk)
            self.free(on_disk)

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
        """Raises `UsageError` if the model refuses the values."""
        try:
            order = self._order[signature]
            outputs: Mapping[str, tf.Tensor] = (
                self._calls[signature]([tensors[name] for name in order])
                if order
                else self._functions[signature](**tensors)
            )
        except tf.errors.InvalidArgumentError as error:
            raise UsageError(f"The model can't use these features: {_reason(error)}") from error
        return outputs

    def rows(self) -> dict[str, int]:
        """The number of rows of each table, by its path."""
        return {
            spec.path: len(self._ids[number]) if number in self._ids else spec.shape[0]
            for number, spec in enumerate(self.specs)
            if spec.table
        }

    def prepared(self, lot: Sequence[Delta]) -> Replaced:
        """What these deltas change. Calls are not disturbed, except that they share the processor."""
        found = Replaced([], {})
        for number, (spec, variable) in enumerate(zip(self.specs, self._weights, strict=True)):
            if not spec.table:
                found.variables.append((variable, _like(variable, lot[-1].weights[number])))
                continue
            change = combined([delta.changes[number] for delta in lot])
            if not len(change.ids) and not len(change.gone):
                continue
            if number in self._ids:
                ids, sources, places = moved(self._ids[number], change)
                values = change.rows
                if ids is not self._ids[number]:
                    found.variables.append((self._id_variables[number], _like(self._id_variables[number], ids)))
                    found.ids[number] = ids
            else:
                sources, (places, values) = np.arange(spec.shape[0]), _with_initial_rows(change, spec)
            found.variables.append((variable, self._rebuilt(variable, sources, places, values)))
        return found

    def _rebuilt(self, variable: tf.Variable, sources: Array, places: Array, values: Array) -> tf.Variable:
        """A table in a new variable: the rows at `sources` of the old one, and then other values at some places."""
        made, rows = _table((len(sources), *values.shape[1:]), variable.dtype, self._disk)
        for piece in _pieces(len(sources), rows) if len(places) < len(sources) else ():
            found = tf.raw_ops.ResourceGather(resource=variable.handle, indices=sources[piece], dtype=variable.dtype)
            rows[piece] = array_of(found)
        for piece in _pieces(len(places), rows):
            rows[places[piece]] = values[piece]
        return _like(variable, made)

    def use(self, replaced: Replaced, export: Export) -> None:
        """No call may run meanwhile; takes microseconds."""
        self._put(replaced)
        self.export = export

    def _put(self, replaced: Replaced) -> None:
        handles = {id(old.handle): new.handle for old, new in replaced.variables}
        for function in self._functions.values():
            captured = [handles.get(id(each), each) for each in function.captured_inputs]
            function.set_external_captures(captured)
        self._calls = {name: unchecked(function) for name, function in self._functions.items()}
        new = {id(old): new for old, new in replaced.variables}
        self._weights = [new.get(id(each), each) for each in self._weights]
        self._id_variables = {number: new.get(id(each), each) for number, each in self._id_variables.items()}
        self._ids |= replaced.ids

    def free(self, replaced: Replaced) -> None:
        """Frees the old values, after `use`: the SavedModel keeps its variables."""
        for old, _ in replaced.variables:
            nothing = tf.zeros([0] * max(1, old.shape.rank or 0), old.dtype)
            tf.raw_ops.AssignVariableOp(resource=old.handle, value=nothing, validate_shape=False)


def _order_of(function: Any) -> list[str]:
    """The names of the inputs, in the order in which the function takes them without binding and checking them, which
    takes longer than a small model; none: it is not known."""
    given = {
        name: tf.zeros([size or 0 for size in spec.shape] if spec.shape.rank else [], spec.dtype)
        for name, spec in function.structured_input_signature[1].items()
    }
    flat = function.function_type.unpack_inputs(function.function_type.bind(**given))
    names = [name for each in flat for name, tensor in given.items() if tensor is each]
    return names if len(names) == len(flat) == len(given) else []


def _signature_of(inputs: Mapping[str, tf.TensorSpec], outputs: Mapping[str, tf.TensorSpec]) -> ServingSignature:
    shapes = [spec.shape for spec in (*inputs.values(), *outputs.values())]
    return ServingSignature(inputs, outputs, all(shape.rank and shape[0] is None for shape in shapes))


def _like(variable: tf.Variable, value: Array | tf.Tensor) -> tf.Variable:
    """A variable with another value, whose memory it shares."""
    value = tensor_of(value) if isinstance(value, np.ndarray) else value
    with tf.device(variable.device):
        return tf.Variable(value, shape=variable.shape, dtype=variable.dtype, trainable=False)


def _table(shape: tuple[int, ...], dtype: tf.DType, disk: Path | None) -> tuple[tf.Tensor, Array]:
    """A tensor without values, and its memory as an array, to be written before the tensor is used.

    It is TensorFlow's own memory: a variable that has another's is copied when rows are first gathered from it.

    Args:
        disk: a large table is in a file in this folder, without a name, which is gone with the tensor or this process;
            the system keeps in memory what is used, as long as there is room.

    Raises `OSError` if the disk is full.
    """
    with tf.device("CPU"):
        made = tf.raw_ops.Empty(shape=shape, dtype=dtype, init=False)
    size = math.prod(shape) * dtype.size
    if not size:
        return made, np.empty(shape, dtype.as_numpy_dtype)
    address = array_of(made).ctypes.data
    if disk is not None and size >= _LEAST_IN_FILE:
        _move_to_file(disk, address, size)
    memory = (ctypes.c_char * size).from_address(address)
    return made, np.frombuffer(memory, dtype.as_numpy_dtype).reshape(shape)


def _move_to_file(folder: Path, address: int, size: int) -> None:
    """Maps a file in place of memory that has no values yet."""
    start, stop = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, stop - start)  # else, a full disk would kill this process later
        access, how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
        if library.mmap(start, stop - start, access, how, file.fileno(), 0) != start:
            raise OSError(ctypes.get_errno(), f"A file in {folder} can't be mapped into memory")


def _pieces(count: int, rows: Array) -> Iterator[slice]:
    """Pieces of work. After each comes a pause that is as long, so that requests get processors meanwhile."""
    step = max(1, _PIECE_BYTES * max(1, len(rows)) // max(1, rows.nbytes))
    for first in range(0, count, step):
        began = time.monotonic()
        yield slice(first, first + step)
        if first + step < count:
            time.sleep(time.monotonic() - began)


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
