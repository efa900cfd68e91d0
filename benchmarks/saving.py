"""How long pushes wait while a parameter server saves, exports or counts its tables; memory and bytes.

    python benchmarks/saving.py

One server with one embedding table, in a process of its own, and one client that pushes without a pause: rows of some
ids, most of them often (Zipf), with Adam. Meanwhile the master's side asks the server to save a checkpoint
(`PSControl.save`), to add to the recovery files (`PSControl.persist`), to export (`PSControl.export`) and to count all
that it holds, as for `elasticcb table JOB`; at the end, to read the recovery files. Prints a Markdown table: longest
push meanwhile, how long it took, the server's peak of resident memory above what it held before, and the bytes written.
`--repetitions` are made one after another in the same processes. With `--url`, the server writes there, and reads it
again. The last column names functions of the server and how long each held the table lock at most, without waits for
the interpreter's lock being told apart. To compare with another checkout, run both in turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

MIB, CHUNK = 2**20, 100_000


def serve(pipe: Any, folder: str) -> None:
    import keras

    from elasticcb.ps.server import PSServer
    from elasticcb.settings import Command, JobSettings, ModelSettings

    settings = JobSettings(command=Command.TRAIN, name="benchmark", directory=folder, model=ModelSettings())
    server = PSServer(settings, lambda count: [keras.optimizers.Adam() for _ in range(count)])
    server._servicer.holder.lock = lock = TimedLock()  # type: ignore[assignment]
    server.start()
    pipe.send(server.address)
    while pipe.recv():
        pipe.send(lock.longest)
        lock.longest = {}
    server.stop(0)


class TimedLock:
    """A lock that knows how long each function held it at most, in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.longest: dict[str, float] = {}

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            self._since, self._by = time.perf_counter(), _holder()
        return taken

    def release(self) -> None:
        held, by = time.perf_counter() - self._since, self._by
        self._lock.release()
        self.longest[by] = max(self.longest.get(by, 0.0), held)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _holder() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in ("__enter__", "acquire", "_acquire_restore", "wait"):
        frame = frame.f_back
    return frame.f_code.co_name


def start(folder: str) -> tuple[Any, Any, str]:
    """A server: the pipe that ends it, its process and its address."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    server = context.Process(target=serve, args=(other, folder))
    server.start()
    return pipe, server, pipe.recv()


def specs_of(dim: int) -> list[Any]:
    import keras

    from elasticcb.sharding.partition import VariableSpec
    from elasticcb.sharding.table_state import TableSpec

    initializer = json.dumps(keras.saving.serialize_keras_object(keras.initializers.RandomUniform()))
    table = TableSpec(None, initializer, 7).to_json()
    return [
        VariableSpec("dense/kernel", (16,), "float32", True),
        VariableSpec("table/embeddings", (0, dim), "float32", True, table=table),
    ]


class Pusher:
    """Pushes in a thread of its own; the longest push since the last look."""

    def __init__(self, client: Any, rows: int, dim: int, ids: int) -> None:
        self._client, self._rows, self._dim, self._ids = client, rows, dim, ids
        self._random = np.random.default_rng(0)
        self.longest = 0.0
        self.pushes = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        from elasticcb.sharding.push import Movement

        moved, parts = [{"float32": np.ones(16, np.float32)}], self._client.servers.partition
        while not self._stopped:
            ids = np.unique(self._random.zipf(1.1, self._ids) % self._rows)
            gradients = np.ones((len(ids), self._dim), np.float32)
            begun = time.perf_counter()
            push = Movement(1, parts, moved, [{}], [{}], {1: (ids, gradients)})
            self._client.push(push, self._client.versions, {1: ids})
            self.longest = max(self.longest, time.perf_counter() - begun)
            self.pushes += 1

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()


def memory(process: int, name: str) -> float:
    """VmRSS or VmHWM, in MiB."""
    with open(f"/proc/{process}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(name))


def written(folder: str) -> int:
    """Bytes of the files in a folder or below a URL."""
    files, root = fsspec.core.url_to_fs(folder, use_listings_cache=False)
    return sum(found["size"] for found in files.find(root, detail=True).values())


def measure(function: Callable[[], Any], pusher: Pusher, process: int) -> tuple[float, float, float, int]:
    """Seconds of the longest push and in all, MiB above those before, pushes."""
    with open(f"/proc/{process}/clear_refs", "w", encoding="ascii") as peak:
        peak.write("5")
    before, pushes = memory(process, "VmRSS"), pusher.pushes
    pusher.longest = 0.0
    begun = time.perf_counter()
    function()
    seconds = time.perf_counter() - begun
    return pusher.longest, seconds, memory(process, "VmHWM") - before, pusher.pushes - pushes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=6e6, help="of the table")
    parser.add_argument("--dim", type=int, default=16, help="elements of a row")
    parser.add_argument("--ids", type=int, default=3328, help="of a push")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", help="for the checkpoints; of a disk")
    parser.add_argument("--without", default="", help="names of cases to leave out, separated by commas")
    parser.add_argument("--url", help="for checkpoints and recovery files")
    given = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    rows = int(given.rows)
    folder = tempfile.mkdtemp(prefix="saving-", dir=given.folder)
    pipe, server, address = start(folder)

    from elasticcb.clients.ps import PSClient
    from elasticcb.clients.ps_servers import ServerGroup
    from elasticcb.master.job_copy import RecoveryCopy
    from elasticcb.master.ps_admin import PSControl
    from elasticcb.master.recovery_files import RecoveryFiles
    from elasticcb.optimizers.state import ModelState
    from elasticcb.proto import elasticcb_pb2 as pb
    from elasticcb.sharding.partition import Places, ServerPlace, ShardMap
    from elasticcb.sharding.push import Movement
    from elasticcb.storage.store_lock import Owner

    specs, places = specs_of(given.dim), Places([ServerPlace(address, 0)], ShardMap(1))
    place = f"{given.url}/{Path(folder).name}" if given.url else folder
    copy = RecoveryCopy(place, Owner(1, folder, "benchmark")) if given.url else None
    recovery = RecoveryFiles(Path(folder, "recovery"), "training", specs, copy)
    control = PSControl(PSClient(ServerGroup(places, specs, True)), "training", recovery=recovery)
    control.initialize(ModelState([np.ones(16, np.float32), np.zeros((0, given.dim), np.float32)]))
    client = PSClient(ServerGroup(places, specs, True), client_id=1)
    client.pull()
    for first in range(0, rows, CHUNK):
        ids = np.arange(first, min(first + CHUNK, rows))
        new = {1: (ids, np.ones((len(ids), given.dim), np.float32))}
        moved = [{"float32": np.ones(16, np.float32)}]
        client.push(Movement(1, client.servers.partition, moved, [{}], [{}], new), client.versions, {1: ids})
    pusher = Pusher(client, rows, given.dim, given.ids)
    try:
        while pusher.pushes < 20:  # the first ones compile
            time.sleep(0.1)
        assert server.pid is not None
        held = memory(server.pid, "VmRSS")
        print(f"{rows:,} rows of {given.dim}, Adam; pushes of {given.ids} ids; the server holds {held:,.0f} MiB")
        print("| | longest push, s | in all, s | pushes meanwhile | MiB above | MB written | lock held at most, ms |")
        print("|---|---|---|---|---|---|---|")
        for _ in range(given.repetitions):
            cases: dict[str, Callable[[], Any]] = {
                "5 s of training": lambda: time.sleep(5),
                "count": lambda: control.servers.on_all("CountTables", pb.CountTablesRequest(top=5)),
                "checkpoint": lambda: control.save(place),
                "recovery files": control.persist,
                "10 s of training": lambda: time.sleep(10),
                "what has changed": control.persist,
                "export": control.export,
            }
            for name in given.without.split(","):
                cases.pop(name, None)
            for name, function in cases.items():
                before = written(place)
                longest, seconds, above, pushes = measure(function, pusher, server.pid)
                size = (written(place) - before) / 1e6
                pipe.send(True)
                held_by = sorted(pipe.recv().items(), key=lambda each: -each[1])[:3]
                holds = ", ".join(f"{by} {1000 * held_for:.1f}" for by, held_for in held_by)
                line = f"| {name} | {longest:.3f} | {seconds:.1f} | {pushes} | {above:,.0f} | {size:,.0f} | {holds} |"
                print(line, flush=True)
        pusher.stop()
        version = client.version
        pipe.send(False)
        server.join()
        pipe, server, address = start(folder)  # as a replaced server: empty
        begun = time.perf_counter()
        restored = control.restore(0, address, 0, version, lambda: ModelState(), 0, None)
        print(f"Restored from {restored.source} in {time.perf_counter() - begun:.1f} s.", flush=True)
    finally:
        pusher.stop()
        client.servers.close()
        control.servers.close()
        pipe.send(False)
        server.join()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
