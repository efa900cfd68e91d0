"""The formats of prediction files, by name and by file extension."""

from __future__ import annotations

from pathlib import PurePath

ENDINGS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".npz": "npz"}


def format_of(path: str) -> str:
    """The format by the file extension of `path`; "" if unknown."""
    return ENDINGS.get(PurePath(path).suffix.lower(), "")
