"""`elasticcb ps`: one parameter server, joining a master."""

from __future__ import annotations

import rich_click as click

from elasticcb.cli.address import INDEX_HELP, MASTER_HELP, Address
from elasticcb.cli.command import CONTEXT, role_options
from elasticcb.cli.tls import access


@click.command(context_settings=CONTEXT)
@click.option("--master", "master_address", type=Address(), metavar="HOST:PORT", required=True, help=MASTER_HELP)
@click.option("--index", type=click.IntRange(-1), metavar="PLACE", default=-1, show_default=True, help=INDEX_HELP)
@role_options("ps")
@click.option("--parent_pid", type=click.INT, default=None, hidden=True)  # end when this process ends
def ps(
    master_address: str,
    index: int,
    host: str | None,
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

    run_ps(master_address, index, host or "127.0.0.1", parent_pid, access(tls), health_port, port)
