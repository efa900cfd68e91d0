"""Converts a master's answer about embedding tables to a report."""

from __future__ import annotations

import numpy as np

from elasticcb.checkpoint.table_report import IdReport, TablesReport, id_in_table, table_report
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import from_message
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.table_counts import TableCounts
from elasticcb.sharding.table_state import TableState, from_tensors


def tables_of(folder: str, answer: pb.TablesResponse, top: int) -> TablesReport:
    """Report on all tables.

    Raises `WireError` for an invalid answer.
    """
    servers = [{part.variable: TableCounts.from_message(part) for part in each.tables} for each in answer.counts]
    tables = tuple(
        table_report(spec, [parts[index] for parts in servers if index in parts], top, live=True)
        for index, spec in _specs(answer).items()
    )
    return TablesReport(
        folder,
        max((each.version for each in answer.counts), default=0),
        tables,
        tuple(sum(part.bytes for part in parts.values()) for parts in servers),
        answer.memory_bytes,
    )


def id_of(folder: str, answer: pb.TablesResponse, id: int) -> IdReport:
    """The rows of an id. Raises `WireError` for an invalid answer."""
    states = from_tensors({each.name: from_message(each) for each in answer.found.tensors})
    none = TableState(np.empty(0, np.int64), np.empty((0, 0)))
    tables = tuple(
        id_in_table(spec, answer.server, states.get(index, none), answer.found.lookups.get(index, 0))
        for index, spec in _specs(answer).items()
    )
    return IdReport(folder, answer.found.version, id, tables)


def _specs(answer: pb.TablesResponse) -> dict[int, VariableSpec]:
    """Specs of the tables, by variable index."""
    specs = map(VariableSpec.from_message, answer.variables)
    return {index: spec for index, spec in enumerate(specs) if spec.table}
