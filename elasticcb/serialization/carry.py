"""A Python program as bytes: models, losses, callbacks and data are one graph of objects.

One pickle with one memo, so that one object of the program is one object where it is read. Keras objects are restored
from their attributes, without `get_config`, `from_config`, `build` or `__init__`. Only what belongs to a process is
made again: functions that the framework has compiled, lookup tables (from their entries), locks.

Functions and classes of the user's own modules travel as those of a script do: by value, with the globals that they
use. Installed packages are imported.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import mmap
import pickle
import struct
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticcb.errors import UsageError, describe
from elasticcb.keras_private import KerasSaveable, KerasVariable
from elasticcb.serialization import own_modules
from elasticcb.serialization.library_objects import NOT_SENT
from elasticcb.serialization.object_paths import path_of
from elasticcb.serialization.reducers import Hollow, ObjectPickler, finishing

_KEPT = (KerasVariable, KerasSaveable, type, types.FunctionType)
_LARGE_BYTES = 1 << 20
_ALIGNMENT_BYTES = 64
_MOST_PATH = 300  # characters of a path in a message
_lock = threading.RLock()  # cloudpickle's list of modules belongs to the process


def dumps(
    value: Any,
    names: str | Mapping[str, Any],
    known: Sequence[Any] = (),
    hollow: Hollow | None = None,
    keeps: tuple[type, ...] = (),
    elsewhere: bool = True,
) -> bytes:
    """Pickles `value`.

    Args:
        names: how messages call it; or its parts, by name.
        known: objects that the reader has, in this order: they travel as references.
        hollow: objects that travel without their content.
        keeps: objects of these kinds are added to `known`.
        elsewhere: whether other processes read it; otherwise own modules travel like installed ones.

    Raises:
        UsageError: something in it can't be pickled; the message has its path.
    """
    roots = {names: value} if isinstance(names, str) else names
    return _dumped([value], roots, None, elsewhere, known, hollow or Hollow(), keeps)[0]


def dumps_graph(
    parts: Any, others: Any, names: Mapping[str, Any], hollow: Hollow, folder: Path | None, elsewhere: bool = True
) -> tuple[bytes, list[Any], dict[int, Any]]:
    """Pickles two objects that may share objects, for `Graph`; returns also the variables that travel with their
    values, in the order of `Graph.variables`, and all objects, by their numbers there. The bytes of the first depend
    neither on the second nor on the values of variables.

    Args:
        folder: large arrays are written to a file in it, which readers map into memory.
        names, hollow, elsewhere: as for `dumps`, as are raised errors.
    """
    data, pickler = _dumped([parts, others], names, folder, elsewhere, [], hollow, lists_values=True)
    return data, pickler.variables, dict(pickler.memo.copy().values())


def _dumped(
    values: Sequence[Any],
    roots: Mapping[str, Any],
    folder: Path | None,
    elsewhere: bool,
    known: Sequence[Any],
    hollow: Hollow,
    keeps: tuple[type, ...] = (),
    lists_values: bool = False,
) -> tuple[bytes, _Pickler]:
    imported = set() if elsewhere else set(sys.modules)
    with _lock:
        while True:
            pickler = _Pickler(known, hollow, keeps, folder is not None, lists_values)
            try:
                with own_modules.by_value(imported):
                    sections = pickler.sections(values)
                blocks = None if folder is None else pickler.write_arrays(folder)
                modules = pickler.modules if lists_values else set()
                data = pickle.dumps((pickler.sources, sections, blocks, pickler.values, pickler.is_steady, modules))
                return data, pickler
            except Exception as error:  # any error of a user's __reduce__
                path, module = path_of(roots, pickler.last)
                if module and module not in imported and own_modules.is_own(module):
                    # Created when the module is imported, as a connection or a reader: so a worker does that.
                    imported.add(module)
                    continue
                if isinstance(error, UsageError):
                    raise
                raise _refused(path, pickler.last, error) from error


class Copies:
    """Makes copies of an object in this process. They share Keras objects (a model that data reads), classes, and
    functions without variables of their own.
    """

    def __init__(self, value: Any, name: str) -> None:
        self._kept: list[Any] = []
        self._data = dumps(value, name, self._kept, keeps=_KEPT)

    def new(self) -> Any:
        """The object as it was."""
        return loads(self._data, self._kept)


def loads(data: bytes, known: Sequence[Any] = ()) -> Any:
    """The inverse of `dumps`. Use it only for data of a process that has the job's token."""
    return Graph(data, known).parts


class Graph:
    """The objects of `dumps_graph`, where they are read.

    Args:
        before: an earlier graph, which nobody uses any more. If it can be used again and the first object is the same,
            it is that of this graph too, and its variables get the new values.

    Attributes:
        variables: those that travel with their values, by place.
        continues: whether `parts` is that of `before`.
        objects: those of the second object and its parts too that have attributes, by number.
        is_steady: whether `parts` can be used again: of its state, only variables change.
    """

    def __init__(self, data: bytes, known: Sequence[Any] = (), before: Graph | None = None) -> None:
        sources, (*sections, modules), blocks, values, self.is_steady, own = pickle.loads(data)
        first, *second = sections
        self._fixed = first, modules
        self.parts: Any = None
        self.variables: dict[int, Any] = {}
        self._memo: list[Any] = []
        self._kept: dict[int, Any] = {}  # variables of `parts`
        self.continues = before is not None and before.is_steady and before._fixed == self._fixed
        with finishing(values, own) as variables:
            if before is not None and self.continues:
                self.parts, self._memo, self._kept = before.parts, before._memo, before._kept
                for place, variable in self._kept.items():
                    variable.assign(values[place])
                # The second object refers to objects in the first by their places in the memo.
                content = b"".join([*map(_memoizing, range(len(self._memo))), pickle.NONE, pickle.STOP, *second])
                unpickler = _Unpickler(io.BytesIO(content), self._memo, blocks)
                unpickler.load()
            else:
                for file, lines in sources.items():  # for tracebacks, and for AutoGraph, which converts source code
                    linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
                unpickler = _Unpickler(io.BytesIO(b"".join([*sections, modules])), known, blocks)
                self.parts = unpickler.load()
                self._kept = dict(variables)
                self._memo = [*unpickler.memo.copy().values()] if self.is_steady else []
            self.others: Any = unpickler.load() if second else None
            with contextlib.suppress(EOFError):
                while True:
                    for module, attributes in unpickler.load():
                        own_modules.set_values(module, attributes)
            read = unpickler.memo.copy() if second else {}
            self.objects = {number: each for number, each in read.items() if hasattr(each, "__dict__")}
            self.variables = self._kept | variables


def _memoizing(place: int) -> bytes:
    """Memoizes a known object."""
    return pickle.BININT + struct.pack("<i", place) + pickle.BINPERSID + pickle.MEMOIZE + pickle.POP


def _refused(path: str, item: Any, error: Exception) -> UsageError:
    path = path if len(path) <= _MOST_PATH else f"{path[: _MOST_PATH // 2]} … {path[-_MOST_PATH // 2 :]}"
    if isinstance(error, RecursionError) or isinstance(error.__context__, RecursionError):
        return UsageError(
            f"{path}: a chain of objects that refer to each other, or of containers in containers, is too long to be "
            "sent to workers. Keep the objects side by side, in one list, or create them where they are used."
        )
    kind = type(item).__name__
    advice = next((text for each, text in NOT_SENT.items() if isinstance(item, each) and text), None)
    advice = advice or "create it where it is used, or leave it out of the state by defining __getstate__ in its class"
    article = "an" if kind[0].lower() in "aeiou" else "a"
    return UsageError(f"{path}: {article} {kind} can't be sent to workers ({describe(error)}); {advice}.")


class _Pickler(ObjectPickler):
    def __init__(
        self, known: Any, hollow: Hollow, keeps: tuple[type, ...], separates_arrays: bool, lists_values: bool
    ) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, hollow, lists_values, self._is_small if separates_arrays else None)
        self._objects = known
        self._known = {id(each): index for index, each in enumerate(known)}
        self._keeps = keeps
        self._arrays: list[pickle.PickleBuffer] = []

    def sections(self, values: Sequence[Any]) -> list[bytes]:
        """A pickle of each value, and those of the attributes that own modules have now."""
        ends = [0]
        for value in values:
            self.dump(value)
            ends.append(self._buffer.tell())
            if self._arrays and len(ends) == 2:  # their content is not part of the pickle
                self.is_steady = False
        while self.used:  # their functions may use others
            used, self.used = self.used, {}
            self.dump([(module, own_modules.values_of(module, names)) for module, names in used.items()])
        data = self._buffer.getvalue()
        return [data[start:end] for start, end in zip(ends, [*ends[1:], len(data)], strict=True)]

    def _is_small(self, buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < _LARGE_BYTES:
            return True
        self._arrays.append(buffer)
        return False

    def write_arrays(self, folder: Path) -> tuple[str, list[tuple[int, int]]] | None:
        """Writes the large arrays to one file; returns its path, and where each begins and ends."""
        if not self._arrays:
            return None
        places = []
        with tempfile.NamedTemporaryFile(prefix="program-", suffix=".bin", dir=folder, delete=False) as file:
            for buffer in self._arrays:
                file.write(bytes(-file.tell() % _ALIGNMENT_BYTES))
                begin = file.tell()
                file.write(buffer.raw())
                places.append((begin, file.tell()))
        return file.name, places

    def persistent_id(self, obj: Any) -> int | None:
        is_kept = isinstance(obj, self._keeps) and not getattr(obj, "__closure__", None)
        if is_kept and id(obj) not in self._known:
            self._known[id(obj)] = len(self._objects)
            self._objects.append(obj)
        return self._known.get(id(obj)) if self._known else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, known: Sequence[Any], blocks: tuple[str, list[tuple[int, int]]] | None) -> None:
        super().__init__(file, buffers=None if blocks is None else _mapped(*blocks))
        self._known = known

    def persistent_load(self, index: int) -> Any:
        return self._known[index]


def _mapped(path: str, places: list[tuple[int, int]]) -> Iterator[memoryview]:
    with open(path, "rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))  # may be changed by this process
    return (content[begin:end] for begin, end in places)
