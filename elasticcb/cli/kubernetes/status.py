"""The status of a job on Kubernetes: the master's report, and the state of each pod."""

from __future__ import annotations

import json
from typing import Any

from elasticcb.cli.jobs import table_lines
from elasticcb.cli.kubernetes.job import KubernetesJob, why_no_master
from elasticcb.cluster.kubernetes.api import KubernetesError
from elasticcb.errors import UsageError


def pods_state(job: KubernetesJob) -> dict[str, Any]:
    """As a JSON document; `progress` is the output of `elasticcb status` in the master's pod, None if unavailable."""
    pods = [
        {
            "pod": pod.name,
            "role": pod.role,
            "index": pod.index,
            "node": pod.node,
            "fate": pod.verdict.fate.value,
            "words": pod.verdict.words,
        }
        for pod in job.pods()
    ]
    state = job.state
    why = why_no_master(job.api, job.job) if state == "running" and not pods else ""
    return {"job": job.name, "state": state, "why_no_pods": why, "progress": _progress(job), "pods": pods}


def pods_lines(state: dict[str, Any]) -> list[str]:
    """The pods of the document, for people."""
    if state["why_no_pods"]:
        return [f"The master's pod can't be created; retrying: {state['why_no_pods']}."]
    rows = [(pod["pod"], pod["node"], pod["words"]) for pod in state["pods"]]
    return table_lines([("POD", "NODE", "STATE"), *rows])


def _progress(job: KubernetesJob) -> dict[str, Any] | None:
    try:
        code, said = job.run_beside_master(["status", job.directory, "--json"])
        found: dict[str, Any] = json.loads(said[said.index("{") :])
    except (UsageError, KubernetesError, ValueError):
        return None
    return None if code else found
