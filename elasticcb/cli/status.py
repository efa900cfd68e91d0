"""`elasticcb status`: the status of a job; `elasticcb jobs`: the jobs on Kubernetes."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.cli.job_folders import find_job
from elasticcb.cli.kubernetes.job import KubernetesJob, namespace_option, state_of, why_no_master
from elasticcb.clients.local_job import StoredJob, age, how_it_ended, master_of, wait_for_start
from elasticcb.cluster.kubernetes.api import KubernetesAPI, KubernetesError
from elasticcb.cluster.kubernetes.pods import JOB_LABEL, ROLE_LABEL
from elasticcb.errors import UsageError
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.storage.remote_files import is_url


@click.command(context_settings=CONTEXT)
@click.argument("job", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document.")
@click.option("--namespace", metavar="NAME", help="Kubernetes namespace; JOB is then the name of a job in it.")
def status(job: str, as_json: bool, namespace: str | None) -> None:
    """Show the status of a job, running or ended.

    JOB is the job's folder or its name below `jobs`; a --job_name or `latest` (the newest job); or, with
    --namespace, the name of a job on Kubernetes, whose pods are shown as well. docs/operations.md lists the keys of the
    JSON document.

    \b
    Examples:
      elasticcb status train-mnist-20260101-120000
      elasticcb status latest --json
      elasticcb status mnist --namespace=training
    """
    if namespace:
        state = _pods_state(KubernetesJob(KubernetesAPI(namespace), job))
        progress = state_lines(state["progress"]) if state["progress"] else [f"{job}: {state['state']}"]
        print(json.dumps(state, indent=2) if as_json else "\n".join([*progress, "", *_pods_lines(state)]))
        return
    document = job_state(find_job(job)) if not is_url(job) else _stored_state(job)
    print(json.dumps(document, indent=2) if as_json else "\n".join(state_lines(document)))


def _stored_state(url: str) -> dict[str, Any]:
    """The state of a job below a URL: of its master, if it is on this machine, or as the master last wrote it."""
    stored = StoredJob(url)
    folder = stored.local_folder
    if folder is not None:
        with contextlib.suppress(UsageError):
            return job_state(folder)
    return stored.status()


def job_state(folder: Path) -> dict[str, Any]:
    """The state of the job in a folder. Raises `UsageError` if no job runs or has ended there."""
    wait_for_start(folder)
    ended = how_it_ended(folder)
    if ended is not None:
        return ended
    with master_of(folder) as master:
        return master.status()


def state_lines(document: dict[str, Any]) -> list[str]:
    """Formats the document as text."""
    from elasticcb.cli.figures import status_parts

    seen = JobSnapshot.from_json(document)
    lines = [f"{seen.name} ({document['command']}): {seen.phase}", f"  {', '.join(status_parts(seen))}"]
    for name, counts in (("workers", seen.workers), ("parameter servers", seen.servers)):
        if counts.lost:
            lines.append(f"  {name} lost: {counts.lost}, replaced: {counts.replaced}")
    for condition in seen.conditions:
        if condition["message"]:
            asked_for = seen.phase == "interrupted" and condition["type"] == "Failed"
            lines.append(f"  {'' if asked_for else condition['type'] + ': '}{condition['message']}")
    if "written" in document:
        lines.append(f"  as its master wrote {age(document):.0f} s ago")
    return lines


def _pods_state(job: KubernetesJob) -> dict[str, Any]:
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


def _pods_lines(state: dict[str, Any]) -> list[str]:
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


@click.command(context_settings=CONTEXT)
@namespace_option
def jobs(namespace: str) -> None:
    """List the jobs in a Kubernetes namespace, with their state and number of running processes.

    \b
    Example:
      elasticcb jobs --namespace=training
    """
    api = KubernetesAPI(namespace)
    rows = [("JOB", "STATE", "WORKERS", "SERVERS", "SINCE")]
    running = Counter(
        (pod["metadata"]["labels"][JOB_LABEL], pod["metadata"]["labels"][ROLE_LABEL])
        for pod in api.list("Pod", JOB_LABEL, "status.phase=Running")["items"]
    )
    for job in api.list("Job", JOB_LABEL)["items"]:
        name = job["metadata"]["name"]
        counts = (str(running[name, role]) for role in ("worker", "ps"))
        rows.append((name, state_of(job), *counts, job["metadata"]["creationTimestamp"]))
    print("\n".join(table_lines(rows)))


def table_lines(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Pads all columns but the last to the width of their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] for row in rows)
    return ["  ".join([*cells, row[-1]]).rstrip() for cells, row in zip(padded, rows, strict=True)]
