"""What a process calls the machine that it runs on."""

from __future__ import annotations

import os
import platform

POD_NAME = "ELASTICCB_POD_NAME"  # environment variable, which the manifests of pods set


def host_name() -> str:
    """Of a pod its name, which no other has: servers that take each other's place have the same host name, and pods
    with the network of their node that of the node."""
    return os.environ.get(POD_NAME) or platform.node()
