"""The data that a training step sends to each server, and its frame; used by workers and servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from elasticcb.errors import WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.array_names import (
    EXTRAS,
    GRADIENTS,
    ROWS,
    SHARED,
    SHARES,
    SLOTS,
    STATE,
    by_index_and_name,
    kind_of,
    named,
    of_kind,
    only,
)
from elasticcb.sharding.bucket_map import BucketMap
from elasticcb.sharding.flat_blocks import recut
from elasticcb.sharding.partition import Slice, VariableSpec, cut_slots

_OPTIMIZERS = (SLOTS, EXTRAS, SHARED)
_KINDS = (GRADIENTS, STATE, SHARES, ROWS, *_OPTIMIZERS)
_IDS, _VALUES = "ids", "values"  # parts of "rows/INDEX/…"


class Rows(NamedTuple):
    """Gradients of some rows of one variable."""

    ids: Array  # int64 [n], unique; in a `Push` relative to the server's part, except ids of a table
    values: Array  # [n, *trailing dimensions], the variable's dtype


@dataclass(frozen=True)
class Push:
    """One server's part of a training step, or the mean of several steps."""

    dense: tuple[int, ...]  # variables whose gradients are in `blocks`, in the order of the model
    blocks: Mapping[str, Array]  # dense gradients, flat, by dtype
    rows: Mapping[int, Rows]  # by variable
    # values that non-trainable variables move towards, flat, by dtype
    state: Mapping[str, Array] = field(default_factory=dict)
    shares: Mapping[str, Array] = field(default_factory=dict)  # how far: float32, for each element of `state`
    state_base: int = -1  # the last version on which `state` is based; -1: unknown
    learning_rate: float | None = None  # for this update only
    updated: frozenset[int] = frozenset()  # all variables with gradients, on any server
    # batches of local training that moved the weights by `blocks`; None: these are gradients
    batches: int | None = None
    optimizers: Mapping[str, Array] = field(default_factory=dict)  # after local training: "slots/I/NAME" and so on

    def copied(self) -> Push:
        """A copy that outlives the call, because the worker's next call reuses the memory."""
        return replace(
            self,
            blocks={dtype: block.copy() for dtype, block in self.blocks.items()},
            rows={index: Rows(rows.ids.copy(), rows.values.copy()) for index, rows in self.rows.items()},
            state={dtype: block.copy() for dtype, block in self.state.items()},
            shares={dtype: block.copy() for dtype, block in self.shares.items()},
            optimizers={name: array.copy() for name, array in self.optimizers.items()},
        )

    def encode(self, header: pb.ExchangeRequest) -> dict[str, Array]:
        """The arrays of its frame; other fields are stored in the header."""
        header.dense_variables.extend(self.dense)
        header.row_variables.extend(sorted(self.updated.difference(self.dense)))
        header.state_base = self.state_base
        if self.learning_rate is not None:
            header.learning_rate, header.has_learning_rate = self.learning_rate, True
        if self.batches is not None:
            header.batches = self.batches
        arrays = named(GRADIENTS, self.blocks) | named(STATE, self.state) | named(SHARES, self.shares)
        for index, rows in self.rows.items():
            arrays |= named(ROWS, {(index, _IDS): rows.ids, (index, _VALUES): rows.values})
        return {**arrays, **self.optimizers}

    @classmethod
    def decode(cls, header: pb.ExchangeRequest, arrays: Mapping[str, Array]) -> Push:
        """The inverse of `encode`, for any worker: `dense` includes variables of other servers.

        Raises `WireError` for unknown arrays. `PushReader` checks whether they fit the model.
        """
        pairs: dict[int, dict[str, Array]] = {}
        for (index, what), array in by_index_and_name(ROWS, arrays).items():
            pairs.setdefault(index, {})[what] = array
        unknown = [name for name in arrays if kind_of(name) not in _KINDS]
        unknown += [f"{ROWS}/{i}/{what}" for i, pair in pairs.items() for what in pair if what not in (_IDS, _VALUES)]
        if unknown:
            raise WireError(
                f"A push has an unknown tensor {unknown[0]!r}; known are gradients/DTYPE, rows/INDEX/ids, "
                "rows/INDEX/values, state/DTYPE, shares/DTYPE, slots/INDEX/NAME, extras/INDEX/NAME and shared/NAME."
            )
        for index, pair in pairs.items():
            if len(pair) < 2:
                raise WireError(
                    f"The push has only {sorted(pair)} of the rows of variable {index}; it needs ids and values."
                )
        return cls(
            tuple(header.dense_variables),
            of_kind(GRADIENTS, arrays),
            {index: Rows(pair[_IDS], pair[_VALUES]) for index, pair in pairs.items()},
            of_kind(STATE, arrays),
            of_kind(SHARES, arrays),
            header.state_base,
            header.learning_rate if header.has_learning_rate else None,
            frozenset({*header.dense_variables, *header.row_variables, *pairs}),
            header.batches if header.HasField("batches") else None,
            only(arrays, *_OPTIMIZERS),
        )


@dataclass
class Gradients:
    """The result of a training step for the servers, in blocks cut for these.

    Attributes:
        gradients: by server and dtype, the dense gradients of `dense_variables`, flat.
        dense_variables: indices of the variables in `gradients`.
        rows: by variable index, unique row ids (int64, of the whole variable or table) and their gradients.
        state: by server and dtype, values that the step set for non-trainable variables, flat; without unchanged
            dtypes.
        shares: likewise, how far it moved them, float32: 1 where it set them, 0 where it left them unchanged; `ADDED`
            where `state` is the difference that it made.
        non_finite: what has NaN or infinity, as text: "the loss", "the gradient of 'dense/kernel'"; "" if nothing does.
        partition: slices of `gradients`, `state` and `shares`, by server; None: those of the client.
        batches: batches of local training that moved the weights by `gradients`; None: these are gradients.
        optimizers: after local training: "slots/I/NAME" and so on, complete.
    """

    gradients: list[dict[str, Array]]
    dense_variables: tuple[int, ...]
    rows: dict[int, tuple[Array, Array]]
    state: list[dict[str, Array]]
    shares: list[dict[str, Array]]
    loss: float
    non_finite: str = ""
    partition: Sequence[Sequence[Slice]] | None = None
    batches: int | None = None
    optimizers: Mapping[str, Array] = field(default_factory=dict)

    def recut(self, specs: Sequence[VariableSpec], partition: Sequence[Sequence[Slice]]) -> Gradients:
        """Converts it for servers with another partition."""
        before = self.partition
        if before is None or before == partition:
            return self
        return replace(
            self,
            gradients=recut(self.gradients, specs, before, partition, True, self.dense_variables),
            state=recut(self.state, specs, before, partition, False),
            shares=recut(self.shares, specs, before, partition, False),
            partition=partition,
        )

    def part(
        self,
        index: int,
        specs: Sequence[VariableSpec],
        slices: Sequence[Slice],
        buckets: BucketMap,
        state_base: int = -1,
        learning_rate: float | None = None,
    ) -> Push:
        """The part for server `index`, which has `slices` and its `buckets` of tables."""
        return Push(
            self.dense_variables,
            self.gradients[index],
            self._rows_of(index, specs, slices, buckets),
            self.state[index],
            self.shares[index],
            state_base,
            learning_rate,
            frozenset({*self.dense_variables, *self.rows}),
            self.batches,
            self._optimizers_of(specs, slices),
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

    def _rows_of(
        self, index: int, specs: Sequence[VariableSpec], slices: Sequence[Slice], buckets: BucketMap
    ) -> dict[int, Rows]:
        found: dict[int, Rows] = {}
        for variable, (ids, values) in self.rows.items():
            if specs[variable].table:
                if buckets.servers > 1:
                    places = np.flatnonzero(buckets.owns(index, ids))
                    ids, values = ids[places], values[places]
                found[variable] = Rows(ids, values)
        for part in slices:
            if part.variable not in self.rows:
                continue
            ids, values = self.rows[part.variable]
            first, last = part.row_range(specs[part.variable])
            here: Any = (ids >= first) & (ids < last)
            if here.all():
                here = slice(None)  # a view instead of a copy
            found[part.variable] = Rows(ids[here] - first, values[here])
        return found


def knows_result(request: pb.ExchangeRequest, version: int) -> bool:
    """Whether a server's version was made only by the worker's movement, from a version that the worker had pulled.

    Then the worker knows the server's state. It does not for the replacement of a lost server, from which it had
    pulled nothing (`known_version` -1).
    """
    return 0 <= request.known_version == request.state_base == version - request.batches
