"""Checks of combinations of settings; each yields messages. The command line and `Cluster` share them.

Files and packages of this machine are checked where they are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from elasticcb.errors import UsageError
from elasticcb.settings.choices import Updates, WhenFull, WorkerRange
from elasticcb.settings.init_map import read_init_map
from elasticcb.settings.job import JobSettings
from elasticcb.settings.table import read_table_options


class Said(Protocol):
    """The settings that the user gave, and their names in messages. Settings are identified by path."""

    def __contains__(self, path: str) -> bool:
        """Whether the user gave it."""

    def name(self, path: str) -> str:
        """The user's name for it: "--num_ps"."""

    def with_value(self, path: str) -> str:
        """With its value, given or default: "--num_ps=0 (in /home/me/job.yaml)"."""

    def as_given(self, path: str, value: Any) -> str:
        """How to give it this value: "--num_ps=2"."""


Check = Callable[[JobSettings, Said], Iterator[str]]


def problems_of(settings: JobSettings, said: Said) -> list[str]:
    """Messages about all contradictions between settings."""
    return [problem for check in CHECKS for problem in check(settings, said)]


def completed(settings: JobSettings, said: Said) -> JobSettings:
    """Checked settings, completed with the settings that follow from others, unless the user gave them."""
    cluster = settings.cluster
    more: dict[str, Any] = {}
    if "cluster.silence_seconds" not in said:
        more["silence_seconds"] = min(cluster.silence_seconds, cluster.lease_seconds)
    if cluster.autoscale.most and "cluster.num_workers" not in said:
        more["num_workers"] = cluster.autoscale.least
    return dataclasses.replace(settings, cluster=dataclasses.replace(cluster, **more))


def in_words(what: str, problems: Sequence[str]) -> str:
    """One message with everything that prevents `what` from starting."""
    if len(problems) == 1:
        return problems[0]
    listed = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return f"`{what}` can't start, for {len(problems)} reasons:\n{listed}"


def _evaluation(settings: JobSettings, said: Said) -> Iterator[str]:
    if settings.training.evaluation_steps and not settings.data.validation:
        steps, data = "training.evaluation_steps", "data.validation"
        yield (
            f"{said.with_value(steps)} asks for evaluation, but there is no evaluation data. Add {said.name(data)}, "
            f"or remove {said.name(steps)}."
        )


FORGETS = (
    "a replica does not know which rows its server evicted since the server last wrote its files. Remove one of the "
    "two."
)

# Settings that apply only to some modes.
_MEANT_FOR = {
    "training.local_steps": (Updates.LOCAL,),
    "training.grads_to_wait": (Updates.SYNC,),
    "training.sync_version_tolerance": (Updates.SYNC,),
    "training.max_staleness": (Updates.ASYNC, Updates.LOCAL),
    "training.get_model_steps": (Updates.SYNC, Updates.ASYNC),
}


def _mode_path(said: Said) -> str:
    """Which of the two mode settings the user gave."""
    return "training.use_async" if "training.use_async" in said else "training.updates"


def _mode(settings: JobSettings, said: Said) -> Iterator[str]:
    training, path = settings.training, _mode_path(said)
    if "training.use_async" in said and "training.updates" in said:
        yield (
            f"{said.with_value('training.use_async')} and {said.with_value('training.updates')} set the same thing. "
            f"Remove {said.name('training.use_async')}, which is the earlier name."
        )
        return
    for name, modes in _MEANT_FOR.items():
        if name in said and training.updates not in modes:
            wanted = " or ".join(said.as_given("training.updates", mode.value) for mode in modes)
            yield (
                f"{said.with_value(name)} applies only to {wanted}, and this job has {said.with_value(path)}. Set "
                f"{wanted}, or remove {said.name(name)}."
            )
    if not training.is_synchronous or training.grads_to_wait < 1:
        return
    tolerance = "training.sync_version_tolerance"
    age = (training.get_model_steps - 1) // training.grads_to_wait
    if age > training.sync_version_tolerance:
        steps = "training.get_model_steps"
        yield (
            f"{said.with_value(steps)} makes weights {age} versions old even with one worker, but "
            f"{said.with_value(tolerance)} rejects gradients older than {training.sync_version_tolerance}. Lower "
            f"{said.name(steps)}, or raise {said.name(tolerance)}."
        )


def _autoscale(settings: JobSettings, said: Said) -> Iterator[str]:
    cluster = settings.cluster
    if cluster.autoscale == WorkerRange():
        return
    text, limits = said.with_value("cluster.autoscale"), cluster.autoscale
    if "cluster.num_workers" in said and not limits.least <= cluster.num_workers <= limits.most:
        workers = said.with_value("cluster.num_workers")
        yield (
            f"{workers}, the number of workers at the start, is outside {text}. Choose a number in that range, or "
            "remove it."
        )


def _checkpoints(settings: JobSettings, said: Said) -> Iterator[str]:
    if not settings.checkpoint.directory:
        for path in ("checkpoint.steps", "checkpoint.keep_max"):
            if path in said:
                yield (
                    f"{said.with_value(path)} configures checkpoints, but the job writes none. Add "
                    f"{said.name('checkpoint.directory')}, or remove {said.name(path)}."
                )


def _initial(settings: JobSettings, said: Said) -> Iterator[str]:
    checkpoint, init_from, init_map = settings.checkpoint, "checkpoint.init_from", "checkpoint.init_map"
    if checkpoint.init_from and checkpoint.directory_for_init:
        whole = "checkpoint.directory_for_init"
        yield (
            f"{said.with_value(init_from)} copies matching weights from another model; {said.with_value(whole)} "
            "continues training the same model. Remove one of the two."
        )
    if checkpoint.init_map and not checkpoint.init_from:
        yield (
            f"{said.with_value(init_map)} maps names of a checkpoint, but no checkpoint is given. Add "
            f"{said.name(init_from)}, or remove {said.name(init_map)}."
        )
    try:
        read_init_map(checkpoint.init_map)
    except UsageError as error:
        yield f"{said.with_value(init_map)}: {error}"


def _tables(settings: JobSettings, said: Said) -> Iterator[str]:
    for name, given in settings.embedding.tables.items():
        problems = [_SETTINGS_BY_NAME]
        if isinstance(name, str) and name and isinstance(given, Mapping):
            problems = read_table_options(given)[1]
        for problem in problems:
            yield f"{said.name('embedding.tables')}, {name!r}: {problem}"


_SETTINGS_BY_NAME = "Expected the name of a table with its settings, such as {'users': {'min_count': 3}}."


def _replicas(settings: JobSettings, said: Said) -> Iterator[str]:
    if settings.cluster.ps_replicas == 1:
        for path, why in _conflicts_with_replicas(settings, _mode_path(said)):
            yield f"{said.with_value('cluster.ps_replicas')} can't be combined with {said.with_value(path)}: {why}"


def _conflicts_with_replicas(settings: JobSettings, mode: str) -> Iterator[tuple[str, str]]:
    embedding = settings.embedding
    if settings.cluster.num_ps < 2:
        yield "cluster.num_ps", "a server's replica is kept by the next server. Start at least 2 servers."
    if settings.training.is_synchronous:
        yield mode, "in synchronous mode, all servers restart when one is lost. Remove one of the two."
    if not settings.checkpoint.interval_seconds:
        why = "a replica holds only the updates since the last recovery files. Set an interval of a few seconds."
        yield "checkpoint.interval_seconds", why
    if embedding.min_count > 1:
        yield "embedding.min_count", FORGETS
    if embedding.max_age:
        yield "embedding.max_age", FORGETS
    if embedding.memory_bytes and embedding.when_full in (WhenFull.EVICT, WhenFull.INITIAL):
        yield "embedding.when_full", FORGETS


def _silence(settings: JobSettings, said: Said) -> Iterator[str]:
    silence, lease = "cluster.silence_seconds", "cluster.lease_seconds"
    if silence in said and 0 < settings.cluster.lease_seconds < settings.cluster.silence_seconds:
        yield (
            f"{said.with_value(lease)} is shorter than {said.with_value(silence)}: while a hanging parameter server "
            f"is detected and replaced, workers make no progress and would be killed. Raise {said.name(lease)}, or "
            f"lower {said.name(silence)}."
        )


def _tls(settings: JobSettings, said: Said) -> Iterator[str]:
    cluster, insecure = settings.cluster, "cluster.insecure"
    if "cluster.tls" in said and not cluster.tls:
        yield (
            f"{said.with_value('cluster.tls')} does not turn off TLS: processes with ports always use it. Remove it, "
            f"or set {said.as_given(insecure, True)}."
        )
    if cluster.insecure:
        for name in ("tls", "tls_cert", "tls_key", "tls_ca", "tls_name"):
            if getattr(cluster, name):
                yield (
                    f"{said.with_value(insecure)} turns TLS off, but {said.with_value(f'cluster.{name}')} asks for "
                    "it. Remove one of the two."
                )


CHECKS: tuple[Check, ...] = (_evaluation, _mode, _autoscale, _checkpoints, _initial, _tables, _replicas, _silence, _tls)
