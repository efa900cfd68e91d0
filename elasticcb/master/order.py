"""A job as it was asked for, and what an earlier master has left of it."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elasticcb.checkpoint.warm_start import WarmStart
from elasticcb.master.callback_arrays import CallbackArrays
from elasticcb.master.callback_driver import MasterHooks
from elasticcb.master.desk import Desk
from elasticcb.master.initial_model import InitialModel
from elasticcb.master.journal import Journal, Memory
from elasticcb.master.master import Master
from elasticcb.master.ps_admin import PSControl
from elasticcb.master.report import Report
from elasticcb.master.servers import Servers
from elasticcb.settings import JobSettings


class Takeover(NamedTuple):
    """What a master that was killed has left.

    Attributes:
        running: its processes by role ("worker", "ps") and place, as `ClusterBackend.taken_over` says.
        since: when it was killed; seconds of `time.monotonic`.
    """

    running: Mapping[tuple[str, int], int | str]
    since: float


@dataclass(frozen=True)
class Order:
    """What all phases of a job know.

    Attributes:
        display: as `cli.progress.Display`.
        started: when the user asked for it, in seconds.
        report: shows how the job goes.
        make_host: makes the Keras side of the master.
        make_program: makes what the job runs instead of a model file; None: it runs one.
        journal: of training that can be resumed.
        memory: what an earlier master knew, if there was one and it handed out tasks.
        takeover: what that one has left running.
        arrays: of what callbacks remember.
        goes_on_by: what the user does to go on with the job; "": the command `elasticcb resume`.
        until_end: closes what the phases open.
    """

    settings: JobSettings
    master: Master
    display: Any
    started: float
    report: Report
    make_host: Callable[[JobSettings], Any]
    make_program: Callable[[], bytes] | None
    journal: Journal | None
    memory: Memory | None
    takeover: Takeover | None
    arrays: CallbackArrays
    goes_on_by: str
    until_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def desk(self) -> Desk:
        return self.master.desk

    @property
    def evaluates_as_keras(self) -> bool:
        """`fit` evaluates at the end of epochs alone, and finalizes the optimizer (EMA) after that; a command
        evaluates what it exports."""
        return self.make_program is not None

    @property
    def how_to_go_on(self) -> str:
        """What the user does, in words."""
        return self.goes_on_by or f"elasticcb resume {shlex.quote(self.settings.directory)}"


@dataclass
class ModelOrigin:
    """Where servers have the model from that have no recovery files.

    Attributes:
        checkpoint: the newest one on a disk; "": fresh weights.
        warm_start: what fresh weights take from the checkpoint of another model; asked when they are needed.
        of_earlier_master: finds the newest one of this job, which another master began; "": there is none.
    """

    host: Any
    checkpoint: str
    of_earlier_master: Callable[[], str] | None = None  # not asked before it is needed: files are read through
    warm_start: Callable[[], WarmStart | None] = lambda: None

    def source(self) -> InitialModel:
        """The newest checkpoint, or fresh weights."""
        if self.of_earlier_master is not None:
            self.checkpoint = self.of_earlier_master() or self.checkpoint
            self.of_earlier_master = None
        if self.checkpoint:
            return InitialModel(checkpoint=self.checkpoint)
        host, warm_start = self.host, self.warm_start()
        if warm_start is not None:
            state, slots = host.fresh_state()
            warm_start.apply(state, slots)
            return InitialModel(state.weights, "", state.optimizer, 0, state.ids)
        weights, ids = host.weights()
        return InitialModel(weights, "", host.optimizer_state(), host.version, ids, host.used())


@dataclass(frozen=True)
class TrainedModel:
    """The model, on the master and on the servers.

    Attributes:
        host: Keras's side of the master.
        servers: which hold the model.
        hooks: calls those that run on the master.
    """

    host: Any
    origin: ModelOrigin
    servers: Servers
    hooks: MasterHooks

    @property
    def ps(self) -> PSControl:
        return self.servers.control
