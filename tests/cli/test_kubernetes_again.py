"""The manifests of a job that is made anew, from its objects as Kubernetes has them."""

from __future__ import annotations

import json

import kubernetes_validate
import pytest

from elasticcb.cli.kubernetes.recreate import as_submitted
from elasticcb.cluster.kubernetes.master_pod import _is_ours
from elasticcb.cluster.kubernetes.pods import PodPlan
from elasticcb.errors import JobFailedError
from elasticcb.settings import JOURNAL_FILE, KubernetesSettings

PLAN = PodPlan("census", KubernetesSettings(namespace="training", image="zoo:1"), {"A": "1"}, "TOKEN")


def test_what_kubernetes_has_added_is_left_out():
    added = {"uid": "1", "resourceVersion": "5", "creationTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": []}
    secret, service, job = PLAN.secret("word", {}), PLAN.service(), PLAN.master_job(["train"])
    names, lease = PLAN.server_names(), PLAN.lease()
    for manifest in (secret, service, names, lease, job):
        expected = json.loads(json.dumps(manifest))
        found = manifest | {"metadata": manifest["metadata"] | added, "status": {}}
        if manifest is service:
            found["spec"] = manifest["spec"] | {"clusterIP": "10.0.0.7", "clusterIPs": ["10.0.0.7"]}
        if manifest is lease:
            found["spec"] = manifest["spec"] | {"holderIdentity": "job-x", "renewTime": "2026-01-01T00:00:00.000000Z"}
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
