"""The interface that the master sees of whatever runs the processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from elasticcb.cluster.role import Place, RoleProcess
from elasticcb.security.credentials import OPEN
from elasticcb.settings import ClusterSettings, JobSettings

if TYPE_CHECKING:
    from elasticcb.cluster.local.fork_server import ForkServer


@dataclass(frozen=True)
class Exit:
    """A process that ended by itself.

    Attributes:
        role: "worker" or "ps".
        index: its place.
        pid: 0 when the backend has none.
        reason: in words: "exit code 1", "killed by SIGKILL".
        failed: by an error of its own; false after a normal end, and when a signal killed it.
        log: where its last words are, for messages; "" if nowhere.
        taken_away: others wanted its machine, or that is lost; no restart is used up.
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
        directory: the job's; logs go to `logs` below it.
        say: shows a line to the user.
        run_role: does what a process does, for those that run in this one.
        fork_server: has forked this process, and forks those of a local cluster.
    """

    settings: ClusterSettings
    directory: str
    log_level: str
    say: Callable[[str], None]
    run_role: Callable[[RoleProcess], None]
    fork_server: ForkServer | None = None


@dataclass(frozen=True)
class MasterRun:
    """A job whose master is to run.

    Attributes:
        resumed: it continues what an earlier master has begun.
        own_process: this process does nothing else.
        debug: errors are shown with their traceback.
        here: runs the master in this process; it takes whether the job is resumed, and when an earlier master was
            lost, if its processes may live: seconds of `time.monotonic`, else 0.
        say: shows a line to the user.
        begun: hears that the master runs, in another process.
    """

    settings: JobSettings
    resumed: bool
    own_process: bool
    debug: bool
    here: Callable[[bool, float], None]
    say: Callable[[str], None]
    begun: Callable[[], None]


class Given(Protocol):
    """Flags of a command, or arguments of a function, with the words by which a message names them."""

    def __getitem__(self, name: str) -> Any:
        """The value; None when there is none."""

    def flag(self, name: str, with_value: bool = False) -> str:
        """How to speak of one in a message: "--num_ps=0"."""

    def folder(self, name: str) -> str:
        """The absolute path of a file or folder; "" when none was given."""


class ClusterBackend(ABC):
    """Starts and stops processes, and tells what it sees. The class attributes say what holds for all jobs on it."""

    name = ""  # by which --cluster and `Cluster(kind=...)` choose it
    summary = ""  # after the name, in help texts
    settings: frozenset[str] = frozenset()  # paths of those that apply only to it
    panel = ""  # of the help, whose flags are all of them its own
    in_programs = True  # whether `Cluster` can use it, too, besides commands
    watches = True  # whether `poll` will tell of every process that ends
    separate = True  # whether these are processes of their own, which can be killed, or threads of this one
    scales = False  # whether the number of workers may follow the throughput
    takes_gpus = False  # whether the GPUs that the master sees are those of its processes, so that it must take none
    one_machine = False  # whether its jobs have Unix sockets unless told otherwise; those with ports use TLS
    where_logs_are: str | None = None  # after "The logs are in the job's folder"; None: they are not there
    access = OPEN  # to the job; processes get the token by ELASTICCB_JOB_TOKEN. Set it before the first `start`.

    @classmethod
    def make(cls, context: BackendContext) -> ClusterBackend:
        """Raises `UsageError` when it can't be had."""
        raise NotImplementedError(f"{cls.__name__} is not made from settings")

    @classmethod
    def missing(cls, cluster: ClusterSettings) -> Iterator[str]:
        """What this machine lacks for it, in words."""
        return iter(())

    @classmethod
    def mistakes(cls, given: Given) -> Iterator[str]:
        """What is wrong with the flags of a job on it, in words."""
        return iter(())

    @classmethod
    def submits(cls, given: Given) -> bool:
        """Whether a command hands its job in, and the master runs elsewhere."""
        return False

    @classmethod
    def run_master(cls, run: MasterRun) -> None:
        """Runs a command's job to its end. Raises `ElasticCBError` when it failed, `SystemExit` with its exit code."""
        run.here(run.resumed, 0.0)

    def resume_command(self, name: str) -> str:
        """How the user resumes the job of this name; "": by its folder."""
        return ""

    def prepare(self) -> None:  # noqa: B027 -- there may be nothing to prepare
        """May be called some time before the first `start`, which is quicker then; `stop` must follow."""

    @property
    def host(self) -> str:
        """The address, or the folder of sockets, that the master is to listen on, for the processes to reach it; known
        after `prepare`."""
        return "127.0.0.1"

    @property
    def taken_over(self) -> Mapping[Place, int | str]:
        """Processes that a master before this one has started, and that live, by role and place: the id of a process of
        this machine, or its `host_name` where no other has it."""
        return {}

    def end_taken_over(self) -> None:  # noqa: B027 -- most have none
        """Ends those."""

    @abstractmethod
    def start(self, role: str, index: int, master_address: str) -> None:
        """Has a process of `role` ("worker" or "ps") started that takes the place `index`."""

    @abstractmethod
    def poll(self) -> list[Exit]:
        """The processes that ended since the last call."""

    def pending(self) -> Mapping[Place, str]:
        """Why processes that were asked for do not run yet, in words, by role and place."""
        return {}

    @abstractmethod
    def kill(self, role: str, index: int) -> None:
        """Ends a process at once, as one that hangs."""

    @abstractmethod
    def stop(self, grace_seconds: float) -> None:
        """Ends all processes, whose work nobody goes on with, within `grace_seconds`."""

    def note(self, text: str) -> None:  # noqa: B027 -- most have no such place
        """Keeps a line that the user was shown where others look for what befell a job."""

    def log_tail(self, role: str, index: int, lines: int = 30) -> str:
        """The last lines that a process wrote; "" if they can't be had."""
        return ""
