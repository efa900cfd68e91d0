"""Calls that come again while the first one still runs, or after its answer got lost, are done once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from elasticcb.rpc.tensors import Frame

_KEPT = 256  # answers


class Once:
    """Does each call once, by its number.

    A repetition gets the answer of the first one, and waits for it if need be. A call that raised is done again when it
    comes again. An answer with arrays is not kept: who asks for it again, after it was given, gets a new one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: OrderedDict[int, Future[Frame[Any]]] = OrderedDict()  # those that run, and the latest answered

    def do(self, call: int, function: Callable[[], Frame[Any]]) -> Frame[Any]:
        """The answer of `function`, which the first call of this number runs; 0: it has no number, and runs.

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
        # A copy, since encoding a frame describes its arrays in the header.
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
