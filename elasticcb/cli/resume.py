"""`elasticcb resume`: continues a training job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import rich_click as click

from elasticcb.cli.command import CONTEXT, CommandRun, in_namespace
from elasticcb.cli.job import end_with, run_settings
from elasticcb.cli.job_folders import JOBS, find_job, new_folder, resumes
from elasticcb.cli.kubernetes.job import KubernetesJob, follow_job
from elasticcb.cli.kubernetes.submit import create_all
from elasticcb.clients.local_job import StoredJob
from elasticcb.clients.running_master import can_resume, refuse_cluster
from elasticcb.cluster.kubernetes.api import KubernetesAPI, KubernetesError
from elasticcb.cluster.kubernetes.pods import JOB_LABEL, RESUMES, ROLE_LABEL, lease_with, names_of_servers
from elasticcb.cluster.registry import missing_for
from elasticcb.compute.registry import keep_backend
from elasticcb.errors import JobDoneError, UsageError
from elasticcb.settings import JOB_FILE, JOURNAL_FILE, Command, JobSettings
from elasticcb.storage import durable
from elasticcb.storage.remote_files import is_url

_GONE_SECONDS = 90.0  # seconds to wait for pods to end
_PAUSE_SECONDS = 0.5
_MADE_BY_KUBERNETES = ("controller-uid", "job-name")  # in labels, the first part of which may have a domain


@click.command(context_settings=CONTEXT)
@click.argument("job", metavar="JOB")
@in_namespace
@click.pass_obj
def resume(session: CommandRun, job: str, namespace: str | None) -> None:
    """Continue a training job that was interrupted, failed, or was lost with its machine.

    JOB is the job's folder or its name below `jobs`; its URL, if --job_dir was one, on any machine; a --job_name or
    `latest` (the newest training job); or, with --namespace, the name of a stopped or failed job on Kubernetes. Tasks
    that were reported as done are not repeated; parameter servers restart from their last recovery files. The job keeps
    its original settings.

    \b
    Examples:
      elasticcb resume train-mnist-20260101-120000
      elasticcb resume mnist --namespace=training
    """
    if namespace:
        end_with(_resume_on_kubernetes(KubernetesJob(KubernetesAPI(namespace), job)))
    else:
        settings = _stored_settings(StoredJob(job)) if is_url(job) else resumed_settings(find_job(job, True))
        keep_backend(settings.keras_backend)
        missing = list(missing_for(settings.cluster))  # of this machine, on which the job may not have started
        if missing:
            raise UsageError("\n".join(missing))
        with resumes(Path(settings.directory)):
            run_settings(settings, session, resumed=True)


def _stored_settings(job: StoredJob) -> JobSettings:
    """The settings of the job below a URL, with a folder on this machine: that of before, or a new one."""
    folder = job.local_folder
    if folder is not None and can_resume(folder):  # else its master was killed before it had fetched the job
        return resumed_settings(folder)
    if job.status()["phase"] == "done":
        raise JobDoneError(f"The job in {job.url} is done; there is nothing to continue.")
    settings = job.settings()
    folder = new_folder(Path.cwd() / JOBS, Command.TRAIN, settings.name)
    return replace(settings, directory=str(folder), store=job.url)  # the folder may have been copied there


def _resume_on_kubernetes(job: KubernetesJob) -> int:
    if job.state == "stopped":
        _wait_for_old_master(job)
        job.api.patch("Job", job.name, {"spec": {"parallelism": 1}})
    elif job.state == "failed":
        make_again(job)
    else:
        raise UsageError(
            f"The job {job.name} is {job.state}, not stopped. See its log: elasticcb logs {job.name} "
            f"--namespace={job.api.namespace}"
        )
    return follow_job(job.api, job.name, from_now=True)


def resumed_settings(folder: Path) -> JobSettings:
    """The settings of the job in a folder. Raises `UsageError` if it can't be resumed."""
    try:
        document = durable.read_document(folder / JOB_FILE)
    except ValueError as error:
        raise UsageError(
            f"{error}. Nothing was changed. Restore a copy of the file, or start a new job from the newest checkpoint "
            "with --checkpoint_dir_for_init."
        ) from None
    except OSError as error:
        refuse_cluster(folder)
        raise UsageError(
            f"{folder} contains no job that can be resumed ({error.strerror}). Expected the folder of an `elasticcb "
            "train` job. Start `evaluate` and `predict` jobs again instead."
        ) from None
    settings = JobSettings.from_json(document)
    if not (folder / JOURNAL_FILE).is_file():
        interval = settings.checkpoint.interval_seconds
        why = "it ended before training started" if interval else "the job ran with --checkpoint_interval=0"
        raise UsageError(f"{folder} contains no {JOURNAL_FILE}: {why}, so there is nothing to resume. Start a new job.")
    if settings.directory != str(folder):
        raise UsageError(f"{folder} was at {settings.directory} when the job started. Move it back there.")
    from elasticcb.master.journal import Journal

    if Journal(folder / JOURNAL_FILE).memory.over:
        raise JobDoneError(f"The job in {settings.store or folder} is done; there is nothing to continue.")
    return settings


def make_again(job: KubernetesJob) -> None:
    """Removes a job and creates it again as submitted, because a failed Job can't be restarted; it continues from its
    folder.

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


def _wait_for_old_master(job: KubernetesJob) -> None:
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
