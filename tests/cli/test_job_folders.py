"""How commands find the folder of a job."""

import errno
import json
import os
from pathlib import Path

import pytest

from elasticcb.cli.job_folders import find_job, new_folder, was_refused
from elasticcb.cli.main import main
from elasticcb.clients.running_master import command_runs
from elasticcb.errors import UsageError
from elasticcb.settings import JOB_FILE, STATUS_FILE, Command
from elasticcb.storage import durable


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """The working directory, with jobs."""
    monkeypatch.chdir(tmp_path)
    for name in ("train-mnist-20260101-120000", "train-mnist-20260102-120000", "evaluate-mnist-20260102-120000-12"):
        (tmp_path / "jobs" / name / "logs").mkdir(parents=True)
    (tmp_path / "elsewhere" / "logs").mkdir(parents=True)
    return tmp_path


def test_a_job_is_found_by_its_folder_and_by_its_name(jobs):
    name = "train-mnist-20260101-120000"
    for job in (f"jobs/{name}", str(jobs / "jobs" / name), name):
        assert find_job(job) == jobs / "jobs" / name
    assert find_job("elsewhere") == jobs / "elsewhere"


def test_the_newest_of_the_jobs_of_one_name_is_found_by_it(jobs):
    (jobs / "jobs" / "train-mnist-big-20260103-120000" / "logs").mkdir(parents=True)
    assert find_job("mnist").name == "evaluate-mnist-20260102-120000-12"
    assert find_job("mnist-big").name == "train-mnist-big-20260103-120000"


def test_the_latest_job_is_the_one_begun_last(jobs):
    assert find_job("latest").name == "evaluate-mnist-20260102-120000-12"
    begun = new_folder(jobs / "jobs", Command.PREDICT, "mnist")
    begun.joinpath("logs").mkdir()
    assert begun.name.startswith("predict-mnist-20")
    assert find_job("latest") == begun


def test_resume_and_table_pass_over_jobs_that_evaluate_or_predict(jobs, monkeypatch, capsys):
    for job in ("latest", "mnist"):
        assert find_job(job, only_training=True).name == "train-mnist-20260102-120000"
        for command in ("resume", "table"):
            assert main([command, job]) == 2
            assert "jobs/train-mnist-20260102-120000 " in capsys.readouterr().err
    evaluation = "evaluate-mnist-20260102-120000-12"
    assert find_job(evaluation, only_training=True).name == evaluation
    monkeypatch.chdir(jobs / "elsewhere")
    (jobs / "elsewhere" / "jobs" / evaluation / "logs").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"There is no latest job: .*jobs contains no training jobs"):
        find_job("latest", only_training=True)


def test_a_job_that_is_resumed_and_one_with_a_folder_name_of_its_own_are_the_latest_as_well(jobs):
    resumed, own = jobs / "jobs" / "train-mnist-20260101-120000", jobs / "jobs" / "own"
    with command_runs(resumed):
        pass
    assert find_job("latest") == find_job("mnist") == resumed
    with command_runs(own):
        pass
    assert find_job("latest") == own
    assert find_job("latest", only_training=True) == find_job("mnist") == resumed
    durable.write_document(own / JOB_FILE, {})
    assert find_job("latest", only_training=True) == own


@pytest.mark.parametrize(
    ("tasks", "error", "refused"),
    [({}, "DataError", True), ({}, "ClusterLostError", False), ({"training": {"todo": 3}}, "DataError", False)],
)
def test_a_job_whose_error_before_its_first_task_tells_all_is_told_from_others(tmp_path, tasks, error, refused):
    assert not was_refused(tmp_path)
    durable.write_document(tmp_path / STATUS_FILE, {"tasks": tasks, "error_type": error})
    assert was_refused(tmp_path) is refused


def test_who_names_no_job_is_told_of_those_that_there_are(jobs, monkeypatch):
    with pytest.raises(UsageError, match=r"There is no job train-mnist.* Jobs here: train-mnist-2026010"):
        find_job("train-mnist")
    with pytest.raises(UsageError, match=r"There is no job census.*20260102.*--namespace"):
        find_job("census")
    with pytest.raises(UsageError, match="is not the folder of a job"):
        find_job("jobs")
    monkeypatch.chdir(jobs / "elsewhere")
    with pytest.raises(UsageError, match=r"There is no latest job: .*jobs contains no jobs"):
        find_job("latest")


def test_jobs_are_listed_newest_first_with_what_is_known_of_them(jobs, capsys):
    failed = {
        "name": "mnist",
        "command": "train",
        "phase": "failed",
        "loss": 0.25,
        "metrics": {"auc": 0.5, "bad": None},
    }
    durable.write_document(jobs / "jobs" / "train-mnist-20260102-120000" / STATUS_FILE, failed)
    durable.write_document(jobs / "jobs" / "train-mnist-20260101-120000" / STATUS_FILE, {**failed, "metrics": [7]})
    settings = {"name": "mnist", "command": "predict"}
    durable.write_document(jobs / "jobs" / "evaluate-mnist-20260102-120000-12" / JOB_FILE, settings)
    (jobs / "jobs" / "notes").mkdir()
    assert main(["jobs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(job["state"], job["started"], job["metrics"]) for job in listed] == [
        ("lost", "2026-01-02 12:00:00", "-"),
        ("failed", "2026-01-02 12:00:00", "loss 0.2500, val_auc 0.5000"),
        ("lost", "2026-01-01 12:00:00", "-"),
    ]
    assert [job["command"] for job in listed] == ["predict", "train", "-"]
    assert listed[1]["folder"] == "jobs/train-mnist-20260102-120000"
    assert main(["jobs"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == [
        "JOB", "COMMAND", "STATE", "STARTED", "METRICS", "FOLDER",
    ]  # fmt: skip
    assert main(["jobs", "elsewhere"]) == 0
    assert capsys.readouterr().out == f"There are no jobs in {jobs}/elsewhere.\n"


def test_folders_of_other_users_are_listed_and_refused_in_words(jobs, capsys, monkeypatch):
    foreign = jobs / "jobs" / "train-mnist-20260101-120000"
    stat, listdir = os.stat, os.listdir

    def denied(function, is_in):
        def call(path, *arguments, **named):
            if is_in(path):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return function(path, *arguments, **named)

        return call

    monkeypatch.setattr(os, "stat", denied(stat, lambda path: foreign in Path(os.fsdecode(path)).parents))
    monkeypatch.setattr(os, "listdir", denied(listdir, lambda path: Path(path) == foreign))
    assert main(["jobs"]) == 0
    assert str(foreign.name) in capsys.readouterr().out
    assert main(["clean", "--dry_run"]) == 0
    for command in ("status", "table"):
        assert main([command, str(foreign)]) == 2
        assert f"{foreign.name}" in (said := capsys.readouterr().err)
        assert "Permission denied. Run the command as its owner" in said
    assert main(["status", "x" * 5000]) == 2
    assert "There is no job" in capsys.readouterr().err
