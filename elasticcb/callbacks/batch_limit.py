"""Limits how often the batch hooks of a callback are called."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

from elasticcb.errors import ModelFileError

_ATTRIBUTE = "_elasticcb_every"

Target = TypeVar("Target")


def every(n: int) -> Callable[[Target], Target]:
    """Calls the batch hooks of a callback only for every n-th batch that its process sees.

    Wraps a callback object or decorates a class; other hooks are called as usual. Skipped hooks cost nothing: the
    model's weights are not fetched for them.

    Args:
        n: number of batches from one call to the next, at least 1.

    Raises:
        ModelFileError: `n` is not a whole number of at least 1, or the target has no hooks.

    Example:

        def callbacks():
            return [every(100)(WeightHistograms())]
    """
    try:
        batches = operator.index(n)
    except TypeError:
        batches = 0
    if batches < 1:
        raise ModelFileError(f"every takes a whole number of batches of at least 1. Received: {n!r}.")

    def limit(target: Target) -> Target:
        if not hasattr(target, "on_train_batch_end"):
            raise ModelFileError(
                f"every({n}) takes a callback, or decorates the class of a callback. Received: {target!r} of type "
                f"{type(target).__name__}. Write every({n})(MyCallback()), or @every({n}) above the class."
            )
        setattr(target, _ATTRIBUTE, batches)
        return target

    return limit


def batches_between(callback: Any) -> int:
    """Number of batches from one call of a batch hook to the next."""
    return getattr(callback, _ATTRIBUTE, 1)
