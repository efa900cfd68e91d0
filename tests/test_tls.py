"""TLS between real gRPC servers and clients: who talks to whom, and what the others are told."""

import contextlib
import copy
import dataclasses

import pytest
from echo_server import ask, start_server

from certificates import CA
from elasticcb.errors import TLSError
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.server import Server
from elasticcb.security import tls as tls_module
from elasticcb.security.credentials import Access
from elasticcb.security.tls import TLS, diagnose, make_ca


@pytest.fixture
def call():
    """Has a client with one access call a server with another."""
    with contextlib.ExitStack() as stack:

        def call(server_tls, client_tls, token="", host="127.0.0.1"):
            server = start_server(host=host, access=Access(token, server_tls))
            connection = Connection(server.address, "the echo server", 60.0, Access(token, client_tls))
            stack.callback(server.stop)
            stack.callback(connection.close)
            return ask(connection, 7).header.version

        yield call


def showing(tls, **other):
    """As `tls`, with another certificate, key or CA than its files have."""
    shown = copy.copy(tls)
    shown._certificate = dataclasses.replace(tls.certificate, **other)
    return shown


def test_processes_with_certificates_of_one_ca_talk_to_each_other(call, tmp_path):
    ca = CA(tmp_path)
    assert call(TLS.load(ca.issue("server")), TLS.load(ca.issue("client", address="10.9.8.7")), token="secret") == 7


def test_the_certificates_of_a_job_serve_at_any_address(call, tmp_path):
    tls = make_ca(str(tmp_path))
    assert call(tls, tls) == 7
    assert call(tls, tls, host="localhost") == 7


def test_a_server_of_a_foreign_ca_is_refused_at_once(call, tmp_path, never_again):
    server, client = CA(tmp_path, "theirs").issue(), CA(tmp_path, "ours").issue()
    with pytest.raises(TLSError, match="its certificate is refused: unable to get local issuer certificate"):
        call(TLS.load(server), TLS.load(client))


def test_a_client_of_a_foreign_ca_is_refused_at_once(call, tmp_path, never_again):
    theirs, ours = CA(tmp_path, "theirs"), CA(tmp_path, "ours")
    trusting = showing(TLS.load(theirs.issue()), ca=ours.path.read_bytes())
    with pytest.raises(
        TLSError, match=r"it (refuses|closes the connection when it receives) this process's certificate"
    ):
        call(TLS.load(ours.issue()), trusting)


def test_a_server_whose_certificate_expired_while_it_ran_is_named(call, tmp_path, never_again):
    ca = CA(tmp_path)
    good, old = TLS.load(ca.issue()), ca.issue("old", days=-1).read()
    expired = showing(good, cert=old["tls_cert"], key=old["tls_key"])
    with pytest.raises(TLSError, match="its certificate is refused: certificate has expired"):
        call(expired, good)
    with pytest.raises(
        TLSError, match=r"it (refuses|closes the connection when it receives) this process's certificate"
    ):
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
    with pytest.raises(TLSError, match=r"it uses TLS, but this process does not. Add tls_ca"):
        call(TLS.load(CA(tmp_path).issue()), None)


def test_a_client_with_tls_of_a_plain_server_is_told_at_once(call, tmp_path, never_again):
    with pytest.raises(TLSError, match="it does not use TLS"):
        call(None, TLS.load(CA(tmp_path).issue()))


def test_a_server_that_is_not_there_is_no_matter_of_tls(tmp_path, monkeypatch):
    monkeypatch.setattr(tls_module, "_PROBE_SECONDS", 0.3)
    server = Server()
    server.stop()
    assert diagnose(server.address, None) == ""
    assert diagnose(server.address, TLS.load(CA(tmp_path).issue())) == ""
