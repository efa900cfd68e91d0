"""Shows the output of a job on Kubernetes, across restarts of its master's pod, until it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from elasticcb.cli.kubernetes.job import state_of, why_no_master
from elasticcb.cluster.kubernetes.api import KubernetesAPI, KubernetesError
from elasticcb.cluster.kubernetes.fate import ENDED, HELD_UP, HOPELESS, Fate, PodVerdict, verdict
from elasticcb.cluster.kubernetes.pods import FAILED_CODES, JOB_LABEL, ROLE_LABEL
from elasticcb.errors import JobFailedError
from elasticcb.process.log_files import say

_PAUSE_SECONDS = 0.5
_EVENTS_SECONDS = 10.0  # after which a pod that does not run yet is explained
_VAIN_CALLS = 20  # in a row


def follow_job(api: KubernetesAPI, name: str, lines: int | None = None, from_now: bool = False) -> int:
    """Shows a job's output until it ends; returns its exit code. Ctrl-C detaches and does not stop the job.

    Raises:
        JobFailedError: the job failed without printing an error, or its master can't start.
        KubernetesError: the API server can't be reached.
    """
    try:
        follower = _Follower(api, name)
        if from_now:
            follower.skip_ended()
        return follower.run(lines)
    except KeyboardInterrupt:
        of = f"{name} --namespace={api.namespace}"
        say(
            "\n"
            f"Detached; the job continues. To follow it: elasticcb logs {of} --follow. To stop it: elasticcb stop {of}"
        )
        return 0


class _Follower:
    def __init__(self, api: KubernetesAPI, name: str) -> None:
        self._api, self._name = api, name
        self._told: set[tuple[str, Fate]] = set()
        self._told_why = False  # the master has no pod
        self._done: set[tuple[str, int]] = set()  # pods, and the number of container restarts seen

    def skip_ended(self) -> None:
        for pod in self._pods():
            if "deletionTimestamp" in pod["metadata"] or verdict(pod).fate in ENDED:
                self._done.add((pod["metadata"]["name"], _restarts(pod)))

    def run(self, lines: int | None) -> int:
        vain, begun = 0, time.monotonic()
        while True:
            try:
                job = self._api.read("Job", self._name)
                pod = self._next_pod()
                if pod is None:
                    self._raise_end(job)
                    self._note_not_made(job)
                    time.sleep(_PAUSE_SECONDS)
                    continue
                name = pod["metadata"]["name"]
                waits = time.monotonic() - begun > _EVENTS_SECONDS
                found = verdict(pod, self._api.events_of(name, pod) if waits else ())
                if found.fate is Fate.RUNNING or found.fate in ENDED:
                    code = self._follow(name, _restarts(pod), lines)
                    if code is not None:
                        return code
                    lines, begun = None, time.monotonic()
                else:
                    self._note_waiting(name, found)
                    time.sleep(_PAUSE_SECONDS)
                vain = 0
            except KubernetesError as error:
                if error.status == 404:
                    raise JobFailedError(f"The job {self._name} was deleted.") from None
                vain += 1
                if error.hopeless or vain == _VAIN_CALLS:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def _pods(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self._api.list("Pod", f"{JOB_LABEL}={self._name},{ROLE_LABEL}=master")[
            "items"
        ]
        return found

    def _next_pod(self) -> Mapping[str, Any] | None:
        fresh = [pod for pod in self._pods() if (pod["metadata"]["name"], _restarts(pod)) not in self._done]
        return min(fresh, key=lambda pod: pod["metadata"]["creationTimestamp"], default=None)

    def _follow(self, pod: str, restarts: int, lines: int | None) -> int | None:
        """Shows the log of a pod's container to its end; returns the exit code of the job if the job has ended."""
        for line in self._api.follow_log(pod, lines):
            print(line, flush=True)
        found, code = self._end_of(pod, restarts)
        self._done.add((pod, restarts))
        if found.fate is Fate.COMPLETED:
            return 0
        if found.fate is Fate.FAILED and code in FAILED_CODES:
            # releases before 1.26 would start more pods, which fail in the same way
            with contextlib.suppress(KubernetesError):
                self._api.patch("Job", self._name, {"spec": {"backoffLimit": 0}})
            return code
        sequel = " A new pod continues the job." if self._goes_on() else ""
        say(f"The master's pod {pod}: {found.words}.{sequel}")
        return None

    def _goes_on(self) -> bool:
        """Whether the job is neither stopped nor deleted."""
        try:
            job = self._api.read("Job", self._name)
        except KubernetesError as error:
            if error.status != 404:
                raise
            return False
        return "deletionTimestamp" not in job["metadata"] and state_of(job) == "running"

    def _end_of(self, name: str, restarts: int) -> tuple[PodVerdict, int]:
        """The state of a container whose log has ended."""
        while True:
            try:
                pod = self._api.read("Pod", name)
            except KubernetesError as error:
                if error.status != 404:
                    raise
                return verdict({}, self._api.events_of(name, {}), gone=True), 0
            status = (pod["status"].get("containerStatuses") or [{}])[0]
            if _restarts(pod) > restarts:  # it was restarted
                status["state"] = status.get("lastState", {})
            found = verdict(pod, self._api.events_of(name, pod) if "deletionTimestamp" in pod["metadata"] else ())
            if found.fate in ENDED:
                return found, (status.get("state", {}).get("terminated") or {}).get("exitCode", 0)
            time.sleep(_PAUSE_SECONDS)

    def _note_waiting(self, pod: str, found: PodVerdict) -> None:
        if found.fate in HOPELESS:
            self._api.delete("Job", self._name)
            raise JobFailedError(f"The master's pod can't start: {found.words}. The job was removed.")
        if found.fate in HELD_UP and (pod, found.fate) not in self._told:
            self._told.add((pod, found.fate))
            say(f"The master's pod {pod} does not run yet: {found.words}.")

    def _note_not_made(self, job: Mapping[str, Any]) -> None:
        why = "" if self._told_why else why_no_master(self._api, job)
        if why:
            self._told_why = True
            end = f"elasticcb stop {self._name} --namespace={self._api.namespace} --delete"
            say(f"The master's pod can't be created; retrying: {why}. To give up: {end}")

    def _raise_end(self, job: Mapping[str, Any]) -> None:
        for condition in job["status"].get("conditions") or ():
            if condition["type"] == "Failed" and condition["status"] == "True":
                words = condition.get("message") or condition.get("reason")
                raise JobFailedError(f"The job {self._name} failed: {words}.")


def _restarts(pod: Mapping[str, Any]) -> int:
    return sum(status.get("restartCount", 0) for status in pod["status"].get("containerStatuses") or ())
