"""What Keras models, optimizers and their options can do that jobs can't, for `test_matrix.py`."""

from __future__ import annotations

import socket

from catalogue import compiled
from elasticcb.errors import UsageError
from matrix_models import Plain


class Connected(Plain):
    def __init__(self):
        super().__init__()
        self.client = socket.socket()


# What: (a model, the error, what it says).
UNSUPPORTED = {
    "attributes that belong to one process (files, connections, threads)": (
        lambda: compiled(Connected()),
        UsageError,
        "model.client: a socket can't be sent to workers",
    ),
}
