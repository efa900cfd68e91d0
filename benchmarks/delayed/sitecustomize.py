"""A simulated network between the processes of a cluster. Python imports this first where the folder is on its path.

Every call takes `BENCHMARK_DELAY_MS` longer, as over a network with that round trip, and tensors travel in gRPC's
messages, not in memory that processes of one machine share.
"""

import os
import time

import grpc

from elasticcb.rpc import shared_frames

_DELAY_SECONDS = float(os.environ["BENCHMARK_DELAY_MS"]) / 1000


class _Delay(grpc.UnaryUnaryClientInterceptor):
    def intercept_unary_unary(self, continuation, details, request):
        time.sleep(_DELAY_SECONDS)
        return continuation(details, request)


def _delayed(open_channel):
    return lambda *arguments, **named: grpc.intercept_channel(open_channel(*arguments, **named), _Delay())


assert callable(shared_frames.is_supported), "what turns shared memory off has another name now"
shared_frames.is_supported = lambda: False
if _DELAY_SECONDS:
    grpc.insecure_channel, grpc.secure_channel = map(_delayed, (grpc.insecure_channel, grpc.secure_channel))
