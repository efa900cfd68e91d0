"""TLS between the processes of a job: every process shows a certificate of one CA, servers and clients alike.

What is wrong with a process's own files is found before anything is sent, and what is wrong with the other side by
asking it once more: gRPC itself only says that it can't connect.
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
from elasticcb.security.private_folder import make_private

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 3.0  # for the other side to connect, and again to answer
_HANDSHAKE_TURNS = 10  # more than any handshake takes
_LOOK_SECONDS = 10.0  # between looks at files that others may have replaced
_FOLDER = "tls"  # in the job's folder

# Settings, arguments of `Cluster` and flags have these names; the files are called so in other folders.
FILES: Mapping[str, str] = {"tls_cert": "cert.pem", "tls_key": "key.pem", "tls_ca": "ca.pem"}


@dataclass(frozen=True)
class TLSFiles:
    """Paths of PEM files.

    Attributes:
        tls_ca: certificate of the CA that has signed those of all processes; with its key, where it is a job's own.
        tls_cert: certificate of this process; others may follow, up to the CA's. "": it issues itself one.
        tls_key: its private key, without a password; likewise.
        tls_name: that all certificates are for; "": each is for the address that its process listens on.
    """

    tls_ca: str
    tls_cert: str = ""
    tls_key: str = ""
    tls_name: str = ""

    @property
    def flags(self) -> list[str]:
        """By which another process is told of them."""
        named = {name: getattr(self, name) for name in (*FILES, "tls_name")}
        return [f"--{name}={value}" for name, value in named.items() if value]

    @property
    def are_own(self) -> bool:
        """Whether they are the user's own, not those of a CA by which processes issue themselves certificates."""
        return bool(self.tls_cert)

    def read(self) -> dict[str, bytes]:
        """What is in them, by the names of `FILES`. Raises `UsageError` when one can't be read."""
        return {name: _read(name, path) for name in FILES if (path := getattr(self, name))}


@dataclass(frozen=True)
class Certificate:
    """What a process shows to others, and by what it knows them; all PEM.

    Attributes:
        begins, expires: seconds since the epoch, between which the others take it.
    """

    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)
    begins: float
    expires: float


class TLS:
    """The certificate of this process, which is renewed.

    The files are read again from time to time, and what others have put there is used. A certificate that this process
    issues itself is replaced when less than a third of its life is left, or when its life has not begun: the clock was
    wrong.

    Args:
        files: where `contents` is from.
        contents: of the files, as `TLSFiles.read` gives them.

    Raises `UsageError` for files that do not belong together, or are not valid now.
    """

    def __init__(self, files: TLSFiles, contents: Mapping[str, bytes]) -> None:
        self.files, self._contents = files, dict(contents)
        self._certificate = self._make(self._contents)
        self._looked, self._look_at = self._times_of_looks()

    @classmethod
    def load(cls, files: TLSFiles) -> TLS:
        """Raises `UsageError` for files that can't be read, do not belong together, or are not valid now."""
        return cls(files, files.read())

    @property
    def name(self) -> str:
        """That the certificates of others must be for; "": their addresses."""
        return self.files.tls_name or ("" if self.files.are_own else certificates.NAME)

    @property
    def certificate(self) -> Certificate:
        """The present one: another object when it was renewed."""
        if not self._looked <= time.time() < self._look_at:
            self._look()
            self._looked, self._look_at = self._times_of_looks()
        return self._certificate

    @property
    def contents(self) -> dict[str, bytes]:
        """Of the files, by the names of their copies."""
        return {FILES[name]: content for name, content in self._contents.items()}

    def at(self, folder: str) -> TLS:
        """The same, of copies of the files in `folder`."""
        paths: dict[str, Any] = {name: f"{folder}/{FILES[name]}" for name in self._contents}
        other = object.__new__(TLS)  # with the same certificate
        vars(other).update(vars(self), files=replace(self.files, **paths))
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        return TLS, (self.files, self._contents)  # a process that unpickles it issues itself a certificate

    def _look(self) -> None:
        contents = self._contents
        try:
            contents = self.files.read()
        except UsageError as error:
            level = logging.WARNING if self.files.are_own else logging.DEBUG  # the CA that it has read is enough
            logger.log(level, "The certificate is not renewed: %s", error)
        now, before, replaced = time.time(), self._certificate, contents != self._contents
        if not replaced and (self.files.are_own or before.begins <= now < self._renew_at):
            return
        try:
            renewed = self._make(contents)
        except (UsageError, OSError) as error:  # the files may be half replaced
            logger.warning("The certificate is not renewed: %s", error)
            return
        if replaced or now < before.begins or renewed.expires > before.expires:  # the CA itself may end
            self._certificate, self._contents = renewed, contents
            logger.info("This process has a new certificate")

    def _times_of_looks(self) -> tuple[float, float]:
        """Now, and when the next one is due."""
        now = time.time()
        next_look = now + _LOOK_SECONDS
        if not self.files.are_own and now < self._renew_at:
            next_look = min(next_look, self._renew_at)
        return now, next_look

    @property
    def _renew_at(self) -> float:
        """When a process issues itself the next certificate."""
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
                    f"tls_ca: {self.files.tls_ca} is no CA that can issue a certificate: {error}. Expected a PEM file "
                    "with the certificate and the key of a CA, such as tls/ca.pem in the folder of a job; or give "
                    "tls_cert and tls_key, too."
                ) from None
        try:
            begins, expires = certificates.validity_of(cert, ca)
        except ValueError:
            raise UsageError(
                f"tls_cert: {self.files.tls_cert} holds no certificate. Expected a PEM file with that of this process."
            ) from None
        made = Certificate(cert, key, ca, begins, expires)
        _check(self.files, made)
        return made

    def connected(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """The same connection to a server with TLS, after the handshake. Raises `OSError`."""
        context = _context(ssl.PROTOCOL_TLS_CLIENT, self.files, self.certificate)
        return context.wrap_socket(connection, server_hostname=self.name or host)

    def accepted(self, connection: socket.socket) -> ssl.SSLSocket:
        """The same connection of a client with TLS, after the handshake. Raises `OSError`."""
        context = _context(ssl.PROTOCOL_TLS_SERVER, self.files, self.certificate)
        context.verify_mode = ssl.CERT_REQUIRED
        return context.wrap_socket(connection, server_side=True)

    def diagnose(self, host: str, connection: socket.socket) -> str:
        """Why a server does not talk to this process, as far as TLS is the reason; else ""."""
        context = _context(ssl.PROTOCOL_TLS_CLIENT, self.files, self.certificate)
        context.set_alpn_protocols(["h2"])
        try:
            with context.wrap_socket(connection, server_hostname=self.name or host) as tunnel:
                # In TLS 1.3 the server looks at this process's certificate only now.
                return "" if tunnel.recv(1) else "it ends the connection when it sees this process's certificate"
        except ssl.SSLCertVerificationError as error:
            return f"its certificate is refused: {error.verify_message}"
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or ""):
                return f"it refuses this process's certificate: {_words(error)}"
            return "it does not speak TLS. All processes of a job must do so, or all of them have --insecure"


def make_ca(job: str) -> TLS:
    """Makes a CA, in `tls` in the job's folder, which its owner alone can read; one that is there is replaced.

    Raises `UsageError` when the file can't be written, or the folder is another user's.
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
    """The files that settings or flags name; None when they name none. Raises `UsageError` when some are missing."""
    given = [name for name in FILES if values.get(name)]
    if not given:
        if values.get("tls_name"):
            raise UsageError("tls_name was given without certificates. Give tls_cert, tls_key and tls_ca, too.")
        return None
    missing = [name for name in FILES if name not in given]
    if missing and given != ["tls_ca"]:
        raise UsageError(
            f"{' and '.join(given)} came without {' and '.join(missing)}. A certificate of your own takes all three: "
            "tls_cert, its key, and the certificate of the CA that has signed those of all processes."
        )
    paths = {name: str(Path(values[name]).expanduser().absolute()) for name in given}
    return TLSFiles(**paths, tls_name=values.get("tls_name", ""))


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
            return "it speaks TLS, and this process does not. Give this process --tls_ca, or its certificates, too"
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
    """Shows the certificate to a server of its own, which must take it."""
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
            f"{given}: the certificate {name} can't be used with the CA {files.tls_ca}: "
            f"{error.verify_message}. Expected one that this CA has signed, and that is valid now."
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
                what = f"the key {files.tls_key} is not that of the certificate {files.tls_cert}"
            else:
                what = f"{files.tls_cert} and {files.tls_key} are no certificate and key: {_words(error)}"
            raise UsageError(
                f"tls_key: {what}. Expected PEM files that belong together, the key without a password."
            ) from None
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise UsageError(
                f"tls_ca: {files.tls_ca} holds no certificate: {_words(error)}. Expected the PEM file of a CA."
            ) from None
    return context


@contextlib.contextmanager
def _path_of(content: bytes) -> Iterator[str]:
    """Where OpenSSL, which only reads files, reads it: a file without a name, which is gone when this process is."""
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(content)
        file.seek(0)  # some systems read on from there
        yield f"/dev/fd/{file.fileno()}"


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
