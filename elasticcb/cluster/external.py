"""Workers and parameter servers that a person, or another system, starts."""

from __future__ import annotations

from collections.abc import Callable

from elasticcb.cluster.base import ClusterBackend, Exit
from elasticcb.rpc import TOKEN_VARIABLE, token_of_environment


class ExternalCluster(ClusterBackend):
    """Says what to run where, and waits for it.

    Args:
        say: shows a line to the user.
    """

    watches = False

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def start(self, role: str, index: int, master_address: str) -> None:
        known = self.token == token_of_environment()
        token = f"{TOKEN_VARIABLE}={f'${TOKEN_VARIABLE}' if known else self.token} " if self.token else ""
        self._say(f"Waiting for: {token}elasticcb {role} --master {master_address} --index {index}")

    def poll(self) -> list[Exit]:
        return []

    def kill(self, role: str, index: int) -> None:
        self._say(f"{role} {index} does not answer; end it where it runs.")

    def stop(self, grace_seconds: float) -> None:
        """The processes leave by themselves when the master says that the job is over, or is gone."""
