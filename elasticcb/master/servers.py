"""The parameter servers of a job: the master gives them the model, and again to those in the place of lost ones."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from elasticcb.errors import ConnectionLostError
from elasticcb.master.master import Master, ServerPlace
from elasticcb.master.roster import Role
from elasticcb.ps.partition import VariableSpec
from elasticcb.ps_control import PSControl, Restored, Source

logger = logging.getLogger(__name__)

# Little patience: the master knows when a server is gone.
_PATIENCE_SECONDS = 5.0


class Servers:
    """The servers of one job.

    Args:
        master: the servers have registered with it for the job.
        variables, may_split: the model's weights, and whether they may be cut between servers.
        source: gives what a server begins with that has no recovery files.
        say: shows a line to the user.
        run: names the training, in the servers' recovery files; "": a new one.

    Attributes:
        control: their client.
        learning_rate: gives the base rate that the master has set; None where a schedule rules it.
    """

    def __init__(
        self,
        master: Master,
        variables: Sequence[VariableSpec],
        may_split: bool,
        source: Callable[[], Source],
        say: Callable[[str], None],
        run: str = "",
    ) -> None:
        self._master, self._source, self._say = master, source, say
        self.learning_rate: Callable[[], float | None] = lambda: None
        self._restoring = threading.Lock()
        with master.changed:
            master.lost_ps.clear()  # they hold no model yet, neither do others
            self._places = [ServerPlace(member.address, member.id) for member in master.roster.up(Role.PS)]
        self.control = PSControl(
            [place.address for place in self._places],
            variables,
            may_split,
            patience_seconds=_PATIENCE_SECONDS,
            token=master.token,
            ids=[place.id for place in self._places],
            find=self._find,
            run=run,
        )

    @property
    def places(self) -> Sequence[ServerPlace]:
        """By index."""
        return tuple(self._places)

    def restore_lost(self) -> None:
        """Gives the model to servers that took the place of lost ones, for which it waits.

        Raises `JobFailedError` when the job can't go on without one of them.
        """
        with self._restoring:
            for index in range(len(self._places)):
                self._restore(index)

    def adopt(self, version: int) -> None:
        """Gives the servers of a new cluster what those of the last one wrote down, as `version` of the model."""
        for index in range(len(self._places)):
            place, restored = self._give_back(index, version, 0)
            self._set_place(index, place)
            lost = max(0, version - restored.version)
            self._master.recoveries.updates_lost += lost
            self._say(
                f"Parameter server {index} goes on from {restored.source}; {lost} updates of its part of the model are "
                "lost."
            )
        self.control.pull()

    def _find(self, index: int) -> tuple[str, int]:
        """For the client, whose call got no answer."""
        with self._restoring:
            self._restore(index)
            return self._places[index]

    def _restore(self, index: int) -> None:
        begun = time.monotonic()
        if self._wait_until_up(index).id == self._places[index].id:
            return
        with self._master.changed:
            version, running = self._master.version, self._master.rounds.running
            since = self._master.lost_ps.get(index, begun)
        place, restored = self._give_back(index, version, 0 if running is None else running.id)
        self._set_place(index, place)
        seconds, lost = time.monotonic() - since, max(0, version - restored.version)
        self._master.recoveries.seconds.append(seconds)
        self._master.recoveries.updates_lost += lost
        self._say(
            f"Parameter server {index} is back after {seconds:.1f} s, from {restored.source}; {lost} updates of its "
            f"part of the model are lost."
        )

    def _give_back(self, index: int, version: int, evaluation_round: int) -> tuple[ServerPlace, Restored]:
        """Gives the server that is in a place now what the last one wrote down; another one if that is lost, too."""
        given_up = 0
        while True:
            place = self._wait_until_up(index)
            if place.id == given_up:
                raise ConnectionLostError(f"Parameter server {index} at {place.address} runs, but does not answer.")
            rate = self.learning_rate()
            try:
                return place, self.control.restore(index, *place, version, self._source, evaluation_round, rate)
            except ConnectionLostError as error:
                logger.warning("%s", error)
                given_up = place.id

    def _set_place(self, index: int, place: ServerPlace) -> None:
        self._places[index] = place
        self._master.ps_is_back(index, place)

    def _wait_until_up(self, index: int) -> ServerPlace:
        master = self._master
        with master.changed:
            while True:
                master.tend()
                member = master.roster.at(Role.PS, index)
                if member is not None and master.roster.job_of(member.id) == master.job:
                    return ServerPlace(member.address, member.id)
                master.wait()

    def close(self) -> None:
        """Ends the connections."""
        self.control.close()
