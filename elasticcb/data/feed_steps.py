"""What a `feed` made of a dataset of records, as far as the accounting of records goes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from elasticcb.errors import DataError, ModelFileError

# What a `feed` must not do, by TensorFlow's name of the dataset: its iterator is made anew for each task.
_REFUSED = {
    "IgnoreErrors": "ignores errors, so a file that can't be read would be asked for again without end. Leave "
    "`ignore_errors` out, and `filter` the records that are not wanted",
    "CacheDataset": "caches: every task after the first would get the first one's records. Leave `cache` out",
    "RepeatDataset": "repeats: a task ends with its last record, and the number of epochs repeats. Leave `repeat` out",
    "BatchDataset": "makes batches: the framework does, with the batch size it is given. Leave `batch` out, or end "
    "with `unbatch`",
}
_ONE_TO_ONE = ("MapDataset", "PrefetchDataset", "OptionsDataset")


def check_feed(raw: Any, fed: Any, what: str) -> None:
    """Raises `ModelFileError` when `what`, a feed, does what breaks the accounting of records."""
    if all(step is not raw for step in _steps(raw, fed)):
        raise ModelFileError(
            f"{what} returns a dataset that is not made from the one it is given, so every task would hold the same "
            "records. Return dataset.map(...), or the like."
        )
    unbatches = False
    for step in _steps(raw, fed):
        kind = type(step).__name__
        unbatches = unbatches or "Unbatch" in kind or "FlatMap" in kind
        for name, why in _REFUSED.items():
            if name in kind and not (name == "BatchDataset" and unbatches):
                raise ModelFileError(f"{what} {why}.")


def told_of(raw: Any) -> str:
    """Says what a feed is given."""
    import keras

    record = keras.tree.map_structure(lambda spec: f"{spec.dtype.name} {list(spec.shape)}", raw.element_spec)
    lines = " (a line of text, or the bytes of a record)" if record == "string []" else ""
    return f"Each record of the dataset that it is given is {record}{lines}."


def keeps_order(raw: Any, fed: Any) -> bool:
    """Whether `fed` holds one example per record of `raw`, in its order, every time.

    Known for chains of maps and the like; anything else counts as no.
    """
    steps = [step for step in _steps(raw, fed) if step is not raw]
    if fed.options().deterministic is False or any(getattr(s, "_deterministic", "") == "false" for s in steps):
        return False  # `map(..., num_parallel_calls=…, deterministic=False)`
    kinds = [type(step).__name__ for step in steps]
    return all("FlatMap" not in kind and any(name in kind for name in _ONE_TO_ONE) for kind in kinds)


def batch_error(error: Any, name: str, start: int, end: int, has_header: bool = False) -> DataError:
    """What is raised when records [start, end) of a source can't be turned into batches.

    In TensorFlow's words, without the names of nodes and operations, and what to do where that is known. Without a
    traceback: a pipeline runs where Python has none.

    Args:
        has_header: the reader knows of a first line that is no record.
    """
    message = re.sub(r"\[?\[?\{\{.*?\}\}\]?\]?\s*|\s*\[Op:\w+\]( name:\s*\S*)?", "", error.message)
    message = message.strip(" .\n\t") + "."
    if "different shapes" in error.message or "add tensor to the batch" in error.message:
        message += (
            " `feed` must give every example the same shape, which the batch then stacks: pad them, or end it with "
            "`dataset.ragged_batch(1).unbatch()` to get ragged batches."
        )
    if start == 0 and not has_header and "Field" in message and "is not a valid" in message:
        message += " If the first line names the columns, say so: --data_reader_params='header=true'."
    return DataError(f"Records [{start}, {end}) of {name} can't be turned into batches by `feed`: {message}")


def _steps(raw: Any, fed: Any) -> Iterator[Any]:
    """What `feed` did to `raw`, from the last step to `raw` itself."""
    pending = [fed]
    while pending:
        step = pending.pop()
        yield step
        if step is not raw:
            pending.extend(step._inputs())
