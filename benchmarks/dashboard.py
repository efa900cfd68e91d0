"""What the page of a large job costs: a job of many workers for an hour is told to a real master and shown in Chromium.

    python benchmarks/dashboard.py [--workers=100] [--seconds=3600] [--before=0]

No workers run: a master in this process gets the reports of each second of the job as fast as the page takes them; the
seconds `--before` pass before the page is opened. Prints the memory of the page (JavaScript's after a collection, and
of the renderer's process, private to it), and the master's CPU time for each look at the job, of which there is one a
second. Needs Debian's chromium and chromium-driver, and the extra `elasticcb[test]`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from selenium import webdriver
from selenium.webdriver.common.by import By

from elasticcb.cluster.external import ExternalCluster
from elasticcb.dashboard import server as dashboard_server
from elasticcb.dashboard.server import JobView, make_app
from elasticcb.master.job_history import JobHistory
from elasticcb.master.job_machine import TaskResult
from elasticcb.master.master import Master
from elasticcb.master.members import Role, ServedCluster
from elasticcb.master.task import QueueSettings
from elasticcb.master.task_queue import TaskQueue
from elasticcb.process.stats import PUSH, Stats, TableSize
from elasticcb.settings import ClusterSettings, Command, JobSettings, TrainingSettings

SERVERS, BATCH, BATCHES_A_SECOND, TASK_SECONDS = 8, 100, 20, 5
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage")  # fmt: skip


class SimulatedJob(JobView):
    """A job whose every second passes at a look.

    Attributes:
        seconds: that have passed.
        looks: at the job.
        cpu_seconds: of the master, for these.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        super().__init__(folder)
        cluster = ClusterSettings(num_workers=workers, num_ps=SERVERS)
        training = TrainingSettings(minibatch_size=BATCH)
        settings = JobSettings(
            command=Command.TRAIN, name="large", directory=str(folder), cluster=cluster, training=training
        )
        self.seconds, self.looks, self.cpu_seconds, self._begun = 0, 0, 0.0, time.time()
        self._simulated = Master(cluster, ExternalCluster(lambda line: None), lambda line: None)
        self._simulated.server.begin_job(settings)
        for index in range(SERVERS):
            self._register(Role.PS, index)
        self._workers = {self._register(Role.WORKER, index): 0 for index in range(workers)}  # with their leases
        with self._simulated.server.state() as state:
            records = BATCH * BATCHES_A_SECOND * TASK_SECONDS
            state.queue = TaskQueue(QueueSettings(records, BATCH), training=[("a", workers * records * 1_000)])
            state.cluster = ServedCluster([], [], False)
            state.history = JobHistory(lambda: self._begun + self.seconds)
        self._stats = Stats(cpu_seconds=100.0, resident_bytes=1 << 30)
        self._server_stats = Stats(tables={f"table_{n}/embeddings": TableSize(10**6, 10**8) for n in range(10)})

    def _register(self, role: Role, index: int) -> int:
        return self._simulated.server.register(role, index, "10.0.0.1:50000", 1_000 + index, f"machine-{index}", 1).id

    def _ask(self) -> tuple[dict[str, Any], dict[str, Any]]:
        self.pass_a_second()
        begun = time.thread_time()
        status, past = self._simulated.observe().to_json(), self._simulated.past_after(self._known[1])
        self.cpu_seconds += time.thread_time() - begun
        self.looks += 1
        return status, past

    def pass_a_second(self) -> None:
        """Tells the master what happens in one."""
        self.seconds += 1
        calls = self._simulated.server
        with self._simulated.server.state() as state:
            for place, (worker, lease) in enumerate(self._workers.items()):
                self._stats.histograms[PUSH].observe(0.01 + 0.005 * math.sin(self.seconds / 20))
                state.note_stats(worker, self._stats)
                state.report_progress(
                    worker,
                    0,
                    time.monotonic(),
                    0,
                    version=self.seconds * 100,
                    loss=1 / self.seconds,
                    timed_batches=BATCHES_A_SECOND,
                    batch_seconds=1.0,
                )
                if (self.seconds + place) % TASK_SECONDS == 0 or not lease:
                    if lease:
                        calls.report_done(worker, lease, TaskResult(self.seconds * 100))
                    granted = calls.get_task(worker, (), 0.0).lease
                    self._workers[worker] = granted.id if granted is not None else 0
            for index in range(SERVERS):
                state.note_stats(index + 1, self._server_stats)
            leases = state.queue.leases() if state.queue is not None else ()
            pushes = self._stats.histograms[PUSH]
            if self.seconds % 60 == 0:
                state.history.record_event("checkpoint", f"A checkpoint is written, at version {self.seconds * 100}.")
        seen = self._simulated.observe()
        with self._simulated.server.state() as state:
            state.history.note(seen, [lease.id for lease in leases], (sum(pushes.counts), pushes.sum))

    def close(self) -> None:
        pass


def browser() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in (*QUIET, f"--user-data-dir={tempfile.mkdtemp()}", "--window-size=1280,1600"):
        options.add_argument(argument)
    return webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))


def page_memory(driver: webdriver.Chrome) -> tuple[float, float]:
    """MB of JavaScript's objects, and of the memory that the largest renderer has for itself."""
    driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
    driver.execute_cdp_cmd("Performance.enable", {})
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    heap = next(each["value"] for each in metrics if each["name"] == "JSHeapUsedSize")
    family = psutil.Process(driver.service.process.pid).children(recursive=True)
    renderers = [process for process in family if "--type=renderer" in " ".join(process.cmdline())]
    return heap / 1e6, max(process.memory_full_info().uss for process in renderers) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--seconds", type=int, default=3600, help="of the job")
    parser.add_argument("--before", type=int, default=0, help="seconds of it before the page is opened")
    arguments = parser.parse_args()
    dashboard_server._LOOK_SECONDS = 0.01
    with tempfile.TemporaryDirectory() as folder:
        view = SimulatedJob(Path(folder), arguments.workers)
        for _ in range(arguments.before):
            view.pass_a_second()
        broadcast = dashboard_server.Broadcast(view)
        config = uvicorn.Config(make_app(Path(folder), "key", broadcast), port=0, log_level="error")
        server = uvicorn.Server(config)
        driver = browser()

        async def serve() -> None:
            looks = asyncio.create_task(broadcast.run())
            await server.serve()
            broadcast.end()
            await looks

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        while not server.started:
            time.sleep(0.1)
        port = server.servers[0].sockets[0].getsockname()[1]
        driver.get(f"http://127.0.0.1:{port}/#key=key")
        print("seconds of the job | JavaScript MB | renderer MB | master, ms a look")
        for mark in sorted({60, 600, arguments.before + 30, arguments.seconds}):
            if not arguments.before <= mark <= arguments.seconds:
                continue
            while view.seconds < mark:
                time.sleep(0.2)
            heap, own = page_memory(driver)
            rows = len(driver.find_elements(By.CSS_SELECTOR, "#workers tr"))
            cost = 1_000 * view.cpu_seconds / view.looks
            print(f"{view.seconds:6,} | {heap:.1f} | {own:.0f} | {cost:.2f}   ({rows} workers shown)", flush=True)
        driver.quit()
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
