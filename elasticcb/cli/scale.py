"""`elasticcb scale`: changes the number of workers or parameter servers of a running job."""

from __future__ import annotations

import sys

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.cli.job import end_with
from elasticcb.cli.job_folders import find_job
from elasticcb.cli.kubernetes.job import KubernetesJob
from elasticcb.clients.local_job import scale_job
from elasticcb.cluster.kubernetes.api import KubernetesAPI
from elasticcb.errors import UsageError
from elasticcb.process.logs import say


@click.command(context_settings=CONTEXT)
@click.argument("job", metavar="JOB")
@click.option("--workers", type=click.IntRange(1), metavar="N", help="New number of workers.")
@click.option("--ps", type=click.IntRange(1), metavar="M", help="New number of parameter servers.")
@click.option("--namespace", metavar="NAME", help="Kubernetes namespace; JOB is then the name of a job in it.")
def scale(job: str, workers: int | None, ps: int | None, namespace: str | None) -> None:
    """Change the number of workers or parameter servers of a running job.

    JOB is the job's folder or its name below `jobs`; a --job_name or `latest` (the newest job); or, with
    --namespace, the name of a job on Kubernetes. New workers take tasks as soon as they run. Surplus workers finish
    their batch, return the rest of their task, and exit: no record is lost or trained twice. Parameter servers move
    their shards while training continues; the command returns when they have moved.

    \b
    Examples:
      elasticcb scale train-mnist-20260101-120000 --workers 4
      elasticcb scale train-mnist-20260101-120000 --ps 2
      elasticcb scale mnist --namespace=training --workers 4
    """
    if not workers and not ps:
        raise UsageError("Nothing to scale. Expected --workers=N, --ps=M, or both.")
    if namespace:
        end_with(_scale_on_kubernetes(KubernetesJob(KubernetesAPI(namespace), job), workers, ps))
        return
    for line in scale_job(find_job(job), workers, ps, on_wait=lambda waits_for: say(f"Waiting for {waits_for}.")):
        print(line)


def _scale_on_kubernetes(job: KubernetesJob, workers: int | None, ps: int | None) -> int:
    """Runs the same command in the master's pod: only from there the job can be reached."""
    counts = [f"--{name}={count}" for name, count in (("workers", workers), ("ps", ps)) if count]
    directory = job.directory
    code, said = job.run_beside_master(["scale", directory, *counts])
    print(said.replace(directory, job.name), end="", file=sys.stderr if code else sys.stdout)
    return code
