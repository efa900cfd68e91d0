"""What a process calls the machine that it runs on."""

from __future__ import annotations

import os
import socket

from elasticcb.cluster.pods import POD_NAME


def host_name() -> str:
    """Of a pod its name, which no other has: servers that take each other's place have the same host name, and pods
    with the network of their node that of the node."""
    return os.environ.get(POD_NAME) or socket.gethostname()
