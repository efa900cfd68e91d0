"""Of what health checks ask, and where."""

MASTER_SERVICE, PS_SERVICE = "elasticcb.Master", "elasticcb.ParameterServer"  # of grpc.health.v1.Health/Check
LIVE_PATH, READY_PATH = "/healthz", "/readyz"  # of HTTP, on the port of the master's metrics
