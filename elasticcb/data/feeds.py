"""Checks of what a `feed` does to a dataset of records, for the accounting of records; and the errors of feeds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from elasticcb.data.stacking import flatten
from elasticcb.errors import DataError, ModelFileError

if TYPE_CHECKING:
    from elasticcb.data.reader import Reader

# What a `feed` must not do, by TensorFlow's name of the dataset. Each task creates a new iterator.
_REFUSED = {
    "IgnoreErrors": (
        "ignores errors, so an unreadable file would be retried forever. Remove `ignore_errors`, and `filter` "
        "unwanted records"
    ),
    "CacheDataset": "caches, so every later task would get the records of the first one. Remove `cache`",
    "RepeatDataset": (
        "repeats, but a task must end with its last record; use the number of epochs to repeat. Remove `repeat`"
    ),
    "BatchDataset": (
        "batches, but ElasticCB batches the records itself. Remove `batch`, and convert whole batches in "
        "`feed_batch(records, mode, metadata)`; or end with `unbatch`"
    ),
}
_ONE_TO_ONE = ("MapDataset", "PrefetchDataset", "OptionsDataset")


def check_feed(raw: Any, fed: Any, what: str) -> None:
    """Raises `ModelFileError` if `what`, a feed, breaks the accounting of records."""
    if all(step is not raw for step in _steps(raw, fed)):
        raise ModelFileError(
            f"{what} returns a dataset that is not derived from its argument, so every task would have the same "
            "records. Return dataset.map(...), for example."
        )
    unbatches = False
    for step in _steps(raw, fed):
        kind = type(step).__name__
        unbatches = unbatches or "Unbatch" in kind or "FlatMap" in kind
        for name, why in _REFUSED.items():
            if name in kind and not (name == "BatchDataset" and unbatches):
                raise ModelFileError(f"{what} {why}.")


def told_of(raw: Any, reader: Reader, batches: bool = False) -> str:
    """Describes the input of a feed: single records of a reader, or batches of them."""
    import keras

    record = keras.tree.map_structure(lambda spec: f"{spec.dtype.name} {list(spec.shape)}", raw.element_spec)
    lines = " (a line of text, or the bytes of a record)" if record == "string []" else ""
    lines = " (lines of text, or the bytes of records)" if record == "string [None]" else lines
    given = "Its records are" if batches else "Each record of its input dataset is"
    return f"{given} {record}{lines}. {reader.told_of()}".rstrip()


def keeps_order(raw: Any, fed: Any) -> bool:
    """Whether `fed` always has one example per record of `raw`, in the same order.

    True only for chains of maps and similar steps.
    """
    steps = [step for step in _steps(raw, fed) if step is not raw]
    if fed.options().deterministic is False or any(getattr(s, "_deterministic", "") == "false" for s in steps):
        return False  # `map(..., num_parallel_calls=…, deterministic=False)`
    kinds = [type(step).__name__ for step in steps]
    return all("FlatMap" not in kind and any(name in kind for name in _ONE_TO_ONE) for kind in kinds)


def batched(raw: Any, fed: Any, size: int) -> Any:
    """Batches of the examples of `fed`. If the reader has lists of varying length, so have the batches."""
    is_ragged = any(hasattr(spec, "ragged_rank") for spec in flatten(raw.element_spec, raw.element_spec))
    return fed.ragged_batch(size) if is_ragged else fed.batch(size)


def batch_error(error: Any, what: str, ranges: Sequence[tuple[str, int, int]], reader: Reader) -> DataError:
    """The error for ranges of records that `what`, a feed, can't convert to batches.

    Has TensorFlow's message without names of nodes and operations, and advice if there is any. There is no traceback,
    because a pipeline runs outside of Python.
    """
    message = re.sub(r"\[?\[?\{\{.*?\}\}\]?\]?\s*|\s*\[Op:\w+\]( name:\s*\S*)?", "", error.message)
    message = re.sub(r"^Error in user-defined function .*?Iterator::Root\S*: ", "", message, flags=re.DOTALL)
    failed = re.match(r"assertion failed: \[(.*)\]", message)
    if failed:
        message = failed[1].replace("] [", " ").replace("\\'", "'")
    message = message.strip(" .\n\t") + "."
    if "different shapes" in error.message or "add tensor to the batch" in error.message:
        message += (
            " All examples of `feed` must have the same shape. Pad them, or end `feed` with "
            "`dataset.ragged_batch(1).unbatch()` to get ragged batches."
        )
    of_columns = re.search(r"Field \d+ in record .* is not a valid|Expect \d+ fields but have", message)
    if of_columns and any(start == 0 for _, start, _ in ranges):
        message = f"{message} {reader.told_of()}".rstrip()
    names = ", ".join(f"[{start}, {end}) of {name}" for name, start, end in ranges[:3])
    more = f" and {len(ranges) - 3} more ranges" if len(ranges) > 3 else ""
    return DataError(f"Records {names}{more} can't be converted to batches by {what}: {message}")


def _steps(raw: Any, fed: Any) -> Iterator[Any]:
    """The steps that `feed` applied to `raw`, from the last step back to `raw`."""
    pending = [fed]
    while pending:
        step = pending.pop()
        yield step
        if step is not raw:
            pending.extend(step._inputs())
