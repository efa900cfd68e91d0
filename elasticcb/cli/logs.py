"""`elasticcb logs`: shows the logs of a job's processes."""

from __future__ import annotations

from collections.abc import Iterable

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.cli.job import end_with
from elasticcb.cli.job_folders import find_job
from elasticcb.cli.kubernetes.follow import follow_job
from elasticcb.cli.kubernetes.job import KubernetesJob
from elasticcb.clients.local_job import log_lines
from elasticcb.cluster.kubernetes.api import KubernetesAPI
from elasticcb.errors import UsageError


@click.command(context_settings=CONTEXT)
@click.argument("job", metavar="JOB")
@click.option("--namespace", metavar="NAME", help="Kubernetes namespace; JOB is then the name of a job in it.")
@click.option("--follow", "-f", is_flag=True, help="Follow the log until the job ends. Ctrl-C stops only this command.")
@click.option("--master", is_flag=True, help="Show the log of the master (the default).")
@click.option("--worker", type=click.IntRange(0), metavar="N", help="Show the log of worker N.")
@click.option("--ps", type=click.IntRange(0), metavar="N", help="Show the log of parameter server N.")
@click.option(
    "--lines", type=click.IntRange(1), metavar="N", default=1000, show_default=True, help="Show only the last N lines."
)
def logs(
    job: str, namespace: str | None, follow: bool, master: bool, worker: int | None, ps: int | None, lines: int
) -> None:
    """Show the log of a job's master or of one of its other processes.

    JOB is the job's folder or its name below `jobs`; a --job_name or `latest` (the newest job); or, with
    --namespace, the name of a job on Kubernetes.

    \b
    Examples:
      elasticcb logs latest --follow
      elasticcb logs jobs/train-mnist-20260101-120000 --worker=3
      elasticcb logs census --namespace=training --follow
    """
    if master + (worker is not None) + (ps is not None) > 1:
        raise UsageError("--master, --worker and --ps exclude each other. Give one of them, or none for the master.")
    role, index = ("worker", worker) if worker is not None else ("ps", ps) if ps is not None else ("master", 0)
    if namespace:
        _show_pod(KubernetesJob(KubernetesAPI(namespace), job), role, index or 0, follow, lines)
    else:
        _show(log_lines(find_job(job), "master" if role == "master" else f"{role}-{index}", lines, follow))


def _show(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, end="", flush=True)


def _show_pod(job: KubernetesJob, role: str, index: int, follow: bool, lines: int) -> None:
    if role == "master" and follow and job.state == "running":
        end_with(follow_job(job.api, job.name, lines, from_now=True))
        return
    pod = job.newest(role, index)
    if not pod:
        raise UsageError(f"The job {job.name} has no pod of {role} {index}.")
    if not follow:
        print(job.api.log(pod, lines), end="")
        return
    _show(f"{line}\n" for line in job.api.follow_log(pod, lines))
