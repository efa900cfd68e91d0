"""What somebody of another user finds where the processes of a job listen.

As a program: reads sockets from its input, as JSON, becomes another user, and prints as JSON, by socket, a word for
each attempt: to call who listens there (`call`), to listen there instead (`take`). With `pose` it listens at a port
until others have tried to call it there, and prints the metadata of their calls.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 -- later, another user can't read it
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.admission import PROTOCOL, PROTOCOL_KEY, TOKEN_KEY
from elasticcb.security.certificates import issue, make_ca

NOBODY = 65534
_METHODS = [
    f"/{service.full_name}/{name}"
    for service in pb.DESCRIPTOR.services_by_name.values()
    for name in [*(method.name for method in service.methods), "Attach"]
]
_TOKENS = [(), ((TOKEN_KEY, ""),), ((TOKEN_KEY, "0" * 32),)]
_HTTP = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def listening(processes: Iterable[psutil.Process]) -> list[str]:
    """Where they listen: "host:port", and the names of Unix sockets that have one."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in process.net_connections("all"):
                if each.family is socket.AF_UNIX and each.laddr:
                    found.add(each.laddr)
                elif each.status == psutil.CONN_LISTEN:
                    found.add(f"{each.laddr.ip.removeprefix('::ffff:')}:{each.laddr.port}")
    return sorted(found)


def answers(sockets: list[str]) -> dict[str, list[str]]:
    """What another user is answered at each of them, without the job's token."""
    found: dict[str, list[str]] = _as_another_user("call", sockets)
    return found


def takes(sockets: list[str]) -> dict[str, list[str]]:
    """What becomes of the attempts of another user to listen at Unix sockets: to bind one, to remove it, and to have
    another folder in the place of its own."""
    found: dict[str, list[str]] = _as_another_user("take", sockets)
    return found


def hears(address: str, tls: bool, attempts: int) -> list[str]:
    """The metadata of calls to another user who listens at an address, with or without TLS, when so many attempts to
    call there are over."""
    heard: list[str] = _as_another_user("pose", [address, tls, attempts])
    return heard


def _as_another_user(what: str, given: list[Any]) -> Any:
    if os.getuid():
        pytest.skip("only root can become another user")
    done = subprocess.run(
        [sys.executable, __file__, what], input=json.dumps(given), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _tried(where: str) -> set[str]:
    if ":" not in where or where.startswith(("/", "@", "\0")):
        return {_by_unix(where.replace("@", "\0", 1))}
    host, _, port = where.rpartition(":")
    with grpc.insecure_channel(where) as channel:
        found = {_called(channel, method, token) for method in _METHODS for token in _TOKENS}
    found |= set(filter(None, (_by_tls(host, int(port), own) for own in (False, True))))
    with socket.create_connection((host, int(port)), 10.0) as connection:
        connection.sendall(_HTTP)
        with contextlib.suppress(OSError):
            if b"".join(iter(lambda: connection.recv(4096), b"")).startswith(b"HTTP/1.0 200"):
                found.add("metrics")
    return found


def _called(channel: grpc.Channel, method: str, token: Any) -> str:
    try:
        channel.unary_unary(method)(b"", metadata=(*token, (PROTOCOL_KEY, str(PROTOCOL))), timeout=10.0)
    except grpc.RpcError as error:
        code: str = error.code().name
        return code
    return "answered"


def _by_tls(host: str, port: int, own: bool) -> str:
    """What comes of TLS without a certificate, or with one of another CA; "" where nobody speaks it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if own:
        cert, key, _ = issue(make_ca())
        with tempfile.NamedTemporaryFile() as file:
            file.write(cert + key)
            file.flush()
            context.load_cert_chain(file.name)
    with socket.create_connection((host, port), 10.0) as connection:
        try:
            with context.wrap_socket(connection) as tunnel:
                return "TLS answered" if tunnel.recv(1) else "TLS refused"
        except ssl.SSLError as error:
            return "TLS refused" if "ALERT" in (error.reason or "") else ""
        except OSError:
            return ""


def _pose(address: str, tls: bool, attempts: int) -> list[str]:
    """Answers no call. Connections go to gRPC by way of this function, which sees those, too, that TLS ends."""
    heard: list[str] = []

    class Listener(grpc.GenericRpcHandler):
        def service(self, call: Any) -> Any:
            heard.extend(value for _, value in call.invocation_metadata if isinstance(value, str))
            over.release()

    over = threading.Semaphore(0)
    server = grpc.server(ThreadPoolExecutor(4), handlers=[Listener()])
    if tls:
        cert, key, _ = issue(make_ca())
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)]))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    host, _, own = address.rpartition(":")
    with socket.create_server((host, int(own))) as listener:

        def forward(near: socket.socket) -> None:
            far = socket.create_connection(("127.0.0.1", port))
            threading.Thread(target=_pump, args=(far, near), daemon=True).start()
            _pump(near, far)
            over.release()

        def accept() -> None:
            with contextlib.suppress(OSError):  # it was closed
                while True:
                    threading.Thread(target=forward, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        for _ in range(attempts):
            assert over.acquire(timeout=60.0), "nobody calls"
    server.stop(0.0).wait()
    return heard


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _by_unix(name: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(3.0)
        try:
            connection.connect(name)
            connection.sendall(bytes(16))
            return "answered" if connection.recv(1) else "closed"
        except TimeoutError:
            return "closed"  # nobody says a word
        except OSError:
            return "refused"


def _taken(path: str) -> list[str]:
    folder = os.path.dirname(path)
    attempts: list[Callable[[], Any]] = [
        lambda: socket.socket(socket.AF_UNIX).bind(path),
        lambda: os.unlink(path),
        lambda: os.rename(folder, f"{folder}-gone"),
        lambda: os.listdir(folder),
    ]
    return [_outcome(attempt) for attempt in attempts]


def _outcome(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    return "done"


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def main() -> None:
    given = json.load(sys.stdin)
    become_nobody()
    if sys.argv[1] == "pose":
        print(json.dumps(_pose(*given)))
        return
    attempt = {"call": _tried, "take": _taken}[sys.argv[1]]
    with ThreadPoolExecutor(16) as pool:  # some wait for an answer that does not come
        print(json.dumps({where: sorted(found) for where, found in zip(given, pool.map(attempt, given), strict=True)}))


if __name__ == "__main__":
    main()
