"""Workers and parameter servers as processes on the nodes of an existing Ray cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elasticcb.cluster.base import BackendContext, ClusterBackend, Exit
from elasticcb.cluster.ray.actor import Ended, Launched, PlaceOnNode
from elasticcb.cluster.role import Place, RoleProcess
from elasticcb.errors import UsageError, describe
from elasticcb.settings import ClusterSettings

logger = logging.getLogger(__name__)

_NONE_FREE = "no Ray node has a free CPU"
_CPUS = 1  # CPUs that a process reserves
_ANSWER_SECONDS = 5.0  # seconds, for an unreachable actor, and for one that must end its process
_PENDING_SECONDS = 5.0  # seconds until a pending process is reported, and a worker makes room for a server
_SLOW_SECONDS = 30.0  # likewise, if there were free CPUs: Ray may be slow, and has reserved them already
_CALLS = 8  # to an actor at a time


def check_ray(address: str) -> None:
    """Raises `UsageError` if Ray is not installed, or can't be reached at `address` ("": at RAY_ADDRESS)."""
    variable = os.environ.get("RAY_ADDRESS", "")
    given = f"ray_address={address!r}" if address else f"The environment variable RAY_ADDRESS={variable!r}"
    address = address or variable
    if "://" in address:
        raise UsageError(
            f"{given} is an address for clients outside the cluster, but workers and servers must be able to call the "
            "master. Run the command on a node of the cluster, with HOST:PORT or without an address; or submit it "
            "with `ray job submit`."
        )
    if address not in ("", "auto") and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:/]+):\d{1,5}", address):
        raise UsageError(f"{given} is not the address of a Ray cluster. Expected HOST:PORT, such as 10.0.0.1:6379.")
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            "Running on Ray needs the package ray, which is not installed. Run `pip install 'elasticcb[ray]'` here "
            "and on all nodes."
        )


class RayCluster(ClusterBackend):
    """Processes on Ray nodes: one actor for each, which ends with the program that started it.

    Nodes may share the job's folder; otherwise each node creates it.
    """

    name = "ray"
    summary = "on the nodes of a Ray cluster"
    settings = frozenset({"ray_address"})
    where_logs_are = ", on their nodes"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._directory, self._address = context.directory, context.settings.ray_address
        check_ray(self._address)
        self._marker = f".master-{secrets.token_hex(8)}"
        self._host = ""
        self._connected = False  # initialized by this object, not by the surrounding program
        self._actors: dict[Place, _Actor] = {}
        self._held: list[tuple[str, int, str]] = []  # workers that are requested once all servers are placed
        self._last_words: dict[Place, str] = {}
        self._told_unshared = False
        self._gave_way = 0.0

    @classmethod
    def missing(cls, cluster: ClusterSettings) -> Iterator[str]:
        try:
            check_ray(cluster.ray_address)
        except UsageError as error:
            yield str(error)

    def prepare(self) -> None:
        if self._host:
            return
        import ray

        if not ray.is_initialized():
            self._connect()
        Path(self._directory, self._marker).touch()
        self._host = ray.util.get_node_ip_address()

    def _connect(self) -> None:
        import ray

        try:
            _check_reachable(self._address or os.environ.get("RAY_ADDRESS", ""))
            with _handlers_kept():
                ray.init(self._address or "auto", log_to_driver=False, configure_logging=False)
        except Exception as error:  # Ray raises many types
            raise UsageError(_why_unreachable(self._address, error)) from None
        self._connected = True

    @property
    def host(self) -> str:
        return self._host

    def start(self, role: str, index: int, master_address: str) -> None:
        self.prepare()
        self.kill(role, index)  # a process that has deregistered, and still exists
        if role == "worker":
            self._held.append((role, index, master_address))
        else:
            self._actors[role, index] = self._make_actor(role, index, master_address)

    def _make_actor(self, role: str, index: int, master_address: str) -> _Actor:
        process = RoleProcess(role=role, master=master_address, index=index, access=self.access)
        name = f"elasticcb-{role}-{index}-{secrets.token_hex(4)}"
        return _Actor(name, (process, self._directory, self._marker, self.context.log_level, _CPUS))

    def poll(self) -> list[Exit]:
        exits, now = [], time.monotonic()
        for place, actor in list(self._actors.items()):
            ended = actor.look(now)
            if ended is not None:
                exits.append(self._remove(place, *ended))
            elif actor.launched is not None:
                self._check_shared(place, actor.launched)
        self._give_way(exits, now)
        if not self._waiting_servers():
            held, self._held = self._held, []
            for role, index, master_address in held:
                self._actors[role, index] = self._make_actor(role, index, master_address)
        return exits

    def _remove(self, place: Place, ended: Ended, taken_away: bool) -> Exit:
        actor = self._actors.pop(place)
        actor.discard()
        self._last_words[place] = ended.log_tail
        launched = actor.launched
        where = f"{launched.node}:{self._log_path(*place)}" if launched is not None else ""
        pid = 0 if launched is None else launched.pid
        return Exit(*place, pid, ended.reason, ended.failed, where, taken_away)

    def _waiting_servers(self) -> list[int]:
        return [index for (role, index), actor in self._actors.items() if role == "ps" and actor.launched is None]

    def _give_way(self, exits: list[Exit], now: float) -> None:
        """Ends a worker if a server can't be placed: without it, no worker can continue."""
        late = [index for index in self._waiting_servers() if self._actors["ps", index].is_late(now)]
        workers = [place for place, actor in self._actors.items() if place[0] == "worker" and actor.launched]
        if late and workers and now - self._gave_way >= _PENDING_SECONDS and _why_no_room() == _NONE_FREE:
            self._gave_way = now
            place = max(workers)
            self._actors[place].end()
            ended = Ended(f"it made room for parameter server {min(late)}, which could not be placed", False, "")
            exits.append(self._remove(place, ended, True))

    def _check_shared(self, place: Place, launched: Launched) -> None:
        if place[0] == "ps" and not launched.sees_job and not self._told_unshared:
            self._told_unshared = True
            self.context.say(
                f"Node {launched.node} does not see the job's folder {self._directory} on this machine. Recovery "
                "files of a parameter server there are lost with the node. Put the job's folder on a disk that "
                "all nodes share."
            )

    def pending(self) -> dict[Place, str]:
        now = time.monotonic()
        waiting = [place for place, actor in self._actors.items() if actor.is_late(now)]
        if not waiting:
            return {}
        held = [(role, index) for role, index, _ in self._held]
        return dict.fromkeys(waiting, _why_no_room()) | dict.fromkeys(held, "parameter servers are placed first")

    def kill(self, role: str, index: int) -> None:
        self._held = [each for each in self._held if each[:2] != (role, index)]
        actor = self._actors.pop((role, index), None)
        if actor is not None:
            actor.end()

    def stop(self, grace_seconds: float) -> None:
        actors, self._actors, self._held = list(self._actors.values()), {}, []
        if actors or self._connected:
            import ray

            ended = [call for actor in actors if (call := actor.begin_end()) is not None]
            if ended:
                ray.wait(ended, num_returns=len(ended), timeout=max(grace_seconds, _ANSWER_SECONDS))
            for actor in actors:
                actor.discard()
            if self._connected:
                self._connected = False
                ray.shutdown()
        if self._host:
            self._host = ""
            Path(self._directory, self._marker).unlink(missing_ok=True)

    def log_tail(self, role: str, index: int, lines: int = 30) -> str:
        actor = self._actors.get((role, index))
        if actor is not None and actor.launched is not None:
            return actor.log_tail(lines)
        return "\n".join(self._last_words.get((role, index), "").splitlines()[-lines:])

    def _log_path(self, role: str, index: int) -> Path:
        return Path(self._directory, "logs", f"{role}-{index}.log")


def _why_no_room() -> str:
    """Why Ray has not started an actor."""
    import ray

    if not any(node["Alive"] and node["Resources"].get("CPU", 0) >= _CPUS for node in ray.nodes()):
        return "no Ray node has a CPU for it, even if nothing else runs"
    return _NONE_FREE if ray.available_resources().get("CPU", 0) < _CPUS else "Ray has not started its actor yet"


def _check_reachable(address: str) -> None:
    """Raises `OSError` if nothing listens there; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()


def _why_unreachable(address: str, error: Exception) -> str:
    variable = os.environ.get("RAY_ADDRESS", "")
    where = address or (f"{variable} (from the environment variable RAY_ADDRESS)" if variable else "on this machine")
    return (
        f"No connection to the Ray cluster {where} ({describe(error).splitlines()[0]}). Start a cluster with `ray "
        "start --head`, and run the command on one of its nodes; choose another cluster with "
        "ray_address=HOST:PORT. If the cluster requires a token, set RAY_AUTH_MODE=token and copy its "
        "~/.ray/auth_token here."
    )


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray installs its own SIGTERM handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Actor:
    """The master's handle of a `PlaceOnNode`."""

    def __init__(self, name: str, launch: tuple[Any, ...]) -> None:
        import ray

        self.launched: Launched | None = None
        had_room = ray.available_resources().get("CPU", 0) >= _CPUS
        self._late = time.monotonic() + (_SLOW_SECONDS if had_room else _PENDING_SECONDS)
        self._launch = launch
        # Spread, so that losing a node takes few of them.
        remote: Any = ray.remote
        options = {"num_cpus": _CPUS, "max_concurrency": _CALLS, "scheduling_strategy": "SPREAD"}
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
        if self._probe is not None and now - self._out_of_reach >= _ANSWER_SECONDS:
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
            return str(ray.get(self._handle.log_tail.remote(lines), timeout=_ANSWER_SECONDS))
        return ""

    def begin_end(self) -> Any:
        """Asks the actor to end the process; returns the call to wait for, if any."""
        return None if self.launched is None else self._handle.end.remote()

    def end(self) -> None:
        """Ends the process, and the actor."""
        import ray

        call = self.begin_end()
        if call is not None:
            ray.wait([call], timeout=_ANSWER_SECONDS)
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
