"""Runs the master of a submitted job in its pod on Kubernetes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from elasticcb.cluster.kubernetes.api import MASTER_RIGHTS, KubernetesAPI, KubernetesError, Right
from elasticcb.cluster.kubernetes.lease import MasterLease, held
from elasticcb.cluster.kubernetes.pods import FAILED_CODES, JOB_LABEL, POD_NAME, PORT, RESUMES, ROLE_LABEL
from elasticcb.errors import (
    GO_ON,
    JobDoneError,
    JobFailedError,
    JobInterrupted,
    LostServerError,
    ReplacedError,
    UsageError,
)
from elasticcb.process.logs import say
from elasticcb.settings import JOURNAL_FILE, JobSettings
from elasticcb.storage import durable
from elasticcb.storage.folder_lock import FolderInUseError

_MARK = "kubernetes.json"  # in the job's folder: identifies its owner


def runs_in_pod() -> bool:
    """Whether this process is the master of a submitted job."""
    return POD_NAME in os.environ


def check_rights(api: KubernetesAPI, rights: Sequence[Right]) -> None:
    """Raises `UsageError` if this process lacks the permissions of a master."""
    missing = api.missing_rights(rights)
    if missing:
        wanted = ", ".join(f"{right.verb} {right.resource}" for right in missing)
        raise UsageError(
            f"{api.who.capitalize()} lacks permissions of a master in the namespace {api.namespace}: {wanted}. Bind "
            "the role in deploy/kubernetes to it, and pass it with --service_account."
        )


def service_address(api: KubernetesAPI, job: str, say: Callable[[str], None]) -> str:
    """The address of a submitted job's master that does not depend on its pod; "" if there is no Service."""
    try:
        service = api.read("Service", job)
    except KubernetesError as error:
        say(
            f"{error} Workers and servers use the address of this pod instead, which will change if the pod is "
            "replaced."
        )
        return ""
    address = service["spec"].get("clusterIP", "")
    host = f"[{address}]" if ":" in address else address
    return f"{host}:{PORT}" if address and address != "None" else f"{job}.{api.namespace}:{PORT}"


def keep_in_pod(settings: JobSettings, run: Callable[[bool, float], None]) -> None:
    """Runs a job until it ends, or until its pod must end and the next one continues.

    Args:
        run: runs the job. Its arguments are whether it continues an earlier master's job, and the time
            (`time.monotonic`) when this pod was created, which is when that master was lost.

    Raises `ElasticCBError` if the job fails.
    """
    try:
        _keep(settings, run)
    except JobDoneError:
        say("The job was done when its master was lost.")
    except KeyboardInterrupt:  # SIGTERM, before there was anything to save
        sys.exit(GO_ON)
    except (JobInterrupted, LostServerError, ReplacedError, KubernetesError) as error:
        if isinstance(error, KubernetesError) and error.hopeless:
            raise
        what = str(error).splitlines()[0].partition(" To resume it:")[0]
        say(f"{what} The master's next pod continues the job.")
        sys.exit(GO_ON)


def _keep(settings: JobSettings, run: Callable[[bool, float], None]) -> None:
    api = KubernetesAPI(settings.cluster.kubernetes.namespace)
    check_rights(api, MASTER_RIGHTS)
    own = api.read("Pod", os.environ[POD_NAME])
    job = own["metadata"]["labels"][JOB_LABEL]
    _check_not_failed(api, job, own["metadata"]["name"])
    with held(MasterLease(api, job, own["metadata"]["name"]), say):
        _run(settings, run, own)


def _run(settings: JobSettings, run: Callable[[bool, float], None], own: Mapping[str, Any]) -> None:
    owners = [owner["uid"] for owner in own["metadata"].get("ownerReferences", ())]
    before = own["metadata"].get("annotations", {}).get(RESUMES, "")
    resumed = _is_ours(Path(settings.directory), owners[0] if owners else own["metadata"]["uid"], before)
    try:
        run(resumed, time.monotonic() - _age_seconds(own))
    except FolderInUseError as error:
        if not resumed:
            raise
        raise JobInterrupted(str(error)) from None  # the previous master is disconnected, and has not ended


def _check_not_failed(api: KubernetesAPI, job: str, own: str) -> None:
    """Kubernetes before 1.26 starts another master after a job has failed."""
    for pod in api.list("Pod", f"{JOB_LABEL}={job},{ROLE_LABEL}=master")["items"]:
        for status in pod["status"].get("containerStatuses") or ():
            ended = status.get("state", {}).get("terminated") or {}
            if pod["metadata"]["name"] != own and ended.get("exitCode") in FAILED_CODES:
                raise JobFailedError(f"The job has failed: kubectl logs -n {api.namespace} {pod['metadata']['name']}")


def _is_ours(folder: Path, uid: str, before: str) -> bool:
    """Whether a master of the same Job, or of the Job it replaces, wrote the journal in a folder; marks the folder."""
    mark = folder / _MARK
    try:
        same = durable.read_document(mark)["job"] in (uid, before or uid)
    except FileNotFoundError:
        same = False
    # starting from scratch would delete files that may belong to this job
    except (OSError, ValueError, LookupError) as error:
        raise JobFailedError(
            f"The owner of the folder {folder} can't be read: {error}. Remove {mark} to start from scratch."
        ) from None
    durable.write_document(mark, {"job": uid})
    return same and (folder / JOURNAL_FILE).exists()


def _age_seconds(pod: Mapping[str, Any]) -> float:
    made = datetime.strptime(pod["metadata"]["creationTimestamp"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    return max(0.0, (datetime.now(timezone.utc) - made).total_seconds())
