"""Errors over the wire: an exception of a handler is raised at its caller, with the same class and message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import grpc

from elasticcb import errors
from elasticcb.errors import ConnectionLostError, ElasticCBError, HandlerError, WireError
from elasticcb.rpc.admission import BUSY_KEY, ERROR_KEY

_LONGEST_ERROR = 10_000  # characters; each may take 12 bytes in the header with the text

# Metadata that recreates a handler's error at the caller: its class, and the user's traceback.
_TRACEBACK_KEY = "elasticcb-traceback-bin"
_ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ElasticCBError) and kind is not WireError
}

# A call that failed with one of these may be repeated: it did not reach the handler, or the handler recognizes repeated
# calls.
_TRANSIENT = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}

# gRPC's text for an exception in a handler that is not one of this project's. The code is ambiguous by itself: gRPC
# also uses it for some broken connections.
_DEFECT = "Exception calling application: "


class CallError(grpc.RpcError):
    """A failed call, as gRPC would raise it.

    Attributes:
        metadata: metadata of an error of this project: its class, the user's traceback.
    """

    def __init__(self, code: grpc.StatusCode, text: str, metadata: Mapping[str, str | bytes] | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.metadata = dict(metadata or {})
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self.text

    def trailing_metadata(self) -> Any:
        return tuple(self.metadata.items())


def call_error_of(error: ElasticCBError) -> CallError:
    """The form in which a handler's error is sent."""
    refused = isinstance(error, WireError)
    code = grpc.StatusCode.INVALID_ARGUMENT if refused else grpc.StatusCode.FAILED_PRECONDITION
    trace = error.user_traceback.encode()[-_LONGEST_ERROR:]
    metadata: dict[str, str | bytes] = {ERROR_KEY: type(error).__name__, _TRACEBACK_KEY: trace}
    return CallError(code, str(error)[:_LONGEST_ERROR], metadata)


def call_error_of_defect(error: Exception) -> CallError:
    """The form in which gRPC sends an unexpected error of a handler."""
    return CallError(grpc.StatusCode.UNKNOWN, f"{_DEFECT}{error}")


def abort(context: grpc.ServicerContext, error: CallError) -> NoReturn:
    """Ends a call on the server with an error."""
    context.set_trailing_metadata(error.trailing_metadata())
    context.abort(error.code(), error.details())
    raise AssertionError("abort raises")


def raise_unless_transient(error: Any, server: str) -> None:
    """Raises the error that a failed call to `server` means, unless the same call may succeed later.

    Raises:
        WireError: the server refused the message.
        HandlerError: a bug in the server raised an exception.
        ElasticCBError: the server could not do what was requested; class, message and traceback are the server's.
        ConnectionLostError: anything else.
    """
    code, details = error.code(), error.details() or "no details"
    given = dict(error.trailing_metadata() or ())
    if code in _TRANSIENT or BUSY_KEY in given:
        return
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
        raise WireError(f"{server} refused a message: {details}") from None
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        kind = _ERRORS.get(given.get(ERROR_KEY, ""), ElasticCBError)
        raise kind(details, given.get(_TRACEBACK_KEY, b"").decode(errors="ignore")) from None
    if code is grpc.StatusCode.UNKNOWN and details.startswith(_DEFECT):
        raise HandlerError(
            f"{server} failed to answer a call: {details.removeprefix(_DEFECT) or 'no details'}. This is a bug in "
            "ElasticCB; the log of that process has the traceback."
        ) from None
    raise ConnectionLostError(f"A call to {server} failed: {code.name}: {details}") from None
