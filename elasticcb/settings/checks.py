"""Checks of combinations of settings; each yields messages. The command line and `Cluster` share them.

Files and packages of this machine are checked where they are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from elasticcb.errors import UsageError
from elasticcb.settings.choices import Updates, WorkerRange, read_init_map
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


def _mode_path(said: Said) -> str:
    """The setting by which the user chose the mode."""
    given = ("training.use_async", "training.grads_to_wait", "training.get_model_steps")
    return next((path for path in given if path in said), "training.updates")


def _mode(settings: JobSettings, said: Said) -> Iterator[str]:
    training, path = settings.training, _mode_path(said)
    if "training.sync_version_tolerance" in said:
        yield (
            f"{said.with_value('training.sync_version_tolerance')} has no equivalent: no update is rejected as too "
            "old; a late one counts less. Remove it."
        )
    if path != "training.updates" and "training.updates" in said:
        yield (
            f"{said.with_value(path)} and {said.with_value('training.updates')} set the same thing. Remove "
            f"{said.name(path)}, which is ElasticDL's name."
        )
        return
    steps = next((steps for steps in ("training.get_model_steps", "training.local_steps") if steps in said), "")
    if steps and training.updates is Updates.SYNC:
        yield (
            f"{said.with_value(steps)} can't be combined with {said.with_value(path)}, which merges after each batch. "
            f"Set {said.as_given('training.updates', 'local')} or {said.as_given('training.updates', 'async')}, or "
            f"remove {said.name(steps)}."
        )
    if training.updates is Updates.ASYNC and "training.grads_to_wait" in said:
        yield (
            f"{said.with_value('training.grads_to_wait')} can't be combined with {said.with_value(path)}, where nobody "
            f"waits. Remove one of the two."
        )


def earlier_flags(settings: JobSettings, said: Said) -> Iterator[str]:
    """A line for each flag of ElasticDL that was given: what it is now."""
    updates = said.as_given("training.updates", settings.training.updates.value)
    steps = said.as_given("training.local_steps", settings.training.local_steps)
    now = {
        "training.use_async": f"{updates} now.",
        "training.grads_to_wait": f"{updates} now: a round waits for one batch of each worker.",
        "training.get_model_steps": f"{updates} {steps} now.",
    }
    for path, text in now.items():
        if path in said:
            yield f"{said.with_value(path)} is {text}"


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
    has_folder = settings.model.definition and (settings.directory or settings.cluster.kind != "kubernetes")
    if not settings.checkpoint.directory and not has_folder:
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


CHECKS: tuple[Check, ...] = (_evaluation, _mode, _autoscale, _checkpoints, _initial, _tables, _silence, _tls)
