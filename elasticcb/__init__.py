"""ElasticCB: elastic parameter-server training for Keras 3, driven by callbacks."""

from __future__ import annotations

__version__ = "0.1.0"


class Mode:
    """The `mode` argument of a model file's `feed`."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    PREDICTION = "prediction"
