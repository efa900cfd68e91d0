"""Certificates are renewed before they expire, and when their files or their CA are replaced."""

import concurrent.futures
import contextlib
import datetime
import gc
import socket
import ssl
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from echo_server import ask, echo, start_server
from waiting import wait_until

from certificates import CA
from elasticcb.errors import UsageError
from elasticcb.rpc.connection import Connection
from elasticcb.security import certificates
from elasticcb.security import tls as tls_module
from elasticcb.security.certificates import NAME
from elasticcb.security.credentials import Access
from elasticcb.security.tls import TLS, TLSFiles, _context, make_ca


class Echo:
    """A server whose calls wait while `open` is not set."""

    def __init__(self, tls, stack):
        self._stack = stack
        self.open, self.entered = threading.Event(), threading.Event()
        self.open.set()
        server = start_server(self._answer, access=Access("secret", tls))
        stack.callback(server.stop)
        self.address = server.address

    def _answer(self, request):
        self.entered.set()
        self.open.wait(20)
        return echo(request)

    def connect(self, tls):
        connection = Connection(self.address, "the echo server", 60.0, Access("secret", tls))
        self._stack.callback(connection.close)
        return connection

    @staticmethod
    def ask(connection):
        return ask(connection, 7).header.version


@pytest.fixture
def serve():
    """Starts servers, which end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda tls: Echo(tls, stack)


def shown_by(address, tls, name=NAME):
    """The certificate that a server shows to one who connects anew, and when it expires."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, tls.files, tls.certificate)
    host, port = address.split(":")
    with (
        socket.create_connection((host, int(port))) as connection,
        context.wrap_socket(connection, server_hostname=name) as tunnel,
    ):
        pem = ssl.DER_cert_to_PEM_cert(tunnel.getpeercert(binary_form=True))
    return pem, certificates.validity_of(pem.encode(), b"")[1]


@pytest.fixture
def short_life(monkeypatch):
    """Certificates that processes issue themselves expire after 3 s."""
    monkeypatch.setattr(certificates, "LIFE_SECONDS", 3.0)


def has_expired(certificate):
    return certificate.expires < time.time()


def wait_for_end(certificate):
    wait_until(lambda: has_expired(certificate))


def test_a_certificate_is_renewed_before_it_expires_and_nobody_is_cut_off(tmp_path, short_life, serve):
    files = make_ca(str(tmp_path)).files
    server, first = serve(TLS.load(files)), TLS.load(files)
    connection = server.connect(first)
    before = first.certificate
    assert server.ask(connection) == 7
    channel, shown = connection.channel, shown_by(server.address, first)
    assert first.certificate is before
    wait_until(lambda: first.certificate is not before)  # some call comes
    assert not has_expired(before)
    wait_for_end(before)
    assert server.ask(connection) == 7
    assert connection.channel is not channel
    after = shown_by(server.address, first)
    assert after[0] != shown[0]
    assert after[1] > time.time() > shown[1]
    assert server.ask(server.connect(TLS.load(files))) == 7


def test_a_call_under_way_does_not_end_with_the_certificate_that_it_began_with(tmp_path, short_life, serve):
    tls = make_ca(str(tmp_path))
    server = serve(tls)
    connection = server.connect(tls)
    server.open.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        channel = connection.channel
        slow = pool.submit(server.ask, connection)
        assert server.entered.wait(10)
        wait_for_end(connection._tls._certificate)
        before = weakref.ref(channel)
        assert connection.channel is not channel
        del channel
        gc.collect()
        assert before() is None
        server.open.set()
        assert slow.result(10) == 7
        assert server.ask(connection) == 7


def test_files_of_ones_own_are_read_again_when_they_have_changed(tmp_path, monkeypatch, serve):
    monkeypatch.setattr(tls_module, "_LOOK_SECONDS", 0.0)
    ca = CA(tmp_path)
    files = ca.issue("own", days=1.0)
    tls = TLS.load(files)
    server = serve(tls)
    before = tls.certificate
    assert tls.certificate is before
    content = Path(files.tls_cert).read_bytes()
    Path(files.tls_cert).write_bytes(content[:200])
    assert tls.certificate is before
    assert ca.issue("own", days=5.0) == files
    assert tls.certificate.expires - before.expires == pytest.approx(4 * 86_400)
    assert shown_by(server.address, tls, "127.0.0.1")[1] == tls.certificate.expires
    assert server.ask(server.connect(tls)) == 7


@pytest.fixture
def set_back(monkeypatch):
    """Sets the clock back by some seconds, for this process's code; OpenSSL's is right."""

    def set_back(seconds):
        class Clock(datetime.datetime):
            @classmethod
            def now(cls, zone=None):
                return datetime.datetime.now(zone) - datetime.timedelta(seconds=seconds)

        now = time.time
        monkeypatch.setattr(tls_module, "time", SimpleNamespace(time=lambda: now() - seconds))
        monkeypatch.setattr(certificates, "datetime", SimpleNamespace(**(vars(datetime) | {"datetime": Clock})))

    return set_back


def test_a_certificate_of_a_process_whose_clock_was_ahead_is_replaced(tmp_path, set_back):
    tls = make_ca(str(tmp_path))
    before = tls.certificate
    set_back(86_400)
    assert tls.certificate.begins == pytest.approx(before.begins - 86_400, abs=60)
    assert tls.certificate is tls.certificate
    ca = certificates.validity_of(before.ca, b"")
    assert ca[0] < time.time() - 86_400


@pytest.fixture
def ca_for(monkeypatch, tmp_path):
    """Makes a CA with its key, as users may have one, that is valid for some days; always in the same file."""

    def make(days):
        monkeypatch.setattr(certificates, "_CA_LIFE", datetime.timedelta(days=days))
        (tmp_path / "own.pem").write_bytes(certificates.make_ca())
        return TLSFiles(str(tmp_path / "own.pem"))

    return make


def days_left(tls):
    return (tls.certificate.expires - time.time()) / 86_400


def test_a_certificate_ends_with_its_ca_and_another_is_issued_when_that_is_replaced(ca_for, monkeypatch, serve):
    monkeypatch.setattr(tls_module, "_LOOK_SECONDS", 0.0)
    tls = TLS.load(ca_for(days=5))
    server = serve(tls)
    before = tls.certificate
    assert days_left(tls) == pytest.approx(5, abs=0.01)
    assert shown_by(server.address, tls)[1] == before.expires
    assert tls.certificate is before
    files = ca_for(days=300)
    assert days_left(tls) == pytest.approx(30, abs=0.01)
    assert server.ask(server.connect(TLS.load(files))) == 7
    Path(files.tls_ca).unlink()
    assert tls.certificate is tls.certificate


def test_a_ca_that_has_expired_issues_nothing(ca_for):
    with pytest.raises(UsageError, match=r"own.pem is not a CA that can issue certificates: it has expired\."):
        TLS.load(ca_for(days=0))


def test_a_certificate_of_ones_own_ends_with_the_ca_that_has_signed_it(tmp_path, ca_for):
    files = CA(tmp_path).issue(days=20.0)
    with Path(files.tls_ca).open("ab") as file:
        file.write(Path(ca_for(days=2).tls_ca).read_bytes())  # another one that is trusted
    assert days_left(TLS.load(files)) == pytest.approx(10, abs=0.1)
