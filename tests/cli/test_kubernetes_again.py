"""The manifests of a job that is made anew, from its objects as Kubernetes has them."""

from __future__ import annotations

import contextlib
import itertools
import json
from types import SimpleNamespace

import kubernetes_validate
import pytest

from elasticcb.cli.kubernetes.submit import create_all
from elasticcb.cli.resume import as_submitted, make_again
from elasticcb.cluster.kubernetes.api import KubernetesError
from elasticcb.cluster.kubernetes.master_pod import _is_ours
from elasticcb.cluster.kubernetes.pods import PodPlan
from elasticcb.errors import JobFailedError, UsageError
from elasticcb.settings import JOURNAL_FILE, Command, JobSettings, KubernetesSettings

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
    """An API server with objects by kind and name, and with a garbage collector.

    Args:
        fails: is called before and after each change, with its number from 0 on.
    """

    namespace = "training"

    def __init__(self, manifests=(), fails=lambda number: None):
        self.objects, self._uids, self._changes, self._fails = {}, itertools.count(), itertools.count(), lambda _: None
        for manifest in manifests:
            self.create(manifest)
        self._fails = fails

    @contextlib.contextmanager
    def change(self):
        self._fails(next(self._changes))
        yield
        self._fails(next(self._changes))

    def create(self, manifest):
        with self.change():
            key = manifest["kind"], manifest["metadata"]["name"]
            if key in self.objects:
                raise KubernetesError("it is there", 409)
            kubernetes_validate.validate(manifest, "1.31", strict=True)
            self.objects[key] = manifest | {"metadata": manifest["metadata"] | {"uid": str(next(self._uids))}}
        return self.objects[key]

    def read(self, kind, name):
        if (kind, name) not in self.objects:
            raise KubernetesError(f"no {kind} {name}", 404)
        return self.objects[kind, name]

    def list(self, kind, selector):
        return {"items": []}

    def patch(self, kind, name, patch):
        with self.change():
            self.objects[kind, name]["spec"] = self.objects[kind, name]["spec"] | patch["spec"]

    def delete(self, kind, name):
        with self.change():
            uid = self.objects.pop((kind, name), {"metadata": {"uid": ""}})["metadata"]["uid"]
            self.objects = {key: each for key, each in self.objects.items() if uid not in self.owners(*key)}

    def owners(self, kind, name):
        return [owner["uid"] for owner in self.objects[kind, name]["metadata"].get("ownerReferences", ())]


def owned_by_job(api):
    return [("Job", "census"), *(key for key in api.objects if api.owners(*key) == [uid_of(api)])]


def uid_of(api):
    return api.objects["Job", "census"]["metadata"]["uid"]


def manifests():
    return [PLAN.secret("word", {}), PLAN.service(), PLAN.server_names(), PLAN.lease(), PLAN.master_job(["train"])]


def test_all_objects_of_a_job_belong_to_it():
    api = API()
    create_all(api, manifests())
    assert sorted(owned_by_job(api)) == sorted(api.objects)
    assert len(api.objects) == 5
    assert api.objects["Job", "census"]["spec"] == manifests()[-1]["spec"]


@pytest.mark.parametrize("at", range(12))
def test_a_submission_that_is_interrupted_leaves_nothing(at):
    def interrupt(number):
        if number == at:
            raise KeyboardInterrupt

    api = API(fails=interrupt)
    with pytest.raises(KeyboardInterrupt):
        create_all(api, manifests())
    # Whether the first request was heard is not known; without the others its Job does nothing, and holds no secrets.
    assert list(api.objects) == ([("Job", "census")] if at == 1 else [])
    assert all(job["spec"]["parallelism"] == 0 for job in api.objects.values())


@pytest.mark.parametrize("at", range(12))
def test_a_submission_that_is_cut_off_leaves_only_what_is_removed_with_its_job(at):
    def cut_off(number):
        if number >= at:
            raise KubernetesError("can't be reached")

    api = API(fails=cut_off)
    with pytest.raises(KubernetesError):
        create_all(api, manifests())
    assert not api.objects or sorted(owned_by_job(api)) == sorted(api.objects)
    if at < 11:
        assert all(each["spec"]["parallelism"] == 0 for (kind, _), each in api.objects.items() if kind == "Job")


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (PLAN.master_job(["train"]), "elasticcb stop census --namespace=training --delete"),
        (PLAN.secret("other", {}), "kubectl delete secret census --namespace=training"),
        (PLAN.lease(), "kubectl delete lease census --namespace=training"),
    ],
)
def test_what_has_the_name_of_a_job_already_stays_and_is_named(there, words):
    api = API([there])
    before = dict(api.objects)
    with pytest.raises(UsageError, match=f"The {there['kind']} census already exists .* {words}"):
        create_all(api, manifests())
    assert api.objects == before


@pytest.mark.parametrize("held_by", ["census-x", None])
def test_a_job_that_is_made_again_has_a_lease_that_nobody_holds_also_if_it_had_none(held_by):
    api = API([each for each in manifests() if each["kind"] != "Lease"])
    if held_by:
        api.create(PLAN.lease() | {"spec": {"leaseDurationSeconds": 60, "holderIdentity": held_by}})
    for (kind, _), each in api.objects.items():
        if kind != "Job":
            each["metadata"]["ownerReferences"] = [{"uid": uid_of(api)}]
    make_again(SimpleNamespace(api=api, name="census"))
    lease = api.objects["Lease", "census"]
    assert lease["spec"] == PLAN.lease()["spec"]
    assert lease["metadata"]["labels"] == PLAN.lease()["metadata"]["labels"]
    assert sorted(owned_by_job(api)) == sorted(api.objects)
    assert len(api.objects) == 5


def test_a_journal_is_that_of_the_same_job_or_of_the_one_it_goes_on_with(tmp_path):
    settings = JobSettings(command=Command.TRAIN, directory=str(tmp_path))
    assert not _is_ours(settings, "first", "")
    (tmp_path / JOURNAL_FILE).touch()
    assert _is_ours(settings, "first", "")
    assert _is_ours(settings, "second", "first")
    assert _is_ours(settings, "second", "first")
    assert not _is_ours(settings, "third", "")
    (tmp_path / "kubernetes.json").write_text("{}")
    with pytest.raises(JobFailedError, match="can't be read"):
        _is_ours(settings, "third", "")
