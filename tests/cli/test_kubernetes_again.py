"""The manifests of a job that is made anew, from its objects as Kubernetes has them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import kubernetes_validate
import pytest

from elasticcb.cli.kubernetes.recreate import as_submitted, make_again
from elasticcb.cluster.kubernetes.api import KubernetesError
from elasticcb.cluster.kubernetes.master_pod import _is_ours
from elasticcb.cluster.kubernetes.pods import PodPlan
from elasticcb.errors import JobFailedError
from elasticcb.settings import JOURNAL_FILE, KubernetesSettings

PLAN = PodPlan("census", KubernetesSettings(namespace="training", image="zoo:1"), {"A": "1"}, "TOKEN")


def test_what_kubernetes_has_added_is_left_out():
    added = {"uid": "1", "resourceVersion": "5", "creationTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": []}
    secret, service, job = PLAN.secret("word", {}), PLAN.service(), PLAN.master_job(["train"])
    names = PLAN.server_names()
    for manifest in (secret, service, names, job):
        expected = json.loads(json.dumps(manifest))
        found = manifest | {"metadata": manifest["metadata"] | added, "status": {}}
        if manifest is service:
            found["spec"] = manifest["spec"] | {"clusterIP": "10.0.0.7", "clusterIPs": ["10.0.0.7"]}
        if manifest is names:
            found["spec"] = manifest["spec"] | {"clusterIPs": ["None"]}
        if manifest is job:
            template = manifest["spec"]["template"]
            labels = template["metadata"]["labels"] | {"controller-uid": "1", "batch.kubernetes.io/job-name": "census"}
            more = {"selector": {"matchLabels": {"controller-uid": "1"}}}
            metadata = template["metadata"] | {"labels": labels, "creationTimestamp": None}
            found["spec"] = manifest["spec"] | more | {"template": template | {"metadata": metadata}}
        assert as_submitted(found) == expected
        kubernetes_validate.validate(as_submitted(found), "1.31", strict=True)


class API:
    """An API server with objects by kind and name."""

    def __init__(self, manifests):
        self.objects = {}
        for manifest in manifests:
            self.create(manifest)

    def create(self, manifest):
        found = manifest | {"metadata": manifest["metadata"] | {"uid": str(len(self.objects))}}
        return self.objects.setdefault((manifest["kind"], manifest["metadata"]["name"]), found)

    def read(self, kind, name):
        if (kind, name) not in self.objects:
            raise KubernetesError(f"no {kind} {name}", 404)
        return self.objects[kind, name]

    def list(self, kind, selector):
        return {"items": []}

    def patch(self, kind, name, patch):
        self.objects[kind, name]["metadata"] |= patch["metadata"]

    def delete(self, kind, name):
        self.objects.clear()  # with what it owns


@pytest.mark.parametrize("held_by", ["census-x", None])
def test_a_job_that_is_made_again_has_a_lease_that_nobody_holds_also_if_it_had_none(held_by):
    api = API([PLAN.secret("word", {}), PLAN.service(), PLAN.server_names(), PLAN.master_job(["train"])])
    if held_by:
        api.create(PLAN.lease() | {"spec": {"leaseDurationSeconds": 60, "holderIdentity": held_by}})
    make_again(SimpleNamespace(api=api, name="census"))
    lease = api.objects["Lease", "census"]
    assert lease["spec"] == PLAN.lease()["spec"]
    assert lease["metadata"]["labels"] == PLAN.lease()["metadata"]["labels"]
    (owner,) = lease["metadata"]["ownerReferences"]
    assert owner["uid"] == api.objects["Job", "census"]["metadata"]["uid"]
    assert len(api.objects) == 5


def test_a_journal_is_that_of_the_same_job_or_of_the_one_it_goes_on_with(tmp_path):
    assert not _is_ours(tmp_path, "first", "")
    (tmp_path / JOURNAL_FILE).touch()
    assert _is_ours(tmp_path, "first", "")
    assert _is_ours(tmp_path, "second", "first")
    assert _is_ours(tmp_path, "second", "first")
    assert not _is_ours(tmp_path, "third", "")
    (tmp_path / "kubernetes.json").write_text("{}")
    with pytest.raises(JobFailedError, match="can't be read"):
        _is_ours(tmp_path, "third", "")
