"""Executes repeated calls once: retries during the first call, or after its answer got lost."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from elasticcb.rpc.tensors import Frame

_KEPT = 256  # answers


class Once:
    """Executes each call once, by its number.

    A repeated call gets the answer of the first one, waiting for it if necessary. A call that raised is executed again.
    Answers with arrays are not kept: a later repetition executes the call again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: OrderedDict[int, Future[Frame[Any]]] = OrderedDict()  # running calls, and the latest answers

    def do(self, call: int, function: Callable[[], Frame[Any]]) -> Frame[Any]:
        """The result of `function`, which only the first call with this number runs; 0: no number, always runs.

        Raises what `function` raises.
        """
        if not call:
            return function()
        with self._lock:
            answer = self._calls.get(call)
            is_first = answer is None
            if answer is None:
                answer = self._calls[call] = Future()
        if is_first:
            self._run(call, answer, function)
        given = answer.result()
        # A copy, because encoding a frame describes its arrays in the header.
        header = type(given.header)()
        header.CopyFrom(given.header)
        return Frame(header, given.tensors)

    def _run(self, call: int, answer: Future[Frame[Any]], function: Callable[[], Frame[Any]]) -> None:
        try:
            given = function()
        except BaseException as error:
            self._forget(call)
            answer.set_exception(error)
            return
        answer.set_result(given)
        if given.tensors:
            self._forget(call)
        with self._lock:
            for old in [number for number, each in self._calls.items() if each.done()][:-_KEPT]:
                del self._calls[old]

    def _forget(self, call: int) -> None:
        with self._lock:
            self._calls.pop(call, None)
