"""`elasticcb master`: runs only the master; the user starts the other processes."""

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
    help="The command that the job runs; it takes the flags of that command.",
)
@click.pass_context
def master(context: click.Context, /, job_command: str, **values: Any) -> None:
    """Run only the master, and wait for manually started workers and parameter servers.

    The same as `train`, `evaluate` or `predict` with --cluster=external. It prints the files to copy to the other
    machines, and the commands to run there. The model file and the data must have the same paths there.

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
