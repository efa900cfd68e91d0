"""Workers and parameter servers as threads of the master's process, for debugging.

They talk gRPC as processes do; a breakpoint in the model file or in a callback just works.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable

from elasticcb.cluster.base import ClusterBackend, Exit

logger = logging.getLogger(__name__)

RunRole = Callable[[str, int], None]  # master's address, index


class InProcessCluster(ClusterBackend):
    """Threads.

    Args:
        run: by role ("worker", "ps"), what a process of that role would run.
    """

    def __init__(self, run: dict[str, RunRole]) -> None:
        self._run = run
        self._threads: dict[tuple[str, int], threading.Thread] = {}
        self._exits: list[Exit] = []
        self._last_words: dict[tuple[str, int], str] = {}

    def start(self, role: str, index: int, master_address: str) -> None:
        def target() -> None:
            reason, failed = "it returned", False
            try:
                self._run[role](master_address, index)
            except BaseException as error:
                reason, failed = f"{type(error).__name__}: {error}", True
                self._last_words[role, index] = traceback.format_exc()
            self._exits.append(Exit(role, index, 0, reason, failed))

        thread = threading.Thread(target=target, name=f"{role}-{index}", daemon=True)
        self._threads[role, index] = thread
        thread.start()

    def poll(self) -> list[Exit]:
        exits, self._exits = self._exits, []
        return exits

    def kill(self, role: str, index: int) -> None:
        logger.warning("%s %d hangs; a thread can't be ended, it goes on in the background", role, index)

    def stop(self, grace_seconds: float) -> None:
        for (role, _), thread in self._threads.items():
            if role == "worker":
                thread.join(grace_seconds)

    def log_tail(self, role: str, index: int, lines: int = 30) -> str:
        return self._last_words.get((role, index), "")
