"""Parameter servers of real jobs, killed while workers train: others take their places with what they held."""

import json
import re
import signal
import textwrap

import numpy as np
import pytest
from safetensors.numpy import load_file
from waiting import wait_until

from elasticcb.checkpoint.versions import find_latest
from jobs import GATE, number, offsets_job, open_gate, records_trained, train_flags

RECORDS, TESTED, IDS = 4_000, 400, 40
IS_BACK = r"Parameter server \d recovered in [\d.]+ s from its recovery files; \d+ updates?"


@pytest.fixture
def data(tmp_path):
    """Records of a linear function with an offset for each id, and a model file for them."""
    offsets_job(tmp_path, IDS, train=RECORDS, test=TESTED)
    return tmp_path


def flags(folder, **more):
    return train_flags(folder, "offsets", **{"checkpoint_interval": 0.2, **more})


def test_killed_servers_are_replaced_alone_in_training_and_in_evaluation(data, start_job):
    more = {"num_ps": 2, "num_epochs": 2, "evaluation_steps": 250, "checkpoint_dir": data / "ckpt"}
    job = start_job("train", *flags(data, **more, updates="async", max_staleness=2))
    for index in (0, 1):
        job.wait_for_line(r"Evaluation at version")
        workers = [process.pid for process in job.children("worker")]
        job.kill("ps", index)
        job.wait_for_line(IS_BACK)
        assert [process.pid for process in job.children("worker")] == workers
    job.kill("ps", 0, signal.SIGTERM)
    assert " 0 updates" in job.wait_for_line(IS_BACK)
    assert job.finish() == 0, job.output
    assert records_trained(job.output) == [RECORDS] * 2
    assert re.search(r"parameter servers lost +3 \(3 replaced", job.output)
    assert number(job.output, "workers lost") == 0
    assert {int(float(n)) for n in re.findall(r"Evaluation at version .*rows ([\d.]+)", job.output)} == {TESTED}
    error = float(re.findall(r"Evaluation at version .*error ([\d.e-]+)", job.output)[-1])
    assert error < 0.1  # 1.6 at the start, 0.8 with offsets that are not learned
    job.assert_no_orphans()

    # In an evaluation, a server is replaced with the checkpoint.
    more = {"checkpoint_dir_for_init": data / "ckpt", "num_ps": 2, "minibatch_size": 1, "num_minibatches_per_task": 5}
    unwanted = ("training_data", "checkpoint_interval")
    given = [flag for flag in flags(data, **more) if not flag.startswith(tuple(f"--{name}=" for name in unwanted))]
    evaluation = start_job("evaluate", *given)
    evaluation.wait_for_line(r"The model starts from")
    evaluation.kill("ps", 1)
    assert evaluation.finish() == 0, evaluation.output
    assert number(evaluation.output, "records evaluated, once each") == TESTED
    assert re.search(rf"rows +{TESTED}\b", evaluation.output)
    assert re.search(r"parameter servers lost +1 \(1 replaced", evaluation.output)
    again = re.findall(r"error +([\d.e-]+)", evaluation.output)[-1]
    assert float(again) == pytest.approx(error, abs=1e-3)


def test_epoch_that_has_ended_is_not_lost_with_a_server(data, start_job):
    first_epoch = RECORDS // 8
    stop = data / "stop_at"
    gate = textwrap.dedent(GATE).replace("{version}", f"int(open({str(stop)!r}).read())")
    (data / "gated.py").write_text((data / "offsets.py").read_text() + gate)
    stop.write_text(str(first_epoch))
    # One worker, so that no batch of the next epoch comes before the last ones of the first.
    more = {"num_ps": 2, "num_workers": 1, "num_epochs": 3, "checkpoint_interval": 1000}
    given = flags(data, **more, model_def="gated.custom_model")
    given = [flag for flag in given if not flag.startswith("--validation_data=")]
    job = start_job("train", *given)
    for epoch in (1, 2):  # in the second one servers are new, and the master may not have spoken to them yet
        for index in (0, 1):
            log = data / "job" / "recovery" / f"ps-{index}" / "log.json"
            # The file that the end of the epoch calls for comes after those that the others have begun with.
            wait_until(lambda log=log, epoch=epoch: len(files_of(log)) > epoch)
            job.kill("ps", index)
            assert "; 0 updates to its shard were lost" in job.wait_for_line(IS_BACK)
        (data / "next").write_text(str(first_epoch * (epoch + 1)))
        (data / "next").replace(stop)
    open_gate(data)
    assert job.finish() == 0, job.output
    assert number(job.output, "model version") == 3 * first_epoch
    assert "updates lost" not in job.output


def files_of(log):
    return json.loads(log.read_text())["files"] if log.exists() else []


def test_servers_with_replicas_lose_no_update_however_often_they_are_killed(data, start_job, faults):
    seeded = "import keras\nkeras.utils.set_random_seed(0)\n"
    (data / "seeded.py").write_text(seeded + (data / "offsets.py").read_text())
    # One worker, whose pushes come in one order, and files that are hardly ever written.
    more = {"num_ps": 2, "num_workers": 1, "ps_replicas": 1, "checkpoint_interval": 1000, "local_steps": 8}
    given = {**more, "model_def": "seeded.custom_model", "evaluation_steps": 100}
    calm = start_job("train", *flags(data, **given, job_dir=data / "calm", checkpoint_dir=data / "calm_weights"))
    assert calm.finish() == 0, calm.output
    master_died = faults.fail_at("master", 0, "introduces a server to its neighbour")
    job = start_job("train", *flags(data, **given, checkpoint_dir=data / "weights"))
    by_replica = r"from its recovery files( and its replica)?; 0 updates"  # nothing came after a file just written
    for index, words in ((0, "The master recovered"), (1, by_replica), (0, by_replica)):
        job.wait_for_line(r"Evaluation at version")
        job.kill("ps", index)
        job.wait_for_line(rf"Parameter server {1 - index} has no replica until parameter server {index} recovers")
        assert re.search(words, job.wait_for_line(r"recovered in"))
    assert master_died()
    assert job.finish() == 0, job.output
    assert re.search(r"parameter servers lost +3 \(3 replaced", job.output)
    assert "updates lost" not in job.output
    assert number(job.output, "duplicate records (at most)") == 0
    for one, other in zip(held(data / "weights"), held(data / "calm_weights"), strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    job.assert_no_orphans()


def held(checkpoints):
    """What each server has written into the newest checkpoint; of tables by id, without counts of lookups."""
    for file in sorted(find_latest(checkpoints).glob("*.safetensors")):
        arrays = load_file(file)
        assert "table/0/ids" in arrays
        order = np.argsort(arrays["table/0/ids"])
        del arrays["table/0/hits"]
        yield {name: array[order] if name.startswith("table/") else array for name, array in arrays.items()}
