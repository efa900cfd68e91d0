"""Runs whole jobs for tests: in this process, or as the command that a user types."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import psutil

from elasticcb.cli.progress import FAULTS
from elasticcb.master.snapshot import EpochEnd, JobSnapshot
from elasticcb.roles.master import run_master
from elasticcb.settings import (
    CheckpointSettings,
    ClusterSettings,
    Command,
    DataSettings,
    EmbeddingOptions,
    JobSettings,
    ModelSettings,
    TrainingSettings,
)
from warm import WarmProcess

TRUE_WEIGHTS = np.array([1.0, -2.0, 0.5, 3.0])

_ROWS_METRIC = """
    class Rows(keras.metrics.Sum):
        "Counts the records that were evaluated."

        def update_state(self, labels, predictions, sample_weight=None):
            super().update_state(keras.ops.ones_like(labels))
"""

# For records of `linear_data`.
LINEAR_MODEL = (
    """
    import keras

    def custom_model():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    def loss(labels, predictions):
        return keras.losses.mean_squared_error(labels, predictions)

    def optimizer():
        return keras.optimizers.SGD(0.01)

    def eval_metrics_fn():
        return {"error": keras.metrics.MeanAbsoluteError(), "rows": Rows()}
"""
    + _ROWS_METRIC
)

# A linear function with an offset for each id, which an embedding table learns: the sum of a row, which has one slot.
OFFSETS_MODEL = (
    """
    import elasticcb
    import keras

    def custom_model():
        ids = keras.Input((1,), dtype="int64", name="id")
        numbers = keras.Input((4,), name="numbers")
        rows = keras.layers.Flatten()(elasticcb.layers.Embedding(2, embeddings_initializer="zeros")(ids))
        offset = keras.ops.sum(rows, axis=1, keepdims=True)
        outputs = keras.layers.Add()([keras.layers.Dense(1)(numbers), offset])
        return keras.Model({"id": ids, "numbers": numbers}, outputs)

    def loss(labels, predictions):
        return keras.losses.mean_squared_error(labels, predictions)

    def optimizer():
        return elasticcb.optimizers.RowWiseAdagrad(0.3)

    def feed(dataset, mode, metadata):
        def split(record):
            features = {"id": record["id"], "numbers": record["numbers"]}
            return features if mode == "prediction" else (features, record["y"])
        return dataset.map(split)

    def eval_metrics_fn():
        return {"error": keras.metrics.MeanAbsoluteError(), "rows": Rows()}
"""
    + _ROWS_METRIC
)

# Held at a version of the model until `open_gate`; to be formatted.
GATE = """
    import os
    import time

    class Gate(keras.callbacks.Callback):
        "Lets nobody train further before the test has made a file."

        def on_train_batch_begin(self, version, logs=None):
            while version >= {version} and not os.path.exists(os.path.join(os.path.dirname(__file__), "go_on")):
                time.sleep(0.05)

    def callbacks():
        return [Gate()]
"""


# Batches as long as those of a large model, in a job that has to last; to be formatted.
PACE = """
    import time

    class Pace(keras.callbacks.Callback):
        "Makes each batch last."

        def on_train_batch_begin(self, batch, logs=None):
            time.sleep({seconds})

    def callbacks():
        return [Pace()]
"""


class RecordingDisplay:
    """Keeps what a person would see."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.statuses: list[JobSnapshot] = []
        self.ends: list[EpochEnd] = []

    def update(self, status: JobSnapshot) -> None:
        self.statuses.append(status)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def evaluated(self, text: str, of_epoch: bool) -> None:
        self.message(text)

    def epoch_ended(self, end: EpochEnd) -> None:
        self.ends.append(end)

    def finish(self, summary: JobSnapshot) -> None:
        pass

    def close(self) -> None:
        pass


def write_model_file(folder: Path, text: str, name: str = "model_file") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    return path


def open_gate(folder: Path) -> None:
    """Lets the workers of a job train on whose model file is in `folder`, and has a `GATE`."""
    (folder / "go_on").touch()


def job_settings(model_file: Path, folder: Path, command: Command = Command.TRAIN, **parts) -> JobSettings:
    """Settings of an in-process job; `parts` are fields of the sections, which have no name in common."""
    sections = {
        "data": DataSettings,
        "training": TrainingSettings,
        "checkpoint": CheckpointSettings,
        "cluster": ClusterSettings,
        "embedding": EmbeddingOptions,
    }
    parts.setdefault("kind", "inprocess")
    values = {}
    for name, section in sections.items():
        own = {field: parts.pop(field) for field in section.__dataclass_fields__ if field in parts}
        values[name] = section(**own)
    folder.mkdir(parents=True, exist_ok=True)
    return JobSettings(
        command=command,
        name=model_file.stem,
        directory=str(folder),
        model=ModelSettings(zoo=str(model_file.parent), definition=f"{model_file.stem}.custom_model"),
        output=parts.pop("output", ""),
        **values,
        **parts,
    )


def run_job(settings: JobSettings, display: RecordingDisplay | None = None) -> tuple[JobSnapshot, RecordingDisplay]:
    """Runs a job with its master in this process, and all other roles unless the settings say otherwise."""
    display = display or RecordingDisplay()
    return run_master(settings, display), display


def linear_data(folder: Path, **records: int) -> None:
    """Writes NAME.npz for each name: x [n, 4], and y [n, 1], a linear function of it."""
    generator = np.random.default_rng(0)
    for name, count in records.items():
        x = generator.normal(size=(count, 4)).astype("float32")
        np.savez(folder / f"{name}.npz", x=x, y=(x @ TRUE_WEIGHTS).astype("float32")[:, None])


def offsets_job(folder: Path, ids: int, gate: int | None = None, **records: int) -> None:
    """Writes offsets.py, and NAME.npz for each name. The error is some 1.6 before training, and 0.8 when no offset is
    learned. `gate` is the version at which it has a `GATE`."""
    text = OFFSETS_MODEL if gate is None else OFFSETS_MODEL + GATE.format(version=gate)
    write_model_file(folder, text, "offsets")
    generator = np.random.default_rng(0)
    offsets = generator.normal(size=ids)
    for name, count in records.items():
        numbers = generator.normal(size=(count, 4)).astype("float32")
        id = generator.integers(0, ids, size=(count, 1))
        y = numbers @ TRUE_WEIGHTS + offsets[id[:, 0]]
        np.savez(folder / f"{name}.npz", id=id, numbers=numbers, y=y.astype("float32")[:, None])


def train_flags(folder: Path, model: str, **more) -> list[str]:
    """Flags of a job with the model file and the data in `folder`, in small tasks."""
    flags = {
        "model_zoo": folder,
        "model_def": f"{model}.custom_model",
        "training_data": folder / "train.npz",
        "validation_data": folder / "test.npz",
        "minibatch_size": 8,
        "num_minibatches_per_task": 25,
        "num_workers": 2,
        "job_dir": folder / "job",
        **more,
    }
    return [f"--{name}={value}" for name, value in flags.items()]


def number(output: str, label: str) -> int:
    """What a summary tells behind `label`; 0 of a fault that it does not tell of."""
    found = re.search(rf"{re.escape(label)}\s+([\d,]+)", output)
    if not found and label in FAULTS and " is done, in " in output:
        return 0
    assert found, f"no {label!r} in:\n{output}"
    return _count(found[1])


def records_trained(output: str) -> list[int]:
    """Of each epoch, as the summary tells: "(3 epochs of 120, 1 of 96)"."""
    found = re.search(r"records trained\s+[\d,]+ \((.+)\)$", output, re.MULTILINE)
    assert found, f"no records of epochs in:\n{output}"
    runs = re.findall(r"(\d+) (?:epochs? )?of ([\d,]+)", found[1])
    return [_count(records) for epochs, records in runs for _ in range(int(epochs))]


def _count(text: str) -> int:
    return int(text.replace(",", ""))


class JobProcess:
    """`elasticcb COMMAND …` as a real process, whose output is read as it comes.

    Args:
        warm: it is forked, with all imported (warm.py), instead of being started from nothing.
    """

    def __init__(self, *arguments: str, cwd: Path, warm: bool = True) -> None:
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
        self.process = (
            WarmProcess([*map(str, arguments)], cwd, environment)
            if warm
            else subprocess.Popen(
                [sys.executable, "-m", "elasticcb", *arguments],
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                start_new_session=True,
            )
        )
        self.lines: list[str] = []
        self.family: list[psutil.Process] = []  # children seen so far

    def wait_for_line(self, pattern: str) -> str:
        """Reads until a line matches; fails the test when the job ends before."""
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search(pattern, line):
                self.children()
                return line
        raise AssertionError(f"The job ended without a line like {pattern!r}:\n{self.output}")

    def children(self, role: str = "") -> list[psutil.Process]:
        """The job's processes of a role ("worker", "ps"), by index."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        self.family += [child for child in found if child not in self.family]
        names = {}
        for child in found:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended just now
                if child.status() != psutil.STATUS_ZOMBIE:
                    names[child] = child.name()
        return sorted((child for child, name in names.items() if name.startswith(role)), key=names.__getitem__)

    @property
    def master(self) -> psutil.Process:
        """The one that the launcher has had started."""
        return self.children("master")[0]

    def kill(self, role: str, index: int = 0, number: int = signal.SIGKILL) -> int:
        """Sends a signal to a process; returns its id."""
        child = self.children(role)[index]
        child.send_signal(number)
        return child.pid

    def finish(self) -> int:
        """Reads to the end; the exit code."""
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def assert_no_orphans(self, seconds: float = 10.0) -> None:
        """Every process of the job that was ever seen is gone."""
        _, alive = psutil.wait_procs(self.family, timeout=seconds)
        assert not alive, f"still there: {[process.name() for process in alive]}"
