"""`elasticcb status`: shows the status of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.cli.job_folders import find_job
from elasticcb.cli.kubernetes.job import KubernetesJob
from elasticcb.cli.kubernetes.status import pods_lines, pods_state
from elasticcb.clients.local_job import how_it_ended, master_of, wait_for_start
from elasticcb.cluster.kubernetes.api import KubernetesAPI
from elasticcb.master.snapshot import JobSnapshot, ProcessCounts


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
        state = pods_state(KubernetesJob(KubernetesAPI(namespace), job))
        progress = state_lines(state["progress"]) if state["progress"] else [f"{job}: {state['state']}"]
        print(json.dumps(state, indent=2) if as_json else "\n".join([*progress, "", *pods_lines(state)]))
        return
    document = job_state(find_job(job))
    print(json.dumps(document, indent=2) if as_json else "\n".join(state_lines(document)))


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

    records, tasks = document["records"], document["tasks"]
    workers, servers = document["workers"], document["parameter_servers"]
    seen = JobSnapshot(
        phase=document["phase"],
        epoch=document["epoch"],
        epochs=document["epochs"],
        records_per_epoch=(records["trained"],),
        records_total=records["planned"],
        records_per_second=records["per_second"],
        version=document["version"],
        loss=document["loss"],
        metrics={name: value for name, value in document["metrics"].items() if value is not None},
        workers=ProcessCounts(planned=workers["planned"], up=workers["up"]),
        servers=ProcessCounts(planned=servers["planned"], up=servers["up"]),
        stragglers=tuple(workers["stragglers"]),
        tasks={("all", state): tasks[state] for state in ("todo", "doing")},
        seconds_left=document["seconds_left"],
    )
    lines = [f"{document['name']} ({document['command']}): {seen.phase}", f"  {', '.join(status_parts(seen))}"]
    for name, counts in (("workers", workers), ("parameter servers", servers)):
        if counts["lost"]:
            lines.append(f"  {name} lost: {counts['lost']}, replaced: {counts['replaced']}")
    for condition in document["conditions"]:
        if condition["message"]:
            asked_for = seen.phase == "interrupted" and condition["type"] == "Failed"
            lines.append(f"  {'' if asked_for else condition['type'] + ': '}{condition['message']}")
    return lines
