"""Stores indexes of many files in one, in a job's folder, for its next master."""

from __future__ import annotations

import hashlib
import json
import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path

from elasticcb.storage import durable

logger = logging.getLogger(__name__)

_PARAMETERS = "parameters.json"  # digest of the reader's parameters, and names of the files in the order of the members


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
