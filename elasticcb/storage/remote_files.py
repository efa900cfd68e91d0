"""Folders on remote file systems: whatever fsspec knows by a URL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

SILENCE_SECONDS = 60.0  # of one SFTP operation without an answer


def is_url(folder: str) -> bool:
    """Whether a folder is named by a URL, not by a path of this machine."""
    return "://" in folder


def problem_of(url: str) -> str:
    """Why a URL can't be used, without having connected; "": nothing is wrong with it."""
    import fsspec  # here, as below: most commands need it not

    try:
        fsspec.get_filesystem_class(fsspec.utils.get_protocol(url))
        parts = urlsplit(url)
    except (ImportError, ValueError) as error:
        return f"can't be used: {error}. Install the package of that protocol (elasticcb[s3], elasticcb[sftp])."
    if parts.password is not None:
        return (
            "holds a password, which would stand in logs. Leave it out: fsspec takes it from the protocol's own files "
            "and variables, or from ~/.config/fsspec."
        )
    return "" if parts.netloc or parts.path.strip("/") else "names no folder."


@contextlib.contextmanager
def opened(
    url: str, options: Mapping[str, Any] | None = None, silence_seconds: float = SILENCE_SECONDS
) -> Iterator[tuple[Any, str]]:
    """A new connection: the fsspec file system of a URL, and the path of its folder there.

    Args:
        options: arguments of the file system.
        silence_seconds: of one SFTP operation without an answer; other protocols take theirs by `options`.

    Raises whatever the file system raises.
    """
    import fsspec

    options = dict(options or {})
    protocol = fsspec.utils.get_protocol(url)
    if protocol in ("file", "local"):
        options.setdefault("auto_mkdir", True)
    if protocol in ("sftp", "ssh"):
        for name in ("timeout", "banner_timeout", "auth_timeout"):
            options.setdefault(name, silence_seconds)
    # No instance of an earlier attempt: its connection may be what broke.
    files, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    is_sftp = "sftp" in (files.protocol if isinstance(files.protocol, tuple) else (files.protocol,))
    if is_sftp:
        files.ftp.get_channel().settimeout(silence_seconds)
    try:
        yield files, root.rstrip("/")
    finally:
        if is_sftp:
            files.client.close()
