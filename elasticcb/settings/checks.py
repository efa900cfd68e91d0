"""Checks over several settings: settings in, mistakes out, as sentences. Command line and `Cluster` share them.

What needs this machine (files, packages) is checked where it is used.
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
    """What the user has given, and how to speak of it; settings are named by path."""

    def __contains__(self, path: str) -> bool:
        """Whether the user gave it."""

    def name(self, path: str) -> str:
        """As the user knows it: "--num_ps"."""

    def with_value(self, path: str) -> str:
        """As it was given, or would be: "--num_ps=0 (in /home/me/job.yaml)"."""

    def as_given(self, path: str, value: Any) -> str:
        """How it would be given another value: "--num_ps=2"."""


Check = Callable[[JobSettings, Said], Iterator[str]]


def problems_of(settings: JobSettings, said: Said) -> list[str]:
    """All that settings contradict each other in."""
    return [problem for check in CHECKS for problem in check(settings, said)]


def completed(settings: JobSettings, said: Said) -> JobSettings:
    """Settings that were checked, with those that follow from others where the user has not given them."""
    cluster = settings.cluster
    more: dict[str, Any] = {}
    if "cluster.silence_seconds" not in said:
        more["silence_seconds"] = min(cluster.silence_seconds, cluster.lease_seconds)
    if cluster.autoscale.most and "cluster.num_workers" not in said:
        more["num_workers"] = cluster.autoscale.least
    return dataclasses.replace(settings, cluster=dataclasses.replace(cluster, **more))


def in_words(what: str, problems: Sequence[str]) -> str:
    """What stands in the way of `what`, all at once."""
    if len(problems) == 1:
        return problems[0]
    listed = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return f"`{what}` can't start, for {len(problems)} reasons:\n{listed}"


def _evaluation(settings: JobSettings, said: Said) -> Iterator[str]:
    if settings.training.evaluation_steps and not settings.data.validation:
        steps, data = "training.evaluation_steps", "data.validation"
        yield (
            f"{said.with_value(steps)} asks for evaluation, but there is nothing to evaluate on. Add "
            f"{said.name(data)}, or leave out {said.name(steps)}."
        )


FORGETS = "a replica does not know which rows a server has let go since it wrote its files. Leave one of them out."

# Settings that have a meaning in some modes only.
_MEANT_FOR = {
    "training.local_steps": (Updates.LOCAL,),
    "training.outer_optimizer": (Updates.LOCAL,),
    "training.grads_to_wait": (Updates.SYNC,),
    "training.sync_version_tolerance": (Updates.SYNC,),
    "training.max_staleness": (Updates.ASYNC, Updates.LOCAL),
    "training.get_model_steps": (Updates.SYNC, Updates.ASYNC),
}


def _mode_path(said: Said) -> str:
    """Which of the two settings of the mode the user has given."""
    return "training.use_async" if "training.use_async" in said else "training.updates"


def _mode(settings: JobSettings, said: Said) -> Iterator[str]:
    training, path = settings.training, _mode_path(said)
    if "training.use_async" in said and "training.updates" in said:
        yield (
            f"{said.with_value('training.use_async')} and {said.with_value('training.updates')} are about the same "
            f"thing. Leave out {said.name('training.use_async')}, which is the earlier name."
        )
        return
    for name, modes in _MEANT_FOR.items():
        if name in said and training.updates not in modes:
            wanted = " or ".join(said.as_given("training.updates", mode.value) for mode in modes)
            yield (
                f"{said.with_value(name)} has a meaning with {wanted} only, and this job has {said.with_value(path)}. "
                f"Give {wanted}, or leave out {said.name(name)}."
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
        yield f"{workers}, with which the job begins, is not within {text}. Give another number, or leave it out."


def _checkpoints(settings: JobSettings, said: Said) -> Iterator[str]:
    if not settings.checkpoint.directory:
        for path in ("checkpoint.steps", "checkpoint.keep_max"):
            if path in said:
                yield (
                    f"{said.with_value(path)} is about checkpoints, but there is no folder to write them to. Add "
                    f"{said.name('checkpoint.directory')}, or leave out {said.name(path)}."
                )


def _initial(settings: JobSettings, said: Said) -> Iterator[str]:
    checkpoint, init_from, init_map = settings.checkpoint, "checkpoint.init_from", "checkpoint.init_map"
    if checkpoint.init_from and checkpoint.directory_for_init:
        whole = "checkpoint.directory_for_init"
        yield (
            f"{said.with_value(init_from)} takes what fits from another model, {said.with_value(whole)} trains the "
            "same model further. Leave one of them out."
        )
    if checkpoint.init_map and not checkpoint.init_from:
        yield (
            f"{said.with_value(init_map)} names variables of a checkpoint, but there is none. Add "
            f"{said.name(init_from)}, or leave out {said.name(init_map)}."
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
            yield f"{said.with_value('cluster.ps_replicas')} can't be with {said.with_value(path)}: {why}"


def _conflicts_with_replicas(settings: JobSettings, mode: str) -> Iterator[tuple[str, str]]:
    embedding = settings.embedding
    if settings.cluster.num_ps < 2:
        yield "cluster.num_ps", "the next server keeps the replica of a server. Start at least 2."
    if settings.training.is_synchronous:
        yield mode, "in synchronous mode all servers start anew when one is lost. Leave one of them out."
    if not settings.checkpoint.interval_seconds:
        why = "a replica holds what the files lack that are written then. Give it some seconds."
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
            f"{said.with_value(lease)} is shorter than {said.with_value(silence)}: while a parameter server that hangs "
            f"is missed and replaced, workers make no progress, and would be killed for it. Raise {said.name(lease)}, "
            f"or lower {said.name(silence)}."
        )


def _tls(settings: JobSettings, said: Said) -> Iterator[str]:
    cluster, insecure = settings.cluster, "cluster.insecure"
    if "cluster.tls" in said and not cluster.tls:
        yield (
            f"{said.with_value('cluster.tls')} turns off nothing: processes with ports use TLS all the same. Leave it "
            f"out, or give {said.as_given(insecure, True)}."
        )
    if cluster.insecure:
        for name in ("tls", "tls_cert", "tls_key", "tls_ca", "tls_name"):
            if getattr(cluster, name):
                yield (
                    f"{said.with_value(insecure)} turns TLS off, and {said.with_value(f'cluster.{name}')} asks for it. "
                    "Leave one of them out."
                )


CHECKS: tuple[Check, ...] = (_evaluation, _mode, _autoscale, _checkpoints, _initial, _tables, _replicas, _silence, _tls)
