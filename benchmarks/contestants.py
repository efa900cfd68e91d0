"""Who takes part in a comparison of throughput, and how each is started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parent / "peers"
# Of one function of the strategy's. With 1 the coordinator's work shows.
_STRATEGY_STEPS = 20


@dataclass(frozen=True)
class Contestant:
    """A line of the table.

    Attributes:
        key: names it on the command line.
        title: names it in the table.
        workers: processes that compute.
        stepping: processes that note steps.
        command: from workload and batch size to the arguments of the Python interpreter.
        needs: fields of `elasticcb.ExchangeOptions` without which it is left out.
        package: without which it is also left out.
        environment: of its processes, added to the benchmark's own.
        path: folders that come first on Python's path.
        data: names the data that it reads, where a workload has several.
    """

    key: str
    title: str
    workers: int
    stepping: int
    command: Callable[[str, int], list[str]]
    needs: Sequence[str] = ()
    package: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    path: Sequence[str] = ()
    data: str = ""


def _local(which: str) -> Callable[[str, int], list[str]]:
    return lambda workload, batch: [str(PEERS / "local_fit.py"), workload, str(batch), which]


def _torch(key: str, package: str, title: str, **environment: str) -> Contestant:
    def command(workload: str, batch: int) -> list[str]:
        return [str(PEERS / "torch_fit.py"), workload, str(batch), package]

    return Contestant(key, f"{title}, one process", 1, 1, command, package=package, environment=environment)


def _strategy(key: str, workers: int, steps: int = _STRATEGY_STEPS, title: str = "") -> Contestant:
    def command(workload: str, batch: int) -> list[str]:
        numbers = map(str, (batch, workers, 1, steps))
        return [str(PEERS / "parameter_server_strategy.py"), workload, *numbers]

    return Contestant(key, f"ParameterServerStrategy, {_workers(workers)}{title}", workers, 1, command)


def elastic(key: str, workers: int, title: str = "", updates: str = "async", **exchange: Any) -> Contestant:
    """ElasticCB with `workers` workers, and fields of `elasticcb.ExchangeOptions`."""
    given = json.dumps({"num_workers": workers, "num_ps": 1, "updates": updates, "exchange": exchange})
    return Contestant(
        key,
        f"ElasticCB, {_workers(workers)}{title}",
        workers,
        workers,
        lambda workload, batch: [str(PEERS / "elastic.py"), workload, str(batch), given],
        tuple(exchange),
    )


def _on(contestant: Contestant, backend: str, title: str) -> Contestant:
    """One whose Keras runs on another framework."""
    return replace(
        contestant,
        key=f"{contestant.key}-{backend}",
        title=f"{contestant.title}, on {title}",
        package=backend,
        environment={"KERAS_BACKEND": backend},
    )


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


KERAS = Contestant("keras", "Keras 3 `fit`", 1, 1, _local("keras"))
TORCH = (_torch("torch", "torch", "PyTorch"), _torch("torchrec", "torchrec", "TorchRec"))
STRATEGIES = (_strategy("strategy1", 1), _strategy("strategy2", 2))
ELASTIC = (
    elastic("elastic1", 1),
    elastic("elastic2", 2),
    elastic("elastic1-local", 1, ", local updates", updates="local"),
    elastic("elastic2-local", 2, ", local updates", updates="local"),
    elastic("elastic1-local-stale1", 1, ", local updates, staleness 1", updates="local", max_staleness=1),
    elastic("elastic2-local-stale1", 2, ", local updates, staleness 1", updates="local", max_staleness=1),
    elastic("elastic1-stale1", 1, ", staleness 1", max_staleness=1),
    elastic("elastic2-stale1", 2, ", staleness 1", max_staleness=1),
)
CONTESTANTS = (
    KERAS,
    Contestant("tf_keras", "`tf_keras` `fit`", 1, 1, _local("tf_keras")),
    *TORCH,
    *STRATEGIES,
    *ELASTIC,
)
# Run when they are asked for.
MORE = (
    *(_strategy(f"strategy2-steps{steps}", 2, steps, f", {steps} steps a function") for steps in (1, 10, 50)),
    _torch("torch-thread1", "torch", "PyTorch with one thread", OMP_NUM_THREADS="1"),
    _torch("torchrec-thread1", "torchrec", "TorchRec with one thread", OMP_NUM_THREADS="1"),
    elastic("elastic4", 4),
    *(
        _on(contestant, backend, title)
        for backend, title in (("jax", "JAX"), ("torch", "PyTorch"))
        for contestant in (KERAS, *ELASTIC[:4])
    ),
    elastic("elastic1-bfloat16", 1, ", staleness 1, bfloat16", max_staleness=1, wire_dtype="bfloat16"),
    elastic("elastic2-bfloat16", 2, ", staleness 1, bfloat16", max_staleness=1, wire_dtype="bfloat16"),
)


def update_options() -> set[str]:
    """The fields of `elasticcb.ExchangeOptions` of this release; asked in a process of its own."""
    program = "import elasticcb, inspect; print(*inspect.signature(elasticcb.ExchangeOptions).parameters)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"elasticcb can't be imported:\n{done.stderr}")
    return set(done.stdout.split())
