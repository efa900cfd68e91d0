"""The master's handle of an actor on a Ray node."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

from elasticcb.cluster.ray.actor import Ended, Launched, PlaceOnNode
from elasticcb.errors import describe

logger = logging.getLogger(__name__)

CPUS = 1  # CPUs that a process reserves
ANSWER_SECONDS = 5.0  # seconds, for an unreachable actor, and for one that must end its process
PENDING_SECONDS = 5.0  # seconds until a pending process is reported, and a worker makes room for a server
_SLOW_SECONDS = 30.0  # likewise, if there were free CPUs: Ray may be slow, and has reserved them already
_CALLS = 8  # to an actor at a time


class Actor:
    """The master's handle of a `PlaceOnNode`."""

    def __init__(self, name: str, launch: tuple[Any, ...]) -> None:
        import ray

        self.launched: Launched | None = None
        had_room = ray.available_resources().get("CPU", 0) >= CPUS
        self._late = time.monotonic() + (_SLOW_SECONDS if had_room else PENDING_SECONDS)
        self._launch = launch
        # Spread, so that losing a node takes few of them.
        remote: Any = ray.remote
        options = {"num_cpus": CPUS, "max_concurrency": _CALLS, "scheduling_strategy": "SPREAD"}
        self._handle = remote(**options)(PlaceOnNode).options(name=name).remote()
        self._call = self._handle.launch.remote(*launch)
        self._probe: Any = None  # a call to an unreachable actor
        self._out_of_reach = 0.0  # start time of the probe, if there is one

    def is_late(self, now: float) -> bool:
        """Whether it should have started by `now`, but has not."""
        return self.launched is None and now >= self._late

    def look(self, now: float) -> tuple[Ended, bool] | None:
        """How it ended, and whether the platform ended it; None while it runs or is pending."""
        from ray import exceptions

        try:
            answer = _answer(self._call)
            if isinstance(answer, Ended):
                return answer, False
            if answer is not None:
                self.launched, self._call = answer, self._handle.wait.remote()
            if self._probe is not None and _answer(self._probe) is not None:
                self._probe = None
        except exceptions.ActorUnavailableError:  # its state is not known yet
            if self._probe is None:
                self._out_of_reach = now
            self._probe = self._handle.log_tail.remote(1)
            again = self._handle.launch.remote(*self._launch) if self.launched is None else self._handle.wait.remote()
            self._call = again
        except exceptions.RayError as error:
            return self._explained(error)
        if self._probe is not None and now - self._out_of_reach >= ANSWER_SECONDS:
            return Ended(f"its node {self._node} does not respond any more", False, ""), True
        return None

    def _explained(self, error: Any) -> tuple[Ended, bool]:
        from ray import exceptions

        text = str(error)
        logger.info("An actor ended: %s", text)
        if isinstance(error, exceptions.RayTaskError):  # a call of `PlaceOnNode` raised
            return Ended(f"on node {error.ip}: {describe(error.cause)}", True, ""), False
        if isinstance(error, exceptions.OutOfMemoryError):
            return Ended(
                f"out of memory: Ray ended it because its node {self._node} had little memory left", False, ""
            ), False
        if not isinstance(error, exceptions.RayActorError) or error._actor_init_failed:
            return Ended(f"Ray could not start it: {_last_line(text)}", True, ""), False
        if error.preempted or "node has died" in text or "node was terminated" in text:
            why = "was taken away" if error.preempted else "is lost"
            return Ended(f"its node {self._node} {why}", False, ""), True
        return Ended(f"its actor was killed: {_last_line(text)}", False, ""), False

    @property
    def _node(self) -> str:
        return "" if self.launched is None else self.launched.node

    def log_tail(self, lines: int) -> str:
        """The last lines that its process wrote; "" if unreachable."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            return str(ray.get(self._handle.log_tail.remote(lines), timeout=ANSWER_SECONDS))
        return ""

    def begin_end(self) -> Any:
        """Asks the actor to end the process; returns the call to wait for, if any."""
        return None if self.launched is None else self._handle.end.remote()

    def end(self) -> None:
        """Ends the process, and the actor."""
        import ray

        call = self.begin_end()
        if call is not None:
            ray.wait([call], timeout=ANSWER_SECONDS)
        self.discard()

    def discard(self) -> None:
        """Ends the actor."""
        import ray

        ray.kill(self._handle)


def _answer(call: Any) -> Any:
    """The result of a call; None while it is running."""
    import ray

    return ray.get(call) if ray.wait([call], timeout=0)[0] else None


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1].strip()
