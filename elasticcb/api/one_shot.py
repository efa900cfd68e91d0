"""`fit`, `evaluate` and `predict` on a temporary local cluster."""

from __future__ import annotations

import os
from typing import Any

import keras

from elasticcb.api.cluster import Cluster


def fit(
    model: keras.Model,
    *args: Any,
    num_workers: int = 1,
    num_ps: int = 1,
    job_dir: str | os.PathLike[str] | None = None,
    cluster: dict[str, Any] | None = None,
    **kwargs: Any,
) -> keras.callbacks.History:
    """Starts a `Cluster`, trains `model` on it with `Cluster.fit`, and closes it.

    Args:
        *args: arguments of `Cluster.fit`.
        num_workers: argument of `Cluster`.
        num_ps: argument of `Cluster`.
        job_dir: argument of `Cluster`.
        cluster: other arguments of `Cluster`.
        **kwargs: arguments of `Cluster.fit`.
    """
    with Cluster(num_workers, num_ps, **{"job_dir": job_dir, **(cluster or {})}) as own:
        return own.fit(model, *args, **kwargs)


def evaluate(
    model: keras.Model,
    *args: Any,
    num_workers: int = 1,
    num_ps: int = 1,
    cluster: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Like `fit`, with `Cluster.evaluate`."""
    with Cluster(num_workers, num_ps, **(cluster or {})) as own:
        return own.evaluate(model, *args, **kwargs)


def predict(
    model: keras.Model,
    *args: Any,
    num_workers: int = 1,
    num_ps: int = 1,
    cluster: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Like `fit`, with `Cluster.predict`."""
    with Cluster(num_workers, num_ps, **(cluster or {})) as own:
        return own.predict(model, *args, **kwargs)
