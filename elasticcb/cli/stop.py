"""`elasticcb stop`: stops a job."""

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
    help="How long to wait for a job on this machine to end.",
)
@click.option("--namespace", metavar="NAME", help="Kubernetes namespace; JOB is then the name of a job in it.")
@click.option("--delete", is_flag=True, help="On Kubernetes: delete the job with all its objects; its folder is kept.")
def stop(job: str, timeout: float, namespace: str | None, delete: bool) -> None:
    """Stop a job. `elasticcb resume` can continue a training job later.

    JOB is the job's folder or its name below `jobs`; a --job_name or `latest` (the newest job); or, with
    --namespace, the name of a job on Kubernetes. As after Ctrl-C, running tasks finish, parameter servers save their
    state, and all processes exit. The command returns when they have exited; on Kubernetes, at once.

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
        raise UsageError(
            "--delete applies only to jobs on Kubernetes. Add --namespace; or, for a job on this machine, remove its "
            "folder."
        )
    print(stop_job(find_job(job), timeout))


def _stop_on_kubernetes(job: KubernetesJob, delete: bool) -> None:
    name, namespace = job.name, job.api.namespace
    if delete:
        job.api.delete("Job", name)
        # During its grace period, a master would recreate pods that are deleted before it.
        job.api.delete_pods(f"{JOB_LABEL}={name}")
        print(f"The job {name} was deleted.")
        return
    if job.state != "running":
        raise UsageError(f"The job {name} is {job.state}; there is nothing to stop. Use --delete to delete it.")
    job.api.patch("Job", name, {"spec": {"parallelism": 0}})
    print(f"The job {name} is stopping. To continue it: elasticcb resume {name} --namespace={namespace}")
