"""What `--ps_replicas=1` can't be together with."""

from __future__ import annotations

from collections.abc import Iterator

from elasticcb.cli.given_flags import Given
from elasticcb.settings import conflicts_with_replicas


def check_replicas(given: Given) -> Iterator[str]:
    """The flags that contradict it, in words."""
    if given["ps_replicas"] == 1:
        for name, why in conflicts_with_replicas(given.values):
            flag, other = given.flag("ps_replicas", with_value=True), given.flag(name, with_value=True)
            yield f"{flag} can't be with {other}: {why}"
