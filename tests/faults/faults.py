"""Faults that a test brings about in the processes of a job, and a network between them that can fail."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
_CHUNK = 1 << 16  # bytes


class Faults:
    """What is to go wrong in a job that is started with `environment`.

    Args:
        folder: for what its processes have to know.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"ELASTICCB_FAULTS": str(self._folder), "PYTHONPATH": os.pathsep.join(paths)}

    def fail_at(self, role: str, index: int, event: str, action: str = "kill", nth: int = 1) -> Callable[[], bool]:
        """Makes one process fail, the first of its place that gets so far; those that follow it don't.

        Args:
            role: "worker", "ps", or "master", "export" (a full one) or "serve", whose index is 0.
            event: one of `faulty_process.EVENTS`.
            action: "kill" and "stop" send SIGKILL and SIGSTOP to itself.
            nth: how often the event must have come before it.

        Returns what tells whether it has happened.
        """
        number = len(list(self._folder.glob("*.json")))
        file = self._folder / f"{role}-{index}-{number}.json"
        file.write_text(json.dumps({"event": event, "action": action, "nth": nth}))
        return file.with_suffix(".done").exists

    def shorten(self, limit: str, seconds: float) -> None:
        """Makes a time limit of the package another one in all processes: "elasticcb.master.job._DRAIN_SECONDS"."""
        file = self._folder / "limits"
        limits = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**limits, limit: seconds}))

    @contextlib.contextmanager
    def network(self) -> Iterator[Network]:
        """Makes all connections of the job go by proxies in this process."""
        network = Network(self._folder / "network")
        try:
            yield network
        finally:
            network.close()


class Network:
    """Forwards connections between processes, over TCP and over Unix sockets without a file.

    Args:
        control: a Unix socket, by which a process asks for a proxy in front of an address.
    """

    def __init__(self, control: Path) -> None:
        self._routes: dict[tuple[str, str], Route] = {}
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(control))
        self._listen(listener, self._answer)

    def route(self, source: str, to: str) -> Route:
        """That which connections from a process ("worker-0", "ps-1", "master-0") to "master" or to "ps" take."""
        with self._lock:
            return self._routes.setdefault((source, to), Route())

    def _listen(self, listener: socket.socket, accept: Callable[[socket.socket], None]) -> None:
        listener.listen(64)
        self._listeners.append(listener)

        def run() -> None:
            with contextlib.suppress(OSError):  # it was closed
                while True:
                    accept(listener.accept()[0])

        threading.Thread(target=run, name="proxy", daemon=True).start()

    def _answer(self, asked: socket.socket) -> None:
        with asked:
            source, to, target = json.loads(asked.makefile().readline())
            route = self.route(source, to)
            if target.startswith("\0"):
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                listener.bind("")  # a name that nobody has
                address = listener.getsockname().decode()
                family, there = socket.AF_UNIX, target
            else:
                listener = socket.socket()
                listener.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{listener.getsockname()[1]}"
                host, _, port = target.rpartition(":")
                if host == "unix":
                    family, there = socket.AF_UNIX, port
                else:
                    family, there = socket.AF_INET, (host, int(port))
            proxy = route.proxy(family, there)
            self._listen(listener, proxy.forward)
            asked.sendall(json.dumps(address).encode() + b"\n")

    def close(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for route in self._routes.values():
            route.heal()
            route.cut()


class Route:
    """The connections from the process in a place to the addresses of others.

    What it is told holds for the addresses that it has led to: a process that is started at another is in reach.
    """

    def __init__(self) -> None:
        self._proxies: list[Proxy] = []
        self._held: set[object] = set()  # targets

    def proxy(self, family: socket.AddressFamily, target: object) -> Proxy:
        proxy = Proxy(family, target)
        self._proxies.append(proxy)
        if target in self._held:
            proxy.passes.clear()
        return proxy

    def partition(self) -> None:
        """Nothing gets through any more, and nobody is told; what is sent arrives after `heal`."""
        self._held = {proxy.target for proxy in self._proxies}
        for proxy in self._proxies:
            proxy.passes.clear()

    def heal(self) -> None:
        self._held.clear()
        for proxy in self._proxies:
            proxy.passes.set()

    def delay(self, seconds: float) -> None:
        """Each piece of what is sent takes so long, on the ways that there are."""
        for proxy in self._proxies:
            proxy.seconds = seconds

    def cut(self) -> None:
        """Ends all connections; they can be made again."""
        for proxy in self._proxies:
            proxy.cut()


class Proxy:
    """Forwards the connections to one address.

    Attributes:
        passes: whether anything gets through.
        seconds: that each piece takes.
    """

    def __init__(self, family: socket.AddressFamily, target: object) -> None:
        self._family, self.target = family, target
        self.passes = threading.Event()
        self.passes.set()
        self.seconds = 0.0
        self._ends: list[socket.socket] = []

    def forward(self, near: socket.socket) -> None:
        threading.Thread(target=self._run, args=(near,), name="proxy", daemon=True).start()

    def cut(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def _run(self, near: socket.socket) -> None:
        with near, socket.socket(self._family, socket.SOCK_STREAM) as far:
            self._ends += [near, far]
            self.passes.wait()
            try:
                far.connect(self.target)
            except OSError:
                return
            back = threading.Thread(target=self._pump, args=(far, near), name="proxy", daemon=True)
            back.start()
            self._pump(near, far)
            back.join()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if self.seconds:
                    time.sleep(self.seconds)
                self.passes.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
