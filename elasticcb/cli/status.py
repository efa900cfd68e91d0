"""`elasticcb status`: the status of a job; `elasticcb jobs`: all jobs."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich_click as click

from elasticcb.cli.command import CONTEXT, in_namespace
from elasticcb.cli.job_folders import JOBS, find_job, known_jobs
from elasticcb.cli.kubernetes.job import KubernetesJob, state_of, why_no_master
from elasticcb.clients.local_job import StoredJob, age, how_it_ended, master_of, wait_for_start
from elasticcb.clients.running_master import can_resume, is_of_cluster, is_starting
from elasticcb.cluster.kubernetes.api import KubernetesAPI, KubernetesError
from elasticcb.cluster.kubernetes.pods import JOB_LABEL, ROLE_LABEL
from elasticcb.errors import ConnectionLostError, UsageError
from elasticcb.master.snapshot import JobSnapshot, format_metric
from elasticcb.settings import JOB_FILE
from elasticcb.storage import durable
from elasticcb.storage.remote_files import is_url


@click.command(context_settings=CONTEXT)
@click.argument("job", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document.")
@in_namespace
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
    if seen.export_path:
        lines.append(f"  exports: up to version {seen.export_version} in {seen.export_path}")
    for name, counts in (("workers", seen.workers), ("parameter servers", seen.servers)):
        if counts.lost:
            lines.append(f"  {name} lost: {counts.lost}, replaced: {counts.replaced}")
    for condition in seen.conditions:
        if condition["message"]:
            asked_for = seen.phase == "interrupted" and condition["type"] == "Failed"
            message = document["error"] if condition["type"] == "Failed" else condition["message"]
            lines.append(f"  {'' if asked_for else condition['type'] + ': '}{message}")
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
@click.argument("folder", metavar="[FOLDER]", default=JOBS)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document: a list.")
@click.option("--namespace", metavar="NAME", help="List the jobs in this Kubernetes namespace instead.")
def jobs(folder: str, as_json: bool, namespace: str | None) -> None:
    """List jobs, newest first: name, command, state, start, last metrics, folder.

    FOLDER contains the folders of jobs, and of Python programs with a Cluster; by default `jobs` of the working
    directory.

    \b
    Examples:
      elasticcb jobs
      elasticcb jobs --json
      elasticcb jobs --namespace=training
    """
    if namespace:
        found = _kubernetes_jobs(KubernetesAPI(namespace))
    else:
        found = [_listed(path, begun) for path, begun in known_jobs(Path(folder).expanduser().absolute())]
    if as_json:
        print(json.dumps(found, indent=2))
    elif found:
        print("\n".join(table_lines([tuple(map(str.upper, found[0])), *(tuple(each.values()) for each in found)])))
    else:
        where = f"the namespace {namespace}" if namespace else str(Path(folder).expanduser().absolute())
        print(f"There are no jobs in {where}.")


def _listed(folder: Path, begun: float) -> dict[str, str]:
    """A job on this machine, as text by column."""
    state, document = _state_of(folder)
    name, command = document["name"] or folder.name, document["command"] or "-"
    if is_of_cluster(folder):
        name, command = folder.name, "program"
    values = {} if document["loss"] is None else {"loss": document["loss"]}
    values |= {f"val_{name}": value for name, value in document["metrics"].items() if value is not None}
    return {
        "job": name,
        "command": command,
        "state": state,
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begun)),
        "metrics": ", ".join(f"{name} {format_metric(value)}" for name, value in values.items()) or "-",
        "folder": os.path.relpath(folder),
    }


def _state_of(folder: Path) -> tuple[str, dict[str, Any]]:
    """The phase of a job, or why it is unknown; and its document, as far as it is known."""
    unknown: dict[str, Any] = {"name": "", "command": "", "loss": None, "metrics": {}}
    with contextlib.suppress(OSError, ValueError):
        document = durable.read_document(folder / JOB_FILE)
        unknown |= {each: str(document.get(each, "")) for each in ("name", "command")}
    try:
        ended = how_it_ended(folder)
        if ended is not None:
            if wrong := durable.misfit(ended, {"phase": str, "name": str, "command": str, "metrics": dict}):
                raise UsageError(wrong)
            return ended["phase"], ended
        if is_starting(folder):
            return "starting", unknown
        with master_of(folder) as master:
            document = master.status()
            return str(document["phase"]), document
    except (UsageError, ConnectionLostError):
        if is_of_cluster(folder):
            return "ended", unknown
        return ("not finished" if can_resume(folder) else "lost"), unknown


def _kubernetes_jobs(api: KubernetesAPI) -> list[dict[str, str]]:
    running = Counter(
        (pod["metadata"]["labels"][JOB_LABEL], pod["metadata"]["labels"][ROLE_LABEL])
        for pod in api.list("Pod", JOB_LABEL, "status.phase=Running")["items"]
    )
    found = [
        {
            "job": job["metadata"]["name"],
            "state": state_of(job),
            "workers": str(running[job["metadata"]["name"], "worker"]),
            "servers": str(running[job["metadata"]["name"], "ps"]),
            "since": job["metadata"]["creationTimestamp"],
        }
        for job in api.list("Job", JOB_LABEL)["items"]
    ]
    return sorted(found, key=lambda job: job["since"], reverse=True)


def table_lines(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Pads all columns but the last to the width of their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] for row in rows)
    return ["  ".join([*cells, row[-1]]).rstrip() for cells, row in zip(padded, rows, strict=True)]
