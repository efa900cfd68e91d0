"""A job on Kubernetes, for the commands about running jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rich_click as click

from elasticcb.cluster.kubernetes.api import KubernetesAPI, KubernetesError
from elasticcb.cluster.kubernetes.fate import CONTAINER, ENDED, Fate, PodVerdict, verdict
from elasticcb.cluster.kubernetes.flags import parse_name
from elasticcb.cluster.kubernetes.pods import INDEX_LABEL, JOB_DIR_FLAG, JOB_LABEL, NUMBER_LABEL, ROLE_LABEL
from elasticcb.errors import UsageError

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

    def newest(self, role: str, index: int = 0) -> str:
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


def namespace_option(function: Any) -> Any:
    """Adds --namespace to a click command, for jobs on Kubernetes."""
    return click.option(
        "--namespace", metavar="NAME", default="default", show_default=True, help="Kubernetes namespace of the job."
    )(function)
