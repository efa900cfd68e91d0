"""The model of a job is kept, and exported when the job is done, while it runs, and after it was stopped."""

import json
import re
import shutil
import socket
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from waiting import wait_until

from elasticcb.checkpoint.manifest import read_manifest
from elasticcb.checkpoint.versions import begin_version, find_versions, finish_version
from elasticcb.cli.export import _checkpoint_of, _saved_by
from elasticcb.cli.main import main
from elasticcb.errors import StoreError
from elasticcb.master.checkpoint_writer import CheckpointWriter
from elasticcb.roles.master import run_master
from elasticcb.serving.loading import load_version
from elasticcb.sidecar import export
from elasticcb.storage import durable
from jobs import (
    LINEAR_MODEL,
    RecordingDisplay,
    job_settings,
    linear_data,
    offsets_job,
    open_gate,
    train_flags,
    write_model_file,
)

X = np.eye(4, dtype="float32")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """The working directory, with records of a linear function, and a model file for them."""
    monkeypatch.chdir(tmp_path)
    write_model_file(tmp_path, LINEAR_MODEL, "linear")
    linear_data(tmp_path, train=800, test=80)
    return tmp_path


def flags(folder, model="linear", **more):
    given = train_flags(folder, model, **{"num_workers": 1, "num_ps": 2, **more})
    return ["train", *(flag for flag in given if not flag.startswith("--job_dir=") or "job_dir" in more)]


def served(folder):
    """What a SavedModel answers for `X`."""
    answer = tf.saved_model.load(str(folder)).signatures["serving_default"](features=tf.constant(X))
    return next(iter(answer.values())).numpy()


def test_a_job_keeps_its_model_and_a_refused_one_leaves_nothing(start_job, data, capsys):
    job = start_job(*flags(data, output="served", numbered="true"))
    assert job.finish() == 0, job.output
    kept = re.search(r"The model, as a checkpoint: (.+/model/version-\d+)$", job.output, re.MULTILINE)[1]
    assert main(["export", "latest", "--output=served", "--numbered"]) == 0
    assert "served/2" in capsys.readouterr().out
    assert main(["export", kept, "--output=linear.keras"]) == 0
    expected = served("served/1")
    np.testing.assert_allclose(served("served/2"), expected, rtol=1e-6)
    np.testing.assert_allclose(keras.saving.load_model("linear.keras", compile=False)(X), expected, rtol=1e-6)

    latest = json.loads(_output(capsys, "jobs", "--json"))
    assert [(each["command"], each["state"]) for each in latest] == [("train", "done")]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused = start_job(*flags(data, metrics_port=taken.getsockname()[1]))
        assert refused.finish() == 2
        assert "Choose another metrics_port" in refused.output
    assert main(["resume", "latest"]) == 2
    assert "is done; there is nothing to continue" in capsys.readouterr().err
    assert json.loads(_output(capsys, "jobs", "--json")) == latest


def test_a_job_that_runs_or_was_stopped_is_exported(start_job, tmp_path, capsys):
    offsets_job(tmp_path, 50, gate=60, train=1_200, test=80)
    tables = {"embedding_threshold_bytes": 1, "checkpoint_interval": 0.2, "num_epochs": 3, "job_dir": tmp_path / "job"}
    job = start_job(*flags(tmp_path, "offsets", **tables))
    job.wait_for_line("training: .*version")
    wait_until((tmp_path / "job" / "recovery" / "manifest.json").exists)
    assert main(["export", str(tmp_path / "job"), f"--output={tmp_path / 'running'}"]) == 0
    assert tf.saved_model.load(str(tmp_path / "running")).signatures
    open_gate(tmp_path)
    job.interrupt()
    assert job.finish() == 130, job.output
    (saved,) = find_versions(tmp_path / "job" / "model")
    assert main(["export", str(tmp_path / "job"), f"--output={tmp_path / 'stopped'}"]) == 0
    assert f"version {int(saved.name[8:]):,} of" in capsys.readouterr().out


def test_a_job_that_has_saved_nothing_has_not_the_model_of_another_in_its_checkpoint_folder(tmp_path):
    other = finish_version(begin_version(tmp_path, 3), version=3, specs=[], parts=[], files=[], extra={"run": "other"})
    for place in (str(tmp_path), f"file://{tmp_path}"):
        assert _checkpoint_of(place, "mine") == ""
        assert _checkpoint_of(place, "other") == f"{place}/{other.name}"


def test_a_version_that_is_pruned_while_the_model_is_built_gives_way_to_the_newest(tmp_path, monkeypatch):
    def finished(version):
        return finish_version(begin_version(tmp_path, version), version=version, specs=[], parts=[], files=[])

    def load(model, folder):
        loaded.append(Path(folder).name)
        if len(loaded) == 1:
            finished(4)
            shutil.rmtree(folder)
        read_manifest(folder)
        return 4

    loaded = []
    finished(3)
    monkeypatch.setattr(export, "load_version", load)
    assert export._load(None, tmp_path) == 4
    assert loaded == ["version-00000003", "version-00000004"]


def test_export_names_the_damaged_files_that_it_skips_and_a_store_that_does_not_answer(tmp_path, caplog):
    for version in (3, 4, 5):
        finish_version(
            begin_version(tmp_path, version), version=version, specs=[], parts=[], files=[], extra={"run": "r"}
        )
    newest = tmp_path / "version-00000005" / "manifest.json"
    newest.write_bytes(newest.read_bytes()[:-9])
    lost = tmp_path / "version-00000004" / "manifest.json"
    durable.write_document(lost, {**durable.read_document(lost), "format": 99})
    for place in (str(tmp_path), f"file://{tmp_path}"):
        caplog.clear()
        assert _checkpoint_of(place, "r") == f"{place}/version-00000003"
        assert f"{place}/version-00000005/manifest.json is damaged" in caplog.text
        assert f"{place}/version-00000004/manifest.json has the format 99 of a later release" in caplog.text
    with pytest.raises(StoreError):
        _checkpoint_of("sftp://127.0.0.1:1/models", "r")
    recovery = tmp_path / "recovery"
    assert _saved_by(tmp_path) is None
    recovery.mkdir()
    (recovery / "manifest.json").write_bytes(newest.read_bytes())
    assert _saved_by(tmp_path) is None
    assert f"Skipped the recovery files: The manifest {recovery}/manifest.json can't be read" in caplog.text


def _output(capsys, *arguments):
    capsys.readouterr()
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def test_without_a_folder_that_servers_share_the_master_writes_the_model(data, monkeypatch):
    folder = data / "job"
    settings = job_settings(
        data / "linear.py", folder, training=str(data / "train.npz"), minibatch_size=16, num_ps=2,
        directory=str(folder / "model"),
    )  # fmt: skip
    init = CheckpointWriter.__init__

    def elsewhere(writer, *arguments):
        init(writer, *arguments)
        writer._may_write_here, save = True, writer._control.save
        monkeypatch.setattr(writer._control, "save", lambda place, suffix: save(str(_made(data / "elsewhere")), suffix))

    monkeypatch.setattr(CheckpointWriter, "__init__", elsewhere)
    run_master(settings, RecordingDisplay())
    (version,) = find_versions(folder / "model")
    assert [path.name for path in version.glob("*.safetensors")] == ["server-00000-of-00001.safetensors"]
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    load_version(model, str(version))
    assert durable.read_document(version / "manifest.json")["extra"]["settings"]["name"] == "linear"
    assert np.any(model.get_weights()[0])


def _made(folder):
    folder.mkdir(exist_ok=True)
    return folder
