"""Folders of Unix sockets in which the processes of one machine listen for each other, and which only their user can
enter: nobody else can take the place of a process that died, and be told the job's token.

Such a folder stands for a host, "unix:FOLDER", and the name of a socket in it, a number, for the port. An address is
"unix:FOLDER/NUMBER" where others have "HOST:PORT".
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from elasticcb.security.private_folder import check_temporary

_SCHEME = "unix:"
_PREFIX = "elasticcb-sockets-"
_OTHER_PARENT = "/tmp"  # where temporary files go to a place that has no name for sockets
_PARENT = re.compile(r"[\w/.+-]{1,60}", re.ASCII)  # the path of a socket takes 100 characters; gRPC reads URIs
_YOUNG_SECONDS = 60.0  # its first process may be about to hold it


class SocketFolder:
    """The folder of a job, which processes of the job hold: while one of them lives, it is not abandoned.

    Args:
        address: of a process that listens in the folder; "" makes one when it is first asked for.
    """

    def __init__(self, address: str = "") -> None:
        self._host = host_of(address)
        self._held = hold_folder(self._host)

    @property
    def host(self) -> str:
        """As which it stands in addresses. Raises `UsageError` where other users could replace the folder."""
        if not self._host:
            parent = next(each for each in (tempfile.gettempdir(), _OTHER_PARENT) if _PARENT.fullmatch(each))
            check_temporary(parent)
            self._host = _SCHEME + tempfile.mkdtemp(prefix=_PREFIX, dir=parent)  # 0700
            self._held = hold_folder(self._host)
        return self._host

    def remove(self) -> None:
        """Nobody listens there any more."""
        remove_folder(self._host)
        self._host = ""
        if self._held is not None:
            os.close(self._held)
            self._held = None


def is_folder(host: str) -> bool:
    """Whether a host, or the host of an address, is a folder."""
    return host.startswith(_SCHEME)


def host_of(address: str) -> str:
    """The folder in which a process listens, as a host; "" of one that listens elsewhere."""
    return address.rpartition("/")[0] if is_folder(address) else ""


def address_of(host: str, port: int) -> str:
    return f"{host}/{port}" if is_folder(host) else f"{host}:{port}"


def port_of(address: str) -> int:
    return int(address.rpartition("/" if is_folder(address) else ":")[2])


def why_unsafe(host: str) -> str:
    """Why somebody else may listen in a folder, in words; "" if that can't be."""
    folder = host.removeprefix(_SCHEME)
    try:
        found = os.lstat(folder)
    except OSError as error:
        return f"{folder} is gone ({error.strerror})"
    except ValueError as error:
        return f"{folder!r} is no folder ({error})"
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return ""
    return f"{folder} is not a folder that only the user of this process can enter"


def free_port(host: str, port: int) -> int:
    """The port at which a server can listen in a folder.

    Args:
        port: the only one that will do; 0: any.

    Raises `OSError` when another process listens there, or others than this user can enter the folder.
    """
    unsafe = why_unsafe(host)
    if unsafe:
        raise OSError(unsafe)
    if not port:
        return 1 + secrets.randbelow(2**31 - 1)  # no process of the job draws that of another
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(address_of(host, port).removeprefix(_SCHEME)) in (errno.ENOENT, errno.ECONNREFUSED):
            return port  # gRPC removes the socket of a process that is gone, and that of one which listens, too
    raise OSError("another process listens there")


def hold_folder(host: str) -> int | None:
    """A file by which this process holds a folder until it closes it, or ends; None of what is no folder."""
    if not is_folder(host):
        return None
    held = None
    with contextlib.suppress(OSError):  # it is gone, or its file system knows no locks
        held = os.open(host.removeprefix(_SCHEME), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return held


def abandoned_folders() -> Iterator[Path]:
    """Folders of this user whose jobs were killed with all their processes; nobody can hold one until the next one is
    asked for."""
    for parent in sorted({tempfile.gettempdir(), _OTHER_PARENT}):
        for folder in sorted(Path(parent).glob(f"{_PREFIX}*")):
            if why_unsafe(f"{_SCHEME}{folder}"):
                continue
            with contextlib.suppress(OSError), contextlib.ExitStack() as until_end:  # it is gone, or held
                if time.time() - folder.stat().st_mtime < _YOUNG_SECONDS:
                    continue
                held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
                until_end.callback(os.close, held)
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield folder


def remove_folder(host: str) -> None:
    """Removes a folder that `SocketFolder` has made, with the sockets in it; several processes may do so at once."""
    folder = Path(host.removeprefix(_SCHEME))
    if not is_folder(host) or not folder.name.startswith(_PREFIX) or why_unsafe(host):
        return
    with contextlib.suppress(OSError):
        for each in folder.iterdir():
            if each.is_socket():
                each.unlink(missing_ok=True)
        folder.rmdir()
