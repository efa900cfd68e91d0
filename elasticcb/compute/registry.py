"""The backends by name, and which one a process uses.

A job uses the Keras backend of the process that started it, in its master and its workers. Parameter servers apply
gradients of any backend, with Keras on TensorFlow. Only this module checks the Keras backend.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticcb.errors import UsageError

if TYPE_CHECKING:
    from elasticcb.compute.backend import Backend

# By the name of the Keras backend, which is also the name of its package: the module and the class, imported on demand.
BACKENDS = {
    "tensorflow": ("elasticcb.compute.tensorflow.backend", "TensorFlowBackend"),
    "jax": ("elasticcb.compute.jax.backend", "JAXBackend"),
    "torch": ("elasticcb.compute.torch.backend", "TorchBackend"),
}
VARIABLE = "KERAS_BACKEND"
OF_SERVERS = "tensorflow"


def chosen_backend() -> str:
    """The Keras backend of this process, now or once Keras is imported."""
    if "keras" in sys.modules:
        import keras

        return str(keras.backend.backend())
    return os.environ.get(VARIABLE) or _configured() or "tensorflow"


def runs_eagerly(model: Any) -> bool:
    """Whether the Python code of a model's steps runs for each batch."""
    return bool(model.run_eagerly) or chosen_backend() == "torch"


def _configured() -> str:
    """The backend in the user's Keras config file; "" if there is none."""
    file = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras", "keras.json")
    try:
        return str(json.loads(file.read_text(encoding="utf-8")).get("backend", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def backend_of_role(role: str, job: str) -> str:
    """The Keras backend of a process with a role ("worker" or "ps"), in a job on the backend `job`."""
    return OF_SERVERS if role == "ps" else job


def use_backend_of_servers() -> None:
    """Selects the backend of a parameter server. Raises `UsageError` when Keras is already imported with another."""
    os.environ[VARIABLE] = OF_SERVERS
    check_is_of_servers()


def keep_backend(job: str) -> None:
    """Keeps the backend that a resumed job had, unless the user has chosen one. Call it before Keras is imported."""
    if job:
        os.environ.setdefault(VARIABLE, job)


def check_is_of_servers() -> None:
    """Raises `UsageError` when a parameter server can't run as a thread here because Keras uses another backend."""
    found = chosen_backend()
    if found != OF_SERVERS:
        raise UsageError(
            f"Keras runs on {found!r} in this process, but parameter servers need {OF_SERVERS!r}, so they can't be "
            "threads of it, as with the cluster 'inprocess'. Use processes (the cluster 'local'), or set "
            f"{VARIABLE}={OF_SERVERS}."
        )


def check_chosen_backend() -> None:
    """Raises `UsageError` when the chosen Keras backend is not supported, or its package is not installed."""
    name = chosen_backend()
    if name not in BACKENDS:
        known = " or ".join(map(repr, BACKENDS))
        raise UsageError(f"Keras runs on {name!r} here. Expected {known}: set the environment variable {VARIABLE}.")
    if "keras" not in sys.modules and find_spec(name) is None:
        raise UsageError(
            f"Keras is configured to run on {name!r} here ({VARIABLE}, or keras.json), but {name!r} is not installed. "
            f"Install it (pip install 'elasticcb[{name}]'), or set {VARIABLE}={OF_SERVERS}."
        )


def check_backend_of_job(job: str) -> None:
    """Raises `UsageError` when this worker uses another backend than its job."""
    own = chosen_backend()
    if job and own != job:
        raise UsageError(
            f"Keras runs on {own!r} in this worker, but on {job!r} in the master of its job. All workers of a job must "
            f"use the same backend: start this one with {VARIABLE}={job}."
        )


@functools.cache
def backend() -> Backend:
    """The backend of this process. Raises `UsageError` when the Keras backend is not supported."""
    return backend_class()()


def backend_class() -> type[Backend]:
    """The class of the backend, imported on demand. Raises the same errors as `backend`."""
    check_chosen_backend()
    module, name = BACKENDS[chosen_backend()]
    found: type[Backend] = getattr(import_module(module), name)
    return found
