"""The master: the task queue, the evaluation passes, the roster, and the gRPC service around them."""
