"""How long updates pause while the number of parameter servers changes.

    python benchmarks/changing_servers.py [--rows=1e5,1e6,6e6] [--before=2] [--after=3]

Servers in processes of their own, and one embedding table trained with Adam, which is in their recovery files up to the
last `--ids` rows, as after the seconds since the last save. Prints a Markdown table: seconds in which the servers write
what is missing, and read their parts of the model.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from saving import memory, specs_of

CHUNK = 100_000  # rows of a push


def serve(pipe: Any, folder: str) -> None:
    import keras

    from elasticcb.ps.server import PSServer
    from elasticcb.settings import Command, JobSettings, ModelSettings

    settings = JobSettings(command=Command.TRAIN, name="benchmark", directory=folder, model=ModelSettings())
    server = PSServer(settings, lambda count: [keras.optimizers.Adam() for _ in range(count)])
    server.start()
    pipe.send(server.address)
    pipe.recv()
    server.stop(0)


def measured(rows: int, given: argparse.Namespace) -> str:
    from elasticcb.clients.ps import PSClient
    from elasticcb.clients.ps_servers import ServerGroup
    from elasticcb.master.ps_admin import PSControl
    from elasticcb.master.recovery_files import RecoveryFiles
    from elasticcb.master.server_scaling import Pause
    from elasticcb.optimizers.state import ModelState
    from elasticcb.sharding.partition import Places, ServerPlace, ShardMap
    from elasticcb.sharding.push import Movement

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        pipes, processes = [], []
        for _ in range(max(given.before, given.after)):
            pipe, other = context.Pipe()
            processes.append(context.Process(target=serve, args=(other, folder)))
            processes[-1].start()
            pipes.append(pipe)
        places = [ServerPlace(pipe.recv(), index + 1) for index, pipe in enumerate(pipes)]
        group = ServerGroup(Places(places[: given.before], ShardMap(given.before)), specs_of(given.dim), split=False)
        client = PSClient(group, 1)
        recovery = RecoveryFiles(Path(folder, "recovery"), "run", group.specs)
        control = PSControl(client, "run", recovery=recovery)
        control.initialize(ModelState([np.zeros(16, np.float32), np.zeros((0, given.dim), np.float32)]))
        client.pull()

        def train(first: int, last: int) -> None:
            for start in range(first, last, CHUNK):
                ids = np.arange(start, min(start + CHUNK, last), dtype=np.int64)
                client.lookup({1: ids}, create=True)
                moved: list[Any] = [{"float32": np.ones(16, np.float32)} if part else {} for part in group.partition]
                row_gradients = {1: (ids, np.ones((len(ids), given.dim), np.float32))}
                empty: list[Any] = [{} for _ in group.partition]
                client.push(Movement(1, group.partition, moved, empty, empty, row_gradients), client.versions)

        train(0, rows)
        control.persist()
        train(0, min(given.ids, rows))
        pause = Pause(control, lambda worker: True)
        pause.begin()
        written = time.monotonic() - pause.begun
        group.follow(Places(places[: given.after], group.shard_map.resized(given.after)))
        begun = time.monotonic()
        restored = group.each(
            lambda index: control.restore(index, *places[index], 0, lambda: ModelState(), 0, None),
            range(given.after),
        )
        read = time.monotonic() - begun
        assert all(each.source == "its recovery files" for each in restored)
        peaks = [memory(process.pid or 0, "VmHWM") for process in processes]
        group.close()
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join()
    return f"| {rows:,} | {written:.2f} | {read:.2f} | {written + read:.2f} | {max(peaks):,.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1e5,1e6,6e6", help="of the table")
    parser.add_argument("--dim", type=int, default=16, help="elements of a row")
    parser.add_argument("--ids", type=int, default=200_000, help="rows trained since the last save")
    parser.add_argument("--before", type=int, default=2, help="servers")
    parser.add_argument("--after", type=int, default=3, help="servers")
    parser.add_argument("--folder", help="for the recovery files; of a disk")
    given = parser.parse_args()
    print("| rows | written, s | read, s | pause, s | most memory of a server, MiB |\n|---|---|---|---|---|")
    for rows in given.rows.split(","):
        print(measured(int(float(rows)), given), flush=True)


if __name__ == "__main__":
    main()
