"""Collects a job's predictions in one file.

Each task's report is a part: it is written to the job's folder before the report is accepted, and committed by a rename
afterwards. So a task that is done twice has one part, and leftovers of lost workers are ignored. When all tasks are
done, the parts are merged into a temporary file next to the destination, which is then renamed. If the destination is
unusable by then, the file is written to the job's folder instead.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from elasticcb.errors import JobFailedError, ModelFileError
from elasticcb.master.shards import Shard
from elasticcb.model.metric_messages import Outputs, from_outputs, to_outputs
from elasticcb.predictions.files import WRITERS, Column, check_shapes, columns_of
from elasticcb.process.wording import how_many
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.storage import durable

logger = logging.getLogger(__name__)

_FOLDER = "predictions"  # in the job's folder


class PredictionOutput:
    """The parts of one job's predictions; the batches in them, as `Batches`."""

    def __init__(
        self, path: Path, format: str, job_folder: Path, sources: Sequence[tuple[str, int]], output_names: Sequence[str]
    ) -> None:
        self.path = path
        self._format = format
        self._folder = job_folder / _FOLDER
        self._output_names = output_names
        counts = [count for _, count in sources]
        starts = itertools.accumulate(counts, initial=0)
        self._first = {name: start for (name, _), start in zip(sources, starts, strict=False)}
        self._records = sum(counts)
        self._numbers = itertools.count()
        self._shapes: dict[str, set[tuple[int, ...] | None]] = {}
        self.remove()  # of a previous job in this folder
        self._folder.mkdir(parents=True)

    def stage(self, outputs: Sequence[Outputs]) -> Path:
        """Writes a task's outputs as an uncommitted part. Called by several threads at a time.

        Raises `JobFailedError` when it can't be written.
        """
        path = self._folder / f"staged-{next(self._numbers)}"
        try:
            path.write_bytes(pb.ReportTaskRequest(outputs=to_outputs(outputs)).SerializeToString())
        except OSError as error:
            path.unlink(missing_ok=True)
            raise self._not_kept(error) from error
        return path

    def _not_kept(self, error: OSError) -> JobFailedError:
        return JobFailedError(
            f"The predictions can't be written to {self._folder}: {error.strerror}. Until all records are predicted, "
            "parts of --output are stored in the job's folder. Free disk space there, or choose another --job_dir."
        )

    def commit(self, staged: Path, shard: Shard, outputs: Sequence[Outputs]) -> None:
        """Commits a part after its report was accepted; it replaces an earlier one of the same task.

        Raises:
            ModelFileError: the rows don't match the shard, or the format can't hold them.
            JobFailedError: the part can't be stored.
        """
        rows: dict[str, int] = {}
        for batch in outputs:
            for column in columns_of(batch, self._output_names):
                rows[column.name] = rows.get(column.name, 0) + column.rows
                shapes = self._shapes.setdefault(column.name, set())
                shapes.add(column.shape)
                check_shapes(column.name, shapes, self._format)
        for name, count in rows.items():
            if count != shard.records:
                raise ModelFileError(
                    f"The output {name!r} has {how_many(count, 'row')} for the {how_many(shard.records, 'record')} of "
                    f"{shard}, but --output needs exactly one row per record. Return outputs with the batch on axis 0, "
                    "one row for each record."
                )
        try:
            staged.replace(self._folder / f"part-{self._first[shard.name] + shard.start:015}")
        except OSError as error:
            raise self._not_kept(error) from error

    def discard(self, staged: Path) -> None:
        """Removes a part whose report was not accepted."""
        staged.unlink(missing_ok=True)

    def finish(self) -> None:
        """Merges all parts into the file.

        Raises `JobFailedError` when it can't be written there; the error names a file in the job's folder if that could
        be written instead.
        """
        try:
            self._write(self.path)
        except OSError as error:
            what = f"The predictions can't be written to {self.path}: {error.strerror or error}."
            instead = _free(self._folder.parent / self.path.name)
            try:
                self._write(instead)
            except OSError as second:
                raise JobFailedError(
                    f"{what} Nor could they be written to {instead}: {second.strerror or second}. Run the job again "
                    "with a writable --output."
                ) from second
            raise JobFailedError(f"{what} They are in {instead} instead; move this file where you want it.") from error
        logger.info("Predictions written to %s", self.path)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)

        def check(unfinished: Path) -> None:
            if path.exists():
                raise FileExistsError(None, "a file with this name has appeared; it was left unchanged")

        with durable.replacing(path, check) as unfinished:
            shapes: dict[str, set[tuple[int, ...] | None]] = {
                name: {()} if name in self._numbers_only else found for name, found in self._shapes.items()
            }
            WRITERS[self._format](unfinished, self, shapes)

    @property
    def _numbers_only(self) -> set[str]:
        """Outputs of shape (n, 1), which are written as numbers. A width of 1 in some batches only is a list."""
        return {name for name, shapes in self._shapes.items() if shapes == {(1,)}}

    def __iter__(self) -> Iterator[tuple[int, list[Column]]]:
        """All batches in the order of the data. Raises `JobFailedError` when records are missing."""
        position, numbers = 0, self._numbers_only
        for part in sorted(self._folder.glob("part-*")):
            self._check_continues(position, int(part.name.removeprefix("part-")))
            for outputs in from_outputs(pb.ReportTaskRequest.FromString(part.read_bytes()).outputs):
                columns = columns_of(outputs, self._output_names)
                if columns[0].rows:
                    yield (
                        position,
                        [each.without_unit_axis() if each.name in numbers else each for each in columns],
                    )
                position += columns[0].rows
        self._check_continues(position, self._records)

    def _check_continues(self, position: int, next_part: int) -> None:
        if position != next_part:
            raise JobFailedError(
                f"Predictions are missing in {self._folder}: the part after record {position} starts at record "
                f"{next_part}, of {self._records} in all. Files may have been removed there. Run the job again."
            )

    def remove(self) -> None:
        """Deletes the parts."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _free(path: Path) -> Path:
    """`path`, or a numbered variant that does not exist yet."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if not os.path.lexists(each))
