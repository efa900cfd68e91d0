"""`elasticcb jobs`: the jobs on Kubernetes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.cli.kubernetes.job import namespace_option, state_of
from elasticcb.cluster.kubernetes.api import KubernetesAPI
from elasticcb.cluster.kubernetes.pods import JOB_LABEL, ROLE_LABEL


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
