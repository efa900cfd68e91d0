"""Folders on remote file systems: any URL that fsspec supports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

SILENCE_SECONDS = 60.0  # how long one operation of SFTP or S3 may go without an answer


def is_url(folder: str) -> bool:
    """Whether a folder is given by a URL, not by a local path."""
    return "://" in folder


def problem_of(url: str) -> str:
    """Why a URL can't be used, without connecting; "": it is valid."""
    import fsspec  # here and below, because most commands don't need it

    try:
        fsspec.get_filesystem_class(fsspec.utils.get_protocol(url))
        parts = urlsplit(url)
    except (ImportError, ValueError) as error:
        return f"can't be used: {error}. Install the package of that protocol (elasticcb[s3], elasticcb[sftp])."
    if parts.password is not None:
        return (
            "contains a password, which would appear in logs. Remove it: fsspec reads it from the protocol's own "
            "files and variables, or from ~/.config/fsspec."
        )
    if parts.scheme in ("s3", "s3a", "gs", "gcs") and not parts.netloc:
        return "names no bucket."
    return "" if parts.netloc or parts.path.strip("/") else "contains no folder."


@contextlib.contextmanager
def opened(
    url: str, options: Mapping[str, Any] | None = None, silence_seconds: float = SILENCE_SECONDS
) -> Iterator[tuple[Any, str]]:
    """Opens a new connection: returns the fsspec file system of a URL, and the path of its folder there.

    Args:
        silence_seconds: how long one operation of SFTP or S3 may go without an answer; for other protocols, use
            `options`.

    Raises the errors of the file system.
    """
    import fsspec

    options = dict(options or {})
    protocol = fsspec.utils.get_protocol(url)
    if protocol in ("file", "local"):
        options.setdefault("auto_mkdir", True)
    if protocol in ("sftp", "ssh"):
        for name in ("timeout", "banner_timeout", "auth_timeout"):
            options.setdefault(name, silence_seconds)
    # Not an instance of an earlier attempt, whose connection may be broken.
    files, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    protocols = files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)
    if "s3" in protocols:  # unless configured; its 15 s are too few for the end of a large upload
        files.read_timeout = silence_seconds
    is_sftp = "sftp" in protocols
    if is_sftp:
        files.ftp.get_channel().settimeout(silence_seconds)
    try:
        yield files, root.rstrip("/")
    finally:
        if is_sftp:
            files.client.close()
