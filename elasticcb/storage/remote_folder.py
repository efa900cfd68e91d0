"""A folder on a remote file system with a marker for completeness."""

from __future__ import annotations

import base64
import hashlib
import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticcb.storage.remote_files import opened

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
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MARKER:
            digest = hashlib.md5(usedforsecurity=False)
            with path.open("rb") as stream:
                while block := stream.read(_COPY_BYTES):
                    digest.update(block)
            files[path.relative_to(folder).as_posix()] = FileSum(path.stat().st_size, digest.hexdigest())
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
                {"files": {name: {"size": file.size, "md5": file.md5} for name, file in files.items()}},
                indent=1,
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
