"""`elasticcb stop`: ends a job."""

from __future__ import annotations

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.cli.job_folders import find_job
from elasticcb.cli.kubernetes.job import KubernetesJob
from elasticcb.clients.local_job import stop_job
from elasticcb.cluster.kubernetes.api import KubernetesAPI
from elasticcb.cluster.kubernetes.pods import JOB_LABEL
from elasticcb.errors import UsageError


@click.command(context_settings=CONTEXT)
@click.argument("job", metavar="JOB")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    default=120.0,
    show_default=True,
    help="How long to wait until a job of this machine has ended.",
)
@click.option("--namespace", metavar="NAME", help="JOB is the name of one on Kubernetes, in this namespace.")
@click.option("--delete", is_flag=True, help="On Kubernetes: remove it with all that belongs to it; its folder stays.")
def stop(job: str, timeout: float, namespace: str | None, delete: bool) -> None:
    """Stop a job, so that `elasticcb resume` can go on with it if it trains.

    JOB is the job's folder, or its name below `jobs`; or a --job_name or `latest`, of which the newest is taken; with
    --namespace, the name of a job on Kubernetes. Running tasks finish, parameter servers write down what they hold, and
    all processes end, as after Ctrl-C. The command returns when they have; on Kubernetes at once.

    \b
    Examples:
      elasticcb stop latest
      elasticcb stop jobs/train-mnist-20260101-120000
      elasticcb stop census --namespace=training --delete
    """
    if namespace:
        _stop_on_kubernetes(KubernetesJob(KubernetesAPI(namespace), job), delete)
        return
    if delete:
        raise UsageError("--delete is for jobs on Kubernetes. Add --namespace, or leave it out, and remove the folder.")
    print(stop_job(find_job(job), timeout))


def _stop_on_kubernetes(job: KubernetesJob, delete: bool) -> None:
    name, namespace = job.name, job.api.namespace
    if delete:
        job.api.delete("Job", name)
        # A master that has its minute would ask for processes again that are removed before it.
        job.api.delete_pods(f"{JOB_LABEL}={name}")
        print(f"The job {name} is removed.")
        return
    if job.state != "running":
        raise UsageError(f"The job {name} is {job.state}; there is nothing to stop. --delete removes it.")
    job.api.patch("Job", name, {"spec": {"parallelism": 0}})
    print(f"The job {name} is stopping. To go on: elasticcb resume {name} --namespace={namespace}")
