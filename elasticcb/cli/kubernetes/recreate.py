"""Recreates the objects of a job on Kubernetes, because a failed Job can't be restarted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from elasticcb.cli.kubernetes.job import KubernetesJob
from elasticcb.cli.kubernetes.submit import create_all, owner_reference
from elasticcb.cluster.kubernetes.api import KubernetesAPI, KubernetesError
from elasticcb.cluster.kubernetes.pods import JOB_LABEL, RESUMES, ROLE_LABEL, lease_with, names_of_servers
from elasticcb.errors import UsageError

_GONE_SECONDS = 90.0  # seconds to wait for pods to end
_PAUSE_SECONDS = 0.5
_MADE_BY_KUBERNETES = ("controller-uid", "job-name")  # in labels, the first part of which may have a domain


def make_again(job: KubernetesJob) -> None:
    """Removes a job and creates it again as submitted; it continues from its folder.

    Raises:
        UsageError: its pods do not terminate.
        KubernetesError: the API server refused it.
    """
    api = job.api
    objects = [("Service", job.name), ("Secret", job.name), ("Service", names_of_servers(job.name)), ("Job", job.name)]
    before = [api.read(kind, name) for kind, name in objects]
    manifests = [as_submitted(each) for each in before]
    manifests.insert(0, lease_with(manifests[0]["metadata"]))
    objects.append(("Lease", job.name))
    annotations = manifests[-1]["spec"]["template"]["metadata"].setdefault("annotations", {})
    annotations[RESUMES] = before[-1]["metadata"]["uid"]
    api.delete("Job", job.name)
    give_up = time.monotonic() + _GONE_SECONDS
    while True:
        left = [f"{kind} {name}" for kind, name in objects if _is_there(api, kind, name)]
        left += [f"Pod {pod['metadata']['name']}" for pod in api.list("Pod", f"{JOB_LABEL}={job.name}")["items"]]
        if not left:
            break
        if time.monotonic() > give_up:
            raise UsageError(
                f"The job {job.name} was removed, but can't be recreated: these pods do not terminate: "
                f"{', '.join(left)}. When they are gone, submit the job again with the same --job_dir."
            )
        time.sleep(_PAUSE_SECONDS)
    create_all(api, manifests)


def make_missing_lease(job: KubernetesJob) -> None:
    """Creates the Lease of a job that an earlier release submitted without one."""
    if not _is_there(job.api, "Lease", job.name):
        metadata = as_submitted(job.job)["metadata"] | {"ownerReferences": [owner_reference(job.job)]}
        job.api.create(lease_with(metadata))


def wait_for_old_master(job: KubernetesJob) -> None:
    """Waits until no pod of a job's master is running. Raises `UsageError` if it does not terminate."""
    give_up = time.monotonic() + _GONE_SECONDS
    while True:
        pods = job.api.list("Pod", f"{JOB_LABEL}={job.name},{ROLE_LABEL}=master")["items"]
        left = [pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") in ("Pending", "Running")]
        if not left:
            return
        if time.monotonic() > give_up:
            raise UsageError(
                f"The job {job.name} was stopped, but its master does not terminate: pod {', '.join(left)}. Try again "
                "when it is gone."
            )
        time.sleep(_PAUSE_SECONDS)


def as_submitted(found: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of an object, without the fields that Kubernetes added."""
    metadata = {key: found["metadata"][key] for key in ("name", "namespace", "labels")}
    metadata["labels"] = _own(metadata["labels"])
    manifest: dict[str, Any] = {"apiVersion": found["apiVersion"], "kind": found["kind"], "metadata": metadata}
    manifest |= {key: found[key] for key in ("type", "data") if key in found}
    if "spec" in found:
        spec = manifest["spec"] = dict(found["spec"])
        for key in ("selector", "manualSelector") if found["kind"] == "Job" else ("clusterIPs",):
            spec.pop(key, None)
        if spec.get("clusterIP") != "None":  # with which a Service requests no address
            spec.pop("clusterIP", None)
        if "template" in spec:
            template = spec["template"]
            inner = template["metadata"]
            labels = {"labels": _own(inner["labels"])}
            annotations = {"annotations": inner["annotations"]} if inner.get("annotations") else {}
            spec["template"] = template | {"metadata": labels | annotations}
    return manifest


def _own(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if name.rpartition("/")[2] not in _MADE_BY_KUBERNETES}


def _is_there(api: KubernetesAPI, kind: str, name: str) -> bool:
    try:
        api.read(kind, name)
    except KubernetesError as error:
        if error.status != 404:
            raise
        return False
    return True
