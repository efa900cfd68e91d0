"""A job on Kubernetes, for the commands about running jobs; and its output, across restarts of its master's pod, until
it ends.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticcb.cluster.kubernetes.api import KubernetesAPI, KubernetesError
from elasticcb.cluster.kubernetes.fate import CONTAINER, ENDED, HELD_UP, HOPELESS, Fate, PodVerdict, verdict
from elasticcb.cluster.kubernetes.flags import parse_name
from elasticcb.cluster.kubernetes.pods import (
    FAILED_CODES,
    INDEX_LABEL,
    JOB_DIR_FLAG,
    JOB_LABEL,
    NUMBER_LABEL,
    ROLE_LABEL,
)
from elasticcb.errors import JobFailedError, UsageError
from elasticcb.process.log_files import say

_ROLES = ("master", "ps", "worker")


@dataclass(frozen=True)
class PodLine:
    """One pod; `number` counts the earlier pods in its slot."""

    name: str
    role: str
    index: int
    number: int
    node: str
    verdict: PodVerdict


class KubernetesJob:
    """One job.

    Raises `UsageError` if there is no job of this name.
    """

    def __init__(self, api: KubernetesAPI, name: str) -> None:
        self.api, self.name = api, name
        try:
            self.job = api.read("Job", parse_name(name))
        except KubernetesError as error:
            if error.status != 404:
                raise
            raise UsageError(
                f"There is no job {name} in the namespace {api.namespace} of {api.server}. List the jobs with "
                f"`elasticcb jobs --namespace={api.namespace}`."
            ) from None
        if JOB_LABEL not in self.job["metadata"].get("labels", {}):
            raise UsageError(f"The job {name} in the namespace {api.namespace} was not created by elasticcb.")

    @property
    def state(self) -> str:
        return state_of(self.job)

    def pods(self) -> Sequence[PodLine]:
        """The master's pods first; pods of one slot from oldest to newest."""
        lines = []
        for pod in self.api.list("Pod", f"{JOB_LABEL}={self.name}")["items"]:
            labels, name = pod["metadata"]["labels"], pod["metadata"]["name"]
            found = verdict(pod)
            if found.fate not in (Fate.RUNNING, Fate.COMPLETED):
                found = verdict(pod, self.api.events_of(name, pod))
            place = int(labels.get(INDEX_LABEL, 0)), int(labels.get(NUMBER_LABEL, 0))
            lines.append(PodLine(name, labels[ROLE_LABEL], *place, pod["spec"].get("nodeName", ""), found))
        return sorted(lines, key=lambda each: (_ROLES.index(each.role), each.index, each.number))

    def newest(self, role: str, index: int) -> str:
        """The name of the newest pod in a slot, running or ended; "" if there is none."""
        pods = [pod for pod in self.pods() if (pod.role, pod.index) == (role, index)]
        live = [pod for pod in pods if pod.verdict.fate not in ENDED]
        return next((pod.name for pod in reversed(live or pods)), "")

    @property
    def directory(self) -> str:
        """The job's folder in its pods."""
        containers = self.job["spec"]["template"]["spec"]["containers"]
        (arguments,) = (each["args"] for each in containers if each["name"] == CONTAINER)
        return next(each.removeprefix(JOB_DIR_FLAG) for each in arguments if each.startswith(JOB_DIR_FLAG))

    def run_beside_master(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Runs an `elasticcb` command in the master's pod; returns its exit code and output."""
        running = (each.name for each in self.pods() if (each.role, each.verdict.fate) == ("master", Fate.RUNNING))
        pod = next(running, None)
        if pod is None:
            raise UsageError(f"The job {self.name} has no running master; the job is {self.state}.")
        containers = self.api.read("Pod", pod)["spec"]["containers"]
        (command,) = (each["command"] for each in containers if each["name"] == CONTAINER)
        return self.api.execute(pod, CONTAINER, [*command, *arguments])

    def pass_on(self, command: str, flags: Sequence[str]) -> int:
        """Runs a command about the job in the master's pod: only from there it can be reached. Shows its output, and
        returns its exit code."""
        directory = self.directory
        code, said = self.run_beside_master([command, directory, *flags])
        if "--json" in flags and not code:
            said = said[said.index("{") :]  # other output of the pod comes before it
        print(said.replace(directory, self.name), end="", file=sys.stderr if code else sys.stdout)
        return code


def why_no_master(api: KubernetesAPI, job: Mapping[str, Any]) -> str:
    """Why Kubernetes last failed to create a pod for a job's master, from its events; "": it did not fail, or
    unknown."""
    events = api.events_of(job["metadata"]["name"], job, "Job")
    tries = [event for event in events if event.get("reason") in ("FailedCreate", "SuccessfulCreate")]
    last = max(tries, key=lambda event: event.get("lastTimestamp") or "", default={})
    if last.get("reason") != "FailedCreate":
        return ""
    return str(last.get("message", "")).removeprefix("Error creating: ")


def state_of(job: Mapping[str, Any]) -> str:
    """State of a Job: "running", "stopped", "done" or "failed"."""
    for condition in job["status"].get("conditions") or ():
        if condition["status"] == "True" and condition["type"] in ("Complete", "Failed"):
            return "done" if condition["type"] == "Complete" else "failed"
    return "running" if job["spec"].get("parallelism", 1) else "stopped"


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
