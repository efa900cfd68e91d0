"""Runs the master of a submitted job in its pod on Kubernetes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from elasticcb.cluster.base import MasterRun
from elasticcb.cluster.kubernetes.api import MASTER_RIGHTS, KubernetesAPI, KubernetesError, Right
from elasticcb.cluster.kubernetes.pods import (
    FAILED_CODES,
    JOB_LABEL,
    LEASE_SECONDS,
    POD_NAME,
    PORT,
    RESUMES,
    ROLE_LABEL,
)
from elasticcb.errors import (
    GO_ON,
    JobDoneError,
    JobFailedError,
    JobInterrupted,
    LostServerError,
    ReplacedError,
    UsageError,
    describe,
)
from elasticcb.process.log_files import say
from elasticcb.settings import JOURNAL_FILE, JOURNALS, JobSettings
from elasticcb.storage import durable
from elasticcb.storage.folder_lock import FolderInUseError
from elasticcb.storage.job_store import JobStore

logger = logging.getLogger(__name__)

_MARK = "kubernetes.json"  # in the job's folder: identifies its owner

_RENEW_SECONDS = 5.0
_GIVE_UP_SECONDS = 45.0  # seconds without renewal after which its holder must stop acting
_LOOK_SECONDS = 1.0
_JOIN_SECONDS = 10.0
_SAY_SECONDS = 1.0  # at most, before this process exits


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


def service_address(api: KubernetesAPI, job: str) -> str:
    """The address of a submitted job's master that does not depend on its pod; "": its Service has none. Raises
    `KubernetesError` if there is no Service."""
    address = api.read("Service", job)["spec"].get("clusterIP", "")
    host = f"[{address}]" if ":" in address else address
    return f"{host}:{PORT}" if address and address != "None" else f"{job}.{api.namespace}:{PORT}"


def keep_in_pod(run: MasterRun) -> None:
    """Runs a job until it ends, or until its pod must end and the next one continues. An earlier master was lost when
    this pod was created.

    Raises `ElasticCBError` if the job fails.
    """
    try:
        _keep(run)
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


def _keep(run: MasterRun) -> None:
    api = KubernetesAPI(run.settings.cluster.kubernetes.namespace)
    check_rights(api, MASTER_RIGHTS)
    own = api.read("Pod", os.environ[POD_NAME])
    job = own["metadata"]["labels"][JOB_LABEL]
    _check_not_failed(api, job, own["metadata"]["name"])
    with held(MasterLease(api, job, own["metadata"]["name"]), say):
        _run(run, own)


def _run(run: MasterRun, own: Mapping[str, Any]) -> None:
    owners = [owner["uid"] for owner in own["metadata"].get("ownerReferences", ())]
    before = own["metadata"].get("annotations", {}).get(RESUMES, "")
    uid = owners[0] if owners else own["metadata"]["uid"]
    resumed = _is_ours(run.settings, uid, before)
    try:
        run.here(run.resumed or resumed, time.monotonic() - _age_seconds(own))
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


def _is_ours(settings: JobSettings, uid: str, before: str) -> bool:
    """Whether a master of the same Job, or of the Job it replaces, wrote the journal in the job's folder; marks the
    folder."""
    folder = Path(settings.directory)
    store = JobStore(settings.store) if settings.store else None
    try:
        mark = durable.read_document(folder / _MARK) if store is None else json.loads(store.get(_MARK))
        same = mark["job"] in (uid, before or uid)
    except FileNotFoundError:
        same = False
    # starting from scratch would delete files that may belong to this job
    except (OSError, ValueError, LookupError) as error:
        raise JobFailedError(
            f"The owner of the folder {folder} can't be read: {error}. Remove {folder / _MARK} to start from scratch."
        ) from None
    if store is None:
        durable.write_document(folder / _MARK, {"job": uid})
        return same and (folder / JOURNAL_FILE).exists()
    with store:
        store.put(_MARK, json.dumps({"job": uid}).encode())
        return same and bool(store.names(JOURNALS))


def _age_seconds(pod: Mapping[str, Any]) -> float:
    made = datetime.strptime(pod["metadata"]["creationTimestamp"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    return max(0.0, (datetime.now(timezone.utc) - made).total_seconds())


class MasterLease:
    """A job's Lease: the right to act as its master, which one pod at a time holds, and renews in the background.

    The leader election of the official client uses a ConfigMap and depends on the clocks of both machines.

    Args:
        holder: the pod of this process. Its previous container has ended.
    """

    def __init__(self, api: KubernetesAPI, name: str, holder: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.holder = holder
        self._api, self._name, self._clock = api, name, clock
        self._version = ""  # resourceVersion last seen
        self._seen = self._renewed = 0.0  # when it was seen; when it was last known to be held

    def take_if_free(self) -> str:
        """Takes the Lease if nobody holds it, its holder has ended, or it has expired; returns the holder."""
        asked = self._clock()
        found = self._api.read("Lease", self._name)
        if found["metadata"]["resourceVersion"] != self._version:
            self._version, self._seen = found["metadata"]["resourceVersion"], self._clock()  # not before it was written
        spec = found.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        lasts = spec.get("leaseDurationSeconds") or LEASE_SECONDS
        if holder not in ("", self.holder) and asked - self._seen < lasts and not self._has_ended(holder):
            return str(holder)
        now = _now()
        took = {"holderIdentity": self.holder, "leaseDurationSeconds": LEASE_SECONDS, "acquireTime": now}
        changes = int(spec.get("leaseTransitions") or 0) + (holder != self.holder)
        try:
            self._write({**took, "renewTime": now, "leaseTransitions": changes})
        except KubernetesError as error:
            if error.status != 409:
                raise
            return str(holder)  # another process was faster
        self._renewed = asked
        return self.holder

    def renew(self) -> bool:
        """Whether the Lease is still held; False forever once another pod holds it, or it could not be renewed in time.

        Raises `KubernetesError` if that can't be determined now.
        """
        asked = self._clock()
        if self.is_late:
            return False
        try:
            self._write({"renewTime": _now()})
        except KubernetesError as error:
            if error.status != 409:  # nobody else can take a Lease that was deleted with its job before it expires
                raise
            found = self._api.read("Lease", self._name)
            if found.get("spec", {}).get("holderIdentity") != self.holder:
                return False
            self._version = found["metadata"]["resourceVersion"]  # someone changed another field of it
            self._write({"renewTime": _now()})
        self._renewed = asked
        return True

    @property
    def is_late(self) -> bool:
        """Whether the Lease was not renewed in time."""
        return self._clock() - self._renewed > _GIVE_UP_SECONDS

    def release(self) -> None:
        """Releases the Lease so that others can take it at once."""
        try:
            if self.renew():
                self._write({"holderIdentity": ""})
        except KubernetesError as error:
            logger.info("The Lease %s could not be released: %s", self._name, error)

    def _write(self, spec: dict[str, Any]) -> None:
        """Writes it only if nobody has written since; otherwise raises `KubernetesError` with status 409."""
        patch = {"metadata": {"resourceVersion": self._version}, "spec": spec}
        self._version = self._api.patch("Lease", self._name, patch)["metadata"]["resourceVersion"]

    def _has_ended(self, pod: str) -> bool:
        """Whether its node has reported that its containers ended. A deleted pod may still run on a disconnected
        node."""
        try:
            status = self._api.read("Pod", pod)["status"]
        except KubernetesError as error:
            if error.status != 404:
                raise
            return False
        containers = status.get("containerStatuses") or ()
        return bool(containers) and all("terminated" in each.get("state", {}) for each in containers)


@contextlib.contextmanager
def held(lease: MasterLease, say: Callable[[str], None], end: Callable[[int], object] = os._exit) -> Iterator[None]:
    """While it is active, no other master of the job acts.

    If another pod takes the Lease, or it can't be renewed in time, this process exits at once, as if killed: its files
    and processes then belong to another master.
    """
    told = ""
    while (holder := lease.take_if_free()) != lease.holder:
        if holder != told:
            say(f"The master in the pod {holder} may still act; waiting for its end.")
            told = holder
        time.sleep(_LOOK_SECONDS)
    over = threading.Event()

    def lose() -> None:
        if not over.is_set():
            over.set()
            at_latest = threading.Timer(_SAY_SECONDS, end, [GO_ON])  # its output may not be readable
            at_latest.daemon = True
            at_latest.start()
            try:
                say("This master has lost its Lease, so another master may act. The next pod continues the job.")
            finally:
                at_latest.cancel()
                end(GO_ON)

    threads = [threading.Thread(target=run, args=(lease, over, lose), daemon=True) for run in (_renew, _watch)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        threads[0].join(_JOIN_SECONDS)
        lease.release()


def _renew(lease: MasterLease, over: threading.Event, lose: Callable[[], None]) -> None:
    while not over.wait(_RENEW_SECONDS):
        try:
            if not lease.renew():
                lose()
        except Exception as error:  # including an answer from a server that is not the API server
            logger.warning("The Lease of this master can't be renewed; retrying: %s", describe(error))


def _watch(lease: MasterLease, over: threading.Event, lose: Callable[[], None]) -> None:
    """Runs in a separate thread from `_renew`, which may wait for an answer."""
    while not over.wait(_LOOK_SECONDS):
        if lease.is_late:
            lose()


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
