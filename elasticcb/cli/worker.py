"""`elasticcb worker`: one worker, joining a master."""

from __future__ import annotations

import rich_click as click

from elasticcb.cli.address import INDEX_HELP, MASTER_HELP, Address
from elasticcb.cli.command import CONTEXT, role_options
from elasticcb.cli.tls import access


@click.command(context_settings=CONTEXT)
@click.option("--master", "master_address", type=Address(), metavar="HOST:PORT", required=True, help=MASTER_HELP)
@click.option("--index", type=click.IntRange(-1), metavar="PLACE", default=-1, show_default=True, help=INDEX_HELP)
@role_options("worker")
@click.option("--parent_pid", type=click.INT, default=None, hidden=True)  # end when this process ends
def worker(master_address: str, index: int, parent_pid: int | None, **tls: str | None) -> None:
    """Run one worker, which takes tasks from a master until there are no more.

    The job's settings come from the master.

    \b
    Example:
      elasticcb worker --master 10.0.0.1:50001
    """
    from elasticcb.roles.processes import run_worker

    run_worker(master_address, index, parent_pid, access(tls))
