"""`elasticcb logs`: what a job on Kubernetes says."""

from __future__ import annotations

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.cli.job import end_with
from elasticcb.cli.kubernetes_follow import follow_job
from elasticcb.cli.kubernetes_job import KubernetesJob, namespace_option
from elasticcb.cluster.kubernetes_api import KubernetesAPI
from elasticcb.errors import UsageError


@click.command(context_settings=CONTEXT)
@click.argument("job", metavar="JOB")
@namespace_option
@click.option("--follow", "-f", is_flag=True, help="Go on until the job is over; Ctrl-C ends this alone.")
@click.option("--worker", type=click.IntRange(0), metavar="N", help="What worker N writes, instead of the master.")
@click.option("--ps", type=click.IntRange(0), metavar="N", help="What parameter server N writes.")
@click.option("--lines", type=click.IntRange(1), metavar="N", default=1000, show_default=True, help="The last ones.")
def logs(job: str, namespace: str, follow: bool, worker: int | None, ps: int | None, lines: int) -> None:
    """Show what the master of a job on Kubernetes writes, or one of its other processes.

    \b
    Examples:
      elasticcb logs census --namespace=training --follow
      elasticcb logs census --worker=3
    """
    if worker is not None and ps is not None:
        raise UsageError("--worker and --ps are given. Expected one of them, or none for the master.")
    role, index = ("worker", worker) if worker is not None else ("ps", ps) if ps is not None else ("master", 0)
    found = KubernetesJob(KubernetesAPI(namespace), job)
    if role == "master" and follow and found.state == "running":
        end_with(follow_job(found.api, job, lines, from_now=True))
        return
    pod = found.newest(role, index or 0)
    if not pod:
        raise UsageError(f"The job {job} has no pod of {role} {index}.")
    if not follow:
        print(found.api.log(pod, lines), end="")
        return
    for line in found.api.follow_log(pod, lines):
        print(line, flush=True)
