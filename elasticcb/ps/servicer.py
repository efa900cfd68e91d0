"""Handles the calls of `ParameterServer`; `Servicer` maps each call to its handler.

One lock serializes calls that read or change the model. Blocks of weights are created once per version and shared by
all answers, so that the lock is held for little more than an update.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.holder import Holder, ServerOptions
from elasticcb.ps.state_calls import ReadingCalls, load_state, snapshot
from elasticcb.ps.table_calls import TableCalls
from elasticcb.ps.training_calls import TrainingCalls
from elasticcb.rpc.frame_service import Handler
from elasticcb.rpc.services import PS_METHODS
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


class Servicer:
    """The calls of one parameter server."""

    def __init__(self, options: ServerOptions) -> None:
        training_calls = TrainingCalls(options.lost_workers)
        self.holder = Holder(options)
        self._once = Once()
        self.handlers = self._answers(training_calls, ReadingCalls(self.holder))

    def _answers(self, training: TrainingCalls, reading: ReadingCalls) -> dict[str, Handler]:
        """Handlers by method name."""
        locked, saved, holder = self._locked, self._then_saved, self.holder
        tables = TableCalls(self.holder)
        answers: dict[str, Handler] = {
            "Exchange": self._unless_moving(training.exchange),
            "Snapshot": locked(snapshot),
            "FinishTraining": saved(locked(training.finish_training)),
            "SetLearningRate": locked(training.set_learning_rate),
            "LoadState": saved(locked(load_state)),
            "Persist": holder.persist,
            "Initialize": holder.initialize,
            "Save": reading.save,
            "ReadTable": reading.read_table,
            "Export": reading.export,
            "CountTables": tables.count,
            "FindRow": tables.find_row,
            "Move": locked(training.move),
        }
        return {name: self._once_if_numbered(name, answer) for name, answer in answers.items()}

    def _once_if_numbered(self, name: str, answer: Handler) -> Handler:
        if not PS_METHODS[name].is_numbered:
            return answer
        return lambda frame: self._once.do(frame.header.call, lambda: answer(frame))

    def _locked(self, function: Callable[[Frame[Any], Any], Frame[Any]]) -> Handler:
        def answer(frame: Frame[Any]) -> Frame[Any]:
            with self.holder.lock:
                return function(frame, self.holder.present())

        return answer

    def _unless_moving(self, exchange: Callable[[Frame[Any], Any], Frame[Any]]) -> Handler:
        def answer(frame: Frame[Any]) -> Frame[Any]:
            with self.holder.lock:  # the model may have gone while a call waited for the lock
                if self.holder.is_moving:
                    return Frame(pb.ExchangeResponse(status=pb.MOVING), {})
                return exchange(frame, self.holder.present())

        return answer

    def _then_saved(self, method: Handler) -> Handler:
        """For calls that workers can't repeat: they are in the recovery files before they are answered."""

        def answer(frame: Frame[Any]) -> Frame[Any]:
            response = method(frame)
            self.holder.write_down(replaced=True)
            return response

        return answer
