"""The table of formats, and `open_reader`, which chooses a reader from it."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from elasticcb.data.content import COMPRESSIONS
from elasticcb.data.custom import open_custom_reader
from elasticcb.data.file_reader import FileReader
from elasticcb.data.files import endings_of, list_files
from elasticcb.data.growing_files import SETTLE, GrowingFiles
from elasticcb.data.reader import Reader
from elasticcb.data.unbounded import UnboundedSource
from elasticcb.errors import DataError, UsageError


class Format(NamedTuple):
    """A format and its reader."""

    name: str  # value of the reader parameter `format`
    extensions: tuple[str, ...]
    reader: str  # "module.class" in this package
    defaults: Mapping[str, Any] = {}  # default values of the reader's parameters
    compressible: bool = False


FORMATS = (
    Format("csv", (".csv",), "text.TextReader", {"delimiter": ","}, compressible=True),
    Format("tsv", (".tsv", ".tab"), "text.TextReader", {"delimiter": "\t"}, compressible=True),
    Format("text", (".txt", ".text", ".data", ".jsonl", ".log"), "text.TextReader", compressible=True),
    Format("tfrecord", (".tfrecord", ".tfrecords", ".tfrec"), "tfrecord.TFRecordReader", compressible=True),
    Format("numpy", (".npy", ".npz"), "numpy_arrays.NumpyReader"),
    Format("array_record", (".array_record", ".arrayrecord"), "array_record.ArrayRecordReader"),
    Format("parquet", (".parquet", ".pq"), "parquet.ParquetReader"),
)
_BY_NAME = {known.name: known for known in FORMATS}

STREAMS = {"kafka": "kafka.Kafka"}  # "module.class" in this package of sources that grow, by scheme of their URL


def open_reader(
    origin: str,
    params: Mapping[str, Any] | None = None,
    custom: Callable[..., Any] | None = None,
    records_per_task: int = 0,
    follow: bool = False,
) -> Reader:
    """Creates the reader of a data origin: with `custom`, or for the format of the files.

    Args:
      origin: a path, glob, folder or URL, or several joined by commas; or the URL of a stream, such as
        kafka://HOST:PORT/TOPIC. With `custom`, any text that it accepts.
      params: keyword arguments of the reader or of `custom`. `format` names one of `FORMATS` for files without a known
        extension.
      custom: the model file's `custom_data_reader(data_origin, **params)`.
      records_per_task: passed to `custom` if it has a parameter of this name.
      follow: read also the files that are added later: the result is an `UnboundedSource`.

    Raises:
      DataError: there are no files, or they don't all have the same known format.
      UsageError: a reader parameter is unknown or has an invalid value.
      ModelFileError: `custom` raised, or did not return a reader.
    """
    arguments = dict(params or {})
    if custom is not None:
        reader = open_custom_reader(custom, origin, arguments, records_per_task)
        if follow and not isinstance(reader, UnboundedSource):
            raise UsageError(
                f"`follow` is for files, but {getattr(custom, '__name__', custom)} reads {origin} by a "
                f"{type(reader).__name__}. Expected an elasticcb.data.UnboundedSource. Remove `follow`."
            )
        return reader
    if is_stream(origin):
        scheme = origin.partition("://")[0]
        stream = _class_of(STREAMS[scheme])
        _check_parameters(f"A {scheme}:// stream", stream, arguments, ("servers", "topic"))
        source: Reader = stream.of_url(origin, **arguments)
        return source
    if follow:
        settle = {SETTLE: _seconds(arguments.pop(SETTLE))} if SETTLE in arguments else {}
        return GrowingFiles(origin, functools.partial(_of_files, origin, arguments), **settle)
    return _of_files(origin, arguments, list_files(origin))


def _of_files(origin: str, params: Mapping[str, Any], files: list[str]) -> FileReader:
    arguments = dict(params)
    chosen = _named_format(arguments.pop("format")) if "format" in arguments else _common_format(origin, files)
    reader = _class_of(chosen.reader)
    _check_parameters(f"The reader of {chosen.name} files", reader, arguments, ("files",), ("format",))
    opened: FileReader = reader(files, **{**chosen.defaults, **arguments})
    return opened


def is_stream(origin: str) -> bool:
    """Whether it is the URL of a source that grows."""
    return origin.partition("://")[0] in STREAMS and "://" in origin


def _seconds(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return float(value)
    raise UsageError(f"The reader parameter {SETTLE} is {value!r}. Expected a number of seconds, 0 or more.")


def _class_of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"elasticcb.data.{module}"), name)


def format_of(file: str) -> Format | None:
    """The format by the extension of `file`, if known."""
    ending, compression = endings_of(file)
    for known in FORMATS:
        if ending in known.extensions and (known.compressible or not compression):
            return known
    return None


def _named_format(name: str) -> Format:
    if name not in _BY_NAME:
        raise UsageError(f"The reader parameter format is {name!r}. Expected one of: {', '.join(_BY_NAME)}.")
    return _BY_NAME[name]


def _common_format(origin: str, files: list[str]) -> Format:
    first_of: dict[str, str] = {}
    for file in files:
        known = format_of(file)
        first_of.setdefault(known.name if known else "", file)
    if "" in first_of:
        endings = ", ".join(extension for known in FORMATS for extension in known.extensions)
        raise DataError(
            f"{first_of['']} has no known file extension. Known extensions: {endings} (text and TFRecord also with "
            f"{', '.join(COMPRESSIONS)}). Set the reader parameter `format`, exclude the file with a glob, or write a "
            "`custom_data_reader`."
        )
    if len(first_of) > 1:
        listed = ", ".join(f"{file} ({name})" for name, file in first_of.items())
        raise DataError(
            f"The data origin {origin!r} mixes formats: {listed}. Expected files of one format; select them with a "
            "glob such as folder/*.csv."
        )
    return _BY_NAME[next(iter(first_of))]


def _check_parameters(
    what: str, reader: Any, arguments: Mapping[str, Any], not_given: Sequence[str], besides: Sequence[str] = ()
) -> None:
    """`reader` takes, besides those `not_given` by name, its own parameters; `besides` are taken before."""
    known = [name for name in inspect.signature(reader).parameters if name not in not_given]
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            raise UsageError(
                f"{what} has no parameter {name!r}. "
                + (f"Did you mean {close[0]!r}? " if close else "")
                + (f"It has: {', '.join([*besides, *known])}.")
            )
    for name in ("column_dtypes", "fill_null"):
        value = arguments.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise UsageError(
                f"The reader parameter {name} is {value!r}. Expected a value for each name of a column, such as "
                f"{name}={{price: {'float32' if name == 'column_dtypes' else 0}}}."
            )
