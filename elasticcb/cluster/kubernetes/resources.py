"""What a container asks for and may take, with more memory after it ran out of it. Pure."""

from __future__ import annotations

from typing import Any

from elasticcb.cluster.kubernetes.flags import amount, parse_resources
from elasticcb.settings import KubernetesSettings

_MORE_MEMORY, _MOST_MEMORY = 1.5, 4.0  # times, after a pod ran out of it


def resources(settings: KubernetesSettings, role: str, ooms: int = 0) -> dict[str, Any]:
    """A container's `resources`, with more memory after it ran out of it `ooms` times."""
    requests = parse_resources(getattr(settings, f"{role}_resource_request"))
    limits = parse_resources(getattr(settings, f"{role}_resource_limit"))
    for gpu in (name for name in requests if "/" in name):  # which can't be overcommitted
        limits.setdefault(gpu, requests[gpu])
    for part in (requests, limits):
        if ooms and "memory" in part:
            times = min(_MORE_MEMORY**ooms, _MOST_MEMORY)
            part["memory"] = f"{int(amount(part['memory']) * times / 2**20)}Mi"
    return {name: part for name, part in (("requests", requests), ("limits", limits)) if part}


def has_more_memory(ooms: int) -> bool:
    """Whether a pod after so many that ran out of memory has more than the last of them."""
    return _MORE_MEMORY ** (ooms - 1) < _MOST_MEMORY
