"""Refuses calls before reading their messages, and counts them.

A refused call costs no thread, and its message is not read, so a flood of them costs other calls only time.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent import futures
from enum import Enum
from typing import Any

import grpc

from elasticcb.security.credentials import TOKEN_VARIABLE

logger = logging.getLogger(__name__)

# Increased when messages change so that processes of older and newer releases can't work together.
PROTOCOL = 2

# Metadata of every call.
TOKEN_KEY, PROTOCOL_KEY = "elasticcb-token", "elasticcb-protocol"
ERROR_KEY = "elasticcb-error"  # metadata of an error: its class
TERM_KEY = "elasticcb-term"  # metadata of a master's calls to servers: "TRAINING:NUMBER"
BUSY_KEY = "elasticcb-busy"  # metadata of a refusal: the same call may be accepted later

_LONGEST_PROTOCOL = 20  # maximum characters of a caller's value shown in an error
_MOST_CALLS = 4_096  # maximum running calls of a server; long polls of all workers of a large job are about 1,000
_QUIET_SECONDS = 10.0  # between log lines about calls refused for one reason


class Refusal(Enum):
    """Why a call was refused; the text follows a number."""

    TOKEN = "without the job's token"
    RELEASE = "of another release"
    REPLACED = "of a master that was replaced"
    MALFORMED = "malformed"
    BUSY = "too many at once"


class RefusedCalls:
    """Counts refused calls by reason. Logs a line now and then, however many there are."""

    def __init__(self) -> None:
        self._counts: Counter[Refusal] = Counter()
        self._told: dict[Refusal, float] = {}
        self._lock = threading.Lock()

    def add(self, refusal: Refusal, caller: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._counts[refusal] += 1
            if now < self._told.get(refusal, 0.0):
                return
            self._told[refusal] = now + _QUIET_SECONDS
            count = self._counts[refusal]
        logger.warning("Calls refused so far, %s: %d; the last one came from %s", refusal.value, count, caller)

    def counts(self) -> dict[str, int]:
        """Counts by the text of a `Refusal`."""
        with self._lock:
            return {refusal.value: self._counts[refusal] for refusal in Refusal if self._counts[refusal]}


class CallThreads(futures.ThreadPoolExecutor):
    """The threads that answer calls; counts calls, including waiting ones."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="rpc")
        self.calls = 0
        self._counting = threading.Lock()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future = super().submit(function, *args, **kwargs)
        with self._counting:
            self.calls += 1
        future.add_done_callback(self._one_less)
        return future

    def _one_less(self, future: Any) -> None:
        with self._counting:
            self.calls -= 1


class _AtOnce(futures.ThreadPoolExecutor):
    """Runs functions in the calling thread."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()
        future.set_result(function(*args, **kwargs))
        return future


class Gate(grpc.ServerInterceptor):
    """Accepts calls with the right token and protocol number, up to a maximum number of running calls.

    Args:
        control_threads: threads for the methods in `control` (full names; may grow) instead.
        refused: counts refused calls, refused here or by the method. gRPC itself refuses messages that are too large;
            these are not counted.
    """

    def __init__(
        self,
        token: str,
        threads: CallThreads,
        refused: RefusedCalls,
        control_threads: CallThreads,
        control: Collection[str],
    ) -> None:
        self._token = token.encode()
        self._threads, self._control_threads, self._control = threads, control_threads, control
        self._refused = refused
        self._at_once = _AtOnce(1)
        self._watched: dict[str, Any] = {}  # handlers by method
        self._stranger = self._refusing(
            Refusal.TOKEN,
            grpc.StatusCode.UNAUTHENTICATED,
            f"the call does not carry this job's token; set {TOKEN_VARIABLE} for the process",
        )
        self._newest_term = "", 0  # of the current training
        self._replaced = self._refusing(
            Refusal.REPLACED,
            grpc.StatusCode.FAILED_PRECONDITION,
            "Another master took over this job; the caller was replaced",
            ((ERROR_KEY, "ReplacedError"),),
        )
        self._busy = self._refusing(
            Refusal.BUSY,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"{_MOST_CALLS:,} calls are already running",
            ((BUSY_KEY, "1"),),
        )

    def intercept_service(self, continuation: Callable[[Any], Any], call: Any) -> Any:
        # The token first, so that strangers learn nothing else.
        if self._token and not hmac.compare_digest(_value(call, TOKEN_KEY).encode(), self._token):
            return self._stranger
        given = _value(call, PROTOCOL_KEY)
        if given != str(PROTOCOL):
            return self._refusing(
                Refusal.RELEASE,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"The caller uses protocol {given[:_LONGEST_PROTOCOL] or 'none'}, but this process uses {PROTOCOL}; "
                "run the same release of ElasticCB in all processes of a job.",
            )
        if self._is_of_replaced_master(_value(call, TERM_KEY)):
            return self._replaced
        threads = self._control_threads if call.method in self._control else self._threads
        if threads.calls >= _MOST_CALLS:
            return self._busy
        if call.method not in self._watched:
            handler = continuation(call)
            if handler is None:
                return None
            self._watched[call.method] = self._watching(handler, threads)
        return self._watched[call.method]

    def _is_of_replaced_master(self, term: str) -> bool:
        training, _, number = term.partition(":")
        if not number.isdecimal():
            return False
        given = int(number[:_LONGEST_PROTOCOL])
        known, newest = self._newest_term
        if training != known or given > newest:
            self._newest_term = training, given
        return training == known and given < newest

    def _refusing(self, refusal: Refusal, code: grpc.StatusCode, text: str, metadata: Any = ()) -> Any:
        def refuse(messages: Any, context: grpc.ServicerContext) -> None:
            self._refused.add(refusal, context.peer())
            context.set_trailing_metadata(metadata)
            context.abort(code, text)

        # gRPC looks for this attribute and lets these threads run the call. A stream's method gets no message unless it
        # asks for one.
        refuse.experimental_thread_pool = self._at_once  # type: ignore[attr-defined]
        return grpc.stream_unary_rpc_method_handler(refuse)

    def _watching(self, handler: Any, threads: CallThreads) -> Any:
        """The method's handler, run by `threads`, which counts messages that can't be read or are refused."""
        if handler.request_streaming:
            return self._watching_frames(handler, threads)
        read = handler.request_deserializer or bytes

        def answer(message: bytes, context: Any) -> Any:
            try:
                request = read(message)
            except Exception as error:
                self._refused.add(Refusal.MALFORMED, context.peer())
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the message can't be read: {error}")
            try:
                return handler.unary_unary(request, context)
            except Exception:
                if context.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    self._refused.add(Refusal.MALFORMED, context.peer())
                raise

        answer.experimental_thread_pool = threads  # type: ignore[attr-defined]  # as above
        return grpc.unary_unary_rpc_method_handler(answer, None, handler.response_serializer)

    def _watching_frames(self, handler: Any, threads: CallThreads) -> Any:
        def answer(chunks: Iterator[bytes], context: Any) -> Iterator[bytes]:
            try:
                yield from handler.stream_stream(chunks, context)
            except Exception:
                if context.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    self._refused.add(Refusal.MALFORMED, context.peer())
                raise

        answer.experimental_thread_pool = threads  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(answer)


def _value(call: Any, name: str) -> str:
    """A value of the call's metadata; "" if missing."""
    return next((value for key, value in call.invocation_metadata if key == name), "")
