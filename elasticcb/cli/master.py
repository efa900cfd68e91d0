"""`elasticcb master`: the master alone, for people who start the other processes by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import rich_click as click

from elasticcb.cli.command import CONTEXT, JobCommand, given_values, job_options
from elasticcb.cli.job import run_job
from elasticcb.cluster.external import ExternalCluster
from elasticcb.settings import Command
from elasticcb.settings.definition import ALL, JOB


@click.command(cls=JobCommand, context_settings=CONTEXT)
@job_options(ALL, leave_out=frozenset({"cluster"}))
@click.option(
    "--command",
    "job_command",
    type=click.Choice([command.value for command in Command if command in ALL]),
    default=Command.TRAIN.value,
    show_default=True,
    panel=JOB,
    help="What the job does; the flags are those of that command.",
)
@click.pass_context
def master(context: click.Context, /, job_command: str, **values: Any) -> None:
    """Run the master alone, and wait for workers and servers started by hand.

    The same as `train`, `evaluate` or `predict` with --cluster=external: it prints what to copy to the
    other machines, and what to run there. Model file and data must be found there under the same paths.

    \b
    Examples:
      elasticcb master --config job.yaml --host=10.0.0.1 --port=50001
      elasticcb ps     --master 10.0.0.1:50001 --tls_ca=ca.pem --host=10.0.0.2
      elasticcb worker --master 10.0.0.1:50001 --tls_ca=ca.pem
    """
    given = given_values(context)
    values = {**given.values, "cluster": ExternalCluster.name}
    external = dataclasses.replace(given, values=values, explicit=given.explicit | {"cluster"})
    run_job(Command(job_command), external, context.obj)
