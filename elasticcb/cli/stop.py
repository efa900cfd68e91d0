"""`elasticcb stop`: ends a job on Kubernetes."""

from __future__ import annotations

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.cli.kubernetes_job import KubernetesJob, namespace_option
from elasticcb.cluster.kubernetes_api import KubernetesAPI
from elasticcb.cluster.pods import JOB_LABEL
from elasticcb.errors import UsageError


@click.command(context_settings=CONTEXT)
@click.argument("job", metavar="JOB")
@namespace_option
@click.option("--delete", is_flag=True, help="Remove it with all that belongs to it; its folder stays.")
def stop(job: str, namespace: str, delete: bool) -> None:
    """Stop a job on Kubernetes, so that `elasticcb resume` can go on with it.

    Running tasks finish, parameter servers write down what they hold, and its pods end.

    \b
    Examples:
      elasticcb stop census --namespace=training
      elasticcb stop census --namespace=training --delete
    """
    found = KubernetesJob(KubernetesAPI(namespace), job)
    if delete:
        found.api.delete("Job", job)
        # A master that has its minute would ask for processes again that are removed before it.
        found.api.delete_pods(f"{JOB_LABEL}={job}")
        print(f"The job {job} is removed.")
        return
    if found.state != "running":
        raise UsageError(f"The job {job} is {found.state}; there is nothing to stop. --delete removes it.")
    found.api.patch("Job", job, {"spec": {"parallelism": 0}})
    print(f"The job {job} is stopping. To go on: elasticcb resume {job} --namespace={namespace}")
