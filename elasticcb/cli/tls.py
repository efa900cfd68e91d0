"""TLS credentials of a manually started process."""

from __future__ import annotations

from elasticcb.errors import UsageError
from elasticcb.security.credentials import TOKEN_VARIABLE, Access, token_of_environment
from elasticcb.security.socket_folder import is_folder
from elasticcb.security.tls import TLS, tls_files


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
