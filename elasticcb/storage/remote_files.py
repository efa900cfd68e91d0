"""Folders on remote file systems: any URL that fsspec supports; and one with a marker for completeness."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from elasticcb.storage.local_folders import files_below

SILENCE_SECONDS = 60.0  # how long one operation of SFTP or S3 may go without an answer


def is_url(folder: str) -> bool:
    """Whether a folder is given by a URL, not by a local path."""
    return "://" in folder


def as_path(folder: str) -> str:
    """The path of a `file://` or `local://` URL; others, and paths, unchanged."""
    return folder.removeprefix("file://").removeprefix("local://")


# A password may contain "/", of which `urlsplit` knows nothing. A port is none, nor is what GitHub's URLs have there.
_PASSWORD = re.compile(r"((?<!github)://[^/\s:@]*):(?!\d{1,5}(?:/|$))[^\s@]*@")


def without_password(text: str) -> str:
    """`text` with passwords in URLs masked."""
    return _PASSWORD.sub(r"\1:***@", text)


def password_in(url: str) -> str:
    """Why a URL with a password can't be used; "": it has none."""
    if not _PASSWORD.search(url):
        return ""
    return (
        "contains a password, which would appear in logs. Remove it: fsspec reads it from the protocol's own files and "
        "variables, or from ~/.config/fsspec."
    )


def problem_of(url: str) -> str:
    """Why a URL can't be used, without connecting; "": it is valid."""
    import fsspec  # here and below, because most commands don't need it

    if problem := password_in(url):
        return problem
    try:
        fsspec.get_filesystem_class(fsspec.utils.get_protocol(url))
        parts = urlsplit(url)
    except (ImportError, ValueError) as error:
        return f"can't be used: {error}. Install the package of that protocol (elasticcb[s3], elasticcb[sftp])."
    if parts.scheme in ("file", "local") and parts.netloc:
        return "has a relative path. Expected an absolute one, after three slashes, such as file:///data/jobs."
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
    protocol = fsspec.utils.get_protocol(url) if is_url(url) else "file"
    if protocol in ("file", "local"):
        options.setdefault("auto_mkdir", True)
    if protocol in ("sftp", "ssh"):
        for name in ("timeout", "banner_timeout", "auth_timeout"):
            options.setdefault(name, silence_seconds)
    # Not an instance of an earlier attempt, whose connection may be broken.
    if protocol in ("file", "local"):
        files = fsspec.filesystem(protocol, skip_instance_cache=True, **options)
        root = files._strip_protocol(url)  # in which "::" separates nothing
    else:
        files, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    protocols = protocols_of(files)
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


def protocols_of(files: Any) -> tuple[str, ...]:
    """The names of the protocol of a file system."""
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


MARKER = "_SUCCESS"
_READ_BACK_BYTES = 4 * 1024 * 1024  # files up to this size are compared by content
_COPY_BYTES = 1024 * 1024


@dataclass(frozen=True)
class FileSum:
    size: int  # bytes
    md5: str  # hex


def local_files(folder: Path) -> dict[str, FileSum]:
    """All files below `folder`, by path with `/`."""
    files = {}
    for name, path in files_below(folder):
        if path.name != MARKER:
            digest = hashlib.md5(usedforsecurity=False)
            with path.open("rb") as stream:
                while block := stream.read(_COPY_BYTES):
                    digest.update(block)
            files[name] = FileSum(path.stat().st_size, digest.hexdigest())
    return files


class RemoteFolder:
    """Uploads folders to one URL; remembers uploaded files between attempts."""

    def __init__(self, url: str, storage_options: Mapping[str, Any], timeout_seconds: float) -> None:
        self._url = url
        self._options = dict(storage_options)
        self._timeout_seconds = timeout_seconds
        self._arrived: set[str] = set()
        self._previous: set[str] = set()  # files of the previous model
        self._marker_removed = False

    def upload(self, folder: Path, files: Mapping[str, FileSum]) -> int:
        """Makes one attempt. Returns the number of files sent.

        Raises the errors of the file system, and `OSError` if a file did not arrive completely.
        """
        with opened(self._url, self._options, self._timeout_seconds) as (fs, root):
            marker = json.dumps(
                {"files": {name: {"size": file.size, "md5": file.md5} for name, file in files.items()}}, indent=1
            ).encode()
            if not self._marker_removed:
                there = self._read_marker(fs, root)
                if there == marker and all(self._is_whole(fs, root, name, files[name]) for name in files):
                    return 0
                self._previous |= _files_of(there)  # an earlier attempt may have removed the marker without noticing
                if there is not None:
                    fs.rm_file(_join(root, MARKER))
                self._marker_removed = True
            sent = 0
            for name, file in files.items():
                if name not in self._arrived:
                    fs.put_file(str(folder / name), _join(root, name))
                    self._verify(fs, root, name, file)
                    self._arrived.add(name)
                    sent += 1
            for name in sorted(self._previous - files.keys()):
                if fs.exists(_join(root, name)):
                    fs.rm_file(_join(root, name))
            fs.pipe_file(_join(root, MARKER), marker)
            self._verify(fs, root, MARKER, FileSum(len(marker), _md5(marker)))
            return sent

    def _read_marker(self, fs: Any, root: str) -> bytes | None:
        try:
            return bytes(fs.cat_file(_join(root, MARKER)))
        except FileNotFoundError:
            return None

    def _verify(self, fs: Any, root: str, name: str, file: FileSum) -> None:
        fs.invalidate_cache()
        if not self._is_whole(fs, root, name, file):
            raise OSError(
                f"{name} arrived with {fs.info(_join(root, name)).get('size')} bytes or different content; sent "
                f"{file.size} bytes with MD5 {file.md5}"
            )

    def _is_whole(self, fs: Any, root: str, name: str, file: FileSum) -> bool:
        path = _join(root, name)
        try:
            info = fs.info(path)
        except FileNotFoundError:
            return False
        if info.get("size") != file.size:
            return False
        told = _told_md5(info)
        if told == file.md5:
            return True
        # The store provides no MD5, or a different one: of an encrypted object or a multipart upload.
        return file.size > _READ_BACK_BYTES or _md5(fs.cat_file(path)) == file.md5


def _told_md5(info: Mapping[str, Any]) -> str | None:
    """MD5 in hex, as provided by S3 (ETag) and Google Cloud Storage (md5Hash)."""
    tag = str(info.get("ETag", "")).strip('"').lower()
    if re.fullmatch(r"[0-9a-f]{32}", tag):
        return tag
    return base64.b64decode(info["md5Hash"]).hex() if "md5Hash" in info else None


def _files_of(marker: bytes | None) -> set[str]:
    try:
        names = json.loads(marker or b"{}")["files"]
    except (ValueError, KeyError, TypeError):  # another tool's marker
        return set()
    # Files listed in a marker are deleted, so paths that lead out of the folder are ignored.
    return {name for name in names if not name.startswith("/") and ".." not in name.split("/")}


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _join(root: str, name: str) -> str:
    return posixpath.join(root, name)
