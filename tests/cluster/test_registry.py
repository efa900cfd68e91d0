import pytest

from elasticcb.cluster.base import BackendContext
from elasticcb.cluster.registry import backend_of, contradictions, make_backend
from elasticcb.errors import UsageError
from elasticcb.settings import ClusterSettings, Given, NetworkOptions
from elasticcb.settings.checks import problems_of
from elasticcb.settings.cluster import INSECURE_RISK


def found(**arguments):
    given = Given.by_arguments(arguments)
    return list(contradictions(given.settings(), given))


def test_a_cluster_that_nobody_knows_is_refused_in_words():
    assert found(kind="lunar") == [
        "kind='lunar' is invalid. Expected one of 'local', 'inprocess', 'external', 'kubernetes', 'ray'."
    ]
    with pytest.raises(UsageError, match=r"There is no cluster 'lunar'\. Expected one of 'local'"):
        backend_of("lunar")


def test_a_setting_of_another_cluster_is_told():
    network = NetworkOptions(ray_address="10.0.0.1:6379")
    assert found(kind="ray", network=network) == []
    (told,) = found(network=network)
    assert "(ray_address='10.0.0.1:6379') applies only to kind='ray'." in told


@pytest.mark.parametrize(
    ("given", "encrypted"),
    [
        ({"kind": "local"}, False),
        ({"kind": "inprocess"}, False),
        ({"kind": "local", "tls": True}, True),
        ({"kind": "local", "host": "127.0.0.1"}, True),
        ({"kind": "inprocess", "port": 50001}, True),
        ({"kind": "local", "metrics_port": 0}, False),
        ({"kind": "external"}, True),
        ({"kind": "external", "insecure": True}, False),
        ({"kind": "local", "port": 50001, "insecure": True}, False),
    ],
)
def test_processes_with_ports_use_tls_unless_told_otherwise(given, encrypted, tmp_path):
    lines = []
    context = BackendContext(ClusterSettings(**given), str(tmp_path), "INFO", lines.append, lambda process: None)
    access = make_backend(context).access
    assert lines == [f"The processes of this job run without TLS: {INSECURE_RISK}."] * ("insecure" in given)
    assert (access.tls is not None) is encrypted
    assert (tmp_path / "tls" / "ca.pem").exists() is encrypted
    assert len(access.token) == 32


def test_what_turns_tls_off_contradicts_what_asks_for_it():
    def told(**network):
        given = Given.by_arguments({"network": NetworkOptions(**network)})
        return problems_of(given.settings(), given)

    assert told(insecure=True) == []
    assert told(tls=True) == []
    assert told(insecure=True, tls=True) == [
        "NetworkOptions(insecure=True) turns TLS off, but NetworkOptions(tls=True) asks for it. Remove one of the two."
    ]
    (words,) = told(insecure=True, tls_ca="/ca.pem")
    assert "NetworkOptions(tls_ca='/ca.pem') asks for it" in words
