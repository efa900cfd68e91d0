"""A job as requested, and what an earlier master left of it."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elasticcb.checkpoint.warm_start import WarmStart
from elasticcb.master.callback_arrays import CallbackArrays
from elasticcb.master.callback_driver import MasterHooks
from elasticcb.master.journal import Journal, Memory
from elasticcb.master.master import Master
from elasticcb.master.master_server import MasterServer
from elasticcb.master.ps_admin import PSControl
from elasticcb.master.report import Report
from elasticcb.master.servers import Servers
from elasticcb.optimizers.state import ModelState, OptimizerState
from elasticcb.settings import JobSettings


class Takeover(NamedTuple):
    """What a killed master left running.

    Attributes:
        running: its processes by role ("worker", "ps") and index, as in `ClusterBackend.taken_over`.
        since: when it was killed; seconds of `time.monotonic`.
    """

    running: Mapping[tuple[str, int], int | str]
    since: float


@dataclass(frozen=True)
class JobContext:
    """What all phases of a job share.

    Attributes:
        started: when the user requested it, in seconds.
        make_program: creates the serialized job to run instead of a model file; None: run the model file.
        memory: journal content of an earlier master, if it handed out tasks; else empty.
        run: name of the training in its files, the same for all its masters.
        goes_on_by: how the user resumes the job, as text; "": the command `elasticcb resume`.
        until_end: closes what the phases open.
    """

    settings: JobSettings
    master: Master
    started: float
    report: Report
    make_host: Callable[[JobSettings], Any]
    make_program: Callable[[], bytes] | None
    journal: Journal | None
    memory: Memory
    run: str
    takeover: Takeover | None
    arrays: CallbackArrays
    goes_on_by: str
    until_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def server(self) -> MasterServer:
        return self.master.server

    @property
    def resumes(self) -> bool:
        """Whether an earlier master of the job has handed out tasks."""
        return self.memory.begun

    @property
    def evaluates_as_keras(self) -> bool:
        """`fit` evaluates only at the end of epochs, and finalizes the optimizer (EMA) after that; a command evaluates
        the exported weights."""
        return self.make_program is not None

    @property
    def how_to_go_on(self) -> str:
        """How the user resumes the job, as text."""
        return self.goes_on_by or f"elasticcb resume {shlex.quote(self.settings.store or self.settings.directory)}"


@dataclass
class ModelOrigin:
    """Where servers without recovery files get the model from.

    Attributes:
        checkpoint: folder or URL of the newest checkpoint; "": fresh weights.
        warm_start: initial weights from another model's checkpoint, created on demand.
        of_earlier_master: finds the newest checkpoint of this job by an earlier master; "": none.
    """

    host: Any
    checkpoint: str
    of_earlier_master: Callable[[], str] | None = None  # called only on demand: it reads whole files
    warm_start: Callable[[], WarmStart | None] = lambda: None

    def source(self) -> ModelState:
        """The newest checkpoint, or fresh weights."""
        if self.of_earlier_master is not None:
            self.checkpoint = self.of_earlier_master() or self.checkpoint
            self.of_earlier_master = None
        if self.checkpoint:
            return ModelState(checkpoint=self.checkpoint)
        host, warm_start = self.host, self.warm_start()
        if warm_start is not None:
            state, slots = host.fresh_state()
            warm_start.apply(state, slots)
            return state
        weights, ids = host.weights()
        return ModelState(weights, host.optimizer_state() or OptimizerState(), host.version, ids, host.used())


@dataclass(frozen=True)
class TrainedModel:
    """The model, on the master and on the servers."""

    host: Any
    origin: ModelOrigin
    servers: Servers
    hooks: MasterHooks

    @property
    def ps(self) -> PSControl:
        return self.servers.control
