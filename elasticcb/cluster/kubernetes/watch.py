"""Follows the pods of a job: lists them, then watches changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from elasticcb.cluster.kubernetes.api import KubernetesError

Manifest = Mapping[str, Any]

_LIST_SECONDS = 20  # until the pods are listed again
_EXPIRED = 410  # the API server no longer has the changes since a list
# seconds before they are listed again, after that and after other errors
_PAUSE_SECONDS, _LONG_PAUSE_SECONDS = 0.5, 2.0


class PodsAPI(Protocol):
    def list(self, kind: str, selector: str) -> dict[str, Any]: ...

    def watch_pods(self, selector: str, version: str, seconds: int) -> Iterator[tuple[Manifest, bool]]: ...


def follow_pods(
    api: PodsAPI,
    selector: str,
    stopped: threading.Event,
    see_all: Callable[[Manifest], None],
    see: Callable[[Manifest, bool], None],
    say: Callable[[str], None],
) -> None:
    """Follows the pods until `stopped` is set."""
    silent = False
    while not stopped.is_set():
        try:
            listing = api.list("Pod", selector)
            see_all(listing)
            if silent:
                say("The Kubernetes API server answers again.")
            silent = False
            for pod, gone in api.watch_pods(selector, listing["metadata"]["resourceVersion"], _LIST_SECONDS):
                if stopped.is_set():
                    return
                see(pod, gone)
        except KubernetesError as error:
            expired = error.status == _EXPIRED
            if not expired and not silent and not stopped.is_set():
                silent = True
                say(f"{error} The job continues; pods that end meanwhile are noticed later.")
            stopped.wait(_PAUSE_SECONDS if expired else _LONG_PAUSE_SECONDS)
