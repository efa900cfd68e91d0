"""Private folders: for a job's secrets (its token, the key of its CA, its logs), and for Unix sockets of processes of
one machine. Only their user can enter the latter, so nobody else can impersonate a dead process and receive the token.

A folder of sockets corresponds to a host, "unix:FOLDER", and the name of a socket in it, a number, to a port. An
address is "unix:FOLDER/NUMBER" instead of "HOST:PORT".
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

from elasticcb.errors import UsageError


def make_private(folder: Path, by_link: bool = True) -> None:
    """Creates a folder, or restricts an existing one, so that only its owner can access it, as far as permitted.

    An existing folder for all users (such as /tmp) is not changed.

    Raises:
        UsageError: it belongs to another user. Root may use any folder (for example one mounted into a container), and
            everyone may use root's.
        OSError: it can't be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat() if by_link else folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise UsageError(f"{folder} is a symbolic link. Expected a folder or an unused path. Remove the link.")
    if _is_another_users(folder, found.st_uid):
        raise UsageError(
            f"{folder} belongs to another user (uid {found.st_uid}), who could read and replace a job's keys there. "
            "Choose your own folder, or one that does not exist."
        )
    if found.st_mode & 0o077 and not found.st_mode & stat.S_ISVTX:
        with contextlib.suppress(OSError):  # root's, or its file system does not support modes
            folder.chmod(0o700)


def check_temporary(place: str) -> None:
    """Raises `UsageError` if all users can replace files of this user in a folder for temporary files: they can write
    to it or to a parent, and it is not sticky. Members of a group that shares a folder are trusted."""
    path = Path(place).resolve()
    for folder in (path, *path.parents):
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UsageError(
                f"All users can write to {folder} (mode {stat.S_IMODE(mode):o}), and could replace a job's files in "
                f"{place}. Make it sticky (chmod +t {folder}), or set the environment variable TMPDIR to another "
                "folder for temporary files."
            )


def _is_another_users(folder: Path, owner: int) -> bool:
    if os.geteuid() in (0, owner) or owner == 0:
        return False
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as own:
        return os.fstat(own.fileno()).st_uid != owner  # a file system may map all users to one, as NFS can
    return True


_SCHEME = "unix:"
_PREFIX = "elasticcb-sockets-"
_OTHER_PARENT = "/tmp"  # if the path of the temporary folder is unsuitable for sockets
# the path of a socket is limited to 100 characters, and gRPC parses URIs
_PARENT = re.compile(r"[\w/.+-]{1,60}", re.ASCII)
_YOUNG_SECONDS = 60.0  # its first process may be about to lock it


class SocketFolder:
    """The socket folder of a job. Its processes lock it: while one of them lives, the folder is in use.

    Args:
        address: address of a process that listens in the folder; "": create a folder on first use.
    """

    def __init__(self, address: str = "") -> None:
        self._host = host_of(address)
        self._held = hold_folder(self._host)

    @property
    def host(self) -> str:
        """The host for addresses. Raises `UsageError` if other users could replace the folder."""
        if not self._host:
            parent = next(each for each in (tempfile.gettempdir(), _OTHER_PARENT) if _PARENT.fullmatch(each))
            check_temporary(parent)
            self._host = _SCHEME + tempfile.mkdtemp(prefix=_PREFIX, dir=parent)  # 0700
            self._held = hold_folder(self._host)
        return self._host

    def remove(self) -> None:
        """Removes the folder; call it when nobody listens there any more."""
        remove_folder(self._host)
        self._host = ""
        if self._held is not None:
            os.close(self._held)
            self._held = None


def is_folder(host: str) -> bool:
    """Whether a host, or the host of an address, is a folder."""
    return host.startswith(_SCHEME)


def host_of(address: str) -> str:
    """The folder in which a process listens, as a host; "": it listens elsewhere."""
    return address.rpartition("/")[0] if is_folder(address) else ""


def address_of(host: str, port: int) -> str:
    return f"{host}/{port}" if is_folder(host) else f"{host}:{port}"


def port_of(address: str) -> int:
    return int(address.rpartition("/" if is_folder(address) else ":")[2])


def why_unsafe(host: str) -> str:
    """Why another user may be listening in a folder; "" if that is impossible."""
    folder = host.removeprefix(_SCHEME)
    try:
        found = os.lstat(folder)
    except OSError as error:
        return f"{folder} is gone ({error.strerror})"
    except ValueError as error:
        return f"{folder!r} is not a folder ({error})"
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return ""
    return f"{folder} is not a folder that only the user of this process can enter"


def free_port(host: str, port: int) -> int:
    """The port at which a server can listen in a folder.

    Raises `OSError` if another process listens there, or other users can enter the folder.
    """
    unsafe = why_unsafe(host)
    if unsafe:
        raise OSError(unsafe)
    if not port:
        return 1 + secrets.randbelow(2**31 - 1)  # so that processes of the job don't draw the same number
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(address_of(host, port).removeprefix(_SCHEME)) in (errno.ENOENT, errno.ECONNREFUSED):
            return port  # gRPC removes an existing socket, even if a process listens on it
    raise OSError("another process listens there")


def hold_folder(host: str) -> int | None:
    """A file that locks a folder for this process until it is closed; None if it is not a folder."""
    if not is_folder(host):
        return None
    held = None
    with contextlib.suppress(OSError):  # it is gone, or its file system does not support locks
        held = os.open(host.removeprefix(_SCHEME), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return held


def abandoned_folders() -> Iterator[Path]:
    """Folders of this user whose jobs were killed with all their processes; each is locked until the next one is
    requested."""
    for parent in sorted({tempfile.gettempdir(), _OTHER_PARENT}):
        for folder in sorted(Path(parent).glob(f"{_PREFIX}*")):
            if why_unsafe(f"{_SCHEME}{folder}"):
                continue
            with contextlib.suppress(OSError), contextlib.ExitStack() as until_end:  # it is gone, or in use
                if time.time() - folder.stat().st_mtime < _YOUNG_SECONDS:
                    continue
                held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
                until_end.callback(os.close, held)
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield folder


def remove_folder(host: str) -> None:
    """Removes a folder created by `SocketFolder`, with its sockets; several processes may do so at once."""
    folder = Path(host.removeprefix(_SCHEME))
    if not is_folder(host) or not folder.name.startswith(_PREFIX) or why_unsafe(host):
        return
    with contextlib.suppress(OSError):
        for each in folder.iterdir():
            if each.is_socket():
                each.unlink(missing_ok=True)
        folder.rmdir()
