"""Counts the records of a job's data while the model is built, and finds where they begin.

The indexes of all files are kept in the job's folder, for its next master.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from elasticcb.data.file_reader import FileReader
from elasticcb.data.growing_files import GrowingFiles
from elasticcb.model.input_pipeline import FeedPipeline, Pipeline, Sources
from elasticcb.settings import INDEX_FILE, RECOVERY_FOLDER, Command, JobSettings
from elasticcb.storage import durable

logger = logging.getLogger(__name__)
_PARAMETERS = "parameters.json"  # digest of the reader's parameters, and names of the files in the order of the members


class SourceCounts:
    """Counts the records of each mode. A thread scans files; anything else is counted at once, because a user's own
    reader may not be thread-safe.

    Results are kept in the job's folder, so that a replacement master scans only changed files.

    Raises `DataError` when non-file data can't be read; errors of files are raised by `result`.
    """

    def __init__(self, settings: JobSettings, pipelines: Mapping[str, Pipeline]) -> None:
        self._settings = settings
        self._readers: dict[str, FileReader] = {
            mode: pipeline.reader
            for mode, pipeline in pipelines.items()
            if isinstance(pipeline, FeedPipeline) and isinstance(pipeline.reader, FileReader)
        }
        self._growing = {
            mode: pipeline.reader
            for mode, pipeline in pipelines.items()
            if isinstance(pipeline, FeedPipeline) and isinstance(pipeline.reader, GrowingFiles)
        }
        known = {mode: pipeline.sources() for mode, pipeline in pipelines.items() if mode not in self._readers}
        pool = ThreadPoolExecutor(1, "counting")
        self._sources: dict[str, Sources | Future[Sources]] = {
            mode: known[mode] if mode in known else pool.submit(self._scan, mode, pipeline)
            for mode, pipeline in pipelines.items()
        }
        pool.shutdown(wait=False)  # once finished

    def result(self) -> dict[str, Sources]:
        """Name and number of records of each source, by mode. Raises `DataError` when a file can't be read."""
        return {
            mode: sources.result() if isinstance(sources, Future) else sources
            for mode, sources in self._sources.items()
        }

    def stop(self) -> None:
        """Stops scanning so that the process can exit; `result` may then raise `DataError`."""
        for reader in self._readers.values():
            reader.stop()

    def find_index(self, mode: str, file: str) -> bytes:
        """As `FileIndex.to_bytes`; b"" when unknown."""
        growing = self._growing.get(mode)
        reader = self._readers.get(mode) if growing is None else growing.files
        return b"" if reader is None else reader.indexes().get(file, b"")

    def _scan(self, mode: str, pipeline: Pipeline) -> Sources:
        reader = self._readers[mode]
        parameters = json.dumps(self._settings.data.reader_params, sort_keys=True, default=repr)
        # Only training can be resumed.
        keeps = self._settings.command is Command.TRAIN and bool(self._settings.directory)
        path = Path(self._settings.directory, RECOVERY_FOLDER, INDEX_FILE.format(mode=mode))
        reader.known = read_indexes(path, parameters) if keeps else {}
        sources = pipeline.sources()
        if keeps and reader.known != dict(reader.indexes()):
            try:
                write_indexes(path, parameters, reader.indexes())
            except OSError as error:
                logger.warning("Could not write %s, so a resumed job will scan the data again: %s", path, error)
        return sources


def read_indexes(path: Path, parameters: str) -> dict[str, bytes]:
    """Indexes that `write_indexes` wrote with the same `parameters`; {} if there are none, or they can't be used."""
    try:
        with zipfile.ZipFile(path) as archive:
            kept_parameters, files = json.loads(archive.read(_PARAMETERS))
            if kept_parameters != _digest(parameters):
                return {}
            return {file: archive.read(str(number)) for number, file in enumerate(files)}
    except FileNotFoundError:
        return {}
    except Exception as error:  # for damaged archives, zipfile raises a dozen error types
        logger.warning("%s can't be used; scanning the data again: %s", path, error)
        return {}


def write_indexes(path: Path, parameters: str, indexes: Mapping[str, bytes]) -> None:
    """Writes indexes, as `FileIndex.to_bytes`, by file. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with durable.replacing(path) as unfinished, zipfile.ZipFile(unfinished, "w") as archive:
        unfinished.chmod(durable.PRIVATE)
        for number, index in enumerate(indexes.values()):
            archive.writestr(str(number), index)
        archive.writestr(_PARAMETERS, json.dumps([_digest(parameters), list(indexes)]))


def _digest(parameters: str) -> str:
    """A digest of parameters, which may contain passwords; only for comparison."""
    return hashlib.sha256(parameters.encode()).hexdigest()
