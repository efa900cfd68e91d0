import pytest

from elasticcb.cluster.registry import backend_of, completed, contradictions
from elasticcb.errors import UsageError
from elasticcb.settings import NetworkOptions
from elasticcb.settings.arguments import Arguments


def found(**given):
    arguments = Arguments(given)
    return list(contradictions(arguments.settings, arguments))


def test_a_cluster_that_nobody_knows_is_refused_in_words():
    assert found(kind="lunar") == [
        "kind='lunar' can't be. Expected one of 'local', 'inprocess', 'external', 'kubernetes', 'ray'."
    ]
    with pytest.raises(UsageError, match=r"There is no cluster 'lunar'\. Expected one of 'local'"):
        backend_of("lunar")


def test_a_setting_of_another_cluster_is_told():
    network = NetworkOptions(ray_address="10.0.0.1:6379")
    assert found(kind="ray", network=network) == []
    (told,) = found(network=network)
    assert "(ray_address='10.0.0.1:6379') has a meaning with kind='ray' only." in told


@pytest.mark.parametrize(("kind", "encrypted"), [("local", False), ("kubernetes", True)])
def test_jobs_are_encrypted_where_others_may_hear_them(kind, encrypted):
    arguments = Arguments({"kind": kind})
    assert completed(arguments.settings, arguments).cluster.tls is encrypted
