"""The server's side of calls with plain protobuf messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from elasticcb.errors import ElasticCBError
from elasticcb.rpc.call_errors import abort, call_error_of
from elasticcb.rpc.services import Method


def message_service(methods: Mapping[str, Method], servicer: Any) -> grpc.GenericRpcHandler:
    """A gRPC service of calls with plain protobuf messages.

    Args:
        servicer: has a function for each method, from the request and gRPC's context to the response. Its
            `ElasticCBError`s are raised at the caller.
    """
    handlers = {name: _handler(method, getattr(servicer, name)) for name, method in methods.items()}
    return grpc.method_handlers_generic_handler(next(iter(methods.values())).service, handlers)


def _handler(method: Method, function: Any) -> Any:
    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return function(request, context)
        except ElasticCBError as error:
            abort(context, call_error_of(error))

    return grpc.unary_unary_rpc_method_handler(answer, method.request.FromString, method.response.SerializeToString)
