"""Custom readers of model files: subclasses of `Reader`, or readers written for ElasticDL."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elasticcb.data.reader import Metadata, Reader, Source, check_range
from elasticcb.errors import DataError, ElasticCBError, ModelFileError

_ELASTICDL_METHODS = ("create_shards", "read_records")


def open_custom_reader(
    custom: Callable[..., Any], origin: str, params: Mapping[str, Any], records_per_task: int
) -> Reader:
    """The reader that `custom(data_origin=origin, **params)` returns, adapted if it was written for ElasticDL.

    Raises `ModelFileError` if the call fails or does not return a reader.
    """
    name = getattr(custom, "__name__", repr(custom))
    arguments: dict[str, Any] = {"data_origin": origin, **params}
    try:
        signature = inspect.signature(custom)
    except (TypeError, ValueError) as error:
        raise ModelFileError(f"{name} is not a function: {error}. Expected {name}(data_origin, **params).") from error
    if "records_per_task" in signature.parameters:
        arguments.setdefault("records_per_task", records_per_task)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ModelFileError(
            f"{name}{signature} can't be called with {', '.join(arguments)}: {error}. It receives data_origin and the "
            "reader parameters as keyword arguments."
        ) from error
    try:
        reader = custom(**arguments)
    except ElasticCBError:
        raise
    except Exception as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        raise ModelFileError(
            f"{name}(data_origin={origin!r}) raised {type(error).__name__}: {error}",
            user_traceback="".join(traceback.format_exception(type(error), error, frames)),
        ) from error
    if isinstance(reader, Reader):
        return reader
    if all(callable(getattr(reader, method, None)) for method in _ELASTICDL_METHODS):
        return ElasticDLReader(reader)
    raise ModelFileError(
        f"{name} returned {reader!r} of type {type(reader).__name__}. Expected an elasticcb.data.Reader, or an object "
        f"with ElasticDL's {' and '.join(_ELASTICDL_METHODS)}."
    )


@dataclass(frozen=True)
class _Shard:
    name: str
    start: int
    end: int
    indices: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Task:
    """The task that ElasticDL's `read_records(task)` expects."""

    shard: _Shard
    type: str = ""

    @property
    def shard_name(self) -> str:
        return self.shard.name

    @property
    def start(self) -> int:
        return self.shard.start

    @property
    def end(self) -> int:
        return self.shard.end


class ElasticDLReader(Reader):
    """An ElasticDL data reader as a `Reader`.

    Each range that `create_shards` returns, as `{name: (start, count)}` or a list of `(name, start, count)`, becomes a
    source; consecutive ranges of the same name are joined first.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._shards: dict[str, _Shard] | None = None

    def sources(self) -> list[Source]:
        return [Source(name, shard.end - shard.start) for name, shard in self._by_source().items()]

    def read(self, name: str, start: int, end: int) -> Iterator[Any]:
        shard = self._by_source().get(name)
        if shard is None:
            raise DataError(
                f"{type(self._reader).__name__}.create_shards() did not return {name!r} in this process; it must "
                f"return the same shards in every process. It returned {', '.join(self._by_source())}."
            )
        check_range(name, start, end, shard.end - shard.start)
        yield from self._reader.read_records(_Task(_Shard(shard.name, shard.start + start, shard.start + end)))

    @property
    def element_spec(self) -> Any:
        """ElasticDL specifies only dtypes, so shapes are unknown; TensorSpecs are used unchanged."""
        import tensorflow as tf

        types = getattr(self._reader, "records_output_types", tf.string)
        types = types() if inspect.ismethod(types) else types
        if isinstance(types, list):
            types = tuple(types)
        return tf.nest.map_structure(
            lambda leaf: leaf if isinstance(leaf, tf.TensorSpec) else tf.TensorSpec(None, leaf), types
        )

    @property
    def metadata(self) -> Any:
        """The reader's own metadata, which the model file's `feed` understands."""
        given = getattr(self._reader, "metadata", None)
        given = given() if inspect.ismethod(given) else given
        return Metadata() if given is None else given

    def default_feed(self) -> Any:
        method = getattr(self._reader, "default_feed", None) or getattr(self._reader, "default_dataset_fn", None)
        return method() if callable(method) else None

    def _by_source(self) -> dict[str, _Shard]:
        if self._shards is None:
            self._shards = _named(_joined(self._given_shards()))
        return self._shards

    def _given_shards(self) -> list[_Shard]:
        given = self._reader.create_shards()
        try:
            items = [(name, *rest) for name, rest in given.items()] if isinstance(given, dict) else list(given)
            return [_Shard(str(name), int(start), int(start) + int(count)) for name, start, count in items]
        except (TypeError, ValueError) as error:
            raise ModelFileError(
                f"{type(self._reader).__name__}.create_shards() returned {str(given)[:200]}. Expected "
                "{name: (start, number of records)} or a list of (name, start, number of records)."
            ) from error


def _joined(shards: list[_Shard]) -> list[_Shard]:
    joined: list[_Shard] = []
    for shard in shards:
        if joined and joined[-1].name == shard.name and joined[-1].end == shard.start:
            joined[-1] = _Shard(shard.name, joined[-1].start, shard.end)
        else:
            joined.append(shard)
    return joined


def _named(shards: list[_Shard]) -> dict[str, _Shard]:
    names = [shard.name for shard in shards]
    return {
        shard.name if names.count(shard.name) == 1 else f"{shard.name}[{shard.start}:{shard.end}]": shard
        for shard in shards
    }
