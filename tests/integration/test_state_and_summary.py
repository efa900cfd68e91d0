"""The summary of a job and the state that it leaves are of the same moment."""

import json

import pytest

from elasticcb.master.state_document import document
from elasticcb.settings import Command
from jobs import LINEAR_MODEL, job_settings, linear_data, run_job, write_model_file

RECEIVER = """
    class PredictionOutputsProcessor:
        def process(self, predictions, worker_id):
            pass
"""


@pytest.mark.parametrize("command", list(Command)[:3])
def test_summary_and_state_agree(tmp_path, command):
    path = write_model_file(tmp_path, LINEAR_MODEL + RECEIVER, "linear")
    linear_data(tmp_path, train=96, test=40)
    data = {name: str(tmp_path / f"{file}.npz") for name, file in (("training", "train"), ("validation", "test"))}
    train = job_settings(
        path,
        tmp_path / "train",
        **data,
        minibatch_size=8,
        num_epochs=2,
        evaluation_steps=5,
        num_workers=2,
        directory=str(tmp_path / "checkpoints"),
    )
    summary, _ = run_job(train)
    folder, expected = tmp_path / "train", (96 * 2, 40, 0)
    if command is not Command.TRAIN:
        folder = tmp_path / "other"
        given = {"validation": data["validation"]} if command is Command.EVALUATE else {"prediction": data["training"]}
        initial = str(tmp_path / "checkpoints")
        summary, _ = run_job(job_settings(path, folder, command, **given, directory_for_init=initial))
        expected = (0, 40, 0) if command is Command.EVALUATE else (0, 0, 96)
    state = json.loads((folder / "status.json").read_text())
    records = state["records"]
    assert (records["trained"], records["evaluated"], records["predicted"]) == expected
    told = document(summary, over=True)
    for key in state.keys() - {"workers", "parameter_servers", "processes"}:  # which leave meanwhile
        assert state[key] == told[key], key
