"""Metrics of each batch before the model is trained on it."""

# mypy: allow-subclassing-any

from __future__ import annotations

from typing import Any

import keras

from elasticcb.callbacks.placement import check_in_job


class ProgressiveMetrics(keras.callbacks.Callback):
    """Evaluates each batch, as `evaluate` would, before a worker trains on it ("test, then train"). The logs of
    `on_epoch_end` get the loss and the metrics over the records of the epoch, as `progressive_loss` and so on: how good
    the model is for records that it has not seen. A step takes longer by an evaluation.

    Raises, before training, `CallbackError` if a metric of the model has no mergeable state, and `ModelFileError` in
    Keras's own `fit`.

    Example:

        def callbacks():
            return [ProgressiveMetrics(), keras.callbacks.EarlyStopping(monitor="progressive_loss")]
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        check_in_job(self)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """The master has put the metrics into the logs."""
