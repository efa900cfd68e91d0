"""Handles the calls of `ParameterServer`.

One lock serializes calls that read or change the model. Blocks of weights are created once per version and shared by
all answers, so that the lock is held for little more than an update.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from elasticcb.errors import CheckpointError, ElasticCBError, WireError
from elasticcb.optimizers.state import from_tensors, to_tensors
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.embedding_table import EmbeddingTable
from elasticcb.ps.holder import Exported, Holder, Kept, ModelShard, MoveGate, ServerOptions, values_of
from elasticcb.ps.table_rows import OVERHEAD_BYTES
from elasticcb.ps.update_policy import PushName
from elasticcb.rpc.frame_service import Handler
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Array, Frame
from elasticcb.settings import WireDtype
from elasticcb.sharding.array_names import (
    EXTRAS,
    SHARED,
    SLOTS,
    STATE,
    TABLE,
    WANTED,
    WEIGHTS,
    by_index,
    named,
    only,
    without,
)
from elasticcb.sharding.push import Push, narrowed, widened
from elasticcb.sharding.table_counts import TableCounts, Top
from elasticcb.sharding.table_state import TableState
from elasticcb.sharding.table_state import from_tensors as tables_from
from elasticcb.sharding.table_state import to_tensors as tables_to
from elasticcb.storage.remote_files import is_url

logger = logging.getLogger(__name__)

_LONGEST_WAIT_SECONDS = 60.0  # for other workers, in one call
PIECE_ROWS = 1 << 16  # rows copied under the lock at a time: 1.5 MB
_MOST_TOP = 10_000  # maximum number of ids per answer
_KEPT = 256  # answers of repeated calls


class Servicer:
    """The calls of one parameter server.

    Those that read or report the whole state take the lock repeatedly, but only briefly: training continues meanwhile.

    Attributes:
        handlers: by method name.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.holder = Holder(options)
        self._lost_workers, self._wire_dtype = options.lost_workers, options.training.wire_dtype
        self._once = Once()
        answers: dict[str, Handler] = {
            "Exchange": self.exchange,
            "Snapshot": self.snapshot,
            "FinishTraining": self.finish_training,
            "SetLearningRate": self.set_learning_rate,
            "LoadState": self.load_state,
            "Initialize": self.holder.initialize,
            "Save": self.save,
            "ReadTable": self.read_table,
            "Export": self.export,
            "CountTables": self.count_tables,
            "FindRow": self.find_row,
            "Move": self.move,
        }
        self.handlers = {name: self._once_if_numbered(name, answer) for name, answer in answers.items()}

    def _once_if_numbered(self, name: str, answer: Handler) -> Handler:
        if not PS_METHODS[name].is_numbered:
            return answer
        return lambda frame: self._once.do(frame.header.call, lambda: answer(frame))

    # -------------------------------------------------------------- training

    def exchange(self, frame: Frame[pb.ExchangeRequest]) -> Frame[Any]:
        with self.holder.lock:  # the model may have gone while a call waited for the lock
            if self.holder.is_moving:
                return Frame(pb.ExchangeResponse(status=pb.MOVING), {})
            return self._exchange(frame, self.holder.present())

    def _exchange(self, frame: Frame[pb.ExchangeRequest], model: ModelShard) -> Frame[Any]:
        request = frame.header
        if request.map_version != model.shard_map.version:
            return Frame(pb.ExchangeResponse(status=pb.MOVED, map_version=model.shard_map.version), {})
        if model.gate is not None and not model.gate.admits(request.worker_id, request.sequence, request.create_rows):
            return Frame(pb.ExchangeResponse(status=pb.MOVING), {})
        pushed = without(frame.tensors, WANTED)
        if request.sequence:
            self._push(request, pushed, model)
        elif pushed:
            raise WireError("A push needs a sequence number above 0; this one has none.")
        if request.joins:
            model.policy.join(request.worker_id, request.epoch, request.peers)
        if request.rests:
            model.policy.rest(request.worker_id, request.epoch)
        self._merge_due(model)
        if not self._is_merged(PushName(request.worker_id, request.sequence), model):
            return Frame(pb.ExchangeResponse(status=pb.WAITS), {})
        parameters = model.parameters
        response = pb.ExchangeResponse(
            status=pb.DONE,
            version=parameters.version,
            state_version=parameters.state_version,
            learning_rate=parameters.optimizers.learning_rate,
            base_learning_rate_version=model.rate_version,
            slots_version=model.slots_version,
            # Not for the replacement of a lost server, from which the worker had pulled nothing (`known_version` -1).
            alone=request.batches > 0
            and model.policy.workers == 1
            and 0 <= request.known_version == request.base == parameters.version - request.batches,
        )
        snapshot = model.snapshot_of(request.snapshot) if request.snapshot else None
        if snapshot is not None:
            response.version, response.state_version = snapshot.version, snapshot.state_version
        ids = by_index(WANTED, frame.tensors)
        rows = parameters.tables.lookup(ids, request.create_rows, snapshot and snapshot.tables)
        tensors = narrowed(named(TABLE, rows), self._wire_dtype if request.create_rows else WireDtype.SAME)
        if response.alone:
            return Frame(response, tensors)
        if request.optimizers or request.batches:
            tensors |= to_tensors(parameters.optimizers.state(request.optimizers))
        if not request.pull:
            return Frame(response, tensors)
        pulled = snapshot or parameters.snapshot()
        # Not "older than known": a restored server may be at a lower version.
        if pulled.version != request.known_version:
            tensors |= named(WEIGHTS, pulled.weights)
        if pulled.state_version != request.known_state_version:
            tensors |= named(STATE, pulled.state)
        return Frame(response, tensors)

    def _push(self, request: pb.ExchangeRequest, tensors: Mapping[str, Array], model: ModelShard) -> None:
        """Merges a push, or keeps it until it is due; not if it came before."""
        name = PushName(request.worker_id, request.sequence)
        if request.worker_id in self._lost_workers:
            raise ElasticCBError(
                f"The updates of worker {request.worker_id} are refused: the master declared it lost and reassigned "
                "its tasks."
            )
        if model.has(name):
            return
        push = model.parameters.checked(Push.decode(request, widened(tensors, model.parameters.specs)))
        model.parameters.optimizers.check(from_tensors(push.optimizers))
        if push.batches:
            model.policy.come(name)
            model.waiting[name] = push
            self._merge_due(model)
            if name in model.waiting:
                model.waiting[name] = push.copied()
        else:
            model.parameters.merge([push])
            model.taken[name.worker] = name.sequence

    def _merge_due(self, model: ModelShard) -> None:
        names = model.policy.due(self._lost_workers)
        # Others repeat the batches of a lost worker.
        model.merge(names, leave_out=self._lost_workers)

    def _is_merged(self, name: PushName, model: ModelShard) -> bool:
        """Waits until a movement is merged, which other workers' movements may have to come for."""
        end = time.monotonic() + _LONGEST_WAIT_SECONDS
        while name in model.waiting and time.monotonic() < end and not model.is_closed:
            model.merged.wait(model.policy.patience)
            self._merge_due(model)
        return name not in model.waiting

    def move(self, frame: Frame[pb.MoveRequest]) -> Frame[Any]:
        """Closes the model to pushes, or opens it again: see `MoveStep`."""
        with self.holder.locked_model() as model:
            request, response = frame.header, pb.MoveResponse(map_version=model.shard_map.version)
            if request.step == pb.OPEN:
                model.gate = model.gate if request.map_version != model.shard_map.version else None
                return Frame(response, {})
            if request.step == pb.CLOSE:
                model.gate = model.gate or MoveGate()
                model.flush()
                response.pushes.extend(_names(model.taken.items()))
            elif model.gate is not None:
                model.gate.allowed = {push.worker_id: push.sequence for push in request.pushes}
                response.pushes.extend(_names(model.gate.missing(model.taken)))
            return Frame(response, {})

    def finish_training(self, frame: Frame[pb.FinishTrainingRequest]) -> Frame[Any]:
        with self.holder.locked_model() as model:
            model.flush()
            return Frame(pb.VersionResponse(version=model.parameters.version), {})

    def set_learning_rate(self, frame: Frame[pb.SetLearningRateRequest]) -> Frame[Any]:
        rate = frame.header.learning_rate
        if not math.isfinite(rate):
            raise WireError(f"The learning rate can't be set to {rate}: it must be finite.")
        with self.holder.locked_model() as model:
            model.parameters.optimizers.set_learning_rate(rate)
            model.rate_version += 1
            return Frame(pb.VersionResponse(version=model.parameters.version), {})

    # -------------------------------------------------------------- the whole state

    def snapshot(self, frame: Frame[pb.SnapshotRequest]) -> Frame[Any]:
        evaluation_round = frame.header.evaluation_round
        if evaluation_round <= 0:
            raise WireError(f"Snapshot has evaluation pass {evaluation_round}; passes are numbered from 1.")
        with self.holder.locked_model() as model:
            if frame.header.release:
                released = model.snapshots.pop(evaluation_round, None)
                for table in (released.tables if released and released.tables else {}).values():
                    table.release()
                return Frame(pb.VersionResponse(version=model.parameters.version), {})
            if frame.tensors or evaluation_round not in model.snapshots:
                dense = model.given_snapshot(frame.tensors) if frame.tensors else model.parameters.snapshot()
                model.snapshots[evaluation_round] = dense._replace(tables=model.parameters.tables.snapshot())
            return Frame(pb.VersionResponse(version=model.snapshots[evaluation_round].version), {})

    def save(self, frame: Frame[pb.SaveRequest]) -> Frame[Any]:
        request = frame.header
        for path in (request.path, *filter(None, [request.whole])):
            if "\0" in path or not (os.path.isabs(path) or is_url(path)):
                raise WireError(f"Save has an invalid path: {path!r}; expected an absolute one, or a URL.")
        return Frame(self.holder.save(request), {})

    def load_state(self, frame: Frame[pb.LoadStateRequest]) -> Frame[Any]:
        with self.holder.locked_model() as model:
            response = _load_state(frame, model)
        if frame.header.HasField("save"):
            try:
                response.saved.CopyFrom(self.save(Frame(frame.header.save, {})).header)
            except CheckpointError as error:
                logger.warning("%s", error)
        return Frame(response, {})

    def export(self, frame: Frame[pb.ExportRequest]) -> Frame[Any]:
        request = frame.header
        with self.holder.locked_model() as model:
            parameters = model.parameters
            if model.exported is not None and (request.release or not request.id or model.exported.id != request.id):
                model.exported.part.release()
                model.exported = None
            if request.release:
                return Frame(pb.ExportResponse(version=parameters.version), {})
            if model.exported is None:
                model.exported = Exported(request.id, parameters.hold(self.holder.lock), parameters.snapshot())
            part, dense = model.exported.part, model.exported.dense
        response = pb.ExportResponse(version=part.version)
        tensors = named(WEIGHTS, dense.weights) | named(STATE, dense.state)
        optimizers = part.optimizers
        response.optimizers.extend(optimizers.optimizers)
        response.rows.update({number: len(table) for number, table in part.held.items()})
        return Frame(response, tensors | to_tensors(optimizers))

    def read_table(self, frame: Frame[pb.ReadTableRequest]) -> Frame[Any]:
        request = frame.header
        number, start = request.variable, max(0, request.start)
        with self.holder.locked_model() as model:
            table, exported = model.parameters.tables[number], model.exported
            if not request.export_id:
                total, state = len(table), TableState(*table.rows(start, request.count))
        if request.export_id:
            if exported is None or exported.id != request.export_id:
                raise ElasticCBError("This export is over, or the server was restarted.")
            held = exported.part.held[number]
            total, state = len(held), held.read(start)
        return Frame(pb.ReadTableResponse(total=total), tables_to({number: state}))

    # -------------------------------------------------------------- content of embedding tables, for users

    def count_tables(self, frame: Frame[pb.CountTablesRequest]) -> Frame[Any]:
        top = frame.header.top
        if not 0 <= top <= _MOST_TOP:
            raise WireError(f"CountTables requests the top {top:,} ids; expected 0 to {_MOST_TOP:,}.")
        with self.holder.locked_model() as model:
            parameters = model.parameters
        response = pb.CountTablesResponse(version=parameters.version)
        for number in parameters.tables.numbers:
            counted = count_table(parameters.tables[number], parameters.version, top, self.holder.lock)
            response.tables.append(counted.to_message(number))
        return Frame(response, {})

    def find_row(self, frame: Frame[pb.FindRowRequest]) -> Frame[Any]:
        id = frame.header.id
        if id < 0:
            raise WireError(f"FindRow has id {id}; expected 0 or more.")
        with self.holder.locked_model() as model:
            parameters = model.parameters
            tables = {number: parameters.tables[number] for number in parameters.tables.numbers}
            found = {number: table.select(np.array([id], np.int64)) for number, table in tables.items()}
            waiting = {number: table.candidates.lookups(id) for number, table in tables.items()}
            version = parameters.version
        response = pb.FindRowResponse(version=version, lookups={k: n for k, n in waiting.items() if n})
        return Frame(response, tables_to(found))


def _names(pushes: Iterable[tuple[int, int]]) -> list[pb.PushName]:
    return [pb.PushName(worker_id=worker, sequence=sequence) for worker, sequence in pushes]


def _load_state(frame: Frame[pb.LoadStateRequest], model: ModelShard) -> pb.LoadStateResponse:
    request = frame.header
    parameters = model.parameters
    values: dict[int, Array] = {}
    if only(frame.tensors, WEIGHTS, STATE):
        values = values_of(frame.tensors, parameters.specs, parameters.slices, "LoadState")
    state = from_tensors(frame.tensors, request.optimizers)
    parameters.optimizers.check(state)
    parameters.load(values, state, parameters.version + 1, tables_from(frame.tensors))
    model.kept, model.exported_files = Kept(), []
    if only(frame.tensors, SLOTS, EXTRAS, SHARED):
        model.slots_version += 1
    return pb.LoadStateResponse(version=parameters.version)


def count_table(table: EmbeddingTable, version: int, top: int, lock: AbstractContextManager[Any]) -> TableCounts:
    """Statistics of a table, collected in pieces while it may change: a row that is evicted meanwhile, or replaces
    another, may be missing or counted twice.
    """
    counts, start = TableCounts(Top(top)), 0
    while True:
        with lock:
            ids, hits, used = table.counts(start, PIECE_ROWS)
            if not len(ids):
                break
        counts.count(ids, hits, used, version)
        start += len(ids)
    with lock:
        rows = len(table)
        slot_bytes = table.row_bytes - OVERHEAD_BYTES - table.value_bytes
        counts.rows, counts.row_bytes, counts.slot_bytes = rows, rows * table.value_bytes, rows * slot_bytes
        counts.slots, counts.bytes, counts.waiting = tuple(sorted(table.slots)), table.bytes, len(table.candidates)
        counts.removed = table.flow.removed
        counts.seconds, counts.made_lately, counts.removed_lately = table.flow.lately(time.monotonic())
    return counts


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
