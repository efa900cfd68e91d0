"""A simulated network between the processes of a cluster. Python imports this first where the folder is on its path.

Every call takes `BENCHMARK_DELAY_MS` longer, as over a network with that round trip, and tensors travel as they do
between machines, not in memory that processes of one machine share. With `BENCHMARK_NAMESPACE` a process is in that
network namespace.
"""

import ctypes
import os
import time

_NAMESPACE = os.environ.get("BENCHMARK_NAMESPACE")
if _NAMESPACE:  # before anything starts a thread, which would stay outside
    with open(f"/run/netns/{_NAMESPACE}") as _file:
        if ctypes.CDLL(None, use_errno=True).setns(_file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"The network namespace {_NAMESPACE} can't be entered")

import grpc  # noqa: E402

from elasticcb.rpc import link, shared_frames  # noqa: E402

_DELAY_SECONDS = float(os.environ["BENCHMARK_DELAY_MS"]) / 1000


class _Delay(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    def intercept_unary_unary(self, continuation, details, request):
        time.sleep(_DELAY_SECONDS)
        return continuation(details, request)

    intercept_stream_stream = intercept_unary_unary


def _delayed(open_channel):
    return lambda *arguments, **named: grpc.intercept_channel(open_channel(*arguments, **named), _Delay())


def _late(call):
    def after_a_pause(*arguments):
        time.sleep(_DELAY_SECONDS)
        return call(*arguments)

    return after_a_pause


assert callable(shared_frames.is_supported), "what turns shared memory off has another name now"
shared_frames.is_supported = lambda: False
if _DELAY_SECONDS:
    link.ClientLink.call = _late(link.ClientLink.call)
    grpc.insecure_channel, grpc.secure_channel = map(_delayed, (grpc.insecure_channel, grpc.secure_channel))
