"""What a process holds that is started by hand."""

from __future__ import annotations

from elasticcb.errors import UsageError
from elasticcb.security.credentials import TOKEN_VARIABLE, Access, token_of_environment
from elasticcb.security.socket_folder import is_folder
from elasticcb.security.tls import TLS, tls_files


def access(master: str, flags: dict[str, str | None], insecure: bool) -> Access:
    """Of the flags of TLS.

    Args:
        master: its address.

    Raises `UsageError` for files that can't be used, without a token, and where a stranger might be sent it.
    """
    files = tls_files({name: value or "" for name, value in flags.items()})
    if files is not None and insecure:
        raise UsageError(f"--insecure turns TLS off, and {files.flags[0]} asks for it. Leave one of them out.")
    if files is None and not insecure and not is_folder(master):
        raise UsageError(
            f"Nothing was given by which the master at {master} can be known, and the job's token is not sent to a "
            "stranger. Give --tls_ca, as in the command that the master prints after `Waiting for:`; or --insecure, if "
            "the master has that."
        )
    tls = None if files is None else TLS.load(files)
    token = token_of_environment()
    if not token:
        raise UsageError(
            f"The environment variable {TOKEN_VARIABLE} is not set. Set it to the job's token, as in the command that "
            "the master prints after `Waiting for:`."
        )
    return Access(token, tls)
