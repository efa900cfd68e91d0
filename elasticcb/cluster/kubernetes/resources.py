"""Resource requests and limits of containers, with more memory after an out-of-memory kill. Pure functions."""

from __future__ import annotations

from typing import Any

from elasticcb.cluster.kubernetes.flags import amount, parse_resources
from elasticcb.settings import KubernetesSettings

_MORE_MEMORY, _MOST_MEMORY = 1.5, 4.0  # factor, after a pod ran out of memory


def resources(settings: KubernetesSettings, role: str, ooms: int = 0) -> dict[str, Any]:
    """A container's `resources`, with more memory after `ooms` out-of-memory kills."""
    requests = parse_resources(getattr(settings, f"{role}_resource_request"))
    limits = parse_resources(getattr(settings, f"{role}_resource_limit"))
    for gpu in (name for name in requests if "/" in name):  # which can't be overcommitted
        limits.setdefault(gpu, requests[gpu])
    for part in (requests, limits):
        if ooms and "memory" in part:
            times = min(_MORE_MEMORY**ooms, _MOST_MEMORY)
            part["memory"] = f"{int(amount(part['memory']) * times / 2**20)}Mi"
    return {name: part for name, part in (("requests", requests), ("limits", limits)) if part}


def after_oom(settings: KubernetesSettings, role: str, ooms: int) -> tuple[int, str]:
    """Counts out-of-memory kills, this one included, and says how much memory the next container gets."""
    if "memory" not in resources(settings, role).get("limits", {}):
        return ooms, f"; it has no limit, but its node had no memory left. Request more with --{role}_resource_request"
    memory = resources(settings, role, ooms + 1)["limits"]["memory"]
    if _MORE_MEMORY**ooms < _MOST_MEMORY:
        return ooms + 1, f"; the next one gets {memory}"
    return ooms + 1, f"; the next one gets {memory} again, the maximum. Raise --{role}_resource_limit"
