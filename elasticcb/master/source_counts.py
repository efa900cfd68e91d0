"""Counts the records of a job's data while the model is built, and finds where they begin."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from elasticcb.data.file_reader import FileReader
from elasticcb.data.index_file import read_indexes, write_indexes
from elasticcb.model.input_pipeline import FeedPipeline, Pipeline, Sources
from elasticcb.settings import INDEX_FILE, RECOVERY_FOLDER, Command, JobSettings

logger = logging.getLogger(__name__)


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
        reader = self._readers.get(mode)
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
