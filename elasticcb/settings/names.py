"""All settings by name, and texts that name them as their reader does: as flags, or as arguments of `Cluster`."""

from __future__ import annotations

from pathlib import Path
from string import Formatter

from elasticcb.settings.cluster import NetworkOptions, RecoveryOptions
from elasticcb.settings.definition import ONLY_NAME, Section, Setting, settings_of
from elasticcb.settings.job import CheckpointOptions, ExportSettings, FollowSettings, JobSettings, SubmissionSettings
from elasticcb.settings.training import EmbeddingOptions, ExchangeOptions

SETTINGS: dict[str, Setting] = {
    each.name: each
    for each in (
        *settings_of(JobSettings),
        *settings_of(FollowSettings, "follow."),
        *settings_of(SubmissionSettings, "submission."),
        *settings_of(ExportSettings, "export."),
    )
}
GROUPS: dict[str, type[Section]] = {
    owner.GROUP: owner
    for owner in (ExchangeOptions, CheckpointOptions, EmbeddingOptions, NetworkOptions, RecoveryOptions)
}
# The arguments of `Cluster`: the common ones by their name there, the others by group.
EVERYDAY = {each.argument: each for each in SETTINGS.values() if each.argument}
GROUPED = {group: [each for each in SETTINGS.values() if each.group == group] for group in GROUPS}


def written(text: str, in_program: bool, quote: str = "") -> str:
    """A text in which `{num_ps}` and `{updates:local}` stand for a setting, without and with a value.

    Args:
        in_program: whether the reader knows arguments of `Cluster`, or flags.
        quote: surrounds arguments.
    """
    parts = []
    for literal, name, value, _ in Formatter().parse(text):
        parts.append(literal)
        if name is not None:
            setting = SETTINGS[name]
            shown = setting.written(in_program, setting.read(value, Path())[0] if value else ONLY_NAME)
            parts.append(f"{quote}{shown}{quote}" if in_program else shown)
    return "".join(parts)


for _owner in {each.owner: None for each in SETTINGS.values()}:
    _own = [each for each in SETTINGS.values() if each.owner is _owner]
    _texts = [f"    {each.field}: {written(each.help, _owner in GROUPS.values())}" for each in _own]
    _owner.__doc__ = "\n".join([f"{_owner.__doc__}\n\nAttributes:", *_texts])
