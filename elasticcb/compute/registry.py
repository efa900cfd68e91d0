"""The backends by name, and which of them a process uses.

A job computes with what Keras runs on where it was started: in its master and its workers. Parameter servers apply
gradients of any backend, with Keras on TensorFlow. Nothing else asks what Keras runs on.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from elasticcb.errors import UsageError

if TYPE_CHECKING:
    from elasticcb.compute.backend import Backend

# By what Keras calls the framework that it runs on, which is also the name of its package: the module and the class.
# Imported only if it is that.
BACKENDS = {
    "tensorflow": ("elasticcb.compute.tensorflow.backend", "TensorFlowBackend"),
    "jax": ("elasticcb.compute.jax.backend", "JAXBackend"),
    "torch": ("elasticcb.compute.torch.backend", "TorchBackend"),
}
VARIABLE = "KERAS_BACKEND"
OF_SERVERS = "tensorflow"


def chosen_backend() -> str:
    """What Keras runs on in this process, or will once it is imported."""
    if "keras" in sys.modules:
        import keras

        return str(keras.backend.backend())
    return os.environ.get(VARIABLE) or _configured() or "tensorflow"


def _configured() -> str:
    """What the user's file of Keras says; "" where there is none."""
    file = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras", "keras.json")
    try:
        return str(json.loads(file.read_text(encoding="utf-8")).get("backend", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def backend_of_role(role: str, job: str) -> str:
    """What Keras runs on in a process of a role ("worker" or "ps"), in a job on the backend `job`."""
    return OF_SERVERS if role == "ps" else job


def use_backend_of_servers() -> None:
    """Lets this process be a parameter server. Raises `UsageError` when its Keras is imported, and is another."""
    os.environ[VARIABLE] = OF_SERVERS
    check_is_of_servers()


def keep_backend(job: str) -> None:
    """Lets this process go on with a job on the backend that it had, unless the user has chosen one. Call it before
    Keras is imported."""
    if job:
        os.environ.setdefault(VARIABLE, job)


def check_is_of_servers() -> None:
    """Raises `UsageError` when this process can't be a parameter server, as a thread of one whose Keras is another."""
    found = chosen_backend()
    if found != OF_SERVERS:
        raise UsageError(
            f"Keras runs on {found!r} in this process, and parameter servers need {OF_SERVERS!r}: they can't be "
            "threads of it, as with the cluster 'inprocess'. Use processes (--cluster=local, Cluster(kind='local')) or "
            f"{VARIABLE}={OF_SERVERS}."
        )


def check_chosen_backend() -> None:
    """Raises `UsageError` when there is no backend for what Keras runs on here, or its package is not installed."""
    name = chosen_backend()
    if name not in BACKENDS:
        known = " or ".join(map(repr, BACKENDS))
        raise UsageError(f"Keras runs on {name!r} here. Expected {known}: set the environment variable {VARIABLE}.")
    if "keras" not in sys.modules and find_spec(name) is None:
        raise UsageError(
            f"Keras is to run on {name!r} here ({VARIABLE}, or keras.json), and the package {name!r} is not installed. "
            f"Install it (pip install 'elasticcb[{name}]'), or set {VARIABLE}={OF_SERVERS}."
        )


def check_backend_of_job(job: str) -> None:
    """Raises `UsageError` when this process, a worker, computes with another backend than its job."""
    own = chosen_backend()
    if job and own != job:
        raise UsageError(
            f"Keras runs on {own!r} in this worker, and on {job!r} in the master of its job. All workers of a job must "
            f"compute with the same: start this one with {VARIABLE}={job}."
        )


@functools.cache
def backend() -> Backend:
    """That of the framework that Keras runs on in this process. Raises `UsageError` when there is none for it."""
    return backend_class()()


def backend_class() -> type[Backend]:
    """Its class, which is imported. Raises as `backend`."""
    check_chosen_backend()
    module, name = BACKENDS[chosen_backend()]
    found: type[Backend] = getattr(import_module(module), name)
    return found
