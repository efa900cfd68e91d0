"""The server's side of calls with frames, over gRPC and links."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc
import numpy as np

from elasticcb.errors import ElasticCBError, WireError
from elasticcb.rpc.admission import Refusal, RefusedCalls
from elasticcb.rpc.call_errors import CallError, abort, call_error_of, call_error_of_defect
from elasticcb.rpc.link import Message, ServerLinks
from elasticcb.rpc.services import Method
from elasticcb.rpc.shared_frames import Segment, answer_to, attach, request_in
from elasticcb.rpc.stream import ASKED, StreamListener
from elasticcb.rpc.tensors import Frame, decode_frame, encode_frame, in_chunks
from elasticcb.security.tls import TLS

logger = logging.getLogger(__name__)

Handler = Callable[[Frame[Any]], Frame[Any]]


class FrameService(grpc.GenericRpcHandler):
    """A service of calls with frames.

    Args:
        handlers: by method of one service, a function from the request frame to the response frame. Its
            `ElasticCBError`s are raised at the caller.

    Attributes:
        control: full names of the methods that never wait.
    """

    def __init__(self, handlers: Mapping[Method, Handler]) -> None:
        first = next(iter(handlers))
        self._handlers = handlers
        self._methods = {method.name: method for method in handlers}
        self.control = [method.path for method in handlers if method.control] + [first.attach_path]
        self.refused = RefusedCalls()  # the server's, once the service is added
        self._links = ServerLinks(self._answer_link)
        self._streams = StreamListener(self._links)  # of other machines
        self._by_path = {method.path: self._by_grpc(method) for method in handlers}
        self._by_path[first.attach_path] = grpc.unary_unary_rpc_method_handler(self._attach)

    def service(self, handler_call_details: Any) -> Any:
        return self._by_path.get(handler_call_details.method)

    def listen_at(self, host: str, tls: TLS | None) -> None:
        """Sets the interface on which clients of other machines may connect; call it before the first call."""
        self._streams.listen_at(host, tls)

    def stop(self, grace_seconds: float) -> None:
        """Closes the links."""
        self._streams.stop(grace_seconds)
        self._links.stop(grace_seconds)

    def _by_grpc(self, method: Method) -> Any:
        def answer(chunks: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            data = b"".join(chunks)
            try:
                response = self._answer(method.name, lambda: decode_frame(data, method.request))
            except CallError as error:
                abort(context, error)
            yield from in_chunks(encode_frame(response))

        return grpc.stream_stream_rpc_method_handler(answer)

    def _answer_link(self, name: str, request: Message, segment: Segment | None) -> Message:
        def decode() -> Frame[Any]:
            method = self._methods[name]
            frame = request_in(request, method.request, segment)
            if method.transient:
                return frame
            return Frame(frame.header, {key: np.array(array) for key, array in frame.tensors.items()})

        try:
            return answer_to(request, self._answer(name, decode), segment)
        except CallError as error:  # else the gate would count it
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                self.refused.add(Refusal.MALFORMED, "a process of this job")
            raise

    def _answer(self, name: str, decode: Callable[[], Frame[Any]]) -> Frame[Any]:
        try:
            return self._handlers[self._methods[name]](decode())
        except ElasticCBError as error:
            if error.user_traceback:
                logger.error("%s\n%s", error, error.user_traceback)
            raise call_error_of(error) from error
        except Exception as error:  # a bug
            logger.exception("A call of %s failed", name)
            raise call_error_of_defect(error) from error

    def _attach(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        if not message:  # a client checks whether this server is alive
            return b""
        try:
            if message == ASKED:
                return self._streams.offer()
            attach(message, self._links)
            return b""
        except WireError as error:
            abort(context, CallError(grpc.StatusCode.FAILED_PRECONDITION, str(error)))
