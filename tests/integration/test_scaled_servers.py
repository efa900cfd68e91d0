"""Parameter servers of real jobs become more and fewer while workers train."""

import json
import re

import numpy as np
import psutil
import pytest

from elasticcb.checkpoint.manifest import verify
from elasticcb.checkpoint.versions import find_latest
from elasticcb.cli.main import main
from jobs import number, offsets_job, open_gate, records_trained, train_flags

RECORDS, IDS, EPOCHS = 6_000, 40, 4
# The version at which the workers wait until the servers have been moved: well within the last epoch, so that they are
# done with the evaluation round of the epoch before, during which servers don't move. One of them may come to it while
# the other one waits for seconds for a server that was killed, so it is far from where the first move begins.
GATE = (EPOCHS - 1) * RECORDS // 8 + 200


@pytest.fixture
def data(tmp_path):
    offsets_job(tmp_path, IDS, gate=GATE, train=RECORDS, test=400)
    return tmp_path


@pytest.fixture
def scale(data, capsys):
    """Gives the job another number of servers; what is said to that."""

    def run(*flags):
        main(["scale", str(data / "job"), *flags])
        return capsys.readouterr().out

    return run


@pytest.fixture
def table(data, capsys):
    """What is told of the tables of the job."""

    def run(*flags):
        assert main(["table", str(data / "job"), "--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.timeout(400)
def test_servers_become_more_and_fewer_in_the_midst_of_training_though_some_are_killed(
    data, start_job, faults, scale, table
):
    died = [
        faults.fail_at("ps", 2, "reads what other servers have written"),
        faults.fail_at("ps", 0, "pauses for another number of servers", nth=3),
    ]
    more = {"num_epochs": EPOCHS, "checkpoint_interval": 0.2, "checkpoint_dir": data / "ckpt"}
    more |= {"updates": "async", "max_staleness": 1}
    job = start_job("train", *train_flags(data, "offsets", num_ps=1, **more))
    job.wait_for_line(r"Evaluation at version")
    workers = [process.pid for process in job.children("worker")]
    done = scale("--ps=3")
    assert re.search(r"now has 3 parameter servers \(was 1\)\. Updates paused for", done), done
    servers = job.children("ps")
    assert len(servers) == 3
    assert "already has 3 parameter servers" in scale("--ps=3")
    done = scale("--ps=2")
    assert re.search(r"now has 2 parameter servers \(was 3\)\. Updates paused for", done), done
    gone, _ = psutil.wait_procs(servers[2:], timeout=60)
    assert gone == servers[2:]
    assert job.children("ps")[1:] == servers[1:2]  # the first one was killed
    assert [process.pid for process in job.children("worker")] == workers
    assert all(each() for each in died)
    live = table()
    (offsets,) = live["tables"]
    assert (live["folder"], offsets["rows"]) == (str(data / "job"), IDS)
    assert len(offsets["rows_of_servers"]) == len(live["held_bytes"]) == 2
    assert sum(live["held_bytes"]) == offsets["live"]["bytes"] > offsets["row_bytes"] + offsets["slot_bytes"]
    (hottest, hits), *_ = offsets["top"]
    assert hits == offsets["hits"][-1]
    (row,) = table(f"--id={hottest}", "--table=embedding")["tables"]
    assert row["hits"] >= hits
    assert np.linalg.norm(row["row"]) == pytest.approx(row["norm"])
    assert row["slot_norms"].keys() == {"accumulators"}
    job.kill("ps", 1)
    assert table()["tables"][0]["rows"] == IDS  # of the server that takes its place
    job.wait_for_line(r"Parameter server 1 recovered in [\d.]+ s from its recovery files")
    open_gate(data)
    assert job.finish() == 0, job.output
    assert table()["folder"] == str(find_latest(data / "ckpt"))
    assert records_trained(job.output) == [RECORDS] * EPOCHS
    assert number(job.output, "workers lost") == 0
    assert re.search(r"parameter servers lost +3 \(3 replaced", job.output)
    error = float(re.findall(r"Evaluation at version .*error ([\d.e-]+)", job.output)[-1])
    assert error < 0.1  # 1.6 at the start
    newest = find_latest(data / "ckpt")
    assert len(verify(newest)["servers"]) == 2
    job.assert_no_orphans()


@pytest.mark.deep
def test_a_master_that_dies_while_the_number_of_servers_changes_does_not_keep_it_from_changing(
    data, start_job, faults, scale
):
    events = ("has paused the servers", "has written down the number of servers")
    happened = [faults.fail_at("master", 0, event) for event in events]
    job = start_job("train", *train_flags(data, "offsets", num_ps=1, num_epochs=EPOCHS, checkpoint_interval=0.2))
    job.wait_for_line(r"Evaluation at version")
    for died in happened:
        if not died():  # the command may have asked the next master, too
            scale("--ps=2")
        job.wait_for_line(r"The master recovered")
        assert died()
    assert "already has 2 parameter servers" in scale("--ps=2")
    open_gate(data)
    assert job.finish() == 0, job.output
    assert records_trained(job.output) == [RECORDS] * EPOCHS
    assert number(job.output, "workers lost") == 0
    error = float(re.findall(r"Evaluation at version .*error ([\d.e-]+)", job.output)[-1])
    assert error < 0.1  # 1.6 at the start
    job.assert_no_orphans()
