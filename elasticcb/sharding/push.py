"""What a worker's training changes on the servers, and the frame of one server's part; used by workers and servers.

With `--wire_dtype`, movements, embedding rows and gradients of rows are sent as bfloat16 where they are float32, in
both directions. The receiver converts them back to float32; the servers keep float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from elasticcb.errors import WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array, aligned, dtype_of
from elasticcb.settings import WireDtype
from elasticcb.sharding.array_names import (
    EXTRAS,
    MOVED,
    ROWS,
    SHARED,
    SHARES,
    SLOTS,
    STATE,
    TABLE,
    by_index_and_name,
    kind_of,
    named,
    of_kind,
    only,
)
from elasticcb.sharding.flat_blocks import recut
from elasticcb.sharding.partition import ShardMap, Slice, VariableSpec, cut_slots

_OPTIMIZERS = (SLOTS, EXTRAS, SHARED)
_KINDS = (MOVED, STATE, SHARES, ROWS, *_OPTIMIZERS)
_IDS, _VALUES = "ids", "values"  # parts of "rows/INDEX/…"


class Rows(NamedTuple):
    """Gradients of some rows of an embedding table."""

    ids: Array  # int64 [n], unique
    values: Array  # [n, dim], the table's dtype


@dataclass(frozen=True)
class Push:
    """One server's part of a `Movement`.

    Attributes:
        base: version on which the movement is based; -1: unknown.
    """

    batches: int = 0
    moved: Mapping[str, Array] = field(default_factory=dict)
    state: Mapping[str, Array] = field(default_factory=dict)
    shares: Mapping[str, Array] = field(default_factory=dict)
    rows: Mapping[int, Rows] = field(default_factory=dict)
    optimizers: Mapping[str, Array] = field(default_factory=dict)
    base: int = -1

    def copied(self) -> Push:
        """A copy that outlives the call, because the worker's next call reuses the memory."""
        return replace(
            self,
            moved=_copied(self.moved),
            state=_copied(self.state),
            shares=_copied(self.shares),
            rows={index: Rows(rows.ids.copy(), rows.values.copy()) for index, rows in self.rows.items()},
            optimizers=_copied(self.optimizers),
        )

    def encode(self, header: pb.ExchangeRequest) -> dict[str, Array]:
        """The arrays of its frame; other fields are stored in the header."""
        header.base, header.batches = self.base, self.batches
        arrays = named(MOVED, self.moved) | named(STATE, self.state) | named(SHARES, self.shares)
        for index, rows in self.rows.items():
            arrays |= named(ROWS, {(index, _IDS): rows.ids, (index, _VALUES): rows.values})
        return {**arrays, **self.optimizers}

    @classmethod
    def decode(cls, header: pb.ExchangeRequest, arrays: Mapping[str, Array]) -> Push:
        """The inverse of `encode`.

        Raises `WireError` for unknown arrays. `Parameters.checked` checks whether they fit the model.
        """
        pairs: dict[int, dict[str, Array]] = {}
        for (index, what), array in by_index_and_name(ROWS, arrays).items():
            pairs.setdefault(index, {})[what] = array
        unknown = [name for name in arrays if kind_of(name) not in _KINDS]
        unknown += [f"{ROWS}/{i}/{what}" for i, pair in pairs.items() for what in pair if what not in (_IDS, _VALUES)]
        if unknown:
            raise WireError(
                f"A push has an unknown tensor {unknown[0]!r}; known are moved/DTYPE, state/DTYPE, shares/DTYPE, "
                "rows/INDEX/ids, rows/INDEX/values, slots/INDEX/NAME, extras/INDEX/NAME and shared/NAME."
            )
        for index, pair in pairs.items():
            if len(pair) < 2:
                raise WireError(
                    f"The push has only {sorted(pair)} of the rows of variable {index}; it needs ids and values."
                )
        return cls(
            header.batches,
            of_kind(MOVED, arrays),
            of_kind(STATE, arrays),
            of_kind(SHARES, arrays),
            {index: Rows(pair[_IDS], pair[_VALUES]) for index, pair in pairs.items()},
            only(arrays, *_OPTIMIZERS),
            header.base,
        )


@dataclass
class Movement:
    """What some batches of a worker's training changed, in blocks cut for servers.

    Attributes:
        batches: their number; 0: only gradients of rows.
        partition: slices of `moved`, `state` and `shares`, by server.
        moved: by server and dtype, how far the trainable variables moved, flat; without embedding tables.
        state: by server and dtype, values that the steps set for non-trainable variables, flat; without unchanged
            dtypes.
        shares: likewise, how far they moved them, float32: 1 where they set them, 0 where they left them unchanged;
            `ADDED` where `state` is the difference that they made.
        rows: by embedding table, unique ids (int64) and gradients of their rows.
        optimizers: of the worker: "slots/I/NAME" and so on, complete.
    """

    batches: int
    partition: Sequence[Sequence[Slice]]
    moved: Sequence[Mapping[str, Array]]
    state: Sequence[Mapping[str, Array]]
    shares: Sequence[Mapping[str, Array]]
    rows: Mapping[int, tuple[Array, Array]] = field(default_factory=dict)
    optimizers: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    def of_rows(
        cls,
        rows: Mapping[int, tuple[Array, Array]],
        optimizers: Mapping[str, Array],
        partition: Sequence[Sequence[Slice]],
    ) -> Movement:
        """Only gradients of rows, which servers apply at once."""
        nothing: list[dict[str, Array]] = [{} for _ in partition]
        return cls(0, partition, nothing, nothing, nothing, rows, optimizers)

    def recut(self, specs: Sequence[VariableSpec], partition: Sequence[Sequence[Slice]]) -> Movement:
        """Converts it for servers with another partition."""
        before = self.partition
        if before == partition:
            return self
        return replace(
            self,
            partition=partition,
            moved=recut(self.moved, specs, before, partition, True),
            state=recut(self.state, specs, before, partition, False),
            shares=recut(self.shares, specs, before, partition, False),
        )

    def part(
        self, index: int, specs: Sequence[VariableSpec], slices: Sequence[Slice], shard_map: ShardMap, base: int = -1
    ) -> Push:
        """The part for server `index`, which has `slices` and its `shard_map` of tables."""
        return Push(
            self.batches,
            self.moved[index],
            self.state[index],
            self.shares[index],
            self._rows_of(index, shard_map),
            self._optimizers_of(specs, slices),
            base,
        )

    def _optimizers_of(self, specs: Sequence[VariableSpec], slices: Sequence[Slice]) -> dict[str, Array]:
        held = {part.variable for part in slices}
        slots = cut_slots(by_index_and_name(SLOTS, self.optimizers), specs, slices)
        extras = by_index_and_name(EXTRAS, self.optimizers)
        return (
            named(SLOTS, slots)
            | named(EXTRAS, {key: each for key, each in extras.items() if key[0] in held})
            | only(self.optimizers, SHARED)
        )

    def _rows_of(self, index: int, shard_map: ShardMap) -> dict[int, Rows]:
        if shard_map.servers == 1:
            return {table: Rows(ids, values) for table, (ids, values) in self.rows.items()}
        found = {}
        for table, (ids, values) in self.rows.items():
            places = np.flatnonzero(shard_map.owns(index, ids))
            found[table] = Rows(ids[places], values[places])
        return found


def _copied(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array.copy() for name, array in arrays.items()}


def narrowed(arrays: Mapping[str, Array], wire_dtype: WireDtype) -> dict[str, Array]:
    """The arrays of a frame in reduced precision, rounded to nearest."""
    if wire_dtype is WireDtype.SAME:
        return dict(arrays)
    return {
        name: array.astype(dtype_of(WireDtype.BFLOAT16.value))
        if array.dtype == np.float32 and (_is_rows(name) or kind_of(name) == MOVED)
        else array
        for name, array in arrays.items()
    }


def widened(arrays: Mapping[str, Array], specs: Sequence[VariableSpec]) -> dict[str, Array]:
    """The inverse of `narrowed`, except for rounding.

    Args:
        specs: variables of the model, whose dtypes the rows get.
    """
    found = dict(arrays)
    for name, array in arrays.items():
        if array.dtype.name == "bfloat16" and _dtype_before(name, specs) == "float32":
            found[name] = aligned(array.shape, np.float32)
            found[name][...] = array
    return found


def _is_rows(name: str) -> bool:
    """Whether an array contains rows [n, ...], or their gradients."""
    kind, _, key = name.partition("/")
    return key.isdecimal() if kind == TABLE else kind == ROWS and key.endswith("/values")


def _dtype_before(name: str, specs: Sequence[VariableSpec]) -> str:
    key = name.split("/")[1] if "/" in name else ""
    if kind_of(name) == MOVED:
        return key
    is_known = _is_rows(name) and key.isdecimal() and int(key) < len(specs)
    return specs[int(key)].dtype if is_known else ""
