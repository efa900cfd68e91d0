"""TLS between real gRPC servers and clients, with certificates that fit and that don't."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import datetime
import gc
import os
import pickle
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_until

from certificates import CA
from elasticcb.errors import TLSError, UsageError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc import connection as connection_module
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.frame_service import FrameService
from elasticcb.rpc.server import Server
from elasticcb.rpc.services import Method
from elasticcb.rpc.tensors import Frame
from elasticcb.security import certificates
from elasticcb.security import tls as tls_module
from elasticcb.security.certificates import NAME
from elasticcb.security.credentials import Access
from elasticcb.security.tls import TLS, TLSFiles, _context, diagnose, make_ca, tls_files

ECHO = Method("test.Echo", "Echo", pb.ExchangeRequest, pb.ExchangeResponse)


class Echo:
    """A server whose calls wait while `open` is not set."""

    def __init__(self, tls, stack):
        self._stack = stack
        self.open, self.entered = threading.Event(), threading.Event()
        self.open.set()
        server = Server(access=Access("secret", tls))
        server.add(FrameService({ECHO: self._answer}))
        server.start()
        stack.callback(server.stop)
        self.address = server.address

    def _answer(self, request):
        self.entered.set()
        self.open.wait(20)
        return Frame(pb.ExchangeResponse(version=7), {})

    def connect(self, tls):
        connection = Connection(self.address, "the echo server", 60.0, Access("secret", tls))
        self._stack.callback(connection.close)
        return connection

    @staticmethod
    def ask(connection):
        return connection.call(ECHO, Frame(pb.ExchangeRequest(), {})).header.version


@pytest.fixture
def serve():
    """Starts servers, which end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda tls: Echo(tls, stack)


@pytest.fixture
def call():
    """Has a client with one access call a server with another."""
    with contextlib.ExitStack() as stack:

        def call(server_tls, client_tls, token="", host="127.0.0.1"):
            server = Server(host, access=Access(token, server_tls))
            answer = Frame(pb.ExchangeResponse(version=7), {})
            server.add(FrameService({ECHO: lambda request: answer}))
            server.start()
            connection = Connection(server.address, "the echo server", 60.0, Access(token, client_tls))
            stack.callback(server.stop)
            stack.callback(connection.close)
            method = ECHO
            return connection.call(method, Frame(pb.ExchangeRequest(), {})).header.version

        yield call


def showing(tls, **other):
    """As `tls`, with another certificate, key or CA than its files have."""
    shown = copy.copy(tls)
    shown._certificate = dataclasses.replace(tls.certificate, **other)
    return shown


@pytest.fixture
def never_again(monkeypatch):
    """No call may be tried again."""
    monkeypatch.setattr(connection_module.time, "sleep", lambda seconds: pytest.fail("the call was tried again"))


def test_processes_with_certificates_of_one_ca_talk_to_each_other(call, tmp_path):
    ca = CA(tmp_path)
    assert call(TLS.load(ca.issue("server")), TLS.load(ca.issue("client", address="10.9.8.7")), token="secret") == 7


def test_the_certificates_of_a_job_serve_at_any_address(call, tmp_path):
    tls = make_ca(str(tmp_path))
    assert call(tls, tls) == 7
    assert call(tls, tls, host="localhost") == 7


def test_the_ca_of_a_job_is_readable_by_its_owner_alone(tmp_path):
    files = make_ca(str(tmp_path)).files
    before = files.read()
    assert make_ca(str(tmp_path)).files == files == TLSFiles(str(tmp_path / "tls" / "ca.pem"))
    assert files.read() != before
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "tls" / "ca.pem").stat().st_mode) == 0o600


def test_a_certificate_of_one_job_is_of_no_use_in_another(call, tmp_path, never_again):
    tls = [make_ca(str(tmp_path / name)) for name in ("a", "b")]
    with pytest.raises(TLSError, match=r"the echo server at .* its certificate is refused: .*"):
        call(*tls)


def test_a_server_of_a_foreign_ca_is_refused_at_once(call, tmp_path, never_again):
    server, client = CA(tmp_path, "theirs").issue(), CA(tmp_path, "ours").issue()
    with pytest.raises(TLSError, match="its certificate is refused: unable to get local issuer certificate"):
        call(TLS.load(server), TLS.load(client))


def test_a_client_of_a_foreign_ca_is_refused_at_once(call, tmp_path, never_again):
    theirs, ours = CA(tmp_path, "theirs"), CA(tmp_path, "ours")
    trusting = showing(TLS.load(theirs.issue()), ca=ours.path.read_bytes())
    with pytest.raises(TLSError, match=r"it (refuses|ends the connection when it sees) this process's certificate"):
        call(TLS.load(ours.issue()), trusting)


def test_a_server_whose_certificate_expired_while_it_ran_is_named(call, tmp_path, never_again):
    ca = CA(tmp_path)
    good, old = TLS.load(ca.issue()), ca.issue("old", days=-1).read()
    expired = showing(good, cert=old["tls_cert"], key=old["tls_key"])
    with pytest.raises(TLSError, match="its certificate is refused: certificate has expired"):
        call(expired, good)
    with pytest.raises(TLSError, match=r"it (refuses|ends the connection when it sees) this process's certificate"):
        call(good, expired)


def test_a_server_must_be_where_its_certificate_says(call, tmp_path, never_again):
    ca = CA(tmp_path)
    with pytest.raises(TLSError, match=r"IP address mismatch, certificate is not valid for '127.0.0.1'"):
        call(TLS.load(ca.issue(address="10.0.0.1")), TLS.load(ca.issue("client")))


def test_a_name_for_all_certificates_stands_for_their_addresses(call, tmp_path, never_again):
    ca = CA(tmp_path)
    server, client = ca.issue(dns="train.example.org"), ca.issue("client", address="10.0.0.1")
    named = dataclasses.replace(client, tls_name="train.example.org")
    assert call(TLS.load(server), TLS.load(named)) == 7
    other = dataclasses.replace(client, tls_name="other.example.org")
    with pytest.raises(TLSError, match="Hostname mismatch"):
        call(TLS.load(server), TLS.load(other))


def test_a_plain_client_of_a_server_with_tls_is_told_at_once(call, tmp_path, never_again):
    with pytest.raises(TLSError, match=r"it speaks TLS, and this process does not. Give this process --tls_ca"):
        call(TLS.load(CA(tmp_path).issue()), None)


def test_a_client_with_tls_of_a_plain_server_is_told_at_once(call, tmp_path, never_again):
    with pytest.raises(TLSError, match="it does not speak TLS"):
        call(None, TLS.load(CA(tmp_path).issue()))


def test_a_server_that_is_not_there_is_no_matter_of_tls(tmp_path):
    server = Server()
    server.stop()
    assert diagnose(server.address, None) == ""
    assert diagnose(server.address, TLS.load(CA(tmp_path).issue())) == ""


_KILLED_WHILE_IT_STARTS = """
import os, signal, ssl, sys
from pathlib import Path
from elasticcb.security.tls import TLS, TLSFiles

def read_and_die(context, cert, key, password):
    assert b"PRIVATE KEY" in Path(key).read_bytes()
    os.kill(os.getpid(), signal.SIGKILL)

ssl.SSLContext.load_cert_chain = read_and_die
TLS.load(TLSFiles(sys.argv[1]))
"""


def test_a_process_that_is_killed_while_it_starts_leaves_no_key(tmp_path):
    ca = make_ca(str(tmp_path)).files.tls_ca
    (tmp_path / "tmp").mkdir()
    program = [sys.executable, "-c", _KILLED_WHILE_IT_STARTS, ca]
    ended = subprocess.run(program, env=os.environ | {"TMPDIR": str(tmp_path / "tmp")}, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list((tmp_path / "tmp").iterdir()) == []


# ---------------------------------------------------------------- renewal


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
    time.sleep(max(0.0, certificate.expires - time.time()) + 0.1)
    assert has_expired(certificate)


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
    with pytest.raises(UsageError, match=r"own.pem is no CA that can issue a certificate: it has expired\."):
        TLS.load(ca_for(days=0))


def test_a_certificate_of_ones_own_ends_with_the_ca_that_has_signed_it(tmp_path, ca_for):
    files = CA(tmp_path).issue(days=20.0)
    with Path(files.tls_ca).open("ab") as file:
        file.write(Path(ca_for(days=2).tls_ca).read_bytes())  # another one that is trusted
    assert days_left(TLS.load(files)) == pytest.approx(10, abs=0.1)


# ---------------------------------------------------------------- a process's own files


def replaced(files, tmp_path, **contents):
    paths = {}
    for name, content in contents.items():
        paths[name] = str(tmp_path / f"other-{name}")
        Path(paths[name]).write_bytes(content)
    return dataclasses.replace(files, **paths)


def test_a_key_of_another_certificate_is_refused(tmp_path):
    ca = CA(tmp_path)
    files = dataclasses.replace(ca.issue("a"), tls_key=ca.issue("b").tls_key)
    with pytest.raises(UsageError, match=r"tls_key: the key .*b-key.pem is not that of the certificate .*a-cert.pem"):
        TLS.load(files)


def test_an_expired_certificate_is_refused_before_anything_is_sent(tmp_path):
    with pytest.raises(UsageError, match=r"own-cert.pem can't be used with the CA .*: certificate has expired"):
        TLS.load(CA(tmp_path).issue(days=-1))


def test_a_certificate_that_the_ca_has_not_signed_is_refused(tmp_path):
    files = dataclasses.replace(CA(tmp_path, "a").issue(), tls_ca=str(CA(tmp_path, "b").path))
    with pytest.raises(UsageError, match=r"can't be used with the CA .*b.pem: unable to get local issuer certificate"):
        TLS.load(files)


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_ca"])
@pytest.mark.parametrize("content", [b"", b"not PEM"])
def test_a_file_that_is_no_pem_is_named(tmp_path, name, content):
    files = replaced(CA(tmp_path).issue(), tmp_path, **{name: content})
    with pytest.raises(UsageError, match=f"other-{name}"):
        TLS.load(files)


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_ca"])
def test_a_file_that_is_not_there_is_named(tmp_path, name):
    files = dataclasses.replace(CA(tmp_path).issue(), **{name: str(tmp_path / "none.pem")})
    with pytest.raises(UsageError, match=rf"^{name}: .*none.pem can't be read: No such file or directory"):
        TLS.load(files)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda ca: b"", "it holds no certificate"),
        (lambda ca: ca[: ca.index(b"-----BEGIN PRIVATE KEY")], "it holds no key, or one with a password"),
    ],
)
def test_a_ca_without_its_key_issues_nothing(tmp_path, content, words):
    files = make_ca(str(tmp_path)).files
    path = Path(files.tls_ca)
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(UsageError, match=rf"tls_ca: {path} is no CA that can issue a certificate: {words}\."):
        TLS.load(files)


def test_the_ca_of_a_job_is_enough_for_a_process(tmp_path):
    files = make_ca(str(tmp_path)).files
    assert tls_files({"tls_ca": files.tls_ca}) == files
    assert files.flags == [f"--tls_ca={files.tls_ca}"]
    copied = TLS.load(files).at("/etc/elasticcb")
    assert copied.files.flags == ["--tls_ca=/etc/elasticcb/ca.pem"]
    assert copied.contents == {"ca.pem": Path(files.tls_ca).read_bytes()}


@pytest.mark.parametrize("are_own", [False, True])
def test_copies_of_the_files_are_of_the_same_certificate(tmp_path, monkeypatch, are_own):
    tls = TLS.load(CA(tmp_path).issue()) if are_own else make_ca(str(tmp_path))
    before = tls.files
    monkeypatch.setattr(tls_module, "_check", lambda *args: pytest.fail("it was checked again"))
    assert tls.at("/etc/elasticcb").certificate is tls.certificate
    assert tls.at("/etc/elasticcb").files.tls_ca == "/etc/elasticcb/ca.pem"
    assert tls.files == before


def test_a_key_stays_in_its_process_when_others_are_given_the_ca(tmp_path):
    own = make_ca(str(tmp_path))
    sent = pickle.dumps(own)
    assert own.certificate.key not in sent
    other = pickle.loads(sent).at(str(tmp_path / "there"))
    assert other.contents == own.contents
    assert other.certificate.key not in {own.certificate.key, b""}
    assert other.certificate.ca == own.certificate.ca


def test_one_file_without_the_others_is_refused():
    with pytest.raises(UsageError, match="tls_cert came without tls_key and tls_ca"):
        tls_files({"tls_cert": "a.pem"})
    with pytest.raises(UsageError, match="tls_key and tls_ca came without tls_cert"):
        tls_files({"tls_ca": "a.pem", "tls_key": "b.pem"})
    with pytest.raises(UsageError, match="tls_name was given without certificates"):
        tls_files({"tls_name": "a.example.org"})
    assert tls_files({}) is None


def test_keys_are_not_shown(tmp_path):
    tls = make_ca(str(tmp_path))
    assert "PRIVATE" not in repr(Access("secret", tls))
    assert "secret" not in repr(Access("secret", tls))
