"""`elasticcb worker` and `elasticcb ps`: one process, joining a master."""

from __future__ import annotations

from typing import Any

import rich_click as click

from elasticcb.cli.address import INDEX_HELP, MASTER_HELP, Address
from elasticcb.cli.command import CONTEXT, role_options
from elasticcb.cli.tls import access
from elasticcb.cluster.role import RoleProcess
from elasticcb.security.tls import FILES

_HELP = {
    "worker": """Run one worker, which takes tasks from a master until there are no more.

    The job's settings come from the master.

    \b
    Example:
      elasticcb worker --master 10.0.0.1:50001 --tls_ca=ca.pem
    """,
    "ps": """Run one parameter server, which holds its part of the model until the job is over.

    The job's settings come from the master.

    \b
    Example:
      elasticcb ps --master 10.0.0.1:50001 --tls_ca=ca.pem --host 10.0.0.2
    """,
}


def _command(role: str) -> click.Command:
    @click.command(role, context_settings=CONTEXT, help=_HELP[role])
    @click.option("--master", type=Address(), metavar="HOST:PORT", required=True, help=MASTER_HELP)
    @click.option("--index", type=click.IntRange(-1), metavar="PLACE", default=-1, show_default=True, help=INDEX_HELP)
    @role_options(role)
    @click.option("--parent_pid", type=click.INT, default=None, hidden=True)  # end when this process ends
    def run(**values: Any) -> None:
        tls = {name: values.pop(name) for name in (*FILES, "tls_name")}
        granted = access(values["master"], tls, values.pop("insecure"))
        given = {name: value for name, value in values.items() if value is not None}
        process = RoleProcess(role=role, access=granted, **given)
        from elasticcb.roles.run import run_role

        run_role(process)

    return run


worker, ps = _command("worker"), _command("ps")
