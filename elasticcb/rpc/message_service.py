"""The server's side of calls with plain protobuf messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from elasticcb.errors import ElasticCBError
from elasticcb.rpc.call_errors import call_error_of
from elasticcb.rpc.services import Method


class MessageService(grpc.GenericRpcHandler):
    """A gRPC service of calls with plain protobuf messages.

    Args:
        methods: by name.
        servicer: has a function for each method, from the request and gRPC's context to the response. Its
            `ElasticCBError`s are raised at the caller.
    """

    def __init__(self, methods: Mapping[str, Method], servicer: Any) -> None:
        self._by_path = {method.path: _handler(method, getattr(servicer, name)) for name, method in methods.items()}

    def service(self, handler_call_details: Any) -> Any:
        return self._by_path.get(handler_call_details.method)


def _handler(method: Method, function: Any) -> Any:
    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return function(request, context)
        except ElasticCBError as error:
            known = call_error_of(error)
            context.set_trailing_metadata(known.trailing_metadata())
            context.abort(known.code(), known.details())
        raise AssertionError("abort raises")

    return grpc.unary_unary_rpc_method_handler(answer, method.request.FromString, method.response.SerializeToString)
