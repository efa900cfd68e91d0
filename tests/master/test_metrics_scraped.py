"""The metrics of a real master, scraped by HTTP, without any process or driving thread."""

import time
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from master_state import report_progress, settings_of, state_of

from elasticcb.cluster.external import ExternalCluster
from elasticcb.errors import UsageError
from elasticcb.master.master import Master
from elasticcb.master.members import Role
from elasticcb.master.task import QueueSettings
from elasticcb.master.task_queue import TaskQueue
from elasticcb.process.stats import PUSH, Stats, TableSize
from metrics_scrapes import Scrape

SETTINGS = settings_of(name="ratings", num_workers=2, num_ps=1, metrics_port=0)


@pytest.fixture
def lines():
    return []


@pytest.fixture
def master(lines):
    master = Master(SETTINGS.cluster, ExternalCluster(lines.append), lines.append)
    master.server.begin_job(SETTINGS)
    yield master
    master.stop()


def scrape(master):
    """The value of each sample, by its name and the values of its labels."""
    samples = Scrape(master.metrics_address).samples
    return {(each.name, *(value for _, value in sorted(each.labels.items()))): each.value for each in samples}


def test_a_scrape_tells_of_tasks_records_and_processes_as_they_are_at_that_moment(master, lines):
    assert lines == [f"Metrics are served at http://{master.metrics_address}/metrics."]
    found = scrape(master)
    assert found["elasticcb_job_info", "train", "ratings"] == 1
    assert found["elasticcb_ready",] == 0
    assert found["elasticcb_processes", "worker", "planned"] == 2

    worker = master.server.register(Role.WORKER, 0, "", 1, "here").id
    state_of(master).queue = TaskQueue(QueueSettings(records_per_task=10, minibatch_size=5), training=[("a", 30)])
    lease = master.server.get_task(worker, (), 0.0).lease
    report_progress(master, worker, lease.id, 5, version=3)
    found = scrape(master)
    assert found["elasticcb_records_total", "training"] == 5
    assert found["elasticcb_tasks", "doing", "training"] == 1
    assert found["elasticcb_tasks", "todo", "training"] == 2
    assert found["elasticcb_processes", "worker", "up"] == 1


def test_counts_of_a_lost_process_are_kept_and_its_memory_is_not(master):
    def join(pid, pushes):
        worker = master.server.register(Role.WORKER, 0, "", pid, "here").id
        expires = time.time() + 1000
        stats = Stats(cpu_seconds=5.0, resident_bytes=1000, rows_looked_up=10, certificate_expires=expires)
        for _ in range(pushes):
            stats.histograms[PUSH].observe(0.003)
        stats.refused_calls = {"malformed": 2}
        state_of(master).note_stats(worker, stats)
        state_of(master).note_stats(worker, stats)  # said again, it counts once
        return worker

    first = join(1, pushes=3)
    found = scrape(master)
    assert found["elasticcb_resident_memory_bytes", "0", "worker"] == 1000
    assert found["elasticcb_cpu_seconds_total", "0", "worker"] == 5
    assert found["elasticcb_certificate_expiry_seconds", "0", "worker"] == pytest.approx(1000, abs=100)
    assert ("elasticcb_certificate_expiry_seconds", "0", "master") not in found  # it has none
    master.server.lost(first, "killed")
    found = scrape(master)
    assert ("elasticcb_resident_memory_bytes", "0", "worker") not in found
    assert found["elasticcb_processes_lost_total", "worker"] == 1
    join(2, pushes=4)
    found = scrape(master)
    assert found["elasticcb_recoveries_total", "worker"] == 1
    assert found["elasticcb_lookup_rows_total",] == 20
    assert found["elasticcb_exchange_duration_seconds_bucket", "push", "0.0025"] == 0
    assert found["elasticcb_exchange_duration_seconds_bucket", "push", "0.005"] == 7
    assert found["elasticcb_exchange_duration_seconds_count", "push"] == 7
    assert found["elasticcb_refused_calls_total", "malformed"] == 4


def test_rows_and_bytes_of_a_table_are_those_of_the_servers_that_are_up(master):
    master.server.resize(Role.PS, 2)
    servers = [master.server.register(Role.PS, place, f"here:{place}", place, "here").id for place in range(2)]
    for server, rows in zip(servers, (10, 20), strict=True):
        state_of(master).note_stats(server, Stats(tables={"users/embeddings": TableSize(rows, 100 * rows)}))
    found = scrape(master)
    assert found["elasticcb_table_rows", "users/embeddings"] == 30
    assert found["elasticcb_table_bytes", "users/embeddings"] == 3000
    master.server.lost(servers[0], "killed")
    assert scrape(master)["elasticcb_table_rows", "users/embeddings"] == 20


def test_probes_are_answered_beside_the_metrics(master, monkeypatch):
    def ask(path):
        try:
            with urllib.request.urlopen(f"http://{master.metrics_address}{path}", timeout=10) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    assert (ask("/healthz"), ask("/readyz")) == (200, 503)
    monkeypatch.setattr(master.server, "ready", True)
    assert ask("/readyz") == 200


def test_a_port_that_is_taken_is_told_before_anything_starts(master):
    port = int(master.metrics_address.rpartition(":")[2])
    settings = replace(SETTINGS.cluster, metrics_port=port)
    with pytest.raises(UsageError, match="Choose another metrics_port"):
        Master(settings, ExternalCluster(print), print)
