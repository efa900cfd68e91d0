"""The summary of a job and the state that it leaves are of the same moment."""

from elasticcb.master.state_document import document
from elasticcb.settings import Command
from elasticcb.storage import durable
from jobs import LINEAR_MODEL, job_settings, linear_data, run_job, write_model_file

RECEIVER = """
    class PredictionOutputsProcessor:
        def process(self, predictions, worker_id):
            pass
"""


def assert_agree(folder, summary, trained=0, evaluated=0, predicted=0):
    state = durable.read_document(folder / "status.json")
    records = state["records"]
    assert (records["trained"], records["evaluated"], records["predicted"]) == (trained, evaluated, predicted)
    told = document(summary, over=True)
    # Processes leave meanwhile, and others write to the disk.
    for key in state.keys() - {"workers", "parameter_servers", "processes", "free_disk_bytes"}:
        assert state[key] == told[key], key


def test_summary_and_state_agree(tmp_path):
    path = write_model_file(tmp_path, LINEAR_MODEL + RECEIVER, "linear")
    linear_data(tmp_path, train=96, test=40)
    training, validation = (str(tmp_path / f"{file}.npz") for file in ("train", "test"))
    train = job_settings(
        path,
        tmp_path / "train",
        training=training,
        validation=validation,
        minibatch_size=8,
        num_epochs=2,
        evaluation_steps=5,
        num_workers=2,
        directory=str(tmp_path / "checkpoints"),
    )
    summary, _ = run_job(train)
    assert_agree(tmp_path / "train", summary, trained=96 * 2, evaluated=40)
    initial = {"directory_for_init": str(tmp_path / "checkpoints")}
    evaluate = job_settings(path, tmp_path / "evaluate", Command.EVALUATE, validation=validation, **initial)
    summary, _ = run_job(evaluate)
    assert_agree(tmp_path / "evaluate", summary, evaluated=40)
    predict = job_settings(path, tmp_path / "predict", Command.PREDICT, prediction=training, **initial)
    summary, _ = run_job(predict)
    assert_agree(tmp_path / "predict", summary, predicted=96)
