"""The default feed of records that are dicts of named values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elasticcb.data.stream import not_converted
from elasticcb.errors import DataError
from elasticcb.settings import Mode

if TYPE_CHECKING:
    from elasticcb.data.reader import Feed

# Names that identify features and labels.
_KNOWN_PAIRS = (("x", "y"), ("features", "labels"))
_WEIGHT = "sample_weight"


def named_feed(names: Sequence[str], label: str) -> Feed:
    """A feed from records `{name: value}` to `(features, label[, sample_weight])`, or only to `features` in prediction.

    The label is the value named by `label`; by default, `y` if there is `x`, or `labels` if there is `features`.
    Features are a dict of the other values, or the value itself if the only other one is `x` or `features`. The feed
    raises `DataError` if it needs a label and can't determine it.
    """
    known_label = label or next((y for x, y in _KNOWN_PAIRS if x in names and y in names), "")
    features = [name for name in names if name not in (known_label, _WEIGHT)]
    bare = features[0] if features in (["x"], ["features"]) else None

    def feed(dataset: Any, mode: str, metadata: Any) -> Any:
        @not_converted
        def features_of(record: Any) -> Any:
            return record[bare] if bare else {name: record[name] for name in features}

        @not_converted
        def example_of(record: Any) -> Any:
            example = (features_of(record), record[known_label])
            return (*example, record[_WEIGHT]) if _WEIGHT in names else example

        if mode == Mode.PREDICTION:
            return dataset.map(features_of)
        if known_label not in names or not features:
            given = f"The label should be {label!r}, but the" if label else "No label is specified, and the"
            raise DataError(
                f"{given} data contains {', '.join(names)}. Set the reader parameter `label`, or write a `feed`."
            )
        return dataset.map(example_of)

    return feed
