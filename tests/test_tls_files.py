"""The files of a process's certificate: a CA of the job's own, and a user's files, of which some are refused."""

import dataclasses
import os
import pickle
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from certificates import CA
from elasticcb.errors import UsageError
from elasticcb.security import tls as tls_module
from elasticcb.security.credentials import Access
from elasticcb.security.tls import TLS, TLSFiles, make_ca, tls_files


def test_the_ca_of_a_job_is_readable_by_its_owner_alone(tmp_path):
    files = make_ca(str(tmp_path)).files
    before = files.read()
    assert make_ca(str(tmp_path)).files == files == TLSFiles(str(tmp_path / "tls" / "ca.pem"))
    assert files.read() != before
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "tls" / "ca.pem").stat().st_mode) == 0o600


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


def test_keys_are_not_shown(tmp_path):
    tls = make_ca(str(tmp_path))
    assert "PRIVATE" not in repr(Access("secret", tls))
    assert "secret" not in repr(Access("secret", tls))


# ---------------------------------------------------------------- refused


def replaced(files, tmp_path, **contents):
    paths = {}
    for name, content in contents.items():
        paths[name] = str(tmp_path / f"other-{name}")
        Path(paths[name]).write_bytes(content)
    return dataclasses.replace(files, **paths)


def test_a_key_of_another_certificate_is_refused(tmp_path):
    ca = CA(tmp_path)
    files = dataclasses.replace(ca.issue("a"), tls_key=ca.issue("b").tls_key)
    with pytest.raises(
        UsageError, match=r"tls_key: the key .*b-key.pem does not belong to the certificate .*a-cert.pem"
    ):
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
        (lambda ca: b"", "it contains no certificate"),
        (lambda ca: ca[: ca.index(b"-----BEGIN PRIVATE KEY")], "it contains no key, or its key has a password"),
    ],
)
def test_a_ca_without_its_key_issues_nothing(tmp_path, content, words):
    files = make_ca(str(tmp_path)).files
    path = Path(files.tls_ca)
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(UsageError, match=rf"tls_ca: {path} is not a CA that can issue certificates: {words}\."):
        TLS.load(files)


def test_one_file_without_the_others_is_refused():
    with pytest.raises(UsageError, match="tls_cert was given without tls_key and tls_ca"):
        tls_files({"tls_cert": "a.pem"})
    with pytest.raises(UsageError, match="tls_key and tls_ca was given without tls_cert"):
        tls_files({"tls_ca": "a.pem", "tls_key": "b.pem"})
    with pytest.raises(UsageError, match="tls_name was given without certificates"):
        tls_files({"tls_name": "a.example.org"})
    assert tls_files({}) is None
