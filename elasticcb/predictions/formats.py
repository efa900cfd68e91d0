"""The formats of a file of predictions, by name and by the ending of the file."""

from __future__ import annotations

from pathlib import PurePath

ENDINGS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".npz": "npz"}


def format_of(path: str) -> str:
    """The format that the ending of `path` names; "" when it names none."""
    return ENDINGS.get(PurePath(path).suffix.lower(), "")
