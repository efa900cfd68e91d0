"""What a process holds that is started by hand."""

from __future__ import annotations

from elasticcb.security.credentials import Access, token_of_environment
from elasticcb.security.tls import TLS, tls_files


def access(flags: dict[str, str | None]) -> Access:
    """Of the flags of TLS. Raises `UsageError` for files that can't be used."""
    files = tls_files({name: value or "" for name, value in flags.items()})
    return Access(token_of_environment(), None if files is None else TLS.load(files))
