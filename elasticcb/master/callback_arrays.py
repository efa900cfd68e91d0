"""State of callbacks on the master: arrays that they save, such as `EarlyStopping`'s best weights, in a file next to
the journal; and what goes to workers and, from the only worker, back (callbacks/shared_state.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from elasticcb.callbacks.attribute_use import Variable, use_of
from elasticcb.callbacks.placement import overridden_hooks
from elasticcb.callbacks.shared_attributes import Change, Key, Placed, SharedAttributes, is_same, shares_state, sharing
from elasticcb.callbacks.shared_state import SharedState, SharedVariables
from elasticcb.checkpoint.shard_file import Part, SavedFile, check_file, opened, write_part
from elasticcb.errors import CallbackWarning, CheckpointError, UsageError
from elasticcb.optimizers.state import OptimizerState
from elasticcb.rpc.tensors import Array
from elasticcb.settings import JobSettings
from elasticcb.sharding.array_names import SHARED, of_kind

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 30  # maximum total size
_PATTERN = "callbacks-*.safetensors"


class CallbackArrays:
    """Writes arrays to a new file whenever they change. The journal names the current file.

    Args:
        entry: return value of `keep` under an earlier master; None: nothing was saved.
    """

    def __init__(self, folder: Path, entry: Mapping[str, Any] | None, say: Callable[[str], None]) -> None:
        self._folder, self._entry, self._say = folder, None if entry is None else dict(entry), say
        self._warned = False

    def load(self) -> dict[str, Array]:
        """Saved arrays by name; empty (with a warning to the user) if the file is missing or damaged."""
        if self._entry is None:
            return {}
        saved = SavedFile.of(self._entry)
        path = self._folder / saved.name
        try:
            check_file(path, saved)
            with opened(path) as file:
                return of_kind(SHARED, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except CheckpointError as error:
            self._say(f"The arrays that callbacks had saved are lost: {error}")
            self._entry = None
            return {}

    def keep(self, arrays: Mapping[str, Array]) -> dict[str, Any] | None:
        """Writes `arrays` unless they are unchanged; returns an entry for the journal.

        None when there are none, or they can't be saved: disk full, or too large.
        """
        size, digest = sum(array.nbytes for array in arrays.values()), _digest(arrays)
        if not arrays:
            self._entry = None
        elif size > MOST_BYTES:
            self._entry = None
            self._warn(f"{size / 2**30:.1f} GiB exceed the limit of {MOST_BYTES / 2**30:.0f} GiB")
        elif self._entry is None or self._entry["digest"] != digest:
            self._entry = self._write(arrays, digest)
        return self._entry

    def _write(self, arrays: Mapping[str, Array], digest: int) -> dict[str, Any] | None:
        numbers = [int(path.stem.partition("-")[2]) for path in self._folder.glob(_PATTERN)]
        path = self._folder / _PATTERN.replace("*", str(max(numbers, default=0) + 1))
        try:
            self._folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            saved = write_part(path, Part(0, optimizers=OptimizerState(shared=dict(arrays))))
        except (OSError, CheckpointError) as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self._warn(str(error))
            return None
        return {**asdict(saved), "digest": digest}

    def drop_others(self) -> None:
        """Removes outdated files; call it after the journal names the new one."""
        kept = None if self._entry is None else self._entry["name"]
        for path in self._folder.glob(_PATTERN):
            if path.name != kept:
                path.unlink(missing_ok=True)

    def _warn(self, reason: str) -> None:
        logger.warning("Arrays of callbacks are not saved: %s", reason)
        if not self._warned:
            self._warned = True
            self._say(
                f"Arrays of callbacks on the master are not saved, and would be lost if the master died: {reason}. "
                "Training continues."
            )


def _digest(arrays: Mapping[str, Array]) -> int:
    digest = 0
    for name, array in sorted(arrays.items()):
        digest = zlib.crc32(f"{name} {array.dtype.name} {array.shape}".encode(), digest)
        digest = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, digest)
    return digest


class SharedCallbacks:
    """The master's side."""

    def __init__(self, callbacks: Iterable[Any], settings: JobSettings, model: Any, has_tables: bool) -> None:
        self._has_tables = has_tables
        self._returns = shares_state(settings)
        self._placed = sharing(callbacks, settings)
        self._model = model
        self._variables, self._attributes = SharedVariables({}), SharedAttributes({})
        self._warn: Callable[[CallbackWarning], None] = lambda warning: None
        self._follows = False
        self._state = SharedState(self._placed, self._returns, self._model, self._variables)
        self._sent: dict[int, Any] = {}  # values of variables that were sent last
        self._sent_attributes: dict[Any, Change] = {}
        self._lock = threading.Lock()  # protects what follows
        self._number, self._data = 0, b""  # the newest state that was sent
        self._is_old = True  # whether hooks may have changed it since
        self._holder = 0  # the worker that continues from it
        self._returned = b""  # what it sent back
        self._rate: float | None = None  # the learning rate that it sent back

    def share(
        self, variables: Mapping[int, Any], objects: Mapping[int, Any], warn: Callable[[CallbackWarning], None]
    ) -> None:
        """Call before `prepare`, with variables of the program that workers read, and objects whose attributes hooks
        may set, by number."""
        self._variables = SharedVariables(variables)
        self._attributes, self._warn = SharedAttributes(objects), warn
        self._follows = bool(objects)
        self._state = SharedState(self._placed, self._returns, self._model, self._variables)

    @property
    def names(self) -> str:
        """The classes of callbacks that need to be on one worker; "": there are none."""
        return ", ".join(each.name for each in self._placed) if self._returns else ""

    def prepare(self) -> None:
        """Call before workers get tasks. Raises `UsageError` if something can't be sent that a worker needs."""
        if self._placed:
            self._data, left = self._state.dump()
            self._number, self._is_old = self._number + 1, False
            for each, names in zip(self._placed, left, strict=True):
                _check_left(each, names)

    def fetch(self, worker: int, known: int) -> tuple[int, bytes]:
        """The state for a worker that begins an epoch or a pass, and its number; b"" if that is `known`, or if there is
        nothing to send."""
        with self._lock:
            values, attributes = self._variables.changed(), self._attributes.changed()
            is_old = (self._is_old and bool(self._placed)) or not is_same(values, self._sent)
            if is_old or not self._attributes.is_known(attributes, self._sent_attributes):
                self._data, _ = self._state.dump(attributes)
                self._number, self._is_old = self._number + 1, False
                self._sent, self._sent_attributes = values, attributes
                self._warn_of_tables(attributes)
            if self._returns and (self._placed or self._variables or self._follows):
                self._holder, self._returned = worker, b""
            return self._number, self._data if known != self._number else b""

    def _warn_of_tables(self, changes: Mapping[Key, Change]) -> None:
        names = ", ".join(sorted(map(str, self._attributes.of_optimizers(changes)))) if self._has_tables else ""
        if names:
            text = (
                f"A hook has set {names}: the optimizers of embedding tables on parameter servers keep the value of "
                "before the job. Set it before training, or use a learning rate, which they follow."
            )
            self._warn(CallbackWarning(f"{names} set by a hook", text))

    def give_back(self, worker: int, data: bytes, rate: float | None) -> None:
        """The worker has ended its part, and no hook runs there until it fetches the state again."""
        with self._lock:
            if worker == self._holder:
                self._returned, self._rate = data, rate

    @property
    def holder(self) -> int:
        """The worker that continues from the state; 0: none."""
        return self._holder

    @property
    def is_returned(self) -> bool:
        """Whether the worker has given it back."""
        return bool(self._returned)

    def take_back(self) -> float | None:
        """Before hooks on the master: adopts the state that the worker returned, if any. Returns the learning rate
        that a hook has set there."""
        with self._lock:
            data, self._returned, self._holder, self._is_old = self._returned, b"", 0, True
            if data:  # the worker has other values than those that were sent
                self._sent, self._sent_attributes = {}, {}
        if not data:
            return None
        sent = self._state.read(data)
        self._state.adopt(sent)
        self._attributes.adopt(sent.attributes)
        return self._rate


def _check_left(each: Placed, left: dict[str, str]) -> None:
    """Raises `UsageError` for attributes and variables that can't be sent, and that the worker can't make itself."""
    worker = each.on_workers
    variables = {slot.name for slot in worker.reads | worker.changes if isinstance(slot, Variable)}
    made_there = use_of(each.callback, {"on_train_begin"} & overridden_hooks(each.callback).keys()).changes
    needed = sorted(
        name for name, kind in left.items() if kind and name in (worker.reads | worker.changes | variables) - made_there
    )
    if needed:
        names = ", ".join(name if name in variables else f"self.{name}" for name in needed)
        raise UsageError(
            f"{each.name}.{' and '.join(each.batches)} (on a worker) uses {names}, but {left[needed[0]]!r} objects "
            "can't be sent to workers. Create it in on_train_begin, which then also runs on the worker; or put "
            '@elasticcb.callbacks.runs_on("master") above the class, so that all of its hooks run in your process.'
        )
