"""`fit`, `evaluate` and `predict` on a temporary local cluster."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import keras

from elasticcb.api.arguments import check_keywords
from elasticcb.api.cluster import Cluster
from elasticcb.optimizers.step_logs import is_overridden


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

    Raises:
        TypeError: a keyword argument is unknown; nothing was started.
    """
    _check("fit", model, kwargs)
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
    _check("evaluate", model, kwargs)
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
    _check("predict", model, kwargs)
    with Cluster(num_workers, num_ps, **(cluster or {})) as own:
        return own.predict(model, *args, **kwargs)


def _check(method: str, model: Any, given: Mapping[str, Any]) -> None:
    """Raises `TypeError` for keyword arguments that neither this function nor `Cluster`'s method has. A model's own
    method may have others."""
    if isinstance(model, keras.Model) and is_overridden(model, method):
        return
    of_method = list(inspect.signature(getattr(Cluster, method)).parameters)[1:]
    own = [name for name in inspect.signature(globals()[method]).parameters if name not in ("args", "kwargs")]
    for name, value in given.items():
        if name not in of_method and name in inspect.signature(Cluster).parameters:
            raise TypeError(
                f"elasticcb.{method}() got an argument of Cluster, {name}={value!r}. Pass it as "
                f"cluster={{{name!r}: {value!r}}}."
            )
    check_keywords(f"elasticcb.{method}", given, [*of_method, *own])
