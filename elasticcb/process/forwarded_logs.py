"""Records that a user's hooks log on workers: the loggers of the caller's process handle them, with its levels, filters
and handlers, as with `QueueHandler` and `QueueListener` of the standard library.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

import numpy as np

from elasticcb.errors import CallbackWarning, is_users_own
from elasticcb.process.log_files import LOGGERS

_package = logging.getLogger(LOGGERS[0])  # whose handlers, on a worker, write its log
_given: set[str] = set()  # loggers that have had a level of the caller's here


def read_loggers() -> dict[str, tuple[int, bool]]:
    """Level of each logger that is configured in this process, and whether it has handlers."""
    known = [each for each in logging.root.manager.loggerDict.copy().values() if isinstance(each, logging.Logger)]
    used = [each for each in known if (each.level or each.handlers) and not _is_of_package(each)]
    return {each.name: (each.level, bool(each.handlers)) for each in (logging.root, *used)}


def set_loggers(configured: Mapping[str, tuple[int, bool]]) -> None:
    """Sets the levels of the caller's loggers, and removes handlers that are there and, by an import, also here."""
    _given.update(configured)
    for name in _given:
        logger = logging.getLogger(name)
        level, has_handlers = configured.get(name, (logging.NOTSET, False))
        logger.setLevel(level)
        if has_handlers and _package.handlers:
            logger.handlers[:] = []
            logger.propagate = True
    # If it had none, `logging.warning(…)` would add one to standard error, which is sent as well.
    logging.root.handlers[:] = _package.handlers or logging.root.handlers


@contextlib.contextmanager
def sending(send: Callable[[str], None]) -> Iterator[None]:
    """Sends what this thread logs meanwhile, except to this package's loggers and those with handlers added here."""
    before, thread = logging.Logger.callHandlers, threading.get_ident()

    def call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
        if threading.get_ident() == thread and not _is_of_package(logger) and not _is_handled_here(logger):
            try:
                text = _to_json(record)
            except Exception:  # for example because arguments do not fit the message
                logging.Handler().handleError(record)
                return
            send(text)
        before(logger, record)

    logging.Logger.callHandlers = call_handlers  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        logging.Logger.callHandlers = before  # type: ignore[method-assign]


def handle(text: str, process: str) -> None:
    """Handles a record that was sent by a process, as if it had been logged here."""
    record = logging.makeLogRecord(json.loads(text))
    record.levelname, record.processName = logging.getLevelName(record.levelno), process
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _is_of_package(logger: logging.Logger) -> bool:
    return f"{logger.name}.".startswith(tuple(f"{name}." for name in LOGGERS))


def _is_handled_here(logger: logging.Logger) -> bool:
    above = logger.parent if logger.propagate else None
    added = any(handler not in _package.handlers for handler in logger.handlers)
    return added or (above is not None and _is_handled_here(above))


def _to_json(record: logging.LogRecord) -> str:
    sent = {**vars(record), "msg": record.getMessage(), "args": None, "exc_info": None}  # as `QueueHandler` does
    if record.exc_info and not record.exc_text:
        sent["exc_text"] = logging.Formatter().formatException(record.exc_info)
    return json.dumps(sent, default=lambda value: value.item() if isinstance(value, np.generic) else str(value))


@contextlib.contextmanager
def shown(who: str, warn: Callable[[CallbackWarning], None], of_libraries: bool = True) -> Iterator[None]:
    """Shows the user what Python's `warnings` report meanwhile, which a command only logs. (A program shows it itself.)
    Python skips what it has reported before.

    Args:
        of_libraries: whether code of other libraries than Keras counts.
    """
    log = warnings.showwarning

    def show_as_well(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        log(message, category, filename, lineno, file, line)
        if not of_libraries and not is_users_own(filename) and "keras" not in Path(filename).parts:
            return
        text = f"{who} warns: {message}"
        warn(CallbackWarning(text, text))

    warnings.showwarning = show_as_well
    try:
        yield
    finally:
        warnings.showwarning = log
