"""Bytes per example by `--wire_dtype`, and the processor time of encoding and decoding them.

    python benchmarks/wire.py [--batches=64] [--into=docs/updates.md]

Two workers push the gradients and ask for the rows of deepfm's batches (benchmarks/models/deepfm.py), each through a
client of its own, of one real server; with local updates they merge after every 16 batches. The gradients are random
numbers, no model computes them. The bytes are those of all arrays. Prints two Markdown tables.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from report import machine, publish, table_parser

BATCH, LOCAL_STEPS, WORKERS = 128, 16, 2
MODES, WIRE_DTYPES = ("async", "local"), ("same", "bfloat16")
_UP, _DOWN, _REPETITIONS = "up", "down", 200


def main() -> None:
    parser = table_parser(__doc__ or "")
    parser.add_argument("--batches", type=int, default=64, help="of each worker")
    arguments = parser.parse_args()
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1"}

    lines = [f"{machine()}; deepfm, batch {BATCH}, {WORKERS} workers, windows of {LOCAL_STEPS}; bytes per example:\n"]
    lines += ["| | wire_dtype | up | down | both | of `same` |", "|---" * 6 + "|"]
    for mode in MODES:
        before = 0.0
        for wire_dtype in WIRE_DTYPES:
            found = traffic(mode, wire_dtype, arguments.batches)
            up, down = (found[way] / (WORKERS * BATCH * arguments.batches) for way in (_UP, _DOWN))
            before = before or up + down
            share = f"{100 * (up + down) / before:.0f} %"
            lines.append(f"| {mode} | {wire_dtype} | {up:,.0f} | {down:,.0f} | {up + down:,.0f} | {share} |")
            print(lines[-1], flush=True)
    publish("wire", "\n".join([*lines, "", *costs()]), arguments.into)


# ---------------------------------------------------------------- bytes


def traffic(mode: str, wire_dtype: str, batches: int) -> Counter[str]:
    """Bytes of arrays that all workers sent and received, each for this number of batches."""
    with served(mode, wire_dtype, WORKERS) as workers, ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda worker: worker.train(batches), workers))
        return sum((worker.bytes for worker in workers), Counter())


@contextmanager
def served(mode: str, wire_dtype: str, count: int) -> Iterator[list[Worker]]:
    """Workers of a server."""
    import keras

    from elasticcb.ps.server import PSServer
    from elasticcb.settings import Command, JobSettings, ModelSettings, TrainingSettings, WireDtype
    from elasticcb.sharding.partition import ServerPlace

    training = TrainingSettings(updates=mode, wire_dtype=WireDtype(wire_dtype))  # type: ignore[arg-type]
    settings = JobSettings(command=Command.TRAIN, name="wire", directory="", model=ModelSettings(), training=training)
    server = PSServer(settings, lambda count: [keras.optimizers.Adagrad(0.05) for _ in range(count)])
    server.start()
    specs = variables()
    _initialize(ServerPlace(server.address, 0), specs)
    workers = [Worker(number, ServerPlace(server.address, 0), specs, mode, wire_dtype) for number in range(count)]
    yield workers
    for worker in workers:
        worker.close()
    server.stop(0)


def variables() -> list[Any]:
    """Those of deepfm: two embedding tables, and what its layers have."""
    import keras
    from models import deepfm

    from elasticcb.sharding.partition import VariableSpec
    from elasticcb.sharding.table_state import TableSpec

    initializer = json.dumps(keras.saving.serialize_keras_object(keras.initializers.RandomUniform()))
    specs = []
    for variable in deepfm.model(keras, keras.ops).weights:
        shape = tuple(variable.shape)
        if shape[0] == deepfm.VOCABULARY:
            table = TableSpec(deepfm.VOCABULARY, initializer, 1).to_json()
            specs.append(VariableSpec(variable.path, shape, "float32", True, table=table))
        else:
            specs.append(VariableSpec(variable.path, shape, "float32", True))
    return specs


def _group(place: Any, specs: list[Any]) -> Any:
    from elasticcb.clients.ps_servers import ServerGroup
    from elasticcb.sharding.partition import Places, ShardMap

    return ServerGroup(Places([place], ShardMap(1)), specs, True)


def _initialize(place: Any, specs: list[Any]) -> None:
    from elasticcb.clients.ps import PSClient
    from elasticcb.master.ps_admin import PSControl
    from elasticcb.optimizers.state import ModelState

    control = PSControl(PSClient(_group(place, specs)), "wire")
    control.initialize(
        ModelState([np.zeros((0, *spec.shape[1:]) if spec.table else spec.shape, "f4") for spec in specs])
    )
    control.client.servers.close()


class Worker:
    """Pushes and pulls as a worker does.

    Attributes:
        bytes: of arrays, by way.
    """

    def __init__(self, number: int, place: Any, specs: list[Any], mode: str, wire_dtype: str) -> None:
        from elasticcb.clients.ps import PSClient
        from elasticcb.settings import WireDtype

        self.bytes: Counter[str] = Counter()
        self._group, self._specs, self._is_local = _group(place, specs), specs, mode == "local"
        self._send, self._group.send = self._group.send, self._counted
        self._random = np.random.default_rng(number)
        self._client = PSClient(self._group, number + 1, wire_dtype=WireDtype(wire_dtype))
        self._dense = sum(spec.elements for spec in specs if not spec.table)
        self._number = number

    def _counted(self, server: Any, frame: Any, method: str = "Exchange") -> Any:
        answer = self._send(server, frame, method)
        for way, sent in ((_UP, frame), (_DOWN, answer)):
            self.bytes[way] += sum(array.nbytes for array in sent.tensors.values())
        return answer

    def train(self, batches: int) -> None:
        ids = rows_of_batches(self._number, batches + 1, self._specs)
        self._client.pull()
        self._client.lookup(ids[0], create=True)
        self.bytes.clear()  # that was the beginning
        for step in range(batches):
            self.push(self.gradients(ids[step]), 0, ids[step + 1])
            steps = LOCAL_STEPS if self._is_local else 1
            if (step + 1) % steps == 0:
                self.push({}, steps, {})

    def gradients(self, ids: dict[int, Any]) -> dict[int, Any]:
        """Random ones of rows."""
        return {table: (own, self._normal(len(own), self._specs[table])) for table, own in ids.items()}

    def push(self, rows: dict[int, Any], batches: int, wanted: dict[int, Any]) -> None:
        """Pushes gradients of rows, and for a number of `batches` above 0 a movement; asks for the rows `wanted`."""
        from elasticcb.sharding.push import Movement

        blocks: list[dict[str, Any]] = [{}]
        if batches:
            blocks = [{"float32": (self._random.normal(size=self._dense) * 1e-6).astype("f4")}]
        push = Movement(batches, self._group.partition, blocks, [{}], [{}], rows)
        self._client.push(push, self._client.versions, wanted)

    def _normal(self, count: int, spec: Any) -> Any:
        return (self._random.normal(size=(count, spec.row_elements)) * 1e-3).astype("f4")

    def close(self) -> None:
        self._group.close()


def rows_of_batches(seed: int, count: int, specs: list[Any]) -> list[dict[int, Any]]:
    """The ids of some batches, by table."""
    from models import deepfm

    features = deepfm.arrays(np.random.default_rng(seed))["ids"]
    unique = [np.unique(features[BATCH * number : BATCH * (number + 1)]) for number in range(count)]
    return [{index: ids for index, spec in enumerate(specs) if spec.table} for ids in unique]


# ---------------------------------------------------------------- processor time


def costs() -> list[str]:
    """A table of the codec's processor time."""
    from elasticcb.settings import WireDtype

    random = np.random.default_rng(0)
    ids = rows_of_batches(0, 1, specs := variables())[0]
    rows = {
        f"rows/{table}/values": _floats(random, (len(own), specs[table].row_elements)) for table, own in ids.items()
    }
    megabyte = 1 << 18  # floats
    frames = {
        "deepfm's rows of a batch": rows,
        "dense, 1 MiB": {"gradients/float32": _floats(random, (megabyte,))},
        "rows of 16, 1 MiB": {"rows/1/values": _floats(random, (megabyte // 16, 16))},
    }
    lines = ["CPU microseconds:\n", "| | wire_dtype | bytes before | bytes on the wire | narrow | widen |"]
    lines.append("|---" * 6 + "|")
    for name, frame in frames.items():
        lines.append(f"| {name} | {WireDtype.BFLOAT16.value} | {' | '.join(_cost(frame, WireDtype.BFLOAT16, specs))} |")
    return lines


def _floats(random: Any, shape: tuple[int, ...]) -> Any:
    return random.normal(size=shape).astype("f4")


def _cost(frame: dict[str, Any], wire_dtype: Any, specs: list[Any]) -> list[str]:
    from elasticcb.sharding.push import narrowed, widened

    sent = narrowed(frame, wire_dtype)
    sizes = [sum(array.nbytes for array in arrays.values()) for arrays in (frame, sent)]
    times = [
        _microseconds(lambda: narrowed(frame, wire_dtype)),
        _microseconds(lambda: widened(sent, specs)),
    ]
    return [*(f"{size:,}" for size in sizes), *(f"{each:,.0f}" for each in times)]


def _microseconds(function: Any) -> float:
    function()
    begun = time.thread_time()
    for _ in range(_REPETITIONS):
        function()
    return 1e6 * (time.thread_time() - begun) / _REPETITIONS


if __name__ == "__main__":
    main()
