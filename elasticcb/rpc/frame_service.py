"""The server's side of calls with frames, independent of the transport."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import numpy as np

from elasticcb.errors import ElasticCBError, WireError
from elasticcb.rpc.admission import Refusal, RefusedCalls
from elasticcb.rpc.call_errors import CallError, abort, call_error_of
from elasticcb.rpc.frame_pieces import PIECES_MISSING, Pieces, UnknownPiecesError, bytes_of
from elasticcb.rpc.link import Message, ServerLinks
from elasticcb.rpc.services import Method
from elasticcb.rpc.shared_frames import ServerMemory, UnknownSegmentError
from elasticcb.rpc.stream import ASKED, StreamListener, StreamReply
from elasticcb.rpc.tensors import Frame, InPieces, decode_header
from elasticcb.security.tls import TLS

logger = logging.getLogger(__name__)

Handler = Callable[[Frame[Any]], Frame[Any]]


class FrameService(grpc.GenericRpcHandler):
    """A service of calls with frames, over gRPC and links.

    Args:
        handlers: by method of one service, a function from the request frame to the response frame. Its
            `ElasticCBError`s are raised at the caller.

    Attributes:
        control: full names of the methods that never wait.
    """

    def __init__(self, handlers: Mapping[Method, Handler]) -> None:
        first = next(iter(handlers))
        self._pieces = Pieces()
        self._handlers = {**handlers, first.piece: self._pieces.answer}
        self._methods = {method.name: method for method in self._handlers}
        self.control = [method.path for method in self._handlers if method.control] + [first.attach_path]
        self.refused = RefusedCalls()  # the server's, once the service is added
        self._links = ServerLinks(self._answer_link)  # to clients on this machine
        self._memory = ServerMemory(self._links)
        self._streams = StreamListener(ServerLinks(self._answer_stream))
        self._by_path = {method.path: self._by_grpc(method) for method in self._handlers}
        self._by_path[first.attach_path] = grpc.unary_unary_rpc_method_handler(self._attach)

    def service(self, handler_call_details: Any) -> Any:
        return self._by_path.get(handler_call_details.method)

    def listen_at(self, host: str, tls: TLS | None) -> None:
        """Sets the interface on which clients of other machines may connect; call it before the first call."""
        self._streams.listen_at(host, tls)

    def stop(self, grace_seconds: float) -> None:
        """Closes the links."""
        self._links.stop(grace_seconds)
        self._streams.stop(grace_seconds)

    def _by_grpc(self, method: Method) -> Any:
        def answer(data: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return self._answer(method, self._memory.decode, data).data
            except CallError as error:
                abort(context, error)

        return grpc.unary_unary_rpc_method_handler(answer)

    def _answer_link(self, name: str, request: Message) -> Message:
        return self._answer_counted(name, self._memory.decode, request.data)

    def _answer_stream(self, name: str, request: Message) -> Message:
        def decode(data: bytes, header_type: type[Any]) -> tuple[Frame[Any], StreamReply]:
            return decode_header(data, header_type, request.read), StreamReply()

        return self._answer_counted(name, decode, request.data)

    def _answer_counted(self, name: str, decode: Any, data: bytes) -> Message:
        try:
            return self._answer(self._methods[name], decode, data)
        except CallError as error:  # else the gate would count it
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                self.refused.add(Refusal.MALFORMED, "a process of this job")
            raise

    def _answer(self, method: Method, decode: Any, data: bytes) -> Message:
        self._pieces.forget_silent()
        try:
            frame, reply = decode(data, method.request)
            if reply.borrowed and not method.transient:
                frame = Frame(frame.header, {key: _copied(array) for key, array in frame.tensors.items()})
            response = self._handlers[method](self._pieces.taken(frame))
            if not reply.takes(bytes_of(response)):
                response = self._pieces.offered(response)
            answer: Message = reply.encode(response)
            return answer
        except UnknownSegmentError as error:
            raise CallError(grpc.StatusCode.NOT_FOUND, str(error)) from None
        except UnknownPiecesError as error:
            raise CallError(PIECES_MISSING, str(error)) from None
        except ElasticCBError as error:
            if error.user_traceback:
                logger.error("%s\n%s", error, error.user_traceback)
            raise call_error_of(error) from error

    def _attach(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        if not message:  # a client checks whether this server is alive
            return b""
        try:
            return self._streams.offer() if message == ASKED else self._memory.attach(message)
        except WireError as error:
            abort(context, CallError(grpc.StatusCode.FAILED_PRECONDITION, str(error)))


def _copied(array: Any) -> Any:
    return array if isinstance(array, InPieces) else np.array(array)
