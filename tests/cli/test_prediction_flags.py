"""Where `elasticcb predict` writes: known, and checked, before anything starts."""

import os

import pytest

from elasticcb.cli.progress import summary_lines
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.settings import Command


def test_predictions_go_to_a_file_whose_ending_or_flag_names_the_format(workplace):
    flags = workplace.predict[:-1]
    for output, more, format in (
        ("new/folder/out.csv", [], "csv"),
        ("out.ndjson", [], "jsonl"),
        ("out.parquet", [], "parquet"),
        ("out.csv", ["--output_format=npz"], "npz"),
    ):
        settings = workplace.settings(*flags, f"--output={output}", *more, command=Command.PREDICT)
        assert (settings.output, settings.output_format) == (str(workplace.root / output), format)
        assert not (workplace.root / "new").exists()


def test_prediction_into_nothing_is_refused(workplace, complaint):
    flags = workplace.predict[:-1]
    message = complaint("predict", *flags)
    assert "The predictions would be lost: " in message
    assert "linear.py has no `callbacks`, and --output is missing. Add --output=FILE" in message
    for taker in ("def callbacks(): pass", "class PredictionOutputsProcessor: pass", "from elsewhere import *"):
        workplace.write("zoo/linear/linear.py", f"def custom_model(): pass\n{taker}\n")
        assert workplace.settings(*flags, command=Command.PREDICT).output == ""


def test_output_that_cannot_be_written_is_refused(workplace, complaint):
    workplace.write("there.csv", "old")
    (workplace.root / "gone.csv").symlink_to(workplace.root / "nowhere")
    for output, message in (
        ("out.txt", "has no known file extension. Expected .csv, .jsonl"),
        ("s3://bucket/out.csv", "is a URL. Expected a local file"),
        ("there.csv", "there.csv, which exists; `predict` does not overwrite files"),
        ("gone.csv", "gone.csv, which exists"),
        ("data", "data, which is a folder. Expected a file"),
        ("there.csv/out.csv", "there.csv is not a folder"),
    ):
        assert message in complaint("predict", *workplace.predict[:-1], f"--output={output}")
    assert "sets the format of --output, but --output is missing" in complaint(
        "predict", *workplace.predict[:-1], "--output_format=csv"
    )
    assert (workplace.root / "there.csv").read_text() == "old"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_rights_is_refused(workplace, complaint):
    (workplace.root / "closed").mkdir(mode=0o500)
    assert "can't be written to" in complaint("predict", *workplace.predict[:-1], "--output=closed/out.csv")


def test_export_folder_in_a_config_file_is_no_file_of_predictions(workplace, complaint):
    workplace.write("job.yaml", "output: export\n")
    flags = ["--config=job.yaml", *workplace.predict[:-1]]
    assert "--output is missing" in complaint("predict", *flags)
    assert workplace.settings(*flags, "--output=out.csv", command=Command.PREDICT).output.endswith("/out.csv")
    workplace.write("job.yaml", "output: export.npz\n")
    settings = workplace.settings(*flags, command=Command.PREDICT)
    assert (settings.output, settings.output_format) == (str(workplace.root / "export.npz"), "npz")


def test_summary_tells_what_was_predicted_and_where_it_is():
    summary = JobSnapshot(
        command=Command.PREDICT,
        seconds=1.0,
        records_predicted=3000,
        records_repeated=1200,
        predictions_path="/data/out.csv",
    )
    text = "\n".join(summary_lines(summary))
    assert "records predicted                 3,000" in text
    assert "duplicate records (at most)       1,200" in text
    assert "/data/out.csv" in text
    assert "gradients" not in text
    assert "evaluated" not in text
