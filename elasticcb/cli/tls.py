"""What a process holds that is started by hand."""

from __future__ import annotations

from elasticcb.errors import UsageError
from elasticcb.security.credentials import TOKEN_VARIABLE, Access, token_of_environment
from elasticcb.security.tls import TLS, tls_files


def access(flags: dict[str, str | None]) -> Access:
    """Of the flags of TLS. Raises `UsageError` for files that can't be used, and without a token."""
    files = tls_files({name: value or "" for name, value in flags.items()})
    tls = None if files is None else TLS.load(files)
    token = token_of_environment()
    if not token:
        raise UsageError(
            f"The environment variable {TOKEN_VARIABLE} is not set. Set it to the job's token, as in the command that "
            "the master prints after `Waiting for:`."
        )
    return Access(token, tls)
