"""Derives the state of a pod from its status, its last condition and its events. Pure functions; pods are the API's
JSON."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

CONTAINER = "elasticcb"  # name of the container in every pod of a job


class Fate(Enum):
    """The state of a pod, and its name in the table of docs/kubernetes.md."""

    WAITING = "waits"  # starting, as far as is known
    UNSCHEDULABLE = "unschedulable"
    NO_IMAGE = "image not there"  # it may become available
    WRONG_IMAGE = "image can't be pulled"
    CANNOT_START = "container can't start"
    NO_VOLUME = "volume not there"
    RUNNING = "runs"
    CRASH_LOOPING = "crash-looping"
    COMPLETED = "completed"
    FAILED = "failed"
    KILLED = "killed"
    OOM_KILLED = "out of memory"
    EVICTED = "evicted"
    PREEMPTED = "preempted"
    DRAINED = "drained"
    NODE_LOST = "node lost"
    DELETED = "deleted"


# Nothing runs, and nothing will.
ENDED = frozenset(
    {
        Fate.COMPLETED, Fate.FAILED, Fate.KILLED, Fate.OOM_KILLED, Fate.EVICTED, Fate.PREEMPTED, Fate.DRAINED,
        Fate.NODE_LOST, Fate.DELETED,
    }
)  # fmt: skip
# It had to give way to others: not a fault of the process; no restart is used up.
TAKEN_AWAY = frozenset({Fate.PREEMPTED, Fate.DRAINED, Fate.NODE_LOST, Fate.DELETED})
# A new pod would fail in the same way.
HOPELESS = frozenset({Fate.WRONG_IMAGE, Fate.CANNOT_START})
# It does not run yet, and the user should know why.
HELD_UP = frozenset({Fate.UNSCHEDULABLE, Fate.NO_IMAGE, Fate.NO_VOLUME, Fate.CRASH_LOOPING}) | HOPELESS

# Reasons of the condition DisruptionTarget (since Kubernetes 1.26) and of a pod's `status.reason`.
_TAKEN = {
    "PreemptionByScheduler": (Fate.PREEMPTED, "it was preempted by a pod of higher priority"),
    "Preempting": (Fate.PREEMPTED, "it was preempted: its node needed resources for a critical pod"),
    "EvictionByEvictionAPI": (Fate.DRAINED, "it was evicted, for example because its node is being drained"),
    "DeletionByTaintManager": (Fate.DRAINED, "its node has a taint that it does not tolerate"),
    "DeletionByPodGC": (Fate.NODE_LOST, "its node is gone"),
    "NodeLost": (Fate.NODE_LOST, "its node does not respond"),
    "NodeShutdown": (Fate.NODE_LOST, "its node was shut down"),
    "Shutdown": (Fate.NODE_LOST, "its node was shut down"),
    "Terminated": (Fate.NODE_LOST, "its node was shut down"),
    "Evicted": (Fate.EVICTED, "its node evicted it"),
}
_NEVER_PULLED = frozenset({"ErrImageNeverPull", "InvalidImageName"})
_PULLED_LATER = frozenset({"ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError"})
_PULL_REFUSED = ("not found", "manifest unknown", "denied", "unauthorized", "authorization failed", "does not exist")
_NO_START = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_NO_EXEC = frozenset({"ContainerCannotRun", "StartError"})
_OUT_OF = ("OutOf", "UnexpectedAdmissionError", "NodeAffinity", "TopologyAffinityError")


@dataclass(frozen=True)
class PodVerdict:
    """The state of a pod and the reason; `words` continue "Worker 1: "."""

    fate: Fate
    words: str


def verdict(pod: Mapping[str, Any], events: Iterable[Mapping[str, Any]] = (), gone: bool = False) -> PodVerdict:
    """The state of a pod."""
    status = pod.get("status", {})
    state = _container(status).get("state", {})
    terminated, waiting = state.get("terminated"), state.get("waiting") or {}
    if terminated is not None and terminated.get("reason") == "OOMKilled":
        limit = _limits(pod).get("memory")
        of = f", limit {limit}" if limit else ""
        return PodVerdict(Fate.OOM_KILLED, f"it ran out of memory{of} (OOMKilled)")
    leaves = gone or "deletionTimestamp" in pod.get("metadata", {})
    ended = gone or terminated is not None or status.get("phase") in ("Failed", "Succeeded")
    if ended:
        taken = _taken(status, events)
        if taken is not None:
            return taken
        if leaves:
            return PodVerdict(Fate.DELETED, "its pod was deleted")
        return _exit(status, terminated)
    if state.get("running") is not None:
        return PodVerdict(Fate.RUNNING, "it runs")
    return _held_up(pod, status, waiting, events)


def _taken(status: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> PodVerdict | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            known = _TAKEN.get(condition.get("reason", ""))
            if known is not None:
                return _with(known, condition.get("message"))
            return PodVerdict(Fate.EVICTED, _one_line(condition.get("message") or "its node terminated it"))
    known = _TAKEN.get(status.get("reason") or "")
    if known is not None:
        return _with(known, status.get("message"))
    for event in events:
        if event.get("reason") == "Preempted":
            return _with(_TAKEN["PreemptionByScheduler"], event.get("message"))
        if event.get("reason") == "TaintManagerEviction":
            return _with(_TAKEN["DeletionByTaintManager"], event.get("message"))
    return None


def _exit(status: Mapping[str, Any], terminated: Mapping[str, Any] | None) -> PodVerdict:
    if terminated is None:  # the node refused it
        reason = status.get("reason") or "unknown reason"
        fate = Fate.DRAINED if reason.startswith(_OUT_OF) else Fate.KILLED
        return _with((fate, f"its node refused it ({reason})"), status.get("message"))
    code, reason = int(terminated.get("exitCode", 0)), terminated.get("reason", "")
    if reason in _NO_EXEC:
        return _with((Fate.CANNOT_START, "its container can't be started"), terminated.get("message"))
    if code == 0:
        return PodVerdict(Fate.COMPLETED, "exit code 0")
    number = int(terminated.get("signal") or (code - 128 if 128 < code < 128 + signal.NSIG else 0))
    if number:
        try:
            return PodVerdict(Fate.KILLED, f"killed by {signal.Signals(number).name}")
        except ValueError:
            return PodVerdict(Fate.KILLED, f"killed by signal {number}")
    return PodVerdict(Fate.FAILED, f"exit code {code}")


def _held_up(
    pod: Mapping[str, Any], status: Mapping[str, Any], waiting: Mapping[str, Any], events: Iterable[Mapping[str, Any]]
) -> PodVerdict:
    reason, message = waiting.get("reason", ""), waiting.get("message") or ""
    image = next(iter(_containers(pod)), {}).get("image", "")
    if reason in _NEVER_PULLED:
        why = (
            ("is not on its node, and the pull policy forbids pulling it")
            if reason == "ErrImageNeverPull"
            else "is not a valid image name"
        )
        return PodVerdict(Fate.WRONG_IMAGE, f"the image {image} {why}")
    if reason in _PULLED_LATER:
        refused = any(word in message.lower() for word in _PULL_REFUSED)
        fate = Fate.WRONG_IMAGE if refused else Fate.NO_IMAGE
        return _with((fate, f"the image {image} can't be pulled"), message or _last(events, "Failed"))
    if reason in _NO_START:
        return _with((Fate.CANNOT_START, "its container can't be created"), message)
    if reason == "CrashLoopBackOff":
        return _with((Fate.CRASH_LOOPING, "it keeps ending immediately after its start"), message)
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            words = (
                ("it waits for resources")
                if "nsufficient" in (condition.get("message") or "")
                else "no node accepts it"
            )
            return _with((Fate.UNSCHEDULABLE, words), condition.get("message"))
    unmounted = _last(events, "FailedMount") or _last(events, "FailedAttachVolume")
    if unmounted:
        return _with((Fate.NO_VOLUME, "a volume can't be mounted"), unmounted)
    return PodVerdict(Fate.WAITING, "it is starting")


def _last(events: Iterable[Mapping[str, Any]], reason: str) -> str:
    found = [event.get("message", "") for event in events if event.get("reason") == reason]
    return found[-1] if found else ""


def _with(known: tuple[Fate, str], message: str | None) -> PodVerdict:
    fate, words = known
    return PodVerdict(fate, f"{words}: {_one_line(message)}" if message else words)


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    every = pod.get("spec", {}).get("containers") or []
    return [each for each in every if each.get("name") == CONTAINER] or list(every)


def _container(status: Mapping[str, Any]) -> Mapping[str, Any]:
    every = status.get("containerStatuses") or [{}]
    return next((each for each in every if each.get("name") == CONTAINER), every[0])


def _limits(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(iter(_containers(pod)), {}).get("resources", {}).get("limits") or {}
