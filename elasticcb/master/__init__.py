"""The master: the task queue, the evaluation rounds, the roster, and the gRPC service around them."""
