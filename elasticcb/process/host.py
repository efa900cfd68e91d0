"""The name of the machine that a process runs on."""

from __future__ import annotations

import os
import platform

POD_NAME = "ELASTICCB_POD_NAME"  # environment variable, which the manifests of pods set


def host_name() -> str:
    """For a pod, its unique name: servers that replace each other have the same host name, and pods on their node's
    network have that of the node."""
    return os.environ.get(POD_NAME) or platform.node()
