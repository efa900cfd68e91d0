"""docs/tracking.md: its programs and model files run with the real clients, which leave their files in folders."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from code_blocks import code_blocks
from jobs import LINEAR_MODEL, PACE, linear_data, train_flags, write_model_file
from warm import WarmProcess

pytestmark = pytest.mark.deep

mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'elasticcb[test]'")
messages = pytest.importorskip(
    "wandb.proto.wandb_internal_pb2", reason="wandb is not installed: pip install 'elasticcb[test]'"
)

BLOCKS = code_blocks(Path(__file__).parents[2] / "docs" / "tracking.md")
MODEL_FILES = [block for block in BLOCKS if "def callbacks(" in block]
PROGRAM = "\n".join(block for block in BLOCKS if block not in MODEL_FILES)  # they share its cluster
EPOCH = {"loss", "mae", "val_loss", "val_mae"}


def environment(folder: Path) -> dict[str, str]:
    """Of clients that write into folders of `folder`, and ask no server."""
    return {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(folder),
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def records(path: Path) -> Iterator[Any]:
    """What a .wandb file holds, which has the format of LevelDB's logs: blocks of 32 KiB after a header of 7 bytes."""
    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32_768 - at % 32_768 < 7:  # no room for the head of a piece
            at += 32_768 - at % 32_768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole message, or the end of one
            yield messages.Record.FromString(message)
            message = b""


class WandbRun:
    """What a process has logged to a run.

    Attributes:
        id: of the run.
        rows: of each step its metrics, without those that start with an underscore.
        ended: whether the process has ended the run.
    """

    def __init__(self, path: Path) -> None:
        found = [*records(path)]
        self.id = path.stem.removeprefix("run-")
        self.ended = any(each.HasField("exit") for each in found)
        self.rows: dict[int, dict[str, float]] = {}
        for each in found:
            if each.HasField("history"):
                values = {item.key or ".".join(item.nested_key): item.value_json for item in each.history.item}
                kept = {name: float(value) for name, value in values.items() if not name.startswith("_")}
                self.rows[int(values["_step"])] = kept


def wandb_runs(folder: Path) -> list[WandbRun]:
    """In the order in which they ended."""
    paths = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    return [WandbRun(path) for path in paths]


class MlflowRuns:
    """The runs of a folder, by name."""

    def __init__(self, folder: Path, experiment: str = "Default") -> None:
        self._client = mlflow.MlflowClient(environment(folder)["MLFLOW_TRACKING_URI"])
        number = self._client.get_experiment_by_name(experiment).experiment_id
        self._runs = self._client.search_runs([number])
        self.names = sorted(run.info.run_name for run in self._runs)

    def state(self, name: str) -> str:
        return self._one(name).info.status

    def parameters(self, name: str) -> dict[str, str]:
        return self._one(name).data.params

    def steps(self, name: str) -> dict[str, list[int]]:
        """The steps of each metric."""
        run = self._one(name)
        history = self._client.get_metric_history
        return {key: [each.step for each in history(run.info.run_id, key)] for key in run.data.metrics}

    def _one(self, name: str) -> Any:
        (run,) = [run for run in self._runs if run.info.run_name == name]
        return run


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """The folder in which the programs of the page have run, on one cluster."""
    folder = tmp_path_factory.mktemp("tracking")
    (folder / "program.py").write_text(PROGRAM + "\ncluster.close()\n")
    errors = folder / "errors.txt"
    run = WarmProcess([], folder, os.environ | environment(folder), folder / "program.py", stderr=errors)
    run.stdout.read()
    assert run.wait() == 0, errors.read_text()
    return folder


@pytest.fixture
def allow_folders(monkeypatch):
    """MLflow reads its files in this process as well."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def test_epochs_are_logged_to_wandb_in_a_hook(logged):
    run, _ = wandb_runs(logged)
    assert run.ended
    assert {step: set(row) for step, row in run.rows.items()} == dict.fromkeys(range(3), EPOCH)
    losses = [run.rows[step]["loss"] for step in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert run.id == "sums-1"


def test_wandb_metrics_logger_logs_epochs_and_the_batches_of_all_workers(logged):
    *_, run = wandb_runs(logged)
    epochs = [row for row in run.rows.values() if "epoch/epoch" in row]
    assert [row["epoch/epoch"] for row in epochs] == [0, 1, 2]
    assert all({f"epoch/{name}" for name in EPOCH} | {"epoch/learning_rate"} <= row.keys() for row in epochs)
    batches = [row for row in run.rows.values() if "batch/batch_step" in row]
    assert [row["batch/batch_step"] for row in batches] == [0, 10, 20, 30, 40, 50]
    assert all(row.keys() == {"batch/batch_step", "batch/learning_rate", "batch/loss", "batch/mae"} for row in batches)
    assert run.ended


def test_epochs_are_logged_to_mlflow_by_each_recipe_and_workers_open_no_runs(logged, allow_folders):
    runs = MlflowRuns(logged)
    assert runs.names == ["hook", "own callback"]
    assert runs.state("hook") == "FINISHED"
    assert runs.steps("hook") == {key: [0, 1, 2] for key in EPOCH}
    own = runs.steps("own callback")
    assert {name: own[name] for name in EPOCH} == {key: [0, 1, 2] for key in EPOCH}
    assert own.keys() - EPOCH == {"validation_loss", "validation_mae"}  # at the end of each round
    assert runs.parameters("own callback")["optimizer_name"].startswith("adam")


def test_runs_of_a_model_file_are_continued_by_the_next_master(tmp_path, start_job, monkeypatch, allow_folders):
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    own = "def callbacks():\n    return [Pace(), ToWandb(), ToMlflow()]\n"
    path = write_model_file(tmp_path, LINEAR_MODEL + PACE.format(seconds=0.01), "linear")
    path.write_text("\n".join([path.read_text(), *MODEL_FILES, own]))
    linear_data(tmp_path, train=800, test=80)
    epochs = 4
    job = start_job("train", *train_flags(tmp_path, "linear", num_epochs=epochs))
    job.wait_for_line(r"[Ee]poch 2")
    job.master.kill()
    job.wait_for_line(r"recovered in")
    assert job.finish() == 0, job.output
    job.assert_no_orphans()

    # By their id they are one run. Offline the client of the killed master lost what it held in memory.
    killed, other = wandb_runs(tmp_path)
    assert killed.id == other.id == "job"
    assert (killed.ended, other.ended) == (False, True)
    assert list(other.rows) in ([*range(first, epochs)] for first in (1, 2))
    names = {"loss", "error", "rows", "val_loss", "val_error", "val_rows"}
    assert all(row.keys() == names for row in other.rows.values())
    runs = MlflowRuns(tmp_path)
    assert runs.names == ["job"]
    assert runs.state("job") == "FINISHED"
    steps = runs.steps("job")
    assert steps.keys() == names
    assert {name: sorted(set(found)) for name, found in steps.items()} == {key: [*range(epochs)] for key in names}
