"""The right to act as the master of a job on Kubernetes: a Lease. One pod at a time holds it, and renews it in the
background.

The leader election of the official client uses a ConfigMap and depends on the clocks of both machines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any, Protocol

from elasticcb.cluster.kubernetes.api import KubernetesError
from elasticcb.cluster.kubernetes.pods import LEASE_SECONDS
from elasticcb.errors import GO_ON, describe

logger = logging.getLogger(__name__)

_RENEW_SECONDS = 5.0
_GIVE_UP_SECONDS = 45.0  # seconds without renewal after which its holder must stop acting
_LOOK_SECONDS = 1.0
_JOIN_SECONDS = 10.0
_SAY_SECONDS = 1.0  # at most, before this process exits


class LeaseAPI(Protocol):
    def read(self, kind: str, name: str) -> dict[str, Any]: ...

    def patch(self, kind: str, name: str, patch: dict[str, Any]) -> dict[str, Any]: ...


class MasterLease:
    """A job's Lease, from the point of view of one of its masters.

    Args:
        holder: the pod of this process. Its previous container has ended.
    """

    def __init__(self, api: LeaseAPI, name: str, holder: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.holder = holder
        self._api, self._name, self._clock = api, name, clock
        self._version = ""  # resourceVersion last seen
        self._seen = self._renewed = 0.0  # when it was seen; when it was last known to be held

    def take_if_free(self) -> str:
        """Takes the Lease if nobody holds it, its holder has ended, or it has expired; returns the holder."""
        asked = self._clock()
        found = self._api.read("Lease", self._name)
        if found["metadata"]["resourceVersion"] != self._version:
            self._version, self._seen = found["metadata"]["resourceVersion"], self._clock()  # not before it was written
        spec = found.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        lasts = spec.get("leaseDurationSeconds") or LEASE_SECONDS
        if holder not in ("", self.holder) and asked - self._seen < lasts and not self._has_ended(holder):
            return str(holder)
        now = _now()
        took = {"holderIdentity": self.holder, "leaseDurationSeconds": LEASE_SECONDS, "acquireTime": now}
        changes = int(spec.get("leaseTransitions") or 0) + (holder != self.holder)
        try:
            self._write({**took, "renewTime": now, "leaseTransitions": changes})
        except KubernetesError as error:
            if error.status != 409:
                raise
            return str(holder)  # another process was faster
        self._renewed = asked
        return self.holder

    def renew(self) -> bool:
        """Whether the Lease is still held; False forever once another pod holds it, or it could not be renewed in time.

        Raises `KubernetesError` if that can't be determined now.
        """
        asked = self._clock()
        if self.is_late:
            return False
        try:
            self._write({"renewTime": _now()})
        except KubernetesError as error:
            if error.status != 409:  # nobody else can take a Lease that was deleted with its job before it expires
                raise
            found = self._api.read("Lease", self._name)
            if found.get("spec", {}).get("holderIdentity") != self.holder:
                return False
            self._version = found["metadata"]["resourceVersion"]  # someone changed another field of it
            self._write({"renewTime": _now()})
        self._renewed = asked
        return True

    @property
    def is_late(self) -> bool:
        """Whether the Lease was not renewed in time."""
        return self._clock() - self._renewed > _GIVE_UP_SECONDS

    def release(self) -> None:
        """Releases the Lease so that others can take it at once."""
        try:
            if self.renew():
                self._write({"holderIdentity": ""})
        except KubernetesError as error:
            logger.info("The Lease %s could not be released: %s", self._name, error)

    def _write(self, spec: dict[str, Any]) -> None:
        """Writes it only if nobody has written since; otherwise raises `KubernetesError` with status 409."""
        patch = {"metadata": {"resourceVersion": self._version}, "spec": spec}
        self._version = self._api.patch("Lease", self._name, patch)["metadata"]["resourceVersion"]

    def _has_ended(self, pod: str) -> bool:
        """Whether its node has reported that its containers ended. A deleted pod may still run on a disconnected
        node."""
        try:
            status = self._api.read("Pod", pod)["status"]
        except KubernetesError as error:
            if error.status != 404:
                raise
            return False
        containers = status.get("containerStatuses") or ()
        return bool(containers) and all("terminated" in each.get("state", {}) for each in containers)


@contextlib.contextmanager
def held(lease: MasterLease, say: Callable[[str], None], end: Callable[[int], object] = os._exit) -> Iterator[None]:
    """While it is active, no other master of the job acts.

    If another pod takes the Lease, or it can't be renewed in time, this process exits at once, as if killed: its files
    and processes then belong to another master.
    """
    told = ""
    while (holder := lease.take_if_free()) != lease.holder:
        if holder != told:
            say(f"The master in the pod {holder} may still act; waiting for its end.")
            told = holder
        time.sleep(_LOOK_SECONDS)
    over = threading.Event()

    def lose() -> None:
        if not over.is_set():
            over.set()
            at_latest = threading.Timer(_SAY_SECONDS, end, [GO_ON])  # its output may not be readable
            at_latest.daemon = True
            at_latest.start()
            try:
                say("This master has lost its Lease, so another master may act. The next pod continues the job.")
            finally:
                at_latest.cancel()
                end(GO_ON)

    threads = [threading.Thread(target=run, args=(lease, over, lose), daemon=True) for run in (_renew, _watch)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        threads[0].join(_JOIN_SECONDS)
        lease.release()


def _renew(lease: MasterLease, over: threading.Event, lose: Callable[[], None]) -> None:
    while not over.wait(_RENEW_SECONDS):
        try:
            if not lease.renew():
                lose()
        except Exception as error:  # including an answer from a server that is not the API server
            logger.warning("The Lease of this master can't be renewed; retrying: %s", describe(error))


def _watch(lease: MasterLease, over: threading.Event, lose: Callable[[], None]) -> None:
    """Runs in a separate thread from `_renew`, which may wait for an answer."""
    while not over.wait(_LOOK_SECONDS):
        if lease.is_late:
            lose()


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
