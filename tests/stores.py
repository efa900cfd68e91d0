"""Real stores on this machine: an S3 server (moto), and an SFTP server (OpenSSH)."""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest


def _atomic(app: Any) -> Any:
    """Does conditional writes one after another: unlike S3, moto lets two of them look before either writes."""
    writing = threading.Lock()

    def answer(environ: Any, start: Any) -> Any:
        with writing if "HTTP_IF_NONE_MATCH" in environ else contextlib.nullcontext():
            return app(environ, start)

    return answer


class S3Server:
    """It can be stopped, and started again with what it holds. A context manager.

    Args:
        bucket: that it has.
        host: address at which it listens.
    """

    def __init__(self, bucket: str, host: str = "127.0.0.1") -> None:
        self._moto = pytest.importorskip("moto.server")
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # which logs every request
        pytest.importorskip("s3fs")
        self._host, self._port = host, 0
        self.start()
        fsspec.filesystem("s3", **self.options).mkdir(bucket)

    def start(self) -> None:
        self._server = self._moto.ThreadedMotoServer(ip_address=self._host, port=self._port, verbose=False)
        self._server.start()
        self._server._server.app = _atomic(self._server._server.app)
        self._port = self._server.get_host_and_port()[1]

    def stop(self) -> None:
        self._server.stop()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """While active, it takes connections and never answers."""
        self.stop()
        with socket.create_server((self._host, self._port), backlog=100):
            yield
        self.start()

    @property
    def address(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def options(self) -> dict[str, Any]:
        """For fsspec in this process."""
        retries = {"retries": {"max_attempts": 0}}
        return {"endpoint_url": self.address, "key": "key", "secret": "secret", "config_kwargs": retries}

    @property
    def environment(self) -> dict[str, str]:
        """For other processes."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def sftp_server(home: Path) -> Iterator[dict[str, Any]]:
    """Options of fsspec for an SFTP server on a free port; its files are those of this machine.

    Args:
        home: an empty folder for its keys.
    """
    pytest.importorskip("paramiko")
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if sshd is None or shutil.which("ssh-keygen") is None:
        pytest.skip("OpenSSH's sshd is not installed (Debian: apt-get install openssh-server)")
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)]
        subprocess.run(command, check=True)
    (home / "authorized").write_text((home / "user.pub").read_text())
    (home / "authorized").chmod(0o600)
    port = free_port()
    (home / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {home}/host\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {home}/authorized\nStrictModes no\nPasswordAuthentication no\n"
        "Subsystem sftp internal-sftp\nLogLevel ERROR\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd started as root wants it for its unprivileged half
    with (home / "log").open("w") as log:
        server = subprocess.Popen([sshd, "-D", "-e", "-f", str(home / "config")], stderr=log)
        try:
            _wait_until_listening(port, server, home / "log")
            yield {
                "port": port,
                "username": getpass.getuser(),
                "key_filename": str(home / "user"),
                "look_for_keys": False,
                "allow_agent": False,
            }
        finally:
            server.terminate()
            server.wait()


def _wait_until_listening(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
        except ConnectionRefusedError:
            if server.poll() is not None:
                pytest.skip(f"sshd does not start here: {log.read_text()[-300:]}")
        else:
            return
