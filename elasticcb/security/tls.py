"""TLS between the processes of a job: every process shows a certificate of one CA, servers and clients alike.

What is wrong with a process's own files is found before anything is sent, and what is wrong with the other side by
asking it once more: gRPC itself only says that it can't connect.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elasticcb.errors import UsageError

_PROBE_SECONDS = 3.0  # for the other side to connect, and again to answer
_HANDSHAKE_TURNS = 10  # more than any handshake takes

# Settings, arguments of `Cluster` and flags have these names.
FILES = ("tls_cert", "tls_key", "tls_ca")


@dataclass(frozen=True)
class TLSFiles:
    """Paths of PEM files.

    Attributes:
        tls_cert: certificate of this process; others may follow, up to the CA's.
        tls_key: its private key, without a password.
        tls_ca: certificate of the CA that has signed those of all processes.
        tls_name: that all certificates are for; "": each is for the address that its process listens on.
    """

    tls_cert: str
    tls_key: str
    tls_ca: str
    tls_name: str = ""

    @property
    def flags(self) -> list[str]:
        """By which another process is told of them."""
        named = {name: getattr(self, name) for name in (*FILES, "tls_name")}
        return [f"--{name}={value}" for name, value in named.items() if value]


@dataclass(frozen=True)
class TLS:
    """The content of the files, checked; `load` makes it."""

    files: TLSFiles
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)

    @classmethod
    def load(cls, files: TLSFiles) -> TLS:
        """Raises `UsageError` for files that can't be read, do not belong together, or are not valid now."""
        contents = [_read(name, getattr(files, name)) for name in FILES]
        _check(files)
        return cls(files, *contents)

    def diagnose(self, host: str, connection: socket.socket) -> str:
        """Why a server does not talk to this process, as far as TLS is the reason; else ""."""
        context = _context(ssl.PROTOCOL_TLS_CLIENT, self.files)
        context.set_alpn_protocols(["h2"])
        try:
            with context.wrap_socket(connection, server_hostname=self.files.tls_name or host) as tunnel:
                # In TLS 1.3 the server looks at this process's certificate only now.
                return "" if tunnel.recv(1) else "it ends the connection when it sees this process's certificate"
        except ssl.SSLCertVerificationError as error:
            return f"its certificate is refused: {error.verify_message}"
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or ""):
                return f"it refuses this process's certificate: {_words(error)}"
            return (
                "it does not speak TLS. Start it with TLS, too, or this process without; all processes of a job must "
                "do the same"
            )


def tls_files(values: Mapping[str, str]) -> TLSFiles | None:
    """The files that settings or flags name; None when they name none. Raises `UsageError` when some are missing."""
    given = [name for name in FILES if values.get(name)]
    if not given:
        if values.get("tls_name"):
            raise UsageError("tls_name was given without certificates. Give tls_cert, tls_key and tls_ca, too.")
        return None
    missing = [name for name in FILES if name not in given]
    if missing:
        raise UsageError(
            f"{' and '.join(given)} came without {' and '.join(missing)}. TLS takes all three: a process's "
            "certificate, its key, and the certificate of the CA that has signed those of all processes."
        )
    cert, key, ca = (str(Path(values[name]).expanduser().absolute()) for name in FILES)
    return TLSFiles(cert, key, ca, values.get("tls_name", ""))


def diagnose(address: str, tls: TLS | None) -> str:
    """Why a process at "host:port" can't be talked to, as far as TLS is the reason; else ""."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return ""  # nobody is there
    with (
        contextlib.suppress(OSError, UnicodeError),
        socket.create_connection((host, int(port)), _PROBE_SECONDS) as connection,
    ):
        connection.settimeout(_PROBE_SECONDS)
        if tls is not None:
            return tls.diagnose(host, connection)
        if _speaks_tls(connection):
            return "it speaks TLS, and this process does not. Give this process --tls_cert, --tls_key and --tls_ca, too"
    return ""


def _speaks_tls(connection: socket.socket) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{name}: {path} can't be read: {error.strerror}. Expected a PEM file.") from None


def _check(files: TLSFiles) -> None:
    """Shows the certificate to a server of its own, which must take it."""
    server = _context(ssl.PROTOCOL_TLS_SERVER, files)
    server.verify_mode = ssl.CERT_REQUIRED
    client = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    try:
        for _ in range(_HANDSHAKE_TURNS):
            for side in sides:
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise UsageError(
            f"tls_cert: the certificate {files.tls_cert} can't be used with the CA {files.tls_ca}: "
            f"{error.verify_message}. Expected one that this CA has signed, and that is valid now."
        ) from None
    except ssl.SSLError as error:
        raise UsageError(f"tls_cert: the certificate {files.tls_cert} can't be used: {_words(error)}.") from None


def _context(protocol: int, files: TLSFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.tls_cert, files.tls_key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            what = f"the key {files.tls_key} is not that of the certificate {files.tls_cert}"
        else:
            what = f"{files.tls_cert} and {files.tls_key} are no certificate and key: {_words(error)}"
        raise UsageError(
            f"tls_key: {what}. Expected PEM files that belong together, the key without a password."
        ) from None
    try:
        context.load_verify_locations(files.tls_ca)
    except ssl.SSLError as error:
        raise UsageError(
            f"tls_ca: {files.tls_ca} holds no certificate: {_words(error)}. Expected the PEM file of a CA."
        ) from None
    return context


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
