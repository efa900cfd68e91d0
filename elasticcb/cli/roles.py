"""`elasticcb worker` and `elasticcb ps`: one process, joining a master."""

from __future__ import annotations

from typing import Any

import rich_click as click

from elasticcb.cli.command import CONTEXT, role_options
from elasticcb.cluster.role import RoleProcess
from elasticcb.errors import UsageError
from elasticcb.security.credentials import TOKEN_VARIABLE, Access, token_of_environment
from elasticcb.security.socket_folder import is_folder
from elasticcb.security.tls import FILES, TLS, tls_files

_MASTER_HELP = "Address of the master; `elasticcb master` prints it. Required."
_INDEX_HELP = "Index of this process, counted from 0; -1: the master chooses."
_HELP = {
    "worker": """Run one worker, which processes tasks from a master until none are left.

    The job's settings come from the master.

    \b
    Example:
      elasticcb worker --master 10.0.0.1:50001 --tls_ca=ca.pem
    """,
    "ps": """Run one parameter server, which holds its shard of the model until the job ends.

    The job's settings come from the master.

    \b
    Example:
      elasticcb ps --master 10.0.0.1:50001 --tls_ca=ca.pem --host 10.0.0.2
    """,
}


class Address(click.ParamType):
    """Checks the form of `HOST:PORT`, with an IPv6 host in brackets; `unix:FOLDER/NUMBER` passes unchecked."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if is_folder(str(value)):
            return str(value)
        host, colon, port = str(value).strip().rpartition(":")
        if not colon or not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
            self.fail(f"{value!r} is not an address. Expected HOST:PORT, such as 10.0.0.1:50001.", param, ctx)
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            self.fail(f"{value!r} is ambiguous. Put an IPv6 host in brackets: [::1]:50001.", param, ctx)
        return f"{host}:{port}"


def _command(role: str) -> click.Command:
    @click.command(role, context_settings=CONTEXT, help=_HELP[role])
    @click.option("--master", type=Address(), metavar="HOST:PORT", required=True, help=_MASTER_HELP)
    @click.option("--index", type=click.IntRange(-1), metavar="N", default=-1, show_default=True, help=_INDEX_HELP)
    @role_options(role)
    @click.option("--parent_pid", type=click.INT, default=None, hidden=True)  # exit when this process ends
    def run(**values: Any) -> None:
        tls = {name: values.pop(name) for name in (*FILES, "tls_name")}
        granted = access(values["master"], tls, values.pop("insecure"))
        given = {name: value for name, value in values.items() if value is not None}
        process = RoleProcess(role=role, access=granted, **given)
        from elasticcb.roles.run import run_role

        run_role(process)

    return run


worker, ps = _command("worker"), _command("ps")


def access(master: str, flags: dict[str, str | None], insecure: bool) -> Access:
    """Credentials from the TLS flags.

    Raises `UsageError` if files can't be used, the token is missing, or the token could reach a stranger.
    """
    files = tls_files({name: value or "" for name, value in flags.items()})
    if files is not None and insecure:
        raise UsageError(f"--insecure turns TLS off, but {files.flags[0]} asks for it. Remove one of the two.")
    if files is None and not insecure and not is_folder(master):
        raise UsageError(
            f"The master at {master} can't be authenticated without a CA, and the job's token is not sent to a "
            "stranger. Add --tls_ca, as in the command that the master prints after `Waiting for:`; or --insecure, "
            "if the master runs with it."
        )
    tls = None if files is None else TLS.load(files)
    token = token_of_environment()
    if not token:
        raise UsageError(
            f"The environment variable {TOKEN_VARIABLE} is not set. Set it to the job's token, as in the command that "
            "the master prints after `Waiting for:`."
        )
    return Access(token, tls)
