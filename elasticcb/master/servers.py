"""The parameter servers of a job: the master gives them the model, restores it on replacements of lost ones,
and keeps their recovery files new.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from elasticcb.clients.ps import PSClient
from elasticcb.clients.ps_servers import ServerGroup
from elasticcb.errors import CallbackWarning, CheckpointError, ConnectionLostError, ElasticCBError, StoreError
from elasticcb.master import job_copy
from elasticcb.master.job_copy import RecoveryCopy
from elasticcb.master.job_machine import JobMachine
from elasticcb.master.master_server import MasterServer
from elasticcb.master.members import Role
from elasticcb.master.ps_admin import PSControl, Restored
from elasticcb.master.recovery_files import RecoveryFiles
from elasticcb.master.server_scaling import Moved, Pause, end_pause
from elasticcb.optimizers.state import ModelState, Optimizers
from elasticcb.process.wording import how_many
from elasticcb.settings import RECOVERY_FOLDER
from elasticcb.sharding.partition import Places, ServerPlace, ShardMap, VariableSpec
from elasticcb.storage.remote_files import is_url

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 30.0  # for surplus servers to exit
_OPEN_SECONDS = 10.0  # for servers to accept pushes again when their number can't change
# The pause after writing, however large the model, to the time that it took; to a URL, most of it is waiting.
_PAUSE_FACTOR, _PAUSE_FACTOR_URL = 5.0, 1.0
_PAUSE_SECONDS = 0.25  # while a server is lost
_RETRY_SECONDS = 1.0  # while a URL is away
_FIRST_SECONDS = 1.0  # until servers save that have saved nothing: they could not save their last changes


_LOST_FILES = (
    " Its recovery files are missing or damaged: only what had not been saved in them is trained again, the other "
    "updates stay lost."
)


class Servers:
    """The servers of one job.

    Args:
        master: master of the job for which the servers have registered.
        variables, may_split, optimizers: the model's weights, whether they may be split between servers, and what
            trains them.
        run: name of the training in the recovery files; "": a new one.
        copy: of the recovery files below a URL.
        term: term of this master; servers that know a later one refuse it.
        places: the servers, by index, that already hold the model from a killed master.
        map_version: of their shard map.

    Attributes:
        learning_rate: returns the base rate set by the master; None with a schedule.
        lack_updates: whether servers of a resumed job have less than workers had reported.
    """

    def __init__(
        self,
        master: MasterServer,
        doubt: Callable[[int], None],
        variables: Sequence[VariableSpec],
        may_split: bool,
        optimizers: Optimizers,
        source: Callable[[], ModelState],
        say: Callable[[str], None],
        run: str = "",
        term: int = 1,
        places: Sequence[ServerPlace] = (),
        map_version: int = 0,
        copy: RecoveryCopy | None = None,
    ) -> None:
        self._master, self._doubt, self._source, self._say = master, doubt, source, say
        self.learning_rate: Callable[[], float | None] = lambda: None
        self.lack_updates = False
        self._restoring = threading.Lock()
        self._give_up = math.inf  # deadline for lost servers; seconds of `time.monotonic`
        with master.state() as state:
            settings = state.settings
            self._places = list(places)
            if not places:
                state.lost_ps.clear()  # none of them holds the model yet
                self._places = [ServerPlace(member.address, member.id) for member in state.roster.up(Role.PS)]
        self._patience = master.cluster.patience_seconds
        run = run or secrets.token_hex(8)
        servers = ServerGroup(
            Places(self._places, ShardMap(len(self._places), map_version)),
            variables,
            may_split,
            self._patience,
            replace(master.access, term=(run, term)),
            self._find,
        )
        master.end_calls = servers.end_calls
        recovery: RecoveryFiles | None = None
        if settings is not None and settings.keeps_recovery_files and settings.directory:
            recovery = RecoveryFiles(Path(settings.directory, RECOVERY_FOLDER).absolute(), run, variables, copy)
            master.take_last = recovery.take_last
        self.control = PSControl(PSClient(servers), run, optimizers, recovery)
        self.control.members = self._members
        for index in end_pause(self.control) if places else ():
            self._places[index] = ServerPlace(self._places[index].address, 0)  # to be restored
        self._saves: Saves | None = None
        if settings is not None and recovery is not None:
            self._saves = Saves(master, self.control, settings.checkpoint.interval_seconds)

    @property
    def places(self) -> Sequence[ServerPlace]:
        """By index."""
        return tuple(self._places)

    def restore_lost(self) -> None:
        """Restores the model on replacements of lost servers, for which it waits.

        Raises `JobFailedError` when the job can't continue without one of them.
        """
        with self._restoring:
            for index in range(len(self._places)):
                self._restore(index)
            with self._master.state() as state:  # new servers that are lost hold nothing yet
                for index in [index for index in state.lost_ps if index >= len(self._places)]:
                    del state.lost_ps[index]

    def resize(self, servers: int) -> Moved:
        """Moves the model to a different number of servers, which are up; surplus servers exit.

        Raises:
            ElasticCBError: a server was lost, or a worker hangs; nothing has changed.
            JobFailedError: the job can't continue.
        """
        master = self._master
        moved = self._while_tending(lambda: self._resize(servers))
        give_up = time.monotonic() + _LEAVE_SECONDS
        with master.state() as state:
            while state.roster.leaving(Role.PS) and time.monotonic() < give_up:
                master.tend()
                master.wait_a_tick()
        return moved

    def _resize(self, servers: int) -> Moved:
        # In this order: who saves may wait for a lost server to be restored.
        with self.control.saving, self._restoring:
            with self._master.state() as state:
                members = [state.roster.at(Role.PS, index) for index in range(max(servers, len(self._places)))]
            if None in members:
                raise ConnectionLostError("A parameter server is missing.")
            places = [ServerPlace(member.address, member.id) for member in members if member is not None]
            return self._move_to(places[:servers])

    def _move_to(self, places: list[ServerPlace]) -> Moved:
        control, pause, before = self.control, Pause(self.control, self._is_up), len(self._places)
        shard_map = control.servers.shard_map.resized(len(places))
        try:
            pause.begin()
            if control.recovery is not None:
                control.recovery.check_is_shared()
            self._note(places, shard_map)
        except BaseException:
            end_pause(control, _OPEN_SECONDS)
            raise
        # From now on, servers that are lost are restored by the new map, as the others are now.
        self._places = places
        control.servers.follow(Places(places, shard_map))
        control.servers.each(self._restore_moved, range(len(places)))
        control.servers.follow(Places(self._places, shard_map))
        self._note(self._places, shard_map)
        self._master.servers_have_moved(self._places, shard_map.version)
        return Moved(len(places), before, time.monotonic() - pause.begun)

    def _restore_moved(self, index: int) -> None:
        with self._master.state() as state:
            version = state.version
        self._places[index], restored = self._give_back(index, version, 0)
        with self._master.change() as state:
            if restored.version < version and state.queue is not None:  # files were damaged
                state.totals.updates_lost += version - restored.version
                state.queue.updates_lost()
            state.lost_ps.pop(index, None)

    def _note(self, places: Sequence[ServerPlace], shard_map: ShardMap) -> None:
        """Writes to the journal which servers hold the model. Raises `JobFailedError` if that fails."""
        with self._master.state() as state:
            state.persist(servers=list(places), map_version=shard_map.version)
        with self._master.state() as state:  # the entry has been written by now, or that has failed
            if state.error is not None:
                raise state.error

    def _members(self) -> Sequence[int]:
        """Ids of the workers that train."""
        with self._master.state() as state:
            return () if state.queue is None else state.queue.workers_in_training

    def _is_up(self, worker: int) -> bool:
        with self._master.state() as state:
            return state.roster.member(worker) is not None

    def _while_tending(self, function: Callable[[], Moved]) -> Moved:
        """Runs `function` in another thread while tending to processes."""
        master = self._master
        with ThreadPoolExecutor(1, thread_name_prefix="scaling") as pool:
            future = pool.submit(function)
            with master.state():
                while not future.done():
                    master.tend()
                    master.wait_a_tick()
            return future.result()

    def adopt(self, version: int) -> None:
        """Restores the servers of a new cluster from the previous cluster's recovery files, as `version` of the model,
        or a later one that some of them have."""
        for index in range(len(self._places)):
            place, restored = self._give_back(index, version, 0)
            self._places[index] = place
            lost = 0 if restored.complete else max(0, version - restored.version)
            with self._master.change() as state:
                state.server_is_back(index, place, complete=True)  # the queue is not restored yet
                state.totals.updates_lost += lost
            self.lack_updates = self.lack_updates or not restored.complete
            older = _LOST_FILES if lost and restored.is_older else ""
            self._say(f"Parameter server {index} resumes from {restored.source}; {_how_many_lost(lost)}.{older}")
        self.control.client.pull()

    def _find(self, index: int, unreachable: int) -> tuple[str, int]:
        """For the client, when a process does not answer."""
        self._doubt(unreachable)
        with self._restoring:
            self._restore(index)
            return self._places[index]

    def _restore(self, index: int) -> None:
        begun = time.monotonic()
        if self._wait_until_up(index).id == self._places[index].id:
            return
        with self._master.state() as state:
            version, running = state.version, state.rounds.running
            since = state.lost_ps.get(index, begun)
        place, restored = self._give_back(index, version, 0 if running is None else running.id)
        self._places[index] = place
        self.control.servers.connect(self.control.servers.known[index], place)  # not only when it is called next
        seconds, lost = time.monotonic() - since, 0 if restored.complete else max(0, version - restored.version)
        with self._master.change() as state:
            state.totals.recovered(seconds, lost)
            repeated = state.server_is_back(index, place, restored.complete)
        again = ", and trained again" if repeated and lost and not restored.is_older else ""
        self._say(
            f"Parameter server {index} recovered in {seconds:.1f} s from {restored.source}; "
            f"{_how_many_lost(lost)}{again}.{_LOST_FILES if lost and restored.is_older else ''}"
        )

    def _give_back(self, index: int, version: int, evaluation_round: int) -> tuple[ServerPlace, Restored]:
        """Restores the recovery state on the server in a slot; on its replacement if that is also lost. Waits for the
        URL of its files, since others would be older."""
        tried, since, waits = 0, 0.0, False
        while True:
            place, begun = self._wait_until_up(index), time.monotonic()
            if place.id != tried:
                tried, since = place.id, begun
            elif begun - since > self._patience:
                raise ConnectionLostError(f"Parameter server {index} at {place.address} runs, but does not answer.")
            rate = self.learning_rate()
            try:
                return place, self.control.restore(index, *place, version, self._source, evaluation_round, rate)
            except ConnectionLostError as error:
                logger.warning("%s", error)
            except StoreError as error:
                if time.monotonic() > self._give_up:
                    raise
                if not waits:
                    self._say(f"{error} Parameter server {index} waits for its files, and workers for it.")
                tried, waits = 0, True
                time.sleep(_PAUSE_SECONDS)

    def _wait_until_up(self, index: int) -> ServerPlace:
        with self._master.state() as state:
            while True:
                self._master.tend()
                member = state.roster.at(Role.PS, index)
                if member is not None and state.has(member.id):
                    return ServerPlace(member.address, member.id)
                if time.monotonic() > self._give_up:
                    raise ConnectionLostError(f"Parameter server {index} was lost, and no replacement started in time.")
                self._master.wait_a_tick()

    def save(self) -> None:
        """Saves the servers' state now, if they keep recovery files."""
        if self._saves is not None:
            self._saves.save()

    def give_up_after(self, seconds: float) -> None:
        """Sets a deadline for lost servers; after it, calls to them raise `ConnectionLostError`."""
        self._give_up = time.monotonic() + seconds

    def close(self) -> None:
        """Closes the connections, and ends all waiting for lost servers."""
        self.give_up_after(0.0)
        if self._saves is not None:
            self._saves.close()
        self.control.servers.close()


def _how_many_lost(updates: int) -> str:
    return f"{how_many(updates, 'update')} to its shard {'was' if updates == 1 else 'were'} lost"


class Saves:
    """Keeps the recovery files new, in a thread of its own: at intervals, and before training ends.
    Tells the queue what can't be lost any more.
    """

    def __init__(self, master: MasterServer, control: PSControl, interval_seconds: float) -> None:
        self._master, self._control, self._interval = master, control, interval_seconds
        self._closed = False
        self._earliest = 0.0  # time of the next save, unless all is trained
        self._saved_by = -1  # version of the shard map by which the servers have saved
        self._waits_for_url = control.recovery is not None and is_url(control.recovery.place)
        self._failing_since, self._paused = 0.0, False
        self._thread = threading.Thread(target=self._run, name="saves", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause, factor = min(_FIRST_SECONDS, self._interval), _PAUSE_FACTOR_URL if self._waits_for_url else _PAUSE_FACTOR
        while True:
            with self._master.state():
                self._master.wait_for(self._is_due, pause)
                if self._closed:
                    return
            begun, writers, map_version = time.monotonic(), self._writers(), self._control.servers.shard_map.version
            if self.save():
                self._saved_by = map_version
                ended = time.monotonic()
                # Else most of it was waiting for the replacement of a lost server.
                least = (ended - begun) * factor if self._writers() == writers else 0.0
                self._earliest, pause = ended + least, max(self._interval, least)
            else:
                time.sleep(_PAUSE_SECONDS if not self._failing_since else _RETRY_SECONDS)
                pause = 0.0

    def _writers(self) -> list[int]:
        """Ids of the servers."""
        return [link.id for link in self._control.servers.links]

    def _is_due(self, state: JobMachine) -> bool:
        queue, now = state.queue, time.monotonic()
        if self._closed or queue is None:
            return self._closed
        if -1 < self._saved_by < self._control.servers.shard_map.version:  # the number of servers has changed
            return True
        return queue.wants_save and (queue.all_trained or now >= self._earliest)

    def save(self) -> bool:
        """Saves what has been reported; returns whether the servers have written, or can't write."""
        with self._master.state() as state:
            queue = state.queue
            mark = 0 if queue is None else queue.begin_save()
        written = True
        try:
            self._control.persist()
        except CheckpointError as error:
            written = False
            self._failed(error)
        except ElasticCBError as error:
            logger.debug("The servers' state is not saved: %s", error)
            return False
        if written:
            self._is_written_again()
        with self._master.state() as state:
            gives_up = not self._waits_for_url and queue is not None and queue.wants_save
            if queue is not None and state.queue is queue and not self._closed and (written or gives_up):
                state.servers_have_saved(mark, written)  # also if training must end, or too much is unsaved
        return written or not self._waits_for_url

    def _failed(self, error: CheckpointError) -> None:
        """Warns; if the files are below a URL, training waits for it when it has been away for long."""
        text = (
            f"{error} Training continues; what is not saved is trained again if this server is lost now, but "
            "updates that can't be saved for long are lost then. Free space, or make the folder writable."
        )
        now = time.monotonic()
        is_first, self._failing_since = not self._failing_since, self._failing_since or now
        if self._waits_for_url:
            text = (
                f"{error} Training continues for up to {job_copy.PATIENCE_SECONDS:g} s; what is not saved is trained "
                "again if this server is lost now."
            )
        if is_first or not self._waits_for_url:
            with self._master.change() as state:
                state.totals.recovery_files_failed += 1
                state.warn(CallbackWarning("servers can't write recovery files", text))
        if self._waits_for_url and now - self._failing_since > job_copy.PATIENCE_SECONDS and not self._paused:
            self._paused = True
            self._master.print(
                f"The parameter servers could not write their files for {now - self._failing_since:.0f} s. Training "
                "pauses until they can."
            )
            self._master.pause("servers", "parameter servers can't write their files")

    def _is_written_again(self) -> None:
        self._failing_since = 0.0
        if self._paused:
            self._paused = False
            self._master.print("The parameter servers can write their files again. Training continues.")
            self._master.pause("servers", "")

    def close(self) -> None:
        """Saves nothing any more."""
        with self._master.change():
            self._closed = True
