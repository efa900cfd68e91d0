"""Changes of non-trainable variables by a worker that is one of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from elasticcb.process.wording import how_many
from elasticcb.rpc.tensors import Array
from elasticcb.settings import JobSettings
from elasticcb.sharding.flat_blocks import Blocks, state_moves
from elasticcb.sharding.partition import Slice, VariableSpec, layout

_WATCHED = 20  # steps; a check reads all non-trainable variables


class StateChanges:
    """Determines how a worker's changes count, and warns once of variables that one process would compute otherwise.

    Attributes:
        is_first: whether this worker is the first of those that are up.
    """

    def __init__(self, settings: JobSettings, warn: Callable[[str, str], None]) -> None:
        cluster = settings.cluster
        self._left = 0 if (cluster.autoscale.most or cluster.num_workers) < 2 else _WATCHED
        self._warn = warn
        self.is_first = True

    def moves(
        self,
        blocks: Blocks,
        state: Sequence[Mapping[str, Array]],
        specs: Sequence[VariableSpec],
        parts: Sequence[Sequence[Slice]],
        decays: Mapping[int, float],
    ) -> tuple[list[dict[str, Array]], list[dict[str, Array]]]:
        """See `state_moves`."""
        values, shares = state_moves(blocks, state, specs, parts, decays, self.is_first)
        if self._left:
            self._left -= 1
            self._look_at(shares, specs, parts)
        return values, shares

    def _look_at(
        self, shares: Sequence[Mapping[str, Array]], specs: Sequence[VariableSpec], parts: Sequence[Sequence[Slice]]
    ) -> None:
        found = []
        for slices, share in zip(parts, shares, strict=True):
            for part, dtype, offset in layout(specs, slices, False):
                spec, here = specs[part.variable], slice(offset, offset + part.elements)
                if not spec.aggregation and dtype in share and (share[dtype][here] == 1).any():
                    found.append(spec.path)
        if found:
            self._left = 0
            others = f" and {how_many(len(found) - 1, 'other variable')}" if found[1:] else ""
            self._warn(
                "variables that steps change on several workers",
                f"Steps on several workers change {found[0]!r}{others}, each from a value that lacks what the others "
                "change meanwhile. The values that they set are averaged, which is right for averages, such as a copy "
                "that follows the weights, but differs from training in one process for counts, sums and queues. "
                "Create such a variable with add_weight(..., aggregation='sum') to add up the changes, "
                "'only_first_replica' to ignore all workers but the first, or 'mean' if averaging is right, which ends "
                "this warning; or use one worker.",
            )
