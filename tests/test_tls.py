"""TLS between real gRPC servers and clients, with certificates that fit and that don't."""

import contextlib
import dataclasses
import stat
from pathlib import Path

import pytest

from certificates import CA
from elasticcb.errors import TLSError, UsageError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc import connection as connection_module
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.frame_service import FrameService
from elasticcb.rpc.server import Server
from elasticcb.rpc.services import Method
from elasticcb.rpc.tensors import Frame
from elasticcb.security.certificates import NAME, make_certificates
from elasticcb.security.credentials import Access
from elasticcb.security.tls import TLS, diagnose, tls_files

ECHO = Method("test.Echo", "Echo", pb.ExchangeRequest, pb.ExchangeResponse)


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


@pytest.fixture
def never_again(monkeypatch):
    """No call may be tried again."""
    monkeypatch.setattr(connection_module.time, "sleep", lambda seconds: pytest.fail("the call was tried again"))


def test_processes_with_certificates_of_one_ca_talk_to_each_other(call, tmp_path):
    ca = CA(tmp_path)
    assert call(TLS.load(ca.issue("server")), TLS.load(ca.issue("client", address="10.9.8.7")), token="secret") == 7


def test_the_certificates_of_a_job_serve_at_any_address(call, tmp_path):
    tls = TLS.load(make_certificates(str(tmp_path)))
    assert call(tls, tls) == 7
    assert call(tls, tls, host="localhost") == 7


def test_the_certificates_of_a_job_are_readable_by_their_owner_alone(tmp_path):
    files = make_certificates(str(tmp_path))
    again = make_certificates(str(tmp_path))
    assert (files, files.tls_name) == (again, NAME)
    folder = tmp_path / "tls"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == ["ca.pem", "cert.pem", "key.pem"]  # not the CA's key
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_certificate_of_one_job_is_of_no_use_in_another(call, tmp_path, never_again):
    tls = [TLS.load(make_certificates(str(tmp_path / name))) for name in ("a", "b")]
    with pytest.raises(TLSError, match=r"the echo server at .* its certificate is refused: .*"):
        call(*tls)


def test_a_server_of_a_foreign_ca_is_refused_at_once(call, tmp_path, never_again):
    server, client = CA(tmp_path, "theirs").issue(), CA(tmp_path, "ours").issue()
    with pytest.raises(TLSError, match="its certificate is refused: unable to get local issuer certificate"):
        call(TLS.load(server), TLS.load(client))


def test_a_client_of_a_foreign_ca_is_refused_at_once(call, tmp_path, never_again):
    theirs, ours = CA(tmp_path, "theirs"), CA(tmp_path, "ours")
    stranger = TLS.load(theirs.issue())
    trusting = dataclasses.replace(
        stranger, ca=ours.path.read_bytes(), files=dataclasses.replace(stranger.files, tls_ca=str(ours.path))
    )
    with pytest.raises(TLSError, match=r"it (refuses|ends the connection when it sees) this process's certificate"):
        call(TLS.load(ours.issue()), trusting)


def test_a_server_whose_certificate_expired_while_it_ran_is_named(call, tmp_path, never_again):
    ca = CA(tmp_path)
    good, old = TLS.load(ca.issue()), ca.issue("old", days=-1)
    expired = TLS(old, *(Path(path).read_bytes() for path in (old.tls_cert, old.tls_key, old.tls_ca)))
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
    with pytest.raises(TLSError, match=r"it speaks TLS, and this process does not. Give this process --tls_cert"):
        call(TLS.load(CA(tmp_path).issue()), None)


def test_a_client_with_tls_of_a_plain_server_is_told_at_once(call, tmp_path, never_again):
    with pytest.raises(TLSError, match="it does not speak TLS"):
        call(None, TLS.load(CA(tmp_path).issue()))


def test_a_server_that_is_not_there_is_no_matter_of_tls(tmp_path):
    server = Server()
    server.stop()
    assert diagnose(server.address, None) == ""
    assert diagnose(server.address, TLS.load(CA(tmp_path).issue())) == ""


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


def test_one_file_without_the_others_is_refused():
    with pytest.raises(UsageError, match="tls_cert came without tls_key and tls_ca"):
        tls_files({"tls_cert": "a.pem"})
    with pytest.raises(UsageError, match="tls_name was given without certificates"):
        tls_files({"tls_name": "a.example.org"})
    assert tls_files({}) is None


def test_keys_are_not_shown(tmp_path):
    tls = TLS.load(make_certificates(str(tmp_path)))
    assert "PRIVATE" not in repr(Access("secret", tls))
    assert "secret" not in repr(Access("secret", tls))
