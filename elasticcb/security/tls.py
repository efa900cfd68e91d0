"""TLS between the processes of a job: every process, server or client, presents a certificate of one CA.

Errors in a process's own files are detected before anything is sent; errors of the other side are diagnosed by a second
connection, because gRPC only reports that it can't connect.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elasticcb.errors import UsageError
from elasticcb.security import certificates
from elasticcb.security.socket_folder import make_private

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 3.0  # seconds for the other side to connect, and again to answer
_HANDSHAKE_TURNS = 10  # more than any handshake takes
_LOOK_SECONDS = 10.0  # seconds between checks for replaced files
_FOLDER = "tls"  # in the job's folder

# Names of settings, of arguments of `Cluster`, of flags, and of copies of the files.
FILES: Mapping[str, str] = {"tls_cert": "cert.pem", "tls_key": "key.pem", "tls_ca": "ca.pem"}


@dataclass(frozen=True)
class TLSFiles:
    """Paths of PEM files.

    Attributes:
        tls_ca: certificate of the CA that signed the certificates of all processes; with its key if it is the job's own
            CA.
        tls_cert: certificate of this process; intermediate certificates may follow. "": the process issues its own.
        tls_key: its private key, without a password; "": likewise.
        tls_name: name in all certificates; "": each contains the address that its process listens on.
    """

    tls_ca: str
    tls_cert: str = ""
    tls_key: str = ""
    tls_name: str = ""

    @property
    def flags(self) -> list[str]:
        """The flags that pass them to another process."""
        named = {name: getattr(self, name) for name in (*FILES, "tls_name")}
        return [f"--{name}={value}" for name, value in named.items() if value]

    @property
    def are_own(self) -> bool:
        """Whether they are the user's own certificates, not self-issued from a CA."""
        return bool(self.tls_cert)

    def read(self) -> dict[str, bytes]:
        """The contents, by the names of `FILES`. Raises `UsageError` if a file can't be read."""
        return {name: _read(name, path) for name in FILES if (path := getattr(self, name))}


@dataclass(frozen=True)
class Certificate:
    """A process's own certificate and its trusted CA; all PEM.

    Attributes:
        begins, expires: validity period, in seconds since the epoch.
    """

    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)
    begins: float
    expires: float


class TLS:
    """The certificate of this process, renewed automatically.

    The files are reread periodically, so replaced files take effect. A self-issued certificate is renewed when less
    than a third of its lifetime is left, or if it is not valid yet (the clock was wrong).

    Args:
        files: files that `contents` was read from.
        contents: contents of the files, from `TLSFiles.read`.

    Raises `UsageError` if the files do not belong together, or are not valid now.
    """

    def __init__(self, files: TLSFiles, contents: Mapping[str, bytes]) -> None:
        self.files, self._contents = files, dict(contents)
        self._certificate = self._make(self._contents)
        self._looked, self._look_at = self._times_of_looks()

    @classmethod
    def load(cls, files: TLSFiles) -> TLS:
        """Raises `UsageError` if files can't be read, do not belong together, or are not valid now."""
        return cls(files, files.read())

    @property
    def name(self) -> str:
        """Name that the certificates of other processes must contain; "": their addresses."""
        return self.files.tls_name or ("" if self.files.are_own else certificates.NAME)

    @property
    def certificate(self) -> Certificate:
        """The current certificate; a new object after each renewal."""
        if not self._looked <= time.time() < self._look_at:
            self._look()
            self._looked, self._look_at = self._times_of_looks()
        return self._certificate

    @property
    def contents(self) -> dict[str, bytes]:
        """Contents of the files, by the names of their copies."""
        return {FILES[name]: content for name, content in self._contents.items()}

    def at(self, folder: str) -> TLS:
        """The same, for copies of the files in `folder`."""
        paths: dict[str, Any] = {name: f"{folder}/{FILES[name]}" for name in self._contents}
        other = object.__new__(TLS)  # with the same certificate
        vars(other).update(vars(self), files=replace(self.files, **paths))
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        return TLS, (self.files, self._contents)  # a process that unpickles it issues its own certificate

    def _look(self) -> None:
        contents = self._contents
        try:
            contents = self.files.read()
        except UsageError as error:
            level = logging.WARNING if self.files.are_own else logging.DEBUG  # the CA that it has read is sufficient
            logger.log(level, "Could not renew the certificate: %s", error)
        now, before, replaced = time.time(), self._certificate, contents != self._contents
        if not replaced and (self.files.are_own or before.begins <= now < self._renew_at):
            return
        try:
            renewed = self._make(contents)
        except (UsageError, OSError) as error:  # the files may be partly replaced
            logger.warning("Could not renew the certificate: %s", error)
            return
        if replaced or now < before.begins or renewed.expires > before.expires:  # the CA itself may end
            self._certificate, self._contents = renewed, contents
            logger.info("Renewed the certificate of this process")

    def _times_of_looks(self) -> tuple[float, float]:
        """The time of this check (now), and when the next one is due."""
        now = time.time()
        next_look = now + _LOOK_SECONDS
        if not self.files.are_own and now < self._renew_at:
            next_look = min(next_look, self._renew_at)
        return now, next_look

    @property
    def _renew_at(self) -> float:
        """When a process issues its next certificate."""
        return self._certificate.expires - certificates.LIFE_SECONDS / 3

    def _make(self, contents: Mapping[str, bytes]) -> Certificate:
        """Raises `UsageError`."""
        if self.files.are_own:
            cert, key, ca = (contents[name] for name in FILES)
        else:
            try:
                cert, key, ca = certificates.issue(contents["tls_ca"])
            except ValueError as error:
                raise UsageError(
                    f"tls_ca: {self.files.tls_ca} is not a CA that can issue certificates: {error}. Expected a PEM "
                    "file with the certificate and the key of a CA, such as tls/ca.pem in a job's folder; or set "
                    "tls_cert and tls_key as well."
                ) from None
        try:
            begins, expires = certificates.validity_of(cert, ca)
        except ValueError:
            raise UsageError(
                f"tls_cert: {self.files.tls_cert} contains no certificate. Expected a PEM file with the certificate "
                "of this process."
            ) from None
        made = Certificate(cert, key, ca, begins, expires)
        _check(self.files, made)
        return made

    def connected(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """Wraps a client's connection in TLS and does the handshake. Raises `OSError`."""
        context = _context(ssl.PROTOCOL_TLS_CLIENT, self.files, self.certificate)
        return context.wrap_socket(connection, server_hostname=self.name or host)

    def accepted(self, connection: socket.socket) -> ssl.SSLSocket:
        """Wraps a server's connection in TLS and does the handshake. Raises `OSError`."""
        context = _context(ssl.PROTOCOL_TLS_SERVER, self.files, self.certificate)
        context.verify_mode = ssl.CERT_REQUIRED
        return context.wrap_socket(connection, server_side=True)

    def diagnose(self, host: str, connection: socket.socket) -> str:
        """Why a server refuses this process, if TLS is the reason; else ""."""
        context = _context(ssl.PROTOCOL_TLS_CLIENT, self.files, self.certificate)
        context.set_alpn_protocols(["h2"])
        try:
            with context.wrap_socket(connection, server_hostname=self.name or host) as tunnel:
                # In TLS 1.3, the server verifies this process's certificate only now.
                return "" if tunnel.recv(1) else "it closes the connection when it receives this process's certificate"
        except ssl.SSLCertVerificationError as error:
            return f"its certificate is refused: {error.verify_message}"
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or ""):
                return f"it refuses this process's certificate: {_words(error)}"
            return "it does not use TLS. Either all processes of a job must use TLS, or none (insecure)"


def make_ca(job: str) -> TLS:
    """Creates a CA in `tls` in the job's folder, readable only by its owner; an existing one is replaced.

    Raises `UsageError` if the file can't be written, or the folder belongs to another user.
    """
    path = Path(job).absolute() / _FOLDER / FILES["tls_ca"]
    content = certificates.make_ca()
    try:
        make_private(path.parent, by_link=False)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    except OSError as error:
        raise UsageError(f"The CA of the job can't be written to {path}: {error}.") from error
    return TLS(TLSFiles(str(path)), {"tls_ca": content})


def tls_files(values: Mapping[str, str]) -> TLSFiles | None:
    """The files in settings or flags; None if there are none. Raises `UsageError` if some are missing."""
    given = [name for name in FILES if values.get(name)]
    if not given:
        if values.get("tls_name"):
            raise UsageError("tls_name was given without certificates. Set tls_cert, tls_key and tls_ca as well.")
        return None
    missing = [name for name in FILES if name not in given]
    if missing and given != ["tls_ca"]:
        raise UsageError(
            f"{' and '.join(given)} was given without {' and '.join(missing)}. Your own certificate needs all three: "
            "tls_cert, tls_key, and tls_ca with the CA that signed the certificates of all processes."
        )
    paths = {name: str(Path(values[name]).expanduser().absolute()) for name in given}
    return TLSFiles(**paths, tls_name=values.get("tls_name", ""))


def diagnose(address: str, tls: TLS | None) -> str:
    """Why a connection to a process at "host:port" fails, if TLS is the reason; else ""."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return ""  # nothing listens there
    with (
        contextlib.suppress(OSError, UnicodeError),
        socket.create_connection((host, int(port)), _PROBE_SECONDS) as connection,
    ):
        connection.settimeout(_PROBE_SECONDS)
        if tls is not None:
            return tls.diagnose(host, connection)
        if _speaks_tls(connection):
            return "it uses TLS, but this process does not. Add tls_ca, or certificates, to this process"
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


def _check(files: TLSFiles, certificate: Certificate) -> None:
    """Tests the certificate with a local server, which must accept it."""
    server = _context(ssl.PROTOCOL_TLS_SERVER, files, certificate)
    server.verify_mode = ssl.CERT_REQUIRED
    client = _context(ssl.PROTOCOL_TLS_CLIENT, files, certificate)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    given, name = ("tls_cert", files.tls_cert) if files.are_own else ("tls_ca", f"issued by {files.tls_ca}")
    try:
        for _ in range(_HANDSHAKE_TURNS):
            for side in sides:
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise UsageError(
            f"{given}: the certificate {name} can't be used with the CA {files.tls_ca}: {error.verify_message}. "
            "Expected a certificate that is signed by this CA and valid now."
        ) from None
    except ssl.SSLError as error:
        raise UsageError(f"{given}: the certificate {name} can't be used: {_words(error)}.") from None


def _context(protocol: int, files: TLSFiles, certificate: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with contextlib.ExitStack() as until_end:
        contents = certificate.cert, certificate.key, certificate.ca
        cert, key, ca = (until_end.enter_context(_path_of(content)) for content in contents)
        try:
            context.load_cert_chain(cert, key, password="")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                what = f"the key {files.tls_key} does not belong to the certificate {files.tls_cert}"
            else:
                what = f"{files.tls_cert} and {files.tls_key} are not a certificate and a key: {_words(error)}"
            raise UsageError(f"tls_key: {what}. Expected matching PEM files, and a key without a password.") from None
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise UsageError(
                f"tls_ca: {files.tls_ca} contains no certificate: {_words(error)}. Expected the PEM file of a CA."
            ) from None
    return context


@contextlib.contextmanager
def _path_of(content: bytes) -> Iterator[str]:
    """An unnamed file for OpenSSL, which only reads files; it disappears with this process."""
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(content)
        file.seek(0)  # some systems continue reading from there
        yield f"/dev/fd/{file.fileno()}"


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
