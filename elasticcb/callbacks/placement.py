"""The one table of where the hooks of a callback run. The dispatch and the documentation follow it.

This module imports neither Keras nor TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from elasticcb.errors import ModelFileError


class Place(str, Enum):
    """Where a hook runs. A process is a `MASTER` or a `WORKER`; the other two appear in the table only."""

    MASTER = "master"
    WORKER = "worker"  # for hooks of a batch: the worker that runs the batch
    TRAIN_END_WORKER = "train_end_worker"  # the one worker that holds the TRAIN_END task
    WITH_OTHER_HOOKS = "with_other_hooks"  # every process that runs any other hook of the callback


@dataclass(frozen=True)
class Hook:
    """A row of the table.

    `arguments` and `logs` say what the hook is given, `when` says when it is called.
    """

    name: str
    places: tuple[Place, ...]
    when: str
    arguments: str
    logs: str
    alias: str = ""  # an older name of the same hook, called when the hook itself is not overridden

    @property
    def of_batch(self) -> bool:
        """A batch exists only on the worker that runs it."""
        return "_batch_" in self.name

    @property
    def of_epoch(self) -> bool:
        return self.name.startswith("on_epoch_")


_BATCH = (Place.WORKER,)
_VERSION = "`batch`: model version"
_INDEX = "`batch`: index in this worker"

_ROWS = (
    Hook("on_train_begin", (Place.WITH_OTHER_HOOKS,), "once, before the first task of the process", "", "`{}`"),
    Hook(
        "on_train_end",
        (Place.TRAIN_END_WORKER,),
        "after the last training task and the last evaluation round; again when TRAIN_END is retried",
        "",
        "`{}`",
    ),
    Hook("on_epoch_begin", (Place.MASTER,), "an epoch starts", "`epoch`: index, from 0", "`{}`"),
    Hook(
        "on_epoch_end",
        (Place.MASTER,),
        "every training record of the epoch is done",
        "`epoch`: index, from 0",
        "training `loss` and metrics; `val_*` when the epoch was evaluated",
    ),
    Hook(
        "on_train_batch_begin",
        _BATCH,
        "before the forward pass",
        f"{_VERSION} pulled",
        "`batch`: index in this worker, `size`: records",
        alias="on_batch_begin",
    ),
    Hook(
        "on_train_batch_end",
        _BATCH,
        "after the push is accepted",
        f"{_VERSION} after the push",
        "`loss` and metrics of the batch",
        alias="on_batch_end",
    ),
    Hook("on_test_begin", (Place.MASTER,), "an evaluation round starts", "", "`{}`"),
    Hook(
        "on_test_end",
        (Place.MASTER,),
        "all tasks of the round are in",
        "",
        "`metrics`: all of the round, nested by output where the model has several; "
        "each metric under its own name; `version`: model version of the round",
    ),
    Hook("on_test_batch_begin", _BATCH, "before the batch", _INDEX, "`size`: records"),
    Hook("on_test_batch_end", _BATCH, "after the batch", _INDEX, "`size`; metrics over the task so far"),
    Hook(
        "on_predict_begin",
        (Place.MASTER, Place.WORKER),
        "master: the job starts; worker: before its first prediction task",
        "",
        "`{}`",
    ),
    Hook(
        "on_predict_end",
        (Place.MASTER, Place.WORKER),
        "master: every record is predicted; worker: after its last prediction task",
        "",
        "`{}`",
    ),
    Hook("on_predict_batch_begin", _BATCH, "before the batch", _INDEX, "`size`: records"),
    Hook("on_predict_batch_end", _BATCH, "after the batch", _INDEX, "`predictions`: outputs of the batch"),
)

TABLE: dict[str, Hook] = {row.name: row for row in _ROWS}
ALIASES: dict[str, str] = {row.alias: row.name for row in _ROWS if row.alias}

_PLACE_ATTRIBUTE = "_elasticcb_runs_on"

CallbackClass = TypeVar("CallbackClass", bound=type)


def runs_on(place: str) -> Callable[[CallbackClass], CallbackClass]:
    """Class decorator: run every hook of a callback on the master, or every hook on the workers.

    On `"master"` the hooks of batches are not called, since batches run on workers. On `"worker"` the hooks
    of epochs, evaluation rounds and predictions are called as each worker sees them, and `on_train_end` by
    the worker that holds the TRAIN_END task. Subclasses inherit the place.

    Args:
        place: `"master"` or `"worker"`.

    Raises:
        ModelFileError: another place, something that is no class, or `"master"` for a class that itself
            defines hooks of batches.

    Example:

        @runs_on("worker")
        class Timer(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                print("this worker ended epoch", epoch)
    """
    if not isinstance(place, str) or place not in (Place.MASTER.value, Place.WORKER.value):
        raise ModelFileError(
            f'runs_on takes "master" or "worker". Received: {place!r}. Write @runs_on("master") or '
            '@runs_on("worker") above the class of the callback.'
        )

    def decorate(callback_class: CallbackClass) -> CallbackClass:
        if not isinstance(callback_class, type):
            raise ModelFileError(
                f"runs_on decorates the class of a callback. Received: {callback_class!r} of type "
                f'{type(callback_class).__name__}. Put @runs_on("{place}") above "class ...".'
            )
        own = [name for name in vars(callback_class) if name in ALIASES or name in TABLE]
        never_called = [name for name in own if name in ALIASES or TABLE[name].of_batch]
        if place == Place.MASTER.value and never_called:
            raise ModelFileError(
                f'{callback_class.__name__} is marked @runs_on("master") '
                f"and defines {', '.join(never_called)}, which would never be called: batches "
                "run on workers. Move what happens per batch to a callback of its own, without runs_on."
            )
        setattr(callback_class, _PLACE_ATTRIBUTE, place)
        return callback_class

    return decorate


def overridden_hooks(callback: Any) -> dict[str, Callable[..., Any]]:
    """Bound methods of the hooks that a callback implements, by name in the table.

    Methods set on the instance count (`keras.callbacks.LambdaCallback` sets them so). For a hook that is
    implemented under its alias alone, the alias' method is given.
    """
    found: dict[str, Callable[..., Any]] = {}
    for name, row in TABLE.items():
        method = _implemented(callback, name)
        if method is None and row.alias:
            method = _implemented(callback, row.alias)
        if method is not None:
            found[name] = method
    return found


def hooks_at(callback: Any, process: Place, overridden: Collection[str]) -> frozenset[str]:
    """Which of the `overridden` hooks of `callback` run in a process of that kind, MASTER or WORKER."""
    return frozenset(name for name in overridden if process in _processes(callback, name, overridden))


def _implemented(callback: Any, name: str) -> Callable[..., Any] | None:
    # Keras marks the empty hooks of its base class; nothing else tells an empty hook from a real one.
    method = getattr(callback, name, None)
    return None if method is None or getattr(method, "_is_default", False) else method


def _processes(callback: Any, name: str, overridden: Collection[str]) -> set[Place]:
    """The kinds of process, MASTER and WORKER, in which a hook runs."""
    row = TABLE[name]
    moved_to = getattr(callback, _PLACE_ATTRIBUTE, None)
    if moved_to is not None:
        place = Place(moved_to)
        return set() if row.of_batch and place is Place.MASTER else {place}
    if Place.WITH_OTHER_HOOKS in row.places:
        others = [other for other in overridden if other != name]
        if not others:
            return {Place.MASTER, Place.WORKER}
        return set().union(*(_processes(callback, other, overridden) for other in others))
    if Place.TRAIN_END_WORKER in row.places:
        return _processes_of_train_end(callback, name, overridden)
    return set(row.places)


def _processes_of_train_end(callback: Any, name: str, overridden: Collection[str]) -> set[Place]:
    keeps_epochs = any(TABLE[other].of_epoch for other in overridden)
    if not keeps_epochs:
        return {Place.WORKER}
    # A stock Keras callback closes at the end of training what its other hooks opened (CSVLogger its file):
    # where none of those run, its beginning and end would only truncate what the master writes.
    of_keras = (getattr(getattr(callback, name), "__module__", None) or "").startswith("keras.")
    if of_keras and not any(TABLE[other].of_batch for other in overridden):
        return {Place.MASTER}
    return {Place.MASTER, Place.WORKER}
