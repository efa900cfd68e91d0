"""What the master finds out about files, kept for the next master and handed to workers."""

from __future__ import annotations

import gzip
import random
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticcb.data import content, text
from elasticcb.errors import DataError
from elasticcb.master.source_counts import SourceCounts, read_indexes, write_indexes
from elasticcb.model.input_pipeline import FeedPipeline, open_pipeline
from elasticcb.model.model_file import ModelSpec
from elasticcb.settings import Command, DataSettings, JobSettings, Mode, ModelSettings

MODEL = """
    import keras
    import tensorflow as tf

    def custom_model():
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

    def feed(dataset, mode, metadata):
        return dataset.map(lambda line: (tf.strings.to_number(tf.strings.split(line, ",")), 1.0))
"""


@pytest.fixture
def job(tmp_path: Path) -> tuple[JobSettings, ModelSpec]:
    (tmp_path / "counts_model.py").write_text(textwrap.dedent(MODEL))
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("".join(f"{i}\n" for i in range(100_000)))
    model = ModelSettings(zoo=str(tmp_path), definition="counts_model.custom_model")
    data = DataSettings(training=str(tmp_path / "*.csv"), validation=str(tmp_path / "a.csv"))
    settings = JobSettings(
        command=Command.TRAIN, name="job", directory=str(tmp_path / "job"), output="", model=model, data=data
    )
    return settings, ModelSpec(model)


def counts_of(settings: JobSettings, spec: ModelSpec) -> SourceCounts:
    return SourceCounts(
        settings, {mode: open_pipeline(settings, spec, mode) for mode in (Mode.TRAINING, Mode.EVALUATION)}
    )


def test_a_worker_reads_its_first_task_without_a_scan(
    job: tuple[JobSettings, ModelSpec], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counts = counts_of(*job)
    a, b = str(tmp_path / "a.csv"), str(tmp_path / "b.csv")
    assert counts.result() == {"training": [(a, 100_000), (b, 100_000)], "evaluation": [(a, 100_000)]}
    assert counts.find_index("training", "c.csv") == counts.find_index("prediction", a) == b""
    found: list[int | None] = []
    scan = text.index_records

    def watched(*given: Any, enough: int | None = None, **named: Any) -> Any:
        found.append(enough)
        return scan(*given, enough=enough, **named)

    monkeypatch.setattr(text, "index_records", watched)
    early: Any = open_pipeline(*job, Mode.TRAINING, lambda file: b"")
    assert isinstance(early, FeedPipeline)
    early.first_batch()
    assert set(found) == {64}  # while the master still counts, no more than a batch is looked for
    found.clear()
    worker: Any = open_pipeline(*job, Mode.TRAINING, lambda file: counts.find_index("training", file))
    (batch,) = worker.batches(b, 70_000, 70_010)
    assert batch[0].numpy()[:, 0].tolist() == list(range(70_000, 70_010))
    assert not found


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are scanned."""
    names: list[str] = []
    scan = text.index_records

    def watched(content: Any, *given: Any, **named: Any) -> Any:
        names.append(Path(content.name).name)
        return scan(content, *given, **named)

    monkeypatch.setattr(text, "index_records", watched)
    return names


def test_the_next_master_scans_changed_files_alone(
    job: tuple[JobSettings, ModelSpec], scanned: list[str], tmp_path: Path
) -> None:
    counts_of(*job).result()
    (tmp_path / "b.csv").write_text("1\n2\n")
    scanned.clear()
    assert counts_of(*job).result()["training"] == [(str(tmp_path / "a.csv"), 100_000), (str(tmp_path / "b.csv"), 2)]
    assert scanned == ["b.csv"]
    (tmp_path / "job/recovery/index-training.zip").write_bytes(b"damaged")
    assert counts_of(*job).result()["training"][1][1] == 2


def test_a_reader_with_other_parameters_scans_again(
    job: tuple[JobSettings, ModelSpec], scanned: list[str], tmp_path: Path
) -> None:
    settings, spec = job
    counts_of(settings, spec).result()
    scanned.clear()
    other = replace(settings, data=replace(settings.data, reader_params={"skip_blank_lines": False}))
    counts_of(other, spec).result()
    assert sorted(scanned) == ["a.csv", "a.csv", "b.csv"]


@pytest.mark.parametrize("compress", [False, True])
def test_a_scan_that_is_stopped_reads_no_more(
    job: tuple[JobSettings, ModelSpec], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compress: bool
) -> None:
    path = tmp_path / "c.csv"
    data = random.Random(1).randbytes(6_000_000).hex().encode()
    path.write_bytes(gzip.compress(data, 1) if compress else data)
    settings, spec = job
    settings = replace(settings, data=DataSettings(training=str(path), validation=str(path)))
    reading, stopped = threading.Event(), threading.Event()
    reads: list[int] = []
    read = content.LocalFile.read

    def watched(self: Any, start: int, stop: int) -> bytes:
        reads.append(start)
        if start:
            reading.set()
            assert stopped.wait(60)
        return read(self, start, stop)

    monkeypatch.setattr(content.LocalFile, "read", watched)
    counts = counts_of(settings, spec)
    assert reading.wait(60)
    counts.stop()
    stopped.set()
    with pytest.raises(DataError, match=r"c\.csv was aborted because the job ends"):
        counts.result()
    assert max(reads) == content.LocalFile.block_bytes


def test_a_damaged_file_is_told_by_the_result(job: tuple[JobSettings, ModelSpec], tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("1\n2,3\n")
    counts = counts_of(*job)
    with pytest.raises(DataError, match=r"b\.csv, record 1 \(line 2\) has 2 fields"):
        counts.result()


# ---------------------------------------------------------------- indexes in a job's folder


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.deep)])
def test_damaged_indexes_are_not_used(tmp_path: Path, every: int) -> None:
    path, indexes = tmp_path / "recovery/index.zip", {"s3://a": b"index"}
    write_indexes(path, '{"password": "secret"}', indexes)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_indexes(path, '{"password": "secret"}') == indexes
    assert read_indexes(path, "{}") == {}
    whole = path.read_bytes()
    assert b"secret" not in whole
    for place in range(0, 8 * len(whole), every):  # zipfile raises errors of many kinds
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        assert read_indexes(path, '{"password": "secret"}') in ({}, indexes)
