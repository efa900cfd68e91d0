"""Data readers: records of files, arrays and other sources, by ranges `[start, end)`.

Importing this package imports neither TensorFlow nor any format library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticcb.data.array_record import ArrayRecordReader
    from elasticcb.data.batch_sources.records import Records, read
    from elasticcb.data.custom import ElasticDLReader
    from elasticcb.data.formats import open_reader
    from elasticcb.data.kafka import Kafka
    from elasticcb.data.numpy_arrays import NumpyReader
    from elasticcb.data.parquet import ParquetReader
    from elasticcb.data.reader import Metadata, Reader, Source, checked_sources
    from elasticcb.data.stream import RecordStream
    from elasticcb.data.text import TextReader
    from elasticcb.data.tfrecord import TFRecordReader
    from elasticcb.data.unbounded import Partition, UnboundedSource

_MODULES = {
    "ArrayRecordReader": "array_record",
    "ElasticDLReader": "custom",
    "Kafka": "kafka",
    "Metadata": "reader",
    "NumpyReader": "numpy_arrays",
    "ParquetReader": "parquet",
    "Partition": "unbounded",
    "Reader": "reader",
    "RecordStream": "stream",
    "Records": "batch_sources.records",
    "Source": "reader",
    "TFRecordReader": "tfrecord",
    "TextReader": "text",
    "UnboundedSource": "unbounded",
    "checked_sources": "reader",
    "open_reader": "formats",
    "read": "batch_sources.records",
}

__all__ = [
    "ArrayRecordReader",
    "ElasticDLReader",
    "Kafka",
    "Metadata",
    "NumpyReader",
    "ParquetReader",
    "Partition",
    "Reader",
    "RecordStream",
    "Records",
    "Source",
    "TFRecordReader",
    "TextReader",
    "UnboundedSource",
    "checked_sources",
    "open_reader",
    "read",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
