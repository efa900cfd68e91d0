"""The table that defines where the hooks of a callback run. Dispatch and documentation use it.

This module imports neither Keras nor TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from elasticcb.callbacks.attribute_use import use_of
from elasticcb.errors import ModelFileError


class Place(str, Enum):
    """Where a hook runs. A process is a `MASTER` or a `WORKER`; the other two occur only in the table."""

    MASTER = "master"
    WORKER = "worker"  # for hooks of a batch: the worker that runs the batch
    TRAIN_END_WORKER = "train_end_worker"  # the one worker that holds the TRAIN_END task
    WITH_OTHER_HOOKS = "with_other_hooks"  # every process that runs any other hook of the callback


@dataclass(frozen=True)
class Hook:
    """A row of the table.

    `arguments` and `logs` describe what the hook receives, `when` describes when it is called.
    """

    name: str
    places: tuple[Place, ...]
    when: str
    arguments: str
    logs: str
    alias: str = ""  # an older name of the hook, called if the hook itself is not overridden

    @property
    def of_batch(self) -> bool:
        """Whether it is called for each batch: by the worker that runs the batch, or on the master from the worker's
        report."""
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
        "after the last training task and the last evaluation pass; again if TRAIN_END is retried",
        "",
        "`{}`; on the master the logs of the last epoch",
    ),
    Hook("on_epoch_begin", (Place.MASTER,), "an epoch starts", "`epoch`: index, from 0", "`{}`"),
    Hook(
        "on_epoch_end",
        (Place.MASTER,),
        "every training record of the epoch is done",
        "`epoch`: index, from 0",
        "training `loss` and metrics; `val_*` if the epoch was evaluated",
    ),
    Hook(
        "on_train_batch_begin",
        _BATCH,
        "before the forward pass",
        f"{_VERSION}, with this worker's own batches; in `fit`, index in the epoch",
        "`{}`",
        alias="on_batch_begin",
    ),
    Hook(
        "on_train_batch_end",
        _BATCH,
        "after the batch, before its window is merged",
        f"{_VERSION}, with this worker's own batches; in `fit`, index in the epoch",
        "`loss` and metrics of the batch; in `fit`, over the epoch so far",
        alias="on_batch_end",
    ),
    Hook("on_test_begin", (Place.MASTER,), "an evaluation pass starts", "", "`{}`"),
    Hook("on_test_end", (Place.MASTER,), "all tasks of the pass are done", "", "all metrics of the pass"),
    Hook("on_test_batch_begin", _BATCH, "before the batch", _INDEX, "`{}`"),
    Hook(
        "on_test_batch_end",
        _BATCH,
        "after the batch",
        _INDEX,
        "metrics over the task so far; in `fit` and `evaluate`, over this worker's part of the pass so far",
    ),
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
        "master: every record is predicted; worker: after its last prediction task, or before it exits",
        "",
        "`{}`",
    ),
    Hook("on_predict_batch_begin", _BATCH, "before the batch", _INDEX, "`{}`"),
    Hook("on_predict_batch_end", _BATCH, "after the batch", _INDEX, "`outputs`: outputs of the batch"),
)

_OF_CALLS = frozenset({"on_train_begin", "on_train_end", "on_predict_begin", "on_predict_end"})

TABLE: dict[str, Hook] = {row.name: row for row in _ROWS}
BATCH_HOOKS = tuple(row.name for row in _ROWS if row.of_batch)


@dataclass(frozen=True)
class Stock:
    """A row of the table of library callbacks, which keep state between hooks.

    Classes derived from a stock callback share its row.

    Attributes:
        place: where all of its hooks run.
        idle: hooks that do nothing with this object's settings.
        saves: hooks that save or swap the optimizer's state.
        reads: whether the other hooks read weights; of batch hooks, only those in `saves` do.
    """

    place: Place = Place.MASTER
    idle: Callable[[Any], Collection[str]] = lambda callback: ()
    saves: Collection[str] = ()
    reads: Callable[[Any], bool] = lambda callback: True


def _saves_epochs(callback: Any) -> Collection[str]:
    return ("on_train_batch_end",) if callback.save_freq == "epoch" else ()


def _board_of_epochs(callback: Any) -> Collection[str]:
    from elasticcb.keras_private import traces

    return BATCH_HOOKS if callback.update_freq == "epoch" and not traces(callback) else ()


def _silent(callback: Any) -> Collection[str]:
    return BATCH_HOOKS if not callback.verbose else ()


def _run_of_epochs(callback: Any) -> Collection[str]:
    return () if callback.log_every_n_steps else BATCH_HOOKS


def _logs_epochs(callback: Any) -> Collection[str]:
    return () if callback.logging_batch_wise else BATCH_HOOKS


def _never(callback: Any) -> bool:
    return False


_SAVER = ("on_epoch_end", "on_train_batch_end")

STOCK: dict[str, Stock] = {
    "BackupAndRestore": Stock(idle=_saves_epochs, saves=("on_train_begin", *_SAVER)),
    "CSVLogger": Stock(reads=_never),
    "EarlyStopping": Stock(reads=lambda callback: callback.restore_best_weights),
    "History": Stock(reads=_never),
    "LearningRateScheduler": Stock(reads=_never),
    "MlflowCallback": Stock(idle=_run_of_epochs),
    "ModelCheckpoint": Stock(idle=_saves_epochs, saves=_SAVER),
    "OrbaxCheckpoint": Stock(idle=_saves_epochs, saves=_SAVER),
    "ProgbarLogger": Stock(idle=_silent, reads=_never),
    "ReduceLROnPlateau": Stock(reads=_never),
    "RemoteMonitor": Stock(reads=_never),
    "SwapEMAWeights": Stock(saves=[row.name for row in _ROWS if not row.of_batch]),
    "TensorBoard": Stock(idle=_board_of_epochs),
    "TerminateOnNaN": Stock(Place.WORKER),
    "WandbMetricsLogger": Stock(idle=_logs_epochs),
}
_LIBRARIES = frozenset({"keras", "mlflow", "wandb"})  # whose classes these are
_BY_HOOK = frozenset({"Callback", "CallbackList", "LambdaCallback"})  # treated like a user's class
_FUTURE = Stock()  # of a later release of Keras

_PLACE_ATTRIBUTE = "_elasticcb_runs_on"

CallbackClass = TypeVar("CallbackClass", bound=type)


def check_in_job(callback: Any) -> None:
    """Raises `ModelFileError` in plain Keras, where `callback` would do nothing."""
    if "worker_id" not in (callback.params or {}):
        name = type(callback).__name__
        raise ModelFileError(f"{name} does nothing in Keras's own fit. Remove it, or train by elasticcb.Cluster().fit.")


def runs_on(place: str) -> Callable[[CallbackClass], CallbackClass]:
    """Class decorator: run all hooks of a callback on the master, or all hooks on the workers.

    With `"master"`, batch hooks are called for the batches of all workers, in order of model version, some time after
    the batch was trained; no worker waits for them. With `"worker"`, hooks of epochs, evaluation passes and predictions
    are called as each worker sees these events, and `on_train_end` by the worker that holds the TRAIN_END task.
    Subclasses inherit the place.

    Args:
        place: `"master"` or `"worker"`.

    Raises:
        ModelFileError: `place` is invalid, or the decorated object is not a class.

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
        setattr(callback_class, _PLACE_ATTRIBUTE, place)
        return callback_class

    return decorate


def library_of(made: Any) -> str:
    """Which of the libraries defines a class or a method; "": none."""
    package = made.__module__.partition(".")[0]
    return package if package in _LIBRARIES else ""


def stock(callback: Any) -> Stock | None:
    """The row of a library's callback, or of a class derived from it; None for all others."""
    for kind in type(callback).__mro__:
        library = library_of(kind)
        if library == "keras":
            return None if kind.__name__ in _BY_HOOK else STOCK.get(kind.__name__, _FUTURE)
        if library and kind.__name__ in STOCK:
            return STOCK[kind.__name__]
    return None


def place_of(callback: Any) -> Place | None:
    """Where all hooks of `callback` run; None if the table decides for each hook."""
    moved_to = getattr(callback, _PLACE_ATTRIBUTE, None)
    if moved_to is not None:
        return Place(moved_to)
    row = stock(callback)
    return None if row is None else row.place


def overridden_hooks(callback: Any) -> dict[str, Callable[..., Any]]:
    """Bound methods of the hooks that a callback implements, by name in the table.

    Methods set on the instance count (as `keras.callbacks.LambdaCallback` does). If only the alias of a hook is
    implemented, the alias' method is returned. Idle hooks of a stock callback are excluded; a derived class has them if
    it defines them itself.
    """
    found: dict[str, Callable[..., Any]] = {}
    row_of_stock = stock(callback)
    idle = row_of_stock.idle(callback) if row_of_stock else ()
    for name, row in TABLE.items():
        method = _implemented(callback, name)
        if method is None and row.alias:
            method = _implemented(callback, row.alias)
        if method is not None and not (name in idle and library_of(method)):
            found[name] = method
    return found


def hooks_at(
    callback: Any, process: Place, overridden: Collection[str], in_program: bool = False, one_worker: bool = False
) -> frozenset[str]:
    """Which of the `overridden` hooks of `callback` run in a process of this kind, MASTER or WORKER.

    Args:
        in_program: the master is the process that called `Cluster.fit`, which expects `on_train_begin` and
            `on_train_end` to be called on the object that it passed.
        one_worker: the job has one worker, whose callbacks have the state of the caller's (callbacks/shared_state.py):
            what begins and ends a call runs only on these.
    """
    one_worker = one_worker and place_of(callback) is None and len(overridden) > 1
    return frozenset(
        name
        for name in overridden
        if process
        in (
            {Place.MASTER}
            if one_worker and name in _OF_CALLS and _is_of_user(callback, name)
            else _processes(callback, name, overridden, in_program)
        )
    )


def takes_predictions(callbacks: Iterable[Any]) -> bool:
    """Whether any of `callbacks` receives a worker's predictions."""
    return any("on_predict_batch_end" in _on_worker(callback) for callback in callbacks)


def holds_predictions(callbacks: Iterable[Any]) -> bool:
    """Whether any of `callbacks` may keep a worker's predictions until `on_predict_end`."""
    return any({"on_predict_batch_end", "on_predict_end"} <= _on_worker(callback) for callback in callbacks)


def _on_worker(callback: Any) -> frozenset[str]:
    return hooks_at(callback, Place.WORKER, overridden_hooks(callback).keys())


def needs_optimizer_state(callback: Any, hook: str) -> bool:
    """Whether `hook` of `callback` reads or writes the state of `model.optimizer`, as far as its source tells.

    A user's class declares it for all its hooks with `needs_optimizer_state = True`.
    """
    if getattr(callback, "needs_optimizer_state", False):
        return True
    row = stock(callback)
    is_of_user = _is_of_user(callback, hook) and (row is None or not library_of(getattr(callback, hook)))
    if is_of_user and use_of(callback, [hook]).of_optimizers:
        return True
    if row is None or (hook == "on_epoch_end" and getattr(callback, "save_freq", "epoch") != "epoch"):
        return False
    return hook in row.saves


def reads_model(callback: Any, hook: str, batches: int) -> bool:
    """Whether `hook` may read the model's weights; for a batch hook, within the next `batches` batches. A hook that a
    class derived from a stock callback defines itself may."""
    row = stock(callback)
    method = overridden_hooks(callback).get(hook)
    if row is None or row is _FUTURE or (method is not None and not library_of(method)):
        return True
    if not TABLE[hook].of_batch:
        return row.reads(callback)
    if hook not in row.saves:
        return False
    seen = getattr(callback, "_batches_seen_since_last_saving", None)
    return seen is None or bool(seen + batches >= callback.save_freq)


def _implemented(callback: Any, name: str) -> Callable[..., Any] | None:
    # Keras marks the empty hooks of its base class; nothing else distinguishes them from real ones.
    method = getattr(callback, name, None)
    return None if method is None or getattr(method, "_is_default", False) else method


def _processes(callback: Any, name: str, overridden: Collection[str], in_program: bool) -> set[Place]:
    """The kinds of process, MASTER and WORKER, in which a hook runs."""
    row = TABLE[name]
    place = place_of(callback)
    if place is not None:
        return {place}
    if Place.WITH_OTHER_HOOKS in row.places:
        others = [other for other in overridden if other != name]
        if not others:
            return {Place.MASTER, Place.WORKER}
        found = set().union(*(_processes(callback, other, overridden, in_program) for other in others))
        return found | {Place.MASTER} if in_program and _is_of_user(callback, name) else found
    if Place.TRAIN_END_WORKER in row.places:
        if in_program and _is_of_user(callback, name):
            of_batches = any(TABLE[other].of_batch for other in overridden)
            return {Place.MASTER, Place.WORKER} if of_batches else {Place.MASTER}
        keeps_epochs = any(TABLE[other].of_epoch for other in overridden)
        return {Place.MASTER, Place.WORKER} if keeps_epochs else {Place.WORKER}
    return set(row.places)


def _is_of_user(callback: Any, name: str) -> bool:
    """Built-in callbacks, such as the exporter, need objects on the worker."""
    return not getattr(callback, name).__module__.startswith("elasticcb.")
