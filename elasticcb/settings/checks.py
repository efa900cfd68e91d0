"""Checks of combinations of settings; each yields messages. The command line and `Cluster` share them.

Files and packages of this machine are checked where they are used.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from elasticcb.errors import UsageError
from elasticcb.settings.choices import Updates, read_init_map
from elasticcb.settings.given import Given
from elasticcb.settings.job import JobSettings
from elasticcb.settings.table import read_table_options
from elasticcb.settings.training import ENDLESS

Check = Callable[[JobSettings, Given], Iterator[str]]


def problems_of(settings: JobSettings, given: Given) -> list[str]:
    """Messages about invalid values, and about all contradictions between settings."""
    return [*given.problems, *(problem for check in CHECKS for problem in check(settings, given))]


def completed(settings: JobSettings, given: Given) -> JobSettings:
    """Checked settings, completed with the settings that follow from others, unless the user gave them."""
    cluster = settings.cluster
    more: dict[str, Any] = {}
    if "silence_seconds" not in given:
        more["silence_seconds"] = min(cluster.silence_seconds, cluster.lease_seconds)
    if cluster.autoscale.most and "num_workers" not in given:
        more["num_workers"] = cluster.autoscale.least
    training = settings.training
    if settings.stream.ends_of_epochs and "num_epochs" not in given:
        training = dataclasses.replace(training, num_epochs=ENDLESS)
    data = settings.data
    if data.bad_records not in ("fail", "skip") and "://" not in data.bad_records:
        data = dataclasses.replace(data, bad_records=os.path.abspath(data.bad_records))
    return dataclasses.replace(settings, data=data, training=training, cluster=dataclasses.replace(cluster, **more))


def in_words(what: str, problems: Sequence[str]) -> str:
    """One message with everything that prevents `what` from starting."""
    if len(problems) == 1:
        return problems[0]
    listed = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return f"`{what}` can't start, for {len(problems)} reasons:\n{listed}"


def _evaluation(settings: JobSettings, given: Given) -> Iterator[str]:
    if settings.training.evaluation_steps and not settings.data.validation:
        yield given.shown("evaluation_steps") + given.written(
            " asks for evaluation, but there is no evaluation data. Add {validation_data}, or remove "
            "{evaluation_steps}."
        )


def _mode_name(given: Given) -> str:
    """The setting by which the user chose the mode."""
    earlier = ("use_async", "grads_to_wait", "get_model_steps")
    return next((name for name in earlier if name in given), "updates")


def _mode(settings: JobSettings, given: Given) -> Iterator[str]:
    training, mode = settings.training, _mode_name(given)
    if "sync_version_tolerance" in given:
        yield (
            f"{given.shown('sync_version_tolerance')} has no equivalent: no update is rejected as too old; a late one "
            "counts less. Remove it."
        )
    if mode != "updates" and "updates" in given:
        yield (
            f"{given.shown(mode)} and {given.shown('updates')} set the same thing. Remove {given.name(mode)}, which is "
            "ElasticDL's name."
        )
        return
    steps = next((steps for steps in ("get_model_steps", "local_steps") if steps in given), "")
    if steps and training.updates is Updates.SYNC:
        choices = given.written("Set {updates:local} or {updates:async}")
        yield (
            f"{given.shown(steps)} can't be combined with {given.shown(mode)}, which merges after each batch. "
            f"{choices}, or remove {given.name(steps)}."
        )
    if training.updates is Updates.ASYNC and "grads_to_wait" in given:
        yield (
            f"{given.shown('grads_to_wait')} can't be combined with {given.shown(mode)}, where nobody waits. Remove "
            "one of the two."
        )


def earlier_flags(settings: JobSettings, given: Given) -> Iterator[str]:
    """A line for each flag of ElasticDL that was given: what it is now."""
    training = settings.training
    updates = given.written(f"{{updates:{training.updates.value}}}")
    steps = given.written(f"{{local_steps:{training.local_steps}}}")
    now = {
        "use_async": f"{updates} now.",
        "grads_to_wait": f"{updates} now: a round waits for one batch of each worker.",
        "get_model_steps": f"{updates} {steps} now.",
    }
    for name, text in now.items():
        if name in given:
            yield f"{given.shown(name)} is {text}"


def _autoscale(settings: JobSettings, given: Given) -> Iterator[str]:
    workers, limits = settings.cluster.num_workers, settings.cluster.autoscale
    if limits.most and "num_workers" in given and not limits.least <= workers <= limits.most:
        yield (
            f"{given.shown('num_workers')}, the number of workers at the start, is outside {given.shown('autoscale')}. "
            "Choose a number in that range, or remove it."
        )


def _checkpoints(settings: JobSettings, given: Given) -> Iterator[str]:
    has_folder = settings.model.definition and (settings.directory or settings.cluster.kind != "kubernetes")
    if not settings.checkpoint.directory and not has_folder:
        for name in ("checkpoint_steps", "keep_checkpoint_max"):
            if name in given:
                add = given.written("Add {checkpoint_dir}")
                yield (
                    f"{given.shown(name)} configures checkpoints, but the job writes none. {add}, or remove "
                    f"{given.name(name)}."
                )


def _exports(settings: JobSettings, given: Given) -> Iterator[str]:
    for name in ("export_every", "export_full_every", "export_keep"):
        if name in given and not settings.exports.directory:
            add = given.written(" configures exports, but the job writes none. Add {export_dir}")
            yield f"{given.shown(name)}{add}, or remove {given.name(name)}."


def _initial(settings: JobSettings, given: Given) -> Iterator[str]:
    checkpoint = settings.checkpoint
    if checkpoint.init_from and checkpoint.directory_for_init:
        yield (
            f"{given.shown('init_from')} copies matching weights from another model; "
            f"{given.shown('checkpoint_dir_for_init')} continues training the same model. Remove one of the two."
        )
    if checkpoint.init_map and not checkpoint.init_from:
        yield given.shown("init_map") + given.written(
            " maps names of a checkpoint, but no checkpoint is given. Add {init_from}, or remove {init_map}."
        )
    try:
        read_init_map(checkpoint.init_map)
    except UsageError as error:
        yield f"{given.shown('init_map')}: {error}"


def _tables(settings: JobSettings, given: Given) -> Iterator[str]:
    for name, options in settings.embedding.tables.items():
        problems = [_SETTINGS_BY_NAME]
        if isinstance(name, str) and name and isinstance(options, Mapping):
            problems = read_table_options(options)[1]
        for problem in problems:
            yield f"{given.name('embedding_tables')}, {name!r}: {problem}"


_SETTINGS_BY_NAME = "Expected the name of a table with its settings, such as {'users': {'min_count': 3}}."


def _silence(settings: JobSettings, given: Given) -> Iterator[str]:
    if "silence_seconds" in given and settings.cluster.lease_seconds < settings.cluster.silence_seconds:
        yield (
            f"{given.shown('lease_seconds')} is shorter than {given.shown('silence_seconds')}: while a hanging "
            "parameter server is detected and replaced, workers make no progress and would be killed. "
        ) + given.written("Raise {lease_seconds}, or lower {silence_seconds}.")


def _tls(settings: JobSettings, given: Given) -> Iterator[str]:
    cluster = settings.cluster
    if "tls" in given and not cluster.tls:
        yield given.shown("tls") + given.written(
            " does not turn off TLS: processes with ports always use it. Remove it, or set {insecure:true}."
        )
    if cluster.insecure:
        for name in ("tls", "tls_cert", "tls_key", "tls_ca", "tls_name"):
            if getattr(cluster, name):
                yield (
                    f"{given.shown('insecure')} turns TLS off, but {given.shown(name)} asks for it. Remove one of the "
                    "two."
                )


CHECKS: tuple[Check, ...] = (_evaluation, _mode, _autoscale, _checkpoints, _exports, _initial, _tables, _silence, _tls)
