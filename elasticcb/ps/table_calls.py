"""Calls that report the content of embedding tables to users, while training continues."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from elasticcb.errors import WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.embedding_table import EmbeddingTable
from elasticcb.ps.holder import Holder
from elasticcb.ps.table_rows import OVERHEAD_BYTES
from elasticcb.rpc.tensors import Frame
from elasticcb.sharding.table_counts import TableCounts, Top
from elasticcb.sharding.table_state import to_tensors

PIECE_ROWS = 1 << 16  # rows copied under the lock at a time: 1.5 MB
_MOST_TOP = 10_000  # maximum number of ids per answer


class TableCalls:
    """These calls take the lock repeatedly, but only briefly."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder

    def count(self, frame: Frame[pb.CountTablesRequest]) -> Frame[Any]:
        """Handles `CountTables`."""
        top = frame.header.top
        if not 0 <= top <= _MOST_TOP:
            raise WireError(f"CountTables requests the top {top:,} ids; expected 0 to {_MOST_TOP:,}.")
        with self._holder.lock:
            parameters = self._holder.present().parameters
        response = pb.CountTablesResponse(version=parameters.version)
        for number in parameters.tables.numbers:
            counted = count_table(parameters.tables[number], parameters.version, top, self._holder.lock)
            response.tables.append(counted.to_message(number))
        return Frame(response, {})

    def find_row(self, frame: Frame[pb.FindRowRequest]) -> Frame[Any]:
        """Handles `FindRow`."""
        id = frame.header.id
        if id < 0:
            raise WireError(f"FindRow has id {id}; expected 0 or more.")
        with self._holder.lock:
            parameters = self._holder.present().parameters
            tables = {number: parameters.tables[number] for number in parameters.tables.numbers}
            found = {number: table.select(np.array([id], np.int64)) for number, table in tables.items()}
            waiting = {number: table.candidates.lookups(id) for number, table in tables.items()}
            version = parameters.version
        response = pb.FindRowResponse(version=version, lookups={k: n for k, n in waiting.items() if n})
        return Frame(response, to_tensors(found))


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
        counts.removed, counts.growth = table.flow.removed, table.flow.lately(time.monotonic())
    return counts
