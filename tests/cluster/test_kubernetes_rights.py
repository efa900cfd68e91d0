"""What the API server must grant to a master, and what it answers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elasticcb.cluster.base import BackendContext
from elasticcb.cluster.kubernetes import backend as backend_module
from elasticcb.cluster.kubernetes.api import MASTER_RIGHTS, KubernetesAPI, KubernetesError
from elasticcb.cluster.kubernetes.backend import KubernetesCluster
from elasticcb.cluster.kubernetes.master_pod import check_rights
from elasticcb.errors import UsageError
from elasticcb.security.credentials import Access
from elasticcb.settings import ClusterSettings, KubernetesSettings


class API:
    """An API server of a cluster in which nobody was granted Leases."""

    who, namespace = "the user of the kubeconfig", "training"

    def version(self):
        return 1, 31

    def missing_rights(self, rights):
        return [right for right in rights if right.resource == "leases"]

    def create(self, manifest):
        raise KubernetesError("the quota is used up")


def test_a_master_on_the_users_machine_needs_no_rights_on_leases(monkeypatch):
    monkeypatch.setattr(backend_module, "KubernetesAPI", lambda namespace: API())
    settings = ClusterSettings(kubernetes=KubernetesSettings(namespace="training", image="zoo:1"))
    cluster = KubernetesCluster(BackendContext(settings, "/jobs/a", "INFO", print, print))
    cluster.access = Access("secret")
    with pytest.raises(KubernetesError, match="the quota is used up"):
        cluster.prepare()
    with pytest.raises(UsageError, match="get leases, patch leases"):
        check_rights(API(), MASTER_RIGHTS)


@pytest.mark.parametrize("answer", [b"<html>", b"", b"[]"])
def test_an_answer_that_is_no_object_is_an_error_of_kubernetes(answer):
    api = KubernetesAPI.__new__(KubernetesAPI)
    api.server = "https://10.0.0.1"
    with pytest.raises(KubernetesError, match="its answer is not a JSON object"):
        api._json(SimpleNamespace(data=answer))
