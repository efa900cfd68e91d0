"""The interface of cluster backends, which run the processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticcb.cluster.role import Place, RoleProcess
from elasticcb.security.credentials import OPEN
from elasticcb.settings import ClusterSettings, Given, JobSettings

if TYPE_CHECKING:
    from elasticcb.cluster.local.fork_server import ForkServer


@dataclass(frozen=True)
class Exit:
    """A process that ended without being asked to.

    Attributes:
        role: "worker" or "ps".
        index: its index.
        pid: process id; 0 if the backend has none.
        reason: as text: "exit code 1", "killed by SIGKILL".
        failed: it failed with an error of its own; False after a normal end, and if a signal killed it.
        log: where its log is, for messages; "": nowhere.
        taken_away: its machine was reclaimed or lost; the restart does not count against the limit.
    """

    role: str
    index: int
    pid: int
    reason: str
    failed: bool
    log: str = ""
    taken_away: bool = False


@dataclass(frozen=True)
class BackendContext:
    """What a backend is made from.

    Attributes:
        directory: the job's folder; logs go to `logs` below it.
        say: shows a line to the user.
        run_role: runs the role of a process, for backends that use threads of this process.
        fork_server: the process that forked this one, and forks those of a local cluster.
    """

    settings: ClusterSettings
    directory: str
    log_level: str
    say: Callable[[str], None]
    run_role: Callable[[RoleProcess], None]
    fork_server: ForkServer | None = None


@dataclass(frozen=True)
class MasterRun:
    """A job whose master is to be run.

    Attributes:
        resumed: it continues a job that an earlier master started.
        own_process: this process has no other purpose.
        debug: show errors with their traceback.
        here: runs the master in this process. Its arguments are whether the job is resumed, and the time
            (`time.monotonic`) when an earlier master was lost, if processes of that master may be alive; else 0.
        say: shows a line to the user.
        begun: called when the master runs in another process.
    """

    settings: JobSettings
    resumed: bool
    own_process: bool
    debug: bool
    here: Callable[[bool, float], None]
    say: Callable[[str], None]
    begun: Callable[[], None]


class ClusterBackend(ABC):
    """Starts, stops and observes processes. The class attributes describe the backend."""

    name = ""  # name for --cluster and `Cluster(kind=...)`
    summary = ""  # description after the name, in help texts
    settings: frozenset[str] = frozenset()  # names of settings that apply only to it
    panel = ""  # the help panel that contains only its flags
    in_programs = True  # whether `Cluster` can use it, besides commands
    watches = True  # whether `poll` reports every process that ends
    separate = True  # whether these are separate processes, which can be killed, or threads of this one
    scales = False  # whether the number of workers may follow the throughput
    one_machine = False  # whether its jobs use Unix sockets by default; jobs with ports use TLS
    where_logs_are: str | None = None  # text after "The logs are in the job's folder"; None: they are not there
    # credentials of the job; processes get the token in ELASTICCB_JOB_TOKEN. Set before the first `start`.
    access = OPEN

    def __init__(self, context: BackendContext) -> None:
        self.context = context

    @classmethod
    def make(cls, context: BackendContext) -> ClusterBackend:
        """Raises `UsageError` if the backend is not available."""
        return cls(context)

    @classmethod
    def missing(cls, cluster: ClusterSettings) -> Iterator[str]:
        """Messages about what this machine lacks for it."""
        return iter(())

    @classmethod
    def mistakes(cls, given: Given) -> Iterator[str]:
        """Messages about invalid flags of a job on it."""
        return iter(())

    @classmethod
    def submits(cls, given: Given) -> bool:
        """Whether a command submits its job, and the master runs elsewhere."""
        return False

    @classmethod
    def run_master(cls, run: MasterRun) -> None:
        """Runs a command's job until it ends. Raises `ElasticCBError` if it fails, `SystemExit` with its exit code."""
        run.here(run.resumed, 0.0)

    def resume_command(self, name: str) -> str:
        """The command that resumes the job of this name; "": by its folder."""
        return ""

    def prepare(self) -> None:  # noqa: B027 -- there may be nothing to prepare
        """May be called some time before the first `start` to make it faster; `stop` must follow."""

    @property
    def host(self) -> str:
        """The address or socket folder where the master must listen so that processes reach it; known after
        `prepare`."""
        return "127.0.0.1"

    @property
    def taken_over(self) -> Mapping[Place, int | str]:
        """Running processes of an earlier master, by role and index: the id of a process on this machine, or its
        `host_name` where that is unique."""
        return {}

    def end_taken_over(self) -> None:  # noqa: B027 -- most have none
        """Ends these processes."""

    @abstractmethod
    def start(self, role: str, index: int, master_address: str) -> None:
        """Starts the process of `role` ("worker" or "ps") with this index."""

    @abstractmethod
    def poll(self) -> list[Exit]:
        """The processes that ended since the last call."""

    def pending(self) -> Mapping[Place, str]:
        """Why requested processes do not run yet, as text, by role and index."""
        return {}

    @abstractmethod
    def kill(self, role: str, index: int) -> None:
        """Kills a process at once, for example one that hangs."""

    @abstractmethod
    def stop(self, grace_seconds: float) -> None:
        """Ends all processes within `grace_seconds`; nobody continues their work."""

    def note(self, text: str) -> None:  # noqa: B027 -- most have no such place
        """Records a line that the user was shown where people look for a job's events."""

    def log_tail(self, role: str, index: int, lines: int = 30) -> str:
        """The last lines that a process wrote; "" if unavailable."""
        return ""
