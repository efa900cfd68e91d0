"""Which parameter server holds which part of the model: dense weights, and rows of embedding tables by a hash of their
ids; the order of a server's flat blocks; and where the servers are.

Only this module knows the mapping; clients and servers import it. It depends only on the variables and the number of
servers, so every process computes it by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from elasticcb.errors import WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array, dtype_of


@dataclass(frozen=True)
class VariableSpec:
    """One weight of the model, with the fields of `pb.Variable`; its index is its position in `model.weights`."""

    path: str  # Keras path: "dense/kernel"
    shape: tuple[int, ...]
    dtype: str  # NumPy name
    trainable: bool
    constraint: str = ""  # JSON of `keras.saving.serialize_keras_object`; "": none
    optimizer: int = 0  # index in `model_optimizers(model)` of the one that is given it; -1: none
    no_weight_decay: bool = False  # excluded from weight decay
    aggregation: str = ""  # how changes by several workers count, if it is not trainable: `flat_blocks.state_moves`
    table: str = ""  # for an embedding table: JSON of `TableSpec`; shape[0] is then 0 if any id is allowed

    @property
    def row_elements(self) -> int:
        """Elements of one row, i.e. per index of axis 0."""
        return math.prod(self.shape[1:])

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * dtype_of(self.dtype).itemsize

    def to_message(self) -> pb.Variable:
        return pb.Variable(**vars(self))

    @classmethod
    def from_message(cls, message: pb.Variable) -> VariableSpec:
        """Raises `WireError` for an invalid dtype or shape."""
        dtype_of(message.dtype)
        if any(size < 0 for size in message.shape):
            raise WireError(f"Variable {message.path!r} has the invalid shape {list(message.shape)}.")
        return cls(**{each.name: getattr(message, each.name) for each in fields(cls)} | {"shape": tuple(message.shape)})


class Slice(NamedTuple):
    """Elements [start, stop) of a variable in C order; both ends are between rows."""

    variable: int  # index in the model
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start

    def row_range(self, spec: VariableSpec) -> tuple[int, int]:
        """Its rows [first, last)."""
        row = max(spec.row_elements, 1)
        return self.start // row, (self.stop // row if spec.row_elements else spec.rows)

    def shape(self, spec: VariableSpec) -> tuple[int, ...]:
        """Shape of the part: fewer rows, the same trailing dimensions."""
        if not spec.shape:
            return ()
        first, last = self.row_range(spec)
        return (last - first, *spec.shape[1:])

    def of(self, array: Array, spec: VariableSpec, held: Slice | None = None) -> Array:
        """Its rows of an array [rows, …], of the variable or a slot, with the rows of the slice `held`; None: all."""
        if not spec.shape:
            return array
        first, last = self.row_range(spec)
        before = 0 if held is None else held.row_range(spec)[0]
        return array[first - before : last - before]


class PlacedSlice(NamedTuple):
    """Position of a slice within the flat block of its dtype, in elements."""

    slice: Slice
    dtype: str
    offset: int


MOST_SERVERS = 10_000
# A variable is not cut if that moves less than this: tiny parts cost more than the imbalance.
_SMALLEST_PART_BYTES = 16 * 1024


def partition(specs: Sequence[VariableSpec], num_ps: int, split: bool) -> list[list[Slice]]:
    """The slices of each server, in the order of the variables.

    Every element of every variable is held exactly once, and a server has at most one slice of a variable. Trainable
    and non-trainable variables are balanced separately, by bytes. Embedding tables, whose rows are assigned by id
    (`ShardMap`), are in no slice.

    Args:
        split: whether variables may be cut between rows. Variables with a constraint never are.
    """
    if num_ps < 1:
        raise ValueError(f"num_ps={num_ps} is invalid: must be at least 1.")
    servers: list[list[Slice]] = [[] for _ in range(num_ps)]
    for trainable in (True, False):
        group = [index for index, spec in enumerate(specs) if spec.trainable is trainable and not spec.table]
        if split:
            _fill_in_order(specs, group, servers)
        else:
            _least_loaded(specs, group, servers)
    return [sorted(slices) for slices in servers]


def _fill_in_order(specs: Sequence[VariableSpec], group: list[int], servers: list[list[Slice]]) -> None:
    """Cuts the variables, laid end to end, into as many equal pieces as there are servers."""
    left = sum(specs[index].bytes for index in group)
    server, room = 0, left / len(servers)
    for index in group:
        spec = specs[index]
        row_bytes = spec.row_elements * dtype_of(spec.dtype).itemsize
        start = 0
        while True:
            rows = spec.rows - start
            size = rows * row_bytes
            if server + 1 < len(servers) and room < size and size > 0:
                fitting = min(max(round(room / row_bytes), 0), rows)
                kept, moved = fitting * row_bytes, (rows - fitting) * row_bytes
                if spec.constraint or min(kept, moved) < _SMALLEST_PART_BYTES:
                    fitting = rows if 2 * room >= size else 0
                if fitting:
                    servers[server].append(_rows(index, spec, start, start + fitting))
                left -= fitting * row_bytes
                start += fitting
                server += 1
                room = left / (len(servers) - server)
                if fitting == rows:
                    break
                continue
            servers[server].append(_rows(index, spec, start, spec.rows))
            left -= size
            room -= size
            break


def _rows(index: int, spec: VariableSpec, first: int, last: int) -> Slice:
    return Slice(index, first * spec.row_elements, last * spec.row_elements)


def _least_loaded(specs: Sequence[VariableSpec], group: list[int], servers: list[list[Slice]]) -> None:
    """Gives each variable, largest first, to the server with the least so far."""
    loads = [0] * len(servers)
    for index in sorted(group, key=lambda index: (-specs[index].bytes, index)):
        server = loads.index(min(loads))
        servers[server].append(Slice(index, 0, specs[index].elements))
        loads[server] += specs[index].bytes


def layout(specs: Sequence[VariableSpec], slices: Sequence[Slice], trainable: bool) -> Iterator[PlacedSlice]:
    """The position of each slice in the flat blocks, one block per dtype, in the order of `slices`.

    Args:
        trainable: which of the two groups of variables the blocks contain.
    """
    offsets: dict[str, int] = {}
    for part in slices:
        spec = specs[part.variable]
        if spec.trainable is trainable:
            offset = offsets.get(spec.dtype, 0)
            yield PlacedSlice(part, spec.dtype, offset)
            offsets[spec.dtype] = offset + part.elements


def block_sizes(specs: Sequence[VariableSpec], slices: Sequence[Slice], trainable: bool) -> dict[str, int]:
    """Elements of each flat block, by dtype."""
    return {placed.dtype: placed.offset + placed.slice.elements for placed in layout(specs, slices, trainable)}


def pack(
    arrays: Sequence[Array] | Mapping[int, Array],
    specs: Sequence[VariableSpec],
    slices: Sequence[Slice],
    trainable: bool,
) -> dict[str, Array]:
    """The flat blocks of one server, by dtype.

    Args:
        arrays: whole variables by index in the model, each of its spec's shape and dtype.
    """
    sizes = block_sizes(specs, slices, trainable)
    blocks = {dtype: np.empty(size, dtype_of(dtype)) for dtype, size in sizes.items()}
    for part, dtype, offset in layout(specs, slices, trainable):
        source = np.asarray(arrays[part.variable]).reshape(-1)[part.start : part.stop]
        blocks[dtype][offset : offset + part.elements] = source
    return blocks


def unpack(
    blocks: Mapping[str, Array],
    specs: Sequence[VariableSpec],
    slices: Sequence[Slice],
    trainable: bool,
    arrays: Sequence[Array] | Mapping[int, Array],
) -> None:
    """Copies one server's flat blocks into whole variables: the inverse of `pack`.

    Args:
        arrays: whole variables by index in the model, C-contiguous and writable.

    Raises `WireError` when the blocks don't match this layout.
    """
    check_blocks(blocks, block_sizes(specs, slices, trainable), "The blocks of one server")
    for part, dtype, offset in layout(specs, slices, trainable):
        target = arrays[part.variable].reshape(-1)
        target[part.start : part.stop] = blocks[dtype][offset : offset + part.elements]


def check_blocks(blocks: Mapping[str, Array], sizes: Mapping[str, int], what: str) -> None:
    """Raises `WireError` unless there is one flat block of the right size for each dtype."""
    for dtype in sorted({*blocks, *sizes}):
        given, expected = blocks.get(dtype), sizes.get(dtype)
        if given is None or expected is None or given.shape != (expected,) or given.dtype.name != dtype:
            shown = "none" if given is None else f"{given.dtype.name}{list(given.shape)}"
            wanted = "none" if expected is None else f"{dtype}[{expected}]"
            raise WireError(
                f"{what}: for dtype {dtype} expected {wanted}, got {shown}. Both sides must have the same model and "
                "the same number of parameter servers."
            )


def cut_slots(
    slots: Mapping[tuple[int, str], Array], specs: Sequence[VariableSpec], slices: Sequence[Slice]
) -> dict[tuple[int, str], Array]:
    """The part of arrays with one entry per row for the server with `slices`; without untrained variables.

    Raises `WireError` for an array with another number of rows.
    """
    held = {part.variable: part for part in slices if specs[part.variable].trainable}
    found = {}
    for (index, name), value in slots.items():
        if index not in held:
            continue
        spec = specs[index]
        if value.shape[:1] != spec.shape[:1]:
            raise WireError(
                f"The optimizer's {name} of {spec.path!r} has the shape {list(value.shape)}, but the variable has "
                f"{list(spec.shape)}. The state belongs to another model."
            )
        found[index, name] = held[index].of(value, spec)
    return found


# Multiplicative hashing (Knuth, TAOCP 3, 6.4), by 2^64 divided by the plastic number: consecutive ids spread evenly.
# Not the golden ratio, which is the hash of a table's index: the ids of one server would cluster there.
_MULTIPLIER = np.uint64(0xC13FA9A902A6328F)
_HALF = np.uint64(32)


@dataclass(frozen=True)
class ShardMap:
    """Which of a number of servers has which rows.

    Attributes:
        version: increases when the number of servers of a job changes.
    """

    servers: int
    version: int = 0

    def server_of(self, ids: Array) -> Array:
        """Which server holds the rows of `ids` (int64 [n]): int64 [n]."""
        hashed = ids.view(np.uint64) * _MULTIPLIER
        hashed >>= _HALF
        hashed *= np.uint64(self.servers)  # in place of a division (Lemire, Fast random integer generation, 2019)
        hashed >>= _HALF
        servers: Array = hashed.view(np.int64)
        return servers

    def owns(self, server: int, ids: Array) -> Array:
        """Which of `ids` (int64 [n]) are a server's: bool [n]."""
        owned: Array = self.server_of(ids) == server
        return owned

    def resized(self, servers: int) -> ShardMap:
        """The next map, for another number of servers."""
        return ShardMap(servers, self.version + 1)


class ServerPlace(NamedTuple):
    """Address of a server, and the id that the master gave to its process."""

    address: str
    id: int


class Places(NamedTuple):
    """The server processes, by index, and which embedding rows they hold."""

    servers: Sequence[ServerPlace]
    shard_map: ShardMap
