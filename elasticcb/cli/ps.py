"""`elasticcb ps`: one parameter server, joining a master."""

from __future__ import annotations

import rich_click as click

from elasticcb.cli.address import INDEX_HELP, MASTER_HELP, Address
from elasticcb.cli.command import CONTEXT
from elasticcb.cli.tls import access, tls_options


@click.command(context_settings=CONTEXT)
@click.option("--master", "master_address", type=Address(), metavar="HOST:PORT", required=True, help=MASTER_HELP)
@click.option("--index", type=click.IntRange(-1), metavar="PLACE", default=-1, show_default=True, help=INDEX_HELP)
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Address of this machine to listen on; one that the master and the workers reach.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    default=0,
    help="Port to listen on; 0, the default: any that is free.",
)
@click.option(
    "--health_port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Port on which it answers gRPC health checks, as Kubernetes makes them; 0: any that is free.",
)
@tls_options
@click.option("--parent_pid", type=click.INT, default=None, hidden=True)  # end when this process ends
def ps(
    master_address: str,
    index: int,
    host: str,
    port: int,
    health_port: int | None,
    parent_pid: int | None,
    **tls: str | None,
) -> None:
    """Run one parameter server, which holds its part of the model until the job is over.

    The job's settings come from the master.

    \b
    Example:
      elasticcb ps --master 10.0.0.1:50001 --host 10.0.0.2
    """
    from elasticcb.roles.processes import run_ps

    run_ps(master_address, index, host, parent_pid, access(tls), health_port, port)
