"""Starts the processes of a test's jobs by forking one that has imported everything, as an import takes seconds.

What runs is the command line, or a script, and the package's own fork_process.py; the only difference is that none of
them begins with an import. `JobProcess(…, warm=False)` starts from nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from elasticcb.cluster.local import fork_server
from elasticcb.cluster.role import common_environment
from elasticcb.process.system import show_as

_TESTS = Path(__file__).parents[1]
_forks = multiprocessing.get_context("forkserver")


def ensure_warm() -> None:
    """Starts the process that is forked, once."""
    from multiprocessing.forkserver import ensure_running

    _forks.set_forkserver_preload(["warm_imports"])
    before = dict(os.environ)
    os.environ.pop("ELASTICCB_FAULTS", None)  # of the present test; others are forked from it, too
    # Python finds what it preloads by this; the rest is what it must have from its start on.
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [before.get("PYTHONPATH")])])
    os.environ.update(common_environment("INFO"), PYTHONPATH=path)
    try:
        ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


class WarmProcess:
    """Like `subprocess.Popen` of a Python program whose output, and `stdin` where it is asked for, are pipes.

    Args:
        arguments: of the `elasticcb` command, or, with `script`, of that file.
        stderr: a file for it; None puts it among the output.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        cwd: Path,
        env: dict[str, str],
        script: Path | None = None,
        stdin: bool = False,
        stderr: Path | None = None,
    ) -> None:
        ensure_warm()
        shown = [sys.executable, *(["-m", "elasticcb"] if script is None else [str(script)]), *arguments]
        (read, output), (given, write) = os.pipe(), os.pipe()
        errors = os.dup(output) if stderr is None else os.open(stderr, os.O_WRONLY | os.O_CREAT, 0o666)
        files = [DupFd(file) for file in (given, output, errors)]
        self._process = _started(_run_program, shown, str(cwd), env, files, script)
        for file in (given, output, errors):
            os.close(file)
        self.pid = self._process.pid
        self.stdout = os.fdopen(read, encoding="utf-8", errors="replace")
        self.stdin = os.fdopen(write, "w")
        if not stdin:
            self.stdin.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("elasticcb", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(run: Callable[..., None], *arguments: Any) -> Any:
    """A process of `multiprocessing` that runs a function, with all imported."""
    ensure_warm()
    process = _forks.Process(target=run, args=arguments)
    process.start()
    return process


def _started(run: Callable[..., None], *arguments: Any) -> Any:
    """A forked process that has its files: those of one that is killed before would stay open here."""
    has_files, mine = _forks.Pipe(duplex=False)
    process = _forks.Process(target=run, args=(mine, *arguments), daemon=False)
    process.start()
    mine.close()
    has_files.recv()
    has_files.close()
    return process


def _taken(files: Sequence[Any], parent: Any) -> list[int]:
    numbers = [file.detach() for file in files]
    parent.send(None)
    parent.close()
    return numbers


def _run_program(
    parent: Any, shown: list[str], cwd: str, env: dict[str, str], files: Sequence[Any], script: Path | None
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup` has the tests ignore
    for number, file in enumerate(_taken(files, parent)):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)
    os.chdir(cwd)
    _set_environment(env)
    sys.path[:] = _own_path(env)
    show_as("python" if script else shown[3])
    _heed_faults()
    if script is None:
        fork_server.ForkServer.launch = classmethod(_fork_zygote)
        sys.argv = shown[2:]
        from elasticcb.cli.main import main

        _leave(main)
    fork_server.ForkServer.launch = classmethod(_Spare().launch)
    sys.argv = shown[1:]
    sys.path.insert(0, str(Path(script).parent))
    _leave(lambda: runpy.run_path(str(script), run_name="__main__") and 0)


def _own_path(env: dict[str, str]) -> list[str]:
    given = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return [*given, *(folder for folder in sys.path if folder and not _is_of_tests(folder) and folder not in given)]


def _is_of_tests(folder: str) -> bool:
    return Path(folder) == _TESTS or _TESTS in Path(folder).parents


def _heed_faults() -> None:
    """As faults/sitecustomize.py, which a forked process does not import."""
    if "ELASTICCB_FAULTS" in os.environ:
        import faulty_process

        faulty_process.wait_for_role()


def _set_environment(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # it is found by the environment


def _leave(main: Callable[[], int | None]) -> None:
    """Ends this process as Python ends one whose program is `main`."""
    try:
        code = main() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    import threading

    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


# ------------------------------------------------------------ zygotes


class _Forked:
    """What `ForkServer` needs of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._gone = False

    def kill(self) -> None:
        if not self._gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if not self._gone:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self._gone = True


def _fork_zygote(cls: Any, environment: dict[str, str], log: Path, watch: int) -> Any:
    """`ForkServer.launch` in a process that was forked itself, and has done nothing but parse its command line."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_zygote(environment, str(log), theirs.detach(), watch)
    return cls(control, _Forked(pid))


def _launch_from_here(cls: Any, environment: dict[str, str], log: Path, watch: int) -> Any:
    """`ForkServer.launch` in the process of the tests, which can't be forked itself."""
    ensure_warm()
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        files = [DupFd(theirs.fileno()), DupFd(watch)]
        process = _started(_run_zygote, environment, str(log), files, list(sys.path))
    return cls(control, _OfForkServer(process))


@contextlib.contextmanager
def warm_clusters() -> Iterator[None]:
    """Local clusters of this process are forked, with all imported."""
    before = fork_server.ForkServer.launch
    fork_server.ForkServer.launch = classmethod(_launch_from_here)
    try:
        yield
    finally:
        fork_server.ForkServer.launch = before


class _Spare:
    """Forked when a script begins, as it can't be later; becomes what the script's first cluster forks from."""

    def __init__(self) -> None:
        self._usual = fork_server.ForkServer.launch
        self._asked, asks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._asked.close()
            data, files, _, _ = socket.recv_fds(asks, 1 << 20, 2)
            if not data:
                os._exit(0)
            asks.close()
            environment, log = json.loads(data)
            _become_zygote(environment, log, *files)
        asks.close()

    def launch(self, cls: Any, environment: dict[str, str], log: Path, watch: int) -> Any:
        if self._asked.fileno() < 0:
            return self._usual(environment, log, watch)
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._asked:
            message = json.dumps([environment, str(log.absolute())]).encode()
            socket.send_fds(self._asked, [message], [theirs.fileno(), watch])
        return cls(control, _Forked(self._pid))


class _OfForkServer:
    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid = process.pid
        self.kill = process.kill
        self.wait = process.join


def _run_zygote(parent: Any, environment: dict[str, str], log: str, files: Sequence[Any], path: list[str]) -> None:
    sys.path[:] = path
    _become_zygote(environment, log, *_taken(files, parent))


def _become_zygote(environment: dict[str, str], log: str, control: int, watch: int) -> None:
    from elasticcb.launch import fork_process

    os.setsid()
    null, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for number, opened in enumerate((null, file, file)):
        os.dup2(opened, number)
    # As by exec: who holds the other end of `watch` keeps all from ending. The numbers stay taken, since Python objects
    # that were open here (the master's log and standard error) would write into what gets them next.
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in (control, watch, null):
            with contextlib.suppress(OSError):  # that of the list itself
                os.fstat(number)
                os.dup2(null, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    _set_environment(environment)
    sys.argv = ["-c", str(control), str(watch)]
    show_as("fork-process")
    _heed_faults()
    _leave(fork_process.main)
