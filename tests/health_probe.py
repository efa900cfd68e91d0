"""Health checks as a platform makes them."""

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def check(address, service):
    """Its status. Raises `grpc.RpcError` when it is not told."""
    with grpc.insecure_channel(address) as channel:
        return HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=60.0).status
