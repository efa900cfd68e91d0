"""Processes of real jobs that live, but say nothing any more: others take their places."""

import os
import signal

import pytest

from jobs import LINEAR_MODEL, linear_data, number, records_trained, train_flags, write_model_file

CALLBACKS = """
    import os

    class Gate(keras.callbacks.Callback):
        "Holds the master at the end of an evaluation round, until the test lets it go on."

        def on_test_end(self, logs=None):
            gate = os.path.join(self.params["job_directory"], "gate")
            if os.path.exists(gate):
                open(gate).close()
                os.remove(gate)

    def callbacks():
        return [Gate()]
"""
RECORDS = 3_000
IS_BACK = r"Parameter server \d recovered in [\d.]+ s from its recovery files"


@pytest.fixture
def data(tmp_path):
    write_model_file(tmp_path, LINEAR_MODEL + CALLBACKS, "linear")
    linear_data(tmp_path, train=RECORDS, test=400)
    return tmp_path


def test_a_server_that_is_stopped_is_replaced_while_the_master_itself_waits_for_its_answer(data, start_job):
    gate = data / "job" / "gate"
    gate.parent.mkdir()
    os.mkfifo(gate)
    flags = {"num_epochs": 2, "num_ps": 2, "evaluation_steps": 200, "silence_seconds": 3, "checkpoint_interval": 0.2}
    job = start_job("train", *train_flags(data, "linear", **flags))
    job.wait_for_line(r"Evaluation at version")
    workers = [process.pid for process in job.children("worker")]
    job.kill("ps", 1, signal.SIGSTOP)
    gate.open("w").close()  # now the master tells the servers to forget the round's weights
    job.wait_for_line(r"parameter server 1 .* was lost: no heartbeat for 3 s; restart \d of 10")
    job.wait_for_line(IS_BACK)
    assert [process.pid for process in job.children("worker")] == workers
    assert job.finish() == 0, job.output
    assert records_trained(job.output) == [RECORDS] * 2
    assert number(job.output, "workers lost") == 0
    job.assert_no_orphans()
