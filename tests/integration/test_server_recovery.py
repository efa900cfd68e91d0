"""Parameter servers of real jobs, killed while workers train: others take their places with what they held."""

import re
import shutil
import signal

import pytest

from jobs import number, offsets_job, records_trained, train_flags

RECORDS, TESTED, IDS = 4_000, 400, 40
IS_BACK = r"Parameter server \d recovered in [\d.]+ s from its recovery files; \d+ updates?"


@pytest.fixture
def data(tmp_path):
    """Records of a linear function with an offset for each id, and a model file for them."""
    offsets_job(tmp_path, IDS, train=RECORDS, test=TESTED)
    return tmp_path


def flags(folder, **more):
    return train_flags(folder, "offsets", **{"checkpoint_interval": 0.2, **more})


def test_killed_servers_are_replaced_alone_in_training_and_in_evaluation(data, start_job, faults):
    happened = [
        faults.fail_at("ps", 0, "has applied a push", nth=40),
        faults.fail_at("ps", 0, "has saved its part", nth=3),
        faults.fail_at("ps", 1, "has saved its part", nth=5),
    ]
    more = {"num_ps": 2, "num_epochs": 3, "evaluation_steps": 250, "checkpoint_dir": data / "ckpt"}
    job = start_job("train", *flags(data, **more, updates="async", max_staleness=2))
    for _ in happened:
        job.wait_for_line(IS_BACK)
    workers = [process.pid for process in job.children("worker")]
    assert all(each() for each in happened)
    job.wait_for_line(r"Evaluation at version")
    job.kill("ps", 0, signal.SIGTERM)
    assert " 0 updates" in job.wait_for_line(IS_BACK)
    assert [process.pid for process in job.children("worker")] == workers
    assert job.finish() == 0, job.output
    assert records_trained(job.output) == [RECORDS] * 3
    assert re.search(r"parameter servers lost +4 \(4 replaced", job.output)
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


def test_what_killed_servers_had_not_saved_is_trained_again(data, start_job, faults):
    more = {"num_ps": 2, "num_workers": 2, "num_epochs": 3, "checkpoint_interval": 1000, "evaluation_steps": 250}
    master_died = faults.fail_at("master", 0, "has given a server its model back")
    job = start_job("train", *flags(data, **more))
    lost = 0
    for index in (0, 1, 0):  # at the first time, the master dies too
        job.wait_for_line(r"Evaluation at version")
        job.kill("ps", index)
        line = job.wait_for_line(rf"Parameter server {index} recovered in")
        updates = int(re.search(r" (\d+) updates? to its shard w", line)[1])
        assert ("lost, and trained again." in line) == (updates > 0)
        lost += updates
    assert master_died()
    assert lost > 0
    files = data / "job" / "recovery"
    shutil.rmtree(files, ignore_errors=True)
    files.write_text("")  # at the end of training, the servers can't save
    job.wait_for_line(r"recovery.* can't be (written|made): .*\. Training continues; what is not saved is trained")
    assert job.finish() == 0, job.output
    assert records_trained(job.output) == [RECORDS] * 3
    assert re.search(r"parameter servers lost +3 \(3 replaced", job.output)
    assert number(job.output, "duplicate records (at most)") > 0
    error = float(re.findall(r"Evaluation at version .*error ([\d.e-]+)", job.output)[-1])
    assert error < 0.1  # although no server had ever saved anything
    job.assert_no_orphans()
