"""Calls of a parameter server that read or set its whole state."""

from __future__ import annotations

import os
from typing import Any

from elasticcb.checkpoint import parts
from elasticcb.errors import ElasticCBError, WireError
from elasticcb.optimizers.state_messages import from_tensors, to_tensors
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.holder import Holder
from elasticcb.ps.served_model import Exported, ServedModel, values_of
from elasticcb.rpc.tensors import Array, Frame
from elasticcb.sharding.array_names import EXTRAS, SHARED, SLOTS, STATE, WEIGHTS, named, only
from elasticcb.sharding.table_state import TableState
from elasticcb.sharding.table_state import from_tensors as tables_from
from elasticcb.sharding.table_state import to_tensors as tables_to


class ReadingCalls:
    """Calls that run in parallel to training: they take the lock only briefly, and hold what they read."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder

    def save(self, frame: Frame[pb.SaveRequest]) -> Frame[Any]:
        directory = frame.header.directory
        if "\0" in directory or not os.path.isabs(directory):
            raise WireError(f"Save has an invalid path: {directory!r}; expected an absolute one.")
        with self._holder.lock:
            model = self._holder.present()
            part = model.parameters.hold(self._holder.lock)
        try:  # others continue while the file is written
            saved = parts.save_part(directory, part, model.slices, model.index, model.num_ps)
        finally:
            part.release()
        response = pb.SaveResponse(file=saved.name, bytes=saved.bytes, sha256=saved.sha256, version=part.version)
        return Frame(response, {})

    def export(self, frame: Frame[pb.ExportRequest]) -> Frame[Any]:
        request = frame.header
        with self._holder.lock:
            model = self._holder.present()
            parameters = model.parameters
            if model.exported is not None and (request.release or not request.id or model.exported.id != request.id):
                model.exported.part.release()
                model.exported = None
            if request.release:
                return Frame(pb.ExportResponse(version=parameters.version), {})
            if model.exported is None:
                model.exported = Exported(request.id, parameters.hold(self._holder.lock), parameters.snapshot())
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
        with self._holder.lock:
            model = self._holder.present()
            table, exported = model.parameters.tables[number], model.exported
            if not request.export_id:
                total, state = len(table), TableState(*table.rows(start, request.count))
        if request.export_id:
            if exported is None or exported.id != request.export_id:
                raise ElasticCBError("This export is over, or the server was restarted.")
            held = exported.part.held[number]
            total, state = len(held), held.read(start)
        return Frame(pb.ReadTableResponse(total=total), tables_to({number: state}))


def snapshot(frame: Frame[pb.SnapshotRequest], model: ServedModel) -> Frame[Any]:
    evaluation_round = frame.header.evaluation_round
    if evaluation_round <= 0:
        raise WireError(f"Snapshot has evaluation pass {evaluation_round}; passes are numbered from 1.")
    if frame.header.release:
        released = model.snapshots.pop(evaluation_round, None)
        for table in (released.tables if released and released.tables else {}).values():
            table.release()
        return Frame(pb.SnapshotResponse(version=model.parameters.version), {})
    if frame.tensors:
        model.snapshots[evaluation_round] = model.given_snapshot(frame.tensors)._replace(
            tables=model.parameters.tables.snapshot()
        )
    elif evaluation_round not in model.snapshots:
        model.snapshots[evaluation_round] = model.parameters.kept_snapshot()
    return Frame(pb.SnapshotResponse(version=model.snapshots[evaluation_round].version), {})


def load_state(frame: Frame[pb.LoadStateRequest], model: ServedModel) -> Frame[Any]:
    request = frame.header
    if request.id == model.loaded[0]:  # a retry
        return Frame(pb.LoadStateResponse(version=model.loaded[1]), {})
    values: dict[int, Array] = {}
    if only(frame.tensors, WEIGHTS, STATE):
        values = values_of(frame.tensors, model.specs, model.slices, "LoadState")
    state = from_tensors(frame.tensors, request.optimizers)
    parameters = model.parameters
    parameters.check_state(state)
    parameters.load(values, state, parameters.version + 1, tables_from(frame.tensors))
    model.loaded = request.id, parameters.version
    if only(frame.tensors, SLOTS, EXTRAS, SHARED):
        model.slots_version += 1
    return Frame(pb.LoadStateResponse(version=parameters.version), {})
