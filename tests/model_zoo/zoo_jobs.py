"""Trains models of the zoo in this process, and uses what they export."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorflow as tf

from elasticcb.cli.main import main
from elasticcb.data import Reader, Records

ZOO = Path(__file__).resolve().parents[2] / "model_zoo"


@dataclass(frozen=True)
class Trained:
    """A finished job: metrics of its last evaluation, and the exported model."""

    metrics: dict[str, float]
    saved_model: Any

    def predict(self, **features: Any) -> Any:
        """The only output, as an array, for raw features by name."""
        signature = self.saved_model.signatures["serving_default"]
        (predictions,) = signature(**{n: tf.constant(value) for n, value in features.items()}).values()
        return predictions.numpy()

    @property
    def feature_names(self) -> set[str]:
        return set(self.saved_model.signatures["serving_default"].structured_input_signature[1])


def train(folder: str, tmp_path: Path, capsys: Any, **flags: Any) -> Trained:
    """Runs a folder's job.yaml with `flags` in place of its own settings; its roles are threads.

    Each worker compiles the model, and each task a pipeline of its data, so there are few.
    """
    flags = {"num_workers": 1, "num_minibatches_per_task": 50, **flags}
    arguments = ["train", f"--config={ZOO / folder / 'job.yaml'}", "--cluster=inprocess"]
    arguments += [f"--job_dir={tmp_path / 'job'}", f"--output={tmp_path / 'saved_model'}"]
    arguments += [f"--{name}={value}" for name, value in flags.items()]
    code = main(arguments)
    printed = capsys.readouterr()
    assert code == 0, printed.err[-3000:]
    _, _, after = printed.out.partition("Metrics of the last evaluation:\n")
    found = re.findall(r"^  (\w+) +([-+.\de]+)$", after.partition("\n\n")[0], re.MULTILINE)
    metrics = {name: float(value) for name, value in found}
    return Trained(metrics, tf.saved_model.load(str(tmp_path / "saved_model")))


def import_zoo(file: str) -> ModuleType:
    """The module `folder/name` of the zoo, with its folder on the import path, as in a job."""
    path = (ZOO / file).with_suffix(".py")
    name = f"zoo_{path.stem}"
    if name not in sys.modules:
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def fed(module: ModuleType, reader: Reader, mode: str, batch: int) -> Iterator[Any]:
    """Batches of a reader's first source, through the feeds of a model file, as NumPy arrays."""
    source = reader.sources()[0]
    records = Records(reader, getattr(module, "feed", None), getattr(module, "feed_batch", None))
    for given in records.batches(mode, batch, joins=False).batches([(source.name, 0, source.count)]):
        yield tf.nest.map_structure(lambda leaf: leaf.numpy(), given)


def first_lines(source: Path, target: Path, lines: int) -> Path:
    """Writes the first lines of a file into another."""
    with source.open("rb") as file:
        target.write_bytes(b"".join(file.readline() for _ in range(lines)))
    return target
