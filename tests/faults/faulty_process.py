"""The part of `Faults` (faults.py) in a process of a job: brings about what the test has asked for.

The package knows nothing of it. When the modules of `elasticcb.roles` have been imported, the functions with which a
process begins its role are wrapped; there and then the functions that stand for events are wrapped, if this process is
to fail at one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

# By event: the module in which a function is looked up, its name there, and whether the event is before or after it.
EVENTS = {
    # of a worker
    "asks for a task": ("elasticcb.clients.master", "MasterClient.get_task", "before"),
    "trains a batch": ("elasticcb.worker.task_run", "_LocalTraining.train", "before"),
    "has what it trained merged": ("elasticcb.worker.local_updates", "LocalUpdates.merge", "after"),
    "evaluates a batch": ("elasticcb.worker.task_run", "TaskRun._evaluate", "before"),
    "has sent half a call to a server": ("elasticcb.rpc.link", "ClientLink.call", "within"),
    "waits for a server's answer": ("elasticcb.rpc.link", "ClientLink._first_bytes", "before"),
    "reports a task": ("elasticcb.clients.master", "MasterClient.report_done", "before"),
    "has reported a task": ("elasticcb.clients.master", "MasterClient.report_done", "after"),
    # of a parameter server
    "has applied a push": ("elasticcb.ps.servicer", "Servicer._push", "after"),
    "has saved its part": ("elasticcb.checkpoint.shard_file", "write_part", "after"),
    "pauses for another number of servers": ("elasticcb.ps.servicer", "Servicer.move", "before"),
    "reads what other servers have written": ("elasticcb.checkpoint.parts", "load", "before"),
    # of the master
    "has taken a report": ("elasticcb.master.master_server", "MasterServer.report_done", "after"),
    "has given a server its model back": ("elasticcb.master.servers", "Servers._give_back", "after"),
    "has paused the servers": ("elasticcb.master.server_scaling", "Pause._close", "after"),
    "has written down the number of servers": ("elasticcb.master.servers", "Servers._note", "after"),
    # of `elasticcb serve`
    "swaps versions": ("elasticcb.serving.loaded_export", "LoadedExport.use", "before"),
}


_BEGINNINGS: dict[str, tuple[str, Any]] = {
    "elasticcb.roles.process": ("begin", lambda process: _arm(*process.place)),
    "elasticcb.roles.master": ("running_cluster", lambda *_, **__: _arm("master", 0)),
    "elasticcb.serving.full_export": ("main", lambda: _arm("export", 0)),
    "elasticcb.serving.server": ("listener_at", lambda *_: _arm("serve", 0)),
}


@functools.cache
def wait_for_role() -> None:
    """Makes this process, and those that it forks, know their role when they begin it, and other time limits."""
    for name, beginning in _BEGINNINGS.items():
        _when_imported(name, functools.partial(_wrap, beginning))
    limits = Path(os.environ["ELASTICCB_FAULTS"], "limits")
    if limits.exists():
        for limit, seconds in json.loads(limits.read_text()).items():
            module, _, name = limit.rpartition(".")
            _when_imported(module, functools.partial(_set, name, seconds))


def _wrap(beginning: tuple[str, Any], module: Any) -> None:
    _before(module, *beginning)


def _set(name: str, value: Any, module: Any) -> None:
    assert hasattr(module, name), f"{module.__name__} has no {name}"
    setattr(module, name, value)


def _when_imported(name: str, change: Callable[[Any], None]) -> None:
    """Changes a module as soon as it is there."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Changed(name, change))


class _Changed:
    """Finds one module, and changes it when it has been imported."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = execute_and_change
        return spec


def _before(owner: Any, name: str, act: Any) -> None:
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return inner(*args, **kwargs)

    setattr(owner, name, wrapper)


def _after(owner: Any, name: str, act: Any) -> None:
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        act()
        return result

    setattr(owner, name, wrapper)


def _arm(role: str, index: int) -> None:
    folder = Path(os.environ["ELASTICCB_FAULTS"])
    for file in sorted(folder.glob(f"{role}-{index}-*.json")):
        arm(json.loads(file.read_text()), file.with_suffix(".done"))
    if (folder / "network").exists():
        _go_through_the_network(f"{role}-{index}", str(folder / "network"))


def function_of(event: str) -> tuple[Any, str, str]:
    """The object whose attribute is the function, the attribute's name, and when the event is."""
    module, path, when = EVENTS[event]
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    return owner, name, when


def arm(fault: dict[str, Any], done: Path) -> None:
    """Makes this process fail at an event, unless `done` is there: another one has failed so before."""
    owner, name, when = function_of(fault["event"])
    count = itertools.count(1)

    def happen(*args: Any, **kwargs: Any) -> None:
        if next(count) < fault["nth"]:
            return
        with contextlib.suppress(FileExistsError):
            done.touch(exist_ok=False)
            if when == "within":
                _send_half(*args)
            _ACTIONS[fault["action"]]()

    (_after if when == "after" else _before)(owner, name, happen)


def _send_half(link: Any, method: str, sent: Any, timeout: float) -> None:
    name, data = method.encode(), sent.data
    message = struct.pack("<QQB", len(data), 0, len(name)) + name + data  # as in elasticcb/rpc/link.py
    link._socket.sendall(message[: len(message) // 2])


_ACTIONS = {
    # To this thread, which else may go on for a moment.
    "kill": lambda: signal.pthread_kill(threading.get_ident(), signal.SIGKILL),
    "stop": lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP),
}


# ------------------------------------------------------------ connections through the test's network


def _go_through_the_network(process: str, control: str) -> None:
    from elasticcb.rpc import connection as connection_module
    from elasticcb.rpc import shared_frames

    connect, listen = connection_module.Connection.__init__, shared_frames.Listener.__init__

    @functools.wraps(connect)
    def connect_by_proxy(self: Any, address: str, name: str, *args: Any, **kwargs: Any) -> None:
        connect(self, _proxy_of(control, process, "master" if name == "the master" else "ps", address), name,
                *args, **kwargs)  # fmt: skip

    @functools.wraps(listen)
    def listen_by_proxy(self: Any) -> None:
        listen(self)
        self.name = _proxy_of(control, process, "ps", f"\0{self.name}").removeprefix("\0")

    connection_module.Connection.__init__ = connect_by_proxy
    shared_frames.Listener.__init__ = listen_by_proxy


def _proxy_of(control: str, source: str, to: str, target: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        asked.connect(control)
        asked.sendall(json.dumps([source, to, target]).encode() + b"\n")
        return str(json.loads(asked.makefile().readline()))
