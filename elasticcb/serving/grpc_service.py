"""The gRPC `PredictionService` of TensorFlow Serving, with the stubs of `tensorflow-serving-api`."""

# mypy: allow-subclassing-any

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import grpc
import tensorflow as tf
from tensorflow_serving.apis import get_model_metadata_pb2, predict_pb2, prediction_service_pb2_grpc

from elasticcb.errors import UsageError
from elasticcb.rpc.tensors import Array
from elasticcb.serving.loaded_export import SIGNATURE, check_names, check_shape
from elasticcb.serving.service import ModelService, TooLargeError, UnknownModelError, status_of

_GRACE_SECONDS = 30.0  # for running calls when the server ends
_METADATA = "signature_def"  # the only kind that there is


@contextlib.asynccontextmanager
async def grpc_server(service: ModelService) -> AsyncIterator[str]:
    """Serves meanwhile; yields the address. Raises `UsageError` if the port is taken."""
    options = service.options
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", options.max_body),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # else two servers would share a port
        ]
    )
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(_PredictionService(service), server)
    address = f"{options.host}:{options.grpc_port}"
    try:
        if options.tls_cert:
            port = server.add_secure_port(address, _credentials(options))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError:
        raise UsageError(f"gRPC can't be served at {address}. Choose another --grpc_port, or 0 for any.") from None
    await server.start()
    try:
        yield f"{options.host}:{port}"
    finally:
        await server.stop(_GRACE_SECONDS)


def _credentials(options: Any) -> grpc.ServerCredentials:
    key, cert = Path(options.tls_key).read_bytes(), Path(options.tls_cert).read_bytes()
    ca = Path(options.tls_ca).read_bytes() if options.tls_ca else None
    return grpc.ssl_server_credentials([(key, cert)], ca, ca is not None)


class _PredictionService(prediction_service_pb2_grpc.PredictionServiceServicer):
    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def Predict(self, request: Any, context: Any) -> Any:
        began, status = time.perf_counter(), "CANCELLED"
        try:
            version = self._check(request.model_spec, context)
            signature = request.model_spec.signature_name or SIGNATURE
            specs = self._service.model.signature(signature).inputs
            features = _arrays_of(request.inputs, specs, self._service.options.max_body)
            answer = await self._service.predict(features, signature, version)
            wanted = request.output_filter or answer
            if unknown := [name for name in wanted if name not in answer]:
                raise UsageError(f"The model has no output {unknown[0]!r}. Expected some of {', '.join(answer)}.")
            response = predict_pb2.PredictResponse(
                outputs={name: tf.make_tensor_proto(answer[name]) for name in wanted}
            )
            response.model_spec.name, response.model_spec.signature_name = self._service.options.name, signature
            response.model_spec.version.value = answer.version
            status = "OK"
            return response
        except Exception as error:
            _, status, text = status_of(error)
            await _refuse(context, status, text)
        finally:
            self._service.note("grpc", status, began)

    async def GetModelMetadata(self, request: Any, context: Any) -> Any:
        try:
            self._check(request.model_spec, context)
            if other := [field for field in request.metadata_field if field != _METADATA]:
                raise UsageError(f"There is no metadata {other[0]!r}. Expected {_METADATA!r}.")
            signatures = get_model_metadata_pb2.SignatureDefMap(signature_def=self._service.model.signature_defs)
            response = get_model_metadata_pb2.GetModelMetadataResponse()
            response.model_spec.name = self._service.options.name
            response.model_spec.version.value = self._service.model.version or 0
            response.metadata[_METADATA].Pack(signatures)
            return response
        except Exception as error:
            _, status, text = status_of(error)
            await _refuse(context, status, text)

    def _check(self, spec: Any, context: Any) -> int | None:
        """The version that is asked for; None: any. Raises the errors of `ModelService.check_target`."""
        carried = dict(context.invocation_metadata() or ())
        self._service.options.check_token(str(carried.get("authorization", "")))
        if spec.version_label:
            raise UnknownModelError(f"Versions have no labels here. Received: {spec.version_label!r}.")
        version = spec.version.value if spec.HasField("version") else None
        self._service.check_target(spec.name, version)
        return version


def _arrays_of(inputs: Mapping[str, Any], specs: Mapping[str, tf.TensorSpec], most_bytes: int) -> dict[str, Array]:
    check_names(inputs, specs)
    arrays = {}
    for name, spec in specs.items():
        given = inputs[name].dtype
        if given != spec.dtype.as_datatype_enum:
            shown: object = given
            with contextlib.suppress(TypeError):  # TensorFlow does not know it
                shown = tf.as_dtype(given).name
            raise UsageError(f"The input {name!r} has the dtype {shown}. Expected {spec.dtype.name}.")
        # Equal values at the end of a tensor may be left out, so a small message can be a huge array.
        elements = abs(math.prod(dim.size for dim in inputs[name].tensor_shape.dim))
        if elements * (spec.dtype.size or 8) > most_bytes:
            raise TooLargeError(f"The input {name!r} is larger than {most_bytes:,} bytes (--max_body).")
        try:
            arrays[name] = tf.make_ndarray(inputs[name])
        except (TypeError, ValueError) as error:
            raise UsageError(f"The input {name!r} is not a tensor: {error}.") from None
        check_shape(name, arrays[name].shape, spec)
    return arrays


async def _refuse(context: Any, status: str, text: str) -> NoReturn:
    await context.abort(grpc.StatusCode[status], text)
    raise AssertionError  # abort raises
