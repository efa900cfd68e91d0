"""Calls the hooks of a job's callbacks in the processes that the table in `placement` assigns, and limits how often."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import logging
import operator
import os
import stat
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import Any, TextIO, TypeVar

from elasticcb.callbacks.attribute_use import uses_model
from elasticcb.callbacks.placement import (
    TABLE,
    Place,
    hooks_at,
    library_of,
    needs_optimizer_state,
    overridden_hooks,
    place_of,
    reads_model,
    stock,
)
from elasticcb.errors import CallbackError, CallbackWarning, ElasticCBError, ModelFileError, describe, user_traceback
from elasticcb.process import forwarded_logs
from elasticcb.process.forwarded_logs import shown
from elasticcb.settings import CallbackErrors

logger = logging.getLogger(__name__)

_ONCE = frozenset({"on_train_begin", "on_predict_begin"})
# Attributes of a Keras model with which a callback ends an evaluation or a prediction, and what to use instead.
_REFUSED = {
    "stop_evaluating": "To evaluate fewer batches, use `steps`, or `validation_steps` of `fit`, or less data",
    "stop_predicting": "To predict fewer batches, use `steps`, or less data",
}
_TIMED = frozenset({"on_train_batch_begin", "on_train_batch_end"})
_BOTH = (Place.MASTER, Place.WORKER)
_KEPT = 25  # of the newest times of a hook
_ENOUGH = 10  # to tell whether it is slow


class Dispatcher:
    """The callbacks of one process.

    Args:
        place: `Place.MASTER` or `Place.WORKER`. Every worker may get the TRAIN_END task, so every worker's
            dispatcher wants `on_train_end`.
        params: becomes `callback.params`; `worker_id` of a worker is part of it.
        model: becomes `callback.model`.
        warn: receives `CallbackWarning`s: errors with `OnError.WARN`, and slow batch hooks.
        in_program: see `hooks_at`.
        one_worker: see `hooks_at`.
        print_text: receives what hooks print, and whether to standard error; None: it is only printed.
        log: receives records that hooks log, for `forwarded_logs.handle`; None: they are only handled here.

    Raises:
        ModelFileError: an item of `callbacks` is not a callback.
        CallbackError: a callback's own `set_params` or `set_model` raised.
    """

    def __init__(
        self,
        callbacks: Iterable[Any],
        place: Place,
        params: Mapping[str, Any],
        model: Any,
        on_error: CallbackErrors = CallbackErrors.STOP,
        warn: Callable[[CallbackWarning], None] = lambda warning: None,
        in_program: bool = False,
        one_worker: bool = False,
        print_text: Callable[[str, bool], None] | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.callbacks = list(callbacks)
        self.params = dict(params)
        self.model = model
        self.stop_reason = ""
        self._place = place
        self._process = _process_name(place, self.params)
        self.warn = warn
        self._on_error = on_error
        self._in_program = in_program
        self._times = HookTimes()
        self._output = contextlib.nullcontext if print_text is None else functools.partial(_sent, print_text)
        self._logging = contextlib.nullcontext if log is None else functools.partial(forwarded_logs.sending, log)
        self._failures: set[str] = set()
        self._called_once: set[tuple[str, int]] = set()
        self._batches: Counter[tuple[str, int]] = Counter()  # that a callback limited by `every` has seen
        if model is not None:
            model.stop_training = False
            for name in _REFUSED:
                setattr(model, name, False)
        self._in_two_places: set[int] = set()  # ids of callbacks
        self._methods: dict[str, list[tuple[Any, Callable[..., Any]]]] = {name: [] for name in TABLE}
        for position, callback in enumerate(self.callbacks):
            _check_is_callback(callback, position)
            if place_of(callback) not in (None, place):
                continue  # some open files in set_model
            # In the order of Keras' CallbackList. Hooks are looked up afterwards, because a callback may choose its
            # hooks by its model.
            self._guarded(callback, "set_model", callback.set_model, (model,))
            self._guarded(callback, "set_params", callback.set_params, (self.params,))
            methods = overridden_hooks(callback)
            for name in hooks_at(callback, place, methods.keys(), in_program, one_worker):
                self._methods[name].append((callback, methods[name]))
            if in_program and all(hooks_at(callback, each, methods.keys(), True, one_worker) for each in _BOTH):
                self._in_two_places.add(id(callback))
        self._of_optimizers: dict[str, bool] = {}  # answers of `needs_optimizer_state`

    @property
    def stop_requested(self) -> bool:
        """Whether a hook has set `model.stop_training`; never reset. `stop_reason` names the hook."""
        return bool(self.stop_reason)

    def wants(self, hook: str) -> bool:
        """Whether any callback implements `hook` and runs it in this process. Ask before costly `logs`."""
        return bool(self._methods[hook])

    def names(self, hooks: Iterable[str]) -> list[str]:
        """The classes of the callbacks that run any of `hooks` in this process, sorted."""
        return sorted({type(callback).__name__ for hook in hooks for callback, _ in self._methods[hook]})

    def is_due(self, hook: str) -> bool:
        """Whether the next call of a batch hook reaches any callback; `every` skips calls."""
        return any(self._is_due(callback, hook, 1) for callback, _ in self._methods[hook])

    def needs_optimizer_state(self, hook: str) -> bool:
        """Whether a callback reads or writes the optimizer's state in `hook`."""
        if hook not in self._of_optimizers:
            found = (needs_optimizer_state(callback, hook) for callback, _ in self._methods[hook])
            self._of_optimizers[hook] = any(found)
        return self._of_optimizers[hook]

    def readers(self, hook: str, batches: int = 1) -> list[Any]:
        """The callbacks that may read the model's weights in a hook; for a batch hook, within this many batches."""
        return [
            callback
            for callback, _ in self._methods[hook]
            if (not TABLE[hook].of_batch or self._is_due(callback, hook, batches))
            and reads_model(callback, hook, batches)
        ]

    def note_batch(self, seconds: float) -> None:
        """Records the time of a training batch without its hooks; slower hooks cause a warning."""
        self._times.note_batch(seconds)

    def call(self, hook: str, *args: Any, keras_logs: Any = None, after_export: bool | None = None) -> None:
        """Calls `hook` with `args` on every callback that runs it here, in order.

        `on_train_begin` and `on_predict_begin` are called once per callback; later calls do nothing. In `on_train_end`,
        callbacks with `after_export` run last.

        Args:
            keras_logs: `logs` for Keras's own callbacks, instead of the last of `args`; None: the same.
            after_export: call only callbacks that have (not) set `after_export`; None: all.

        Raises:
            CallbackError: a hook raised; the message names callback, hook, process and version, and `user_traceback`
                has the frames outside of ElasticCB.
        """
        methods = self._methods[hook]
        if hook == "on_train_end":
            methods = sorted(methods, key=lambda entry: _after_export(entry[0]))
        of_keras = args if keras_logs is None else (*args[:-1], dict(keras_logs))
        for callback, method in methods:
            if after_export is not None and _after_export(callback) is not after_export:
                continue
            if hook in _ONCE and (hook, id(callback)) in self._called_once:
                continue
            if TABLE[hook].of_batch and not self._count(callback, hook):
                continue
            self._guarded(callback, hook, method, args if stock(callback) is None else of_keras)
            if hook in _ONCE:  # not before: a failed beginning is retried with the next task
                self._called_once.add((hook, id(callback)))
            self._note_stop(f"{type(callback).__name__}.{hook} set model.stop_training{_location(hook, args)}")

    def skip(self, hook: str) -> None:
        """Counts a batch whose hook is not due."""
        for callback, _ in self._methods[hook]:
            self._count(callback, hook)
        self._note_stop("The model's step set model.stop_training")

    def _note_stop(self, reason: str) -> None:
        if not self.stop_reason and self.model is not None and self.model.stop_training:
            self.stop_reason = reason

    def call_on(self, callback: Any, hook: str, *args: Any) -> None:
        """Calls a hook of one callback, if it has it, also if it does not run in this process."""
        method = overridden_hooks(callback).get(hook)
        if method is not None:
            self._guarded(callback, hook, method, args)

    def call_own(self, callback: Any, hook: str, *args: Any) -> None:
        """Calls a method that is a hook only of this class of callbacks."""
        self._guarded(callback, hook, getattr(callback, hook), args)

    def flush_files(self) -> None:
        """Writes what hooks here have written to files and databases that are attributes of their callbacks: the
        `on_train_end` that would close them may run in another process."""
        for callback in self.callbacks:
            _flush_files(callback, appends=id(callback) in self._in_two_places)

    def _is_due(self, callback: Any, hook: str, batches: int) -> bool:
        every = batches_between(callback)
        return self._batches[hook, id(callback)] % every + batches >= every

    def _count(self, callback: Any, hook: str) -> bool:
        """Whether the callback is called for this batch."""
        due = self._is_due(callback, hook, 1)
        self._batches[hook, id(callback)] += 1
        return due

    def _guarded(self, callback: Any, hook: str, method: Callable[..., Any], args: tuple[Any, ...]) -> None:
        started = time.perf_counter()
        try:
            with self._output(), self._logging(), self._warnings(callback):
                method(*args)
            self._refuse_to_stop()
        except CallbackError as error:  # messages of built-in callbacks need no traceback
            message = f"{self._story(callback, hook, args)} {error}"
            self._failed(callback, hook, CallbackError(message, error.user_traceback), error)
        except ElasticCBError:  # not the callback's fault: a lost connection, an interrupted job
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and self._place is not Place.WORKER:
                raise  # in the caller's process, it may come from a signal handler
            message = f"{self._story(callback, hook, args)} {describe(error)}"
            self._failed(callback, hook, CallbackError(message, user_traceback(error)), error)
        if id(callback) in self._in_two_places and (self._place is Place.MASTER or "_batch_" not in hook):
            _flush_files(callback, appends=True)
        if self._place is Place.WORKER and hook in _TIMED:
            name = f"{type(callback).__name__}.{hook}"
            slow = self._times.note_hook(name, time.perf_counter() - started, batches_between(callback))
            if slow:
                if self._in_program and not uses_model(callback, hook):  # it would do the same there, after the batch
                    slow += ', or run it on the master in the background with @runs_on("master")'
                slow += "."
                logger.warning(slow)
                self.warn(CallbackWarning(f"{name} is slow", slow))

    def _warnings(self, callback: Any) -> contextlib.AbstractContextManager[None]:
        if self._in_program or self._place is not Place.MASTER:
            return contextlib.nullcontext()
        return shown(type(callback).__name__, self.warn)

    def _refuse_to_stop(self) -> None:
        for name, advice in _REFUSED.items():
            if getattr(self.model, name, False):
                setattr(self.model, name, False)
                raise CallbackError(
                    f"It set model.{name}, which has no effect here because several workers share the batches and "
                    f"each record counts once. {advice}."
                )

    def _failed(self, callback: Any, hook: str, error: CallbackError, cause: BaseException) -> None:
        is_essential = getattr(callback, "essential", False) or hook in ("set_model", "set_params")
        if self._on_error is CallbackErrors.STOP or is_essential:
            raise error from cause
        subject = f"{type(callback).__name__}.{hook} failed"
        text = f"{error}\n{error.user_traceback}The job continues (callback_errors=warn)."
        logger.error(error if subject in self._failures else text)  # a batch hook may fail with every batch
        self._failures.add(subject)
        self.warn(CallbackWarning(subject, text, errors=1))

    def _story(self, callback: Any, hook: str, args: tuple[Any, ...]) -> str:
        also = " (where it runs as well as in your process)" if self._runs_twice(hook) else ""
        return f"Callback {type(callback).__name__} failed in {hook} on {self._process}{also}{_location(hook, args)}:"

    def _runs_twice(self, hook: str) -> bool:
        return self._in_program and self._place is Place.WORKER and hook in ("on_train_begin", "on_predict_begin")


def _flush_files(callback: Any, appends: bool) -> None:
    """Flushes files, and commits to databases, that are attributes of a callback.

    Args:
        appends: whether what comes later goes to the ends of text files, so that hooks in several processes don't
            overwrite each other's lines.
    """
    for value in list(vars(callback).values()):
        with contextlib.suppress(Exception):  # it is closed, or not for writing
            if type(value).__module__ == "sqlite3":
                value.commit()
            elif isinstance(value, io.IOBase):
                value.flush()
                if appends and isinstance(value, io.TextIOBase) and stat.S_ISREG(os.fstat(value.fileno()).st_mode):
                    fcntl.fcntl(value, fcntl.F_SETFL, fcntl.fcntl(value, fcntl.F_GETFL) | os.O_APPEND)


def _after_export(callback: Any) -> bool:
    """Whether a callback needs the exported model in `on_train_end`."""
    return bool(getattr(callback, "after_export", False))


def _process_name(place: Place, params: Mapping[str, Any]) -> str:
    if place is Place.MASTER:
        return "the master"
    return f"worker {params['worker_id']}" if "worker_id" in params else "a worker"


def _location(hook: str, args: tuple[Any, ...]) -> str:
    """Identifies a call of a hook, as in " (model version 12)"."""
    row = TABLE.get(hook)
    if row is None:
        return ""
    if row.of_batch and args:
        return f" ({'model version' if hook.startswith('on_train_') else 'batch'} {args[0]})"
    if row.of_epoch and args:
        return f" (epoch {args[0]})"
    logs = args[-1] if args else None
    if isinstance(logs, Mapping) and "version" in logs:
        return f" (model version {logs['version']})"
    return ""


def _check_is_callback(callback: Any, position: int) -> None:
    if isinstance(callback, type):
        hint = f"Create an instance: {callback.__name__}()."
    elif callable(getattr(callback, "set_model", None)) and callable(getattr(callback, "set_params", None)):
        return
    else:
        hint = "Derive its class from keras.callbacks.Callback."
    raise ModelFileError(
        f"callbacks() must return a list of keras.callbacks.Callback objects. Item {position} is "
        f"{callback!r}, of type {type(callback).__name__}. {hint}"
    )


class HookTimes:
    """Compares the median time of each batch hook with the median time of a batch, like Keras."""

    def __init__(self) -> None:
        self._batches: deque[float] = deque(maxlen=_KEPT)
        self._hooks: dict[str, deque[float]] = {}
        self._told: set[str] = set()

    def note_batch(self, seconds: float) -> None:
        """Records the time of a batch without its hooks."""
        self._batches.append(seconds)

    def note_hook(self, name: str, seconds: float, every: int = 1) -> str:
        """Records the time of a hook that is called every `every` batches; returns a warning once per hook,
        without its last period."""
        times = self._hooks.setdefault(name, deque(maxlen=_KEPT))
        times.append(seconds)
        if name in self._told or len(times) < _ENOUGH or len(self._batches) < _ENOUGH:
            return ""
        hook, batch = median(times), median(self._batches)
        if hook / every <= batch:
            return ""
        self._told.add(name)
        return (
            f"{name} is slow: it takes {hook:.4f} s{f' every {every} batches' if every > 1 else ''}, a batch takes "
            f"{batch:.4f} s (medians). Make it faster, or call it less often with elasticcb.callbacks.every(n)"
        )


@contextlib.contextmanager
def _sent(send: Callable[[str, bool], None]) -> Iterator[None]:
    """Sends what this thread prints meanwhile, and whether to standard error; it also prints it."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Copied(stream, send, stream is before[1]) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Copied:
    def __init__(self, stream: TextIO, send: Callable[[str, bool], None], is_error: bool) -> None:
        self._stream, self._send, self._is_error = stream, send, is_error
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            self._send(text, self._is_error)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def check_monitors(callbacks: Iterable[Any]) -> None:
    """Checks the callbacks of a job that does not evaluate. After a callback of the user's with `on_epoch_end`, which
    may add metrics to `logs`, nothing is known.

    Raises `ModelFileError` for a callback that would never act.
    """
    for callback in callbacks:
        hook = overridden_hooks(callback).get("on_epoch_end")
        if hook is not None and not library_of(hook):
            return
        monitored = str(getattr(callback, "monitor", ""))
        if _acts_by_metric(callback) and monitored.startswith("val_"):
            raise ModelFileError(
                f"{type(callback).__name__} monitors {monitored!r}, but the job has no validation data, so the "
                f"callback would never act. Add validation data, or let it monitor a metric of the training, such as "
                f"{monitored.removeprefix('val_')!r}."
            )


def _acts_by_metric(callback: Any) -> bool:
    import keras

    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_best_only)
    return isinstance(callback, (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau))


_ATTRIBUTE = "_elasticcb_every"

Target = TypeVar("Target")


def every(n: int) -> Callable[[Target], Target]:
    """Calls the batch hooks of a callback only for every n-th batch that its process sees.

    Wraps a callback object or decorates a class; other hooks are called as usual. Skipped hooks cost nothing: the
    model's weights are not fetched for them.

    Args:
        n: number of batches from one call to the next, at least 1.

    Raises:
        ModelFileError: `n` is not a whole number of at least 1, or the target has no hooks.

    Example:

        def callbacks():
            return [every(100)(WeightHistograms())]
    """
    try:
        batches = operator.index(n)
    except TypeError:
        batches = 0
    if batches < 1:
        raise ModelFileError(f"every takes a whole number of batches of at least 1. Received: {n!r}.")

    def limit(target: Target) -> Target:
        if not hasattr(target, "on_train_batch_end"):
            raise ModelFileError(
                f"every({n}) takes a callback, or decorates the class of a callback. Received: {target!r} of type "
                f"{type(target).__name__}. Write every({n})(MyCallback()), or @every({n}) above the class."
            )
        setattr(target, _ATTRIBUTE, batches)
        return target

    return limit


def batches_between(callback: Any) -> int:
    """Number of batches from one call of a batch hook to the next."""
    return getattr(callback, _ATTRIBUTE, 1)


class HookLogs(dict[str, Any]):
    """What Keras passes to a hook. More values are available by key, but loops over `logs` do not see them.

    Example:

        logs = HookLogs({"loss": 0.5}, version=12)
        assert logs["version"] == 12 and list(logs) == ["loss"]
    """

    def __init__(self, logs: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), **more: Any) -> None:
        super().__init__(logs)
        self._more = more

    def __missing__(self, name: str) -> Any:
        return self._more[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._more

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, self._more.get(name, default))

    def copy(self) -> HookLogs:
        return HookLogs(self, **self._more)
