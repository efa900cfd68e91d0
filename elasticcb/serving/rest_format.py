"""The JSON of TensorFlow Serving's REST API (https://www.tensorflow.org/tfx/serving/api_rest), and arrays."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from elasticcb.errors import UsageError
from elasticcb.rpc.tensors import Array
from elasticcb.serving.loaded_export import SIGNATURE, check_names, check_shape
from elasticcb.serving.served_model import ServedModel

_B64 = {"b64"}  # key of an object that is a string in base64


class Request(NamedTuple):
    """A `:predict` request.

    Attributes:
        by_rows: it has `instances`, and gets `predictions`; else `inputs` and `outputs`.
    """

    features: dict[str, Array]
    signature: str
    by_rows: bool


def read_request(body: bytes, model: ServedModel) -> Request:
    """Raises `UsageError` if the body is not a request for the signature that it names."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"The body is not JSON: {error}.") from None
    if not isinstance(given, dict) or ("instances" in given) == ("inputs" in given):
        raise UsageError('Expected a JSON object with either "instances" (a list) or "inputs" (columns).')
    name = given.get("signature_name", SIGNATURE)
    if not isinstance(name, str):
        raise UsageError(f"signature_name is {json.dumps(name)[:80]}. Expected a string.")
    specs, by_rows = model.signature(name).inputs, "instances" in given
    columns = _columns_of(given["instances"], specs) if by_rows else given["inputs"]
    if not _is_object(columns):
        if len(specs) != 1:
            raise UsageError(f'Expected "inputs" to be an object with the keys {_shown(specs)}.')
        columns = {next(iter(specs)): columns}
    check_names(columns, specs)
    has_booleans = b"true" in body or b"false" in body
    try:
        for each, spec in specs.items():
            if has_booleans and not spec.dtype.is_bool and _has_booleans(columns[each]):
                raise _wrong_kind(each, spec)  # NumPy would take one among numbers as 0 or 1
        return Request({each: _array(each, columns[each], spec) for each, spec in specs.items()}, name, by_rows)
    except RecursionError:
        raise UsageError("The values are nested too deeply.") from None


def _columns_of(instances: Any, specs: Mapping[str, tf.TensorSpec]) -> dict[str, Any]:
    if not isinstance(instances, list) or not instances:
        raise UsageError('Expected "instances" to be a list with at least one example.')
    if len(specs) == 1 and not _is_object(instances[0]):
        return {next(iter(specs)): instances}
    for number, instance in enumerate(instances):
        if not _is_object(instance):
            raise UsageError(f"The instance {number} is not an object with the keys {_shown(specs)}.")
        if instance.keys() != specs.keys():
            raise UsageError(
                f"The instance {number} has the keys {_shown(instance) or 'none'}. Expected {_shown(specs)}."
            )
    return {name: [instance[name] for instance in instances] for name in specs}


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() != _B64


def _has_booleans(value: Any) -> bool:
    return any(map(_has_booleans, value)) if isinstance(value, list) else isinstance(value, bool)


def _wrong_kind(name: str, spec: tf.TensorSpec) -> UsageError:
    return UsageError(f"The input {name!r} contains values that are not {spec.dtype.name}.")


def _shown(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, sorted(names)))


def _array(name: str, value: Any, spec: tf.TensorSpec) -> Array:
    dtype = spec.dtype.as_numpy_dtype
    if spec.dtype == tf.string:
        array = np.array(_texts(name, value), object)
    else:
        try:
            array = np.array(value)
        except (ValueError, OverflowError):
            raise UsageError(f"The input {name!r} is not a tensor: its lists have different lengths.") from None
        _check_kind(name, array, spec)
        with np.errstate(over="ignore"):  # a float becomes infinite
            array = array.astype(dtype)
    check_shape(name, array.shape, spec)
    return array


def _check_kind(name: str, array: Array, spec: tf.TensorSpec) -> None:
    """JSON has numbers, truth values and strings; none of them is converted to another."""
    kinds = "b" if spec.dtype.is_bool else "iu" if spec.dtype.is_integer else "iuf"
    if not array.size:
        return
    if array.dtype.kind not in kinds:
        raise _wrong_kind(name, spec)
    if np.can_cast(array.dtype, spec.dtype.as_numpy_dtype) or not spec.dtype.is_integer:
        return
    if array.min() < spec.dtype.min or array.max() > spec.dtype.max:
        raise UsageError(f"The input {name!r} contains numbers that {spec.dtype.name} can't represent.")


def _texts(name: str, value: Any) -> Any:
    """Strings as bytes, in lists as given."""
    if isinstance(value, list):
        return [_texts(name, each) for each in value]
    try:
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, dict) and value.keys() == _B64:
            return base64.b64decode(value["b64"], validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise UsageError(f"The input {name!r} contains an invalid string: {error}.") from None
    raise UsageError(f"The input {name!r} contains values that are not strings.")


def answer_to(request: Request, outputs: Mapping[str, Array]) -> bytes:
    """The body of the answer. Raises `UsageError` if the outputs have no rows, but these were requested."""
    values = {name: _json_of(name, array) for name, array in outputs.items()}
    if not request.by_rows:
        columns = values if len(values) > 1 else next(iter(values.values()))
        return json.dumps({"outputs": columns}).encode()
    rows = {array.shape[:1] for array in outputs.values()}
    if len(rows) > 1 or rows == {()}:
        raise UsageError('The outputs have different numbers of rows. Send "inputs" in place of "instances".')
    if len(values) == 1:
        predictions = next(iter(values.values()))
    else:
        predictions = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return json.dumps({"predictions": predictions}).encode()


def _json_of(name: str, array: Array) -> Any:
    if array.dtype.kind == "O":
        return _told(name, array.tolist())
    if array.dtype.kind not in "biuf":  # bfloat16
        array = array.astype(np.float32)
    return array.tolist()


def _told(name: str, value: Any) -> Any:
    """Bytes as strings, in lists as given."""
    if isinstance(value, list):
        return [_told(name, each) for each in value]
    try:
        if not name.endswith("_bytes"):
            return value.decode()
    except UnicodeDecodeError:
        pass
    return {"b64": base64.b64encode(value).decode()}
