"""What a job can't have together with replicas of its parameter servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elasticcb.settings import WhenFull


def conflicts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Arguments that `ps_replicas=1` can't be with: (name, why and what to do instead).

    Args:
        values: of the arguments of the same names of `elasticcb.Cluster` and of the command line.
    """
    if values["num_ps"] < 2:
        yield "num_ps", "the next server keeps the replica of a server. Start at least 2."
    if not values["use_async"]:
        yield "use_async", "in synchronous mode all servers start anew when one is lost. Leave one of them out."
    if not values["checkpoint_interval"]:
        yield "checkpoint_interval", "a replica holds what the files lack that are written then. Give it some seconds."
    forgets = "a replica does not know which rows a server has let go since it wrote its files. Leave one of them out."
    if values["embedding_min_count"] > 1:
        yield "embedding_min_count", forgets
    if values["embedding_max_age"]:
        yield "embedding_max_age", forgets
    if values["embedding_memory_bytes"] and WhenFull(values["embedding_when_full"]) is not WhenFull.ERROR:
        yield "embedding_when_full", forgets
