"""Lists of varying length in chunks of records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


class RaggedRows:
    """Rows of varying length, like a `tf.RaggedTensor` of NumPy arrays.

    Args:
        splits: row i has the values `[splits[i], splits[i + 1])`; int64.
        values: an array, or `RaggedRows` for nested lists.
    """

    def __init__(self, splits: Any, values: Any) -> None:
        self.splits, self.values = splits, values

    def __len__(self) -> int:
        return len(self.splits) - 1

    def __getitem__(self, rows: slice) -> RaggedRows:
        start, stop, _ = rows.indices(len(self))
        splits = self.splits[start : stop + 1]
        return RaggedRows(splits - splits[0], self.values[splits[0] : splits[-1]])

    def __iter__(self) -> Iterator[Any]:
        for start, stop in zip(self.splits[:-1], self.splits[1:], strict=True):
            yield self.values[start:stop]

    @property
    def nbytes(self) -> int:
        return int(self.splits.nbytes + self.values.nbytes)

    @property
    def components(self) -> list[Any]:
        """The innermost values, and splits from the outermost."""
        below = self.values.components if isinstance(self.values, RaggedRows) else [self.values]
        return [below[0], self.splits, *below[1:]]

    @classmethod
    def empty(cls, spec: Any) -> RaggedRows:
        """No rows of a `tf.RaggedTensorSpec` of one row."""
        inner = spec.shape[spec.ragged_rank + 1 :]
        values: Any = np.empty((0, *inner), spec.dtype.as_numpy_dtype)
        for _ in range(spec.ragged_rank + 1):
            values = cls(np.zeros(1, np.int64), values)
        return values
