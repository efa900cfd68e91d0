"""Tasks per second of the master, and its memory per task.

    python benchmarks/tasks.py [--tasks 10000 1000000] [--workers 100] [--seconds 5] [--runs 5]

Two ways: only the task queue, called by one thread; and the whole master over gRPC, with workers that ask for a task
and report it done as fast as they are answered. These workers are threads of a few processes, each with a channel of
its own; they share the machine with the master. Medians over the runs, each in a new process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from typing import Any

CLIENTS = 4  # processes that the simulated workers share
BATCH, RECORDS = 128, 1280


def make_queue(tasks: int) -> Any:
    from elasticcb.master.task import QueueSettings
    from elasticcb.master.task_queue import TaskQueue

    settings = QueueSettings(records_per_task=RECORDS, minibatch_size=BATCH)
    return TaskQueue(settings, training=[("data", tasks * RECORDS)])


def run_queue(tasks: int, workers: int, seconds: float) -> dict[str, float]:
    """Only the queue. Memory: with all tasks queued, and one handed out to each worker."""
    queue = make_queue(2)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    queue = make_queue(tasks)
    held = [queue.get_task(worker, 0.0, ()) for worker in range(workers)]
    memory = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    done = 0
    started = time.perf_counter()
    while time.perf_counter() < started + seconds and done + workers < tasks:
        for worker in range(workers):
            queue.report_done(worker, held[worker].lease.id)
            held[worker] = queue.get_task(worker, 0.0, ())
            if held[worker].lease is None:  # the end
                return {"rate": done / (time.perf_counter() - started), "bytes": memory / tasks}
            done += 1
    return {"rate": done / (time.perf_counter() - started), "bytes": memory / tasks}


def run_master(tasks: int, workers: int, seconds: float) -> dict[str, float]:
    """The master behind its port."""
    from elasticcb.cluster.external import ExternalCluster
    from elasticcb.master.master import Master
    from elasticcb.master.members import ServedCluster
    from elasticcb.settings import ClusterSettings, Command, DataSettings, JobSettings, ModelSettings

    quiet = ExternalCluster(lambda text: None)
    master = Master(ClusterSettings(num_workers=workers, num_ps=1), quiet, lambda text: None)
    master.start()
    with tempfile.TemporaryDirectory() as folder:
        model = ModelSettings(zoo=folder, definition="model.custom_model")
        settings = JobSettings(command=Command.TRAIN, name="tasks", directory=folder, model=model, data=DataSettings())
    master.server.begin_job(settings)
    clients = [
        subprocess.Popen(
            [sys.executable, __file__, "--client", master.address, str(first), str(workers // CLIENTS)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in range(0, workers, workers // CLIENTS)
    ]
    queue = make_queue(tasks)
    with master.server.change() as state:
        state.queue, state.cluster = queue, ServedCluster([], [], False)
    for client in clients:
        client.stdout.readline()  # type: ignore[union-attr]
    used, started = time.process_time(), time.perf_counter()
    finish = started + seconds
    while time.perf_counter() < finish and not queue.training_done:
        with master.server.state():
            master.server.wait_a_tick()
            queue.take_milestones()
    elapsed, used = time.perf_counter() - started, time.process_time() - used
    done = sum(queue.accounting.records_trained.values()) // RECORDS
    with master.server.state() as state:
        queue.stop_training("the time is over")
        state.finish()
    latencies = [float(client.communicate()[0]) for client in clients]
    master.stop()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"rate": done / elapsed, "cpu": used / max(done, 1), "latency": statistics.median(latencies), "peak": peak}


def run_client(address: str, first: int, workers: int) -> None:
    """Simulated workers in places from `first` on; prints the median seconds of a `GetTask` with its answer."""
    from elasticcb.clients.master import MasterClient
    from elasticcb.proto import elasticcb_pb2 as pb

    latencies: list[float] = []

    def work(index: int, ready: threading.Barrier) -> None:
        client = MasterClient(address)
        next(client.jobs())
        client.register(pb.WORKER, index)
        client.wait_for_cluster()
        ready.wait()
        leases: list[int] = []
        while True:
            started = time.perf_counter()
            answer = client.get_task(leases)
            latencies.append(time.perf_counter() - started)
            if answer.kind == pb.GetTaskResponse.FINISHED:
                break
            if answer.kind != pb.GetTaskResponse.TASK:
                continue
            report = pb.ReportTaskRequest(lease=answer.task.lease, version=1)
            client.report_done(report)
        client.close()

    ready = threading.Barrier(workers + 1)
    threads = [threading.Thread(target=work, args=(first + place, ready)) for place in range(workers)]
    for thread in threads:
        thread.start()
    ready.wait()
    print("ready", flush=True)
    for thread in threads:
        thread.join()
    print(statistics.median(latencies))


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        run_client(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--one", choices=("queue", "master"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        run = {"queue": run_queue, "master": run_master}[arguments.one]
        print(json.dumps(run(arguments.tasks[0], arguments.workers, arguments.seconds)))
        return
    print("| tasks queued | queue, tasks/s | bytes per task | master, tasks/s | its CPU per task | GetTask takes |")
    print("|---|---|---|---|---|---|")
    for tasks in arguments.tasks:
        queue = medians("queue", tasks, arguments)
        master = medians("master", tasks, arguments)
        print(
            f"| {tasks:,} | {queue['rate']:,.0f} | {queue['bytes']:.1f} | {master['rate']:,.0f} | "
            f"{master['cpu'] * 1e6:.0f} µs | {master['latency'] * 1e3:.1f} ms |"
        )


def medians(kind: str, tasks: int, arguments: argparse.Namespace) -> dict[str, float]:
    numbers = [f"--tasks={tasks}", f"--workers={arguments.workers}", f"--seconds={arguments.seconds}"]
    command = [sys.executable, __file__, f"--one={kind}", *numbers]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        for _ in range(arguments.runs)
    ]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


if __name__ == "__main__":
    main()
