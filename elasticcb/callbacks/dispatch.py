"""Calls the hooks of a job's callbacks, in the processes in which the table of `placement` wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elasticcb.callbacks.placement import TABLE, Place, hooks_at, overridden_hooks
from elasticcb.errors import CallbackError, ElasticCBError, ModelFileError, user_traceback

_ONCE = frozenset({"on_train_begin", "on_predict_begin"})


class Dispatcher:
    """The callbacks of one process.

    Args:
        callbacks: what the model file's `callbacks()` returned in this process.
        place: `Place.MASTER` or `Place.WORKER`. Every worker may get the TRAIN_END task, so every worker's
            dispatcher wants `on_train_end`.
        params: becomes `callback.params`; `worker_id` of a worker is part of it.
        model: becomes `callback.model`.
        process: name of the process in errors; "master" or "worker N" when not given.

    Raises:
        ModelFileError: something in `callbacks` is no callback, or `place` is not that of a process.
        CallbackError: a callback's own `set_params` or `set_model` raised.
    """

    def __init__(
        self,
        callbacks: Iterable[Any],
        place: Place,
        params: Mapping[str, Any],
        model: Any,
        process: str = "",
    ) -> None:
        if place not in (Place.MASTER, Place.WORKER):
            raise ModelFileError(f"A dispatcher is at MASTER or at WORKER. Received: {place!r}.")
        self.callbacks = list(callbacks)
        self.params = dict(params)
        self.model = model
        self.stop_reason = ""
        self._process = process or _process_name(place, self.params)
        self._called_once: set[tuple[str, int]] = set()
        if model is not None:
            model.stop_training = False
        self._methods: dict[str, list[tuple[Any, Callable[..., Any]]]] = {name: [] for name in TABLE}
        for position, callback in enumerate(self.callbacks):
            _check_is_callback(callback, position)
            # In the order of Keras' own CallbackList; hooks are looked up after, since a callback may choose
            # its hooks by its model.
            self._guarded(callback, "set_model", callback.set_model, (model,))
            self._guarded(callback, "set_params", callback.set_params, (self.params,))
            methods = overridden_hooks(callback)
            for name in hooks_at(callback, place, methods.keys()):
                self._methods[name].append((callback, _as_keras_expects(name, methods[name])))
        # What needs the exported model goes after whatever exports it, in which order they are listed.
        self._methods["on_train_end"].sort(key=lambda entry: bool(getattr(entry[0], "after_export", False)))

    @property
    def stop_requested(self) -> bool:
        """Whether a hook has set `model.stop_training`; stays so. `stop_reason` names the hook."""
        return bool(self.stop_reason)

    def wants(self, hook: str) -> bool:
        """Whether any callback implements `hook` and runs it in this process. Ask before costly `logs`."""
        return bool(self._methods[hook])

    def call(self, hook: str, *args: Any) -> None:
        """Calls `hook` with `args` on every callback that runs it here, in order.

        `on_train_begin` and `on_predict_begin` are called once per callback; later calls do nothing.

        Raises:
            CallbackError: a hook raised; names callback, hook, process and version, and carries the part of
                the traceback that is not ElasticCB's own.
        """
        methods = self._methods[hook]
        if not methods:
            return
        for callback, method in methods:
            if hook in _ONCE and (hook, id(callback)) in self._called_once:
                continue
            self._guarded(callback, hook, method, args)
            if hook in _ONCE:  # not before: a beginning that failed is tried again with the next task
                self._called_once.add((hook, id(callback)))
            if not self.stop_reason and self.model is not None and self.model.stop_training:
                self.stop_reason = f"{type(callback).__name__}.{hook} set model.stop_training{_location(hook, args)}"

    def _guarded(self, callback: Any, hook: str, method: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            method(*args)
        except CallbackError as error:  # a pre-made callback explains itself
            message = f"{self._story(callback, hook, args)} {error}"
            raise CallbackError(message, error.user_traceback) from error
        except ElasticCBError:  # not the callback's fault: a lost connection, an interrupted job
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise CallbackError(f"{self._story(callback, hook, args)} {what}", user_traceback(error)) from error

    def _story(self, callback: Any, hook: str, args: tuple[Any, ...]) -> str:
        return f"Callback {type(callback).__name__} failed in {hook} on {self._process}{_location(hook, args)}:"


def _as_keras_expects(hook: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Keras's own callbacks write down whatever is in `logs`, so they get nothing but the metrics."""
    if hook != "on_test_end" or not (getattr(method, "__module__", None) or "").startswith("keras."):
        return method

    def on_test_end(logs: Mapping[str, Any]) -> None:
        method({name: value for name, value in logs.items() if name not in ("metrics", "version")})

    return on_test_end


def _process_name(place: Place, params: Mapping[str, Any]) -> str:
    if place is Place.MASTER:
        return "the master"
    return f"worker {params['worker_id']}" if "worker_id" in params else "a worker"


def _location(hook: str, args: tuple[Any, ...]) -> str:
    """What tells one call of a hook from another, as in " (model version 12)"."""
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
        hint = f"Call the class: {callback.__name__}()."
    elif callable(getattr(callback, "set_model", None)) and callable(getattr(callback, "set_params", None)):
        return
    else:
        hint = "Derive its class from keras.callbacks.Callback."
    raise ModelFileError(
        f"callbacks() must return a list of keras.callbacks.Callback objects. Item {position} is "
        f"{callback!r}, of type {type(callback).__name__}. {hint}"
    )
