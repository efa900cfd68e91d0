"""The flags of the job commands: the settings of a job, and options of the command line itself.

Commands, config file, checks and docs/cli.md share this table, which is generated from the settings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elasticcb.cli.follow import FollowSettings
from elasticcb.cluster.registry import backends
from elasticcb.settings import Command, JobSettings
from elasticcb.settings.definition import (
    CHECKPOINTS,
    KUBERNETES,
    PANELS,
    TRAIN,
    Kind,
    Section,
    Setting,
    setting,
    settings_of,
)


@dataclass(frozen=True, kw_only=True)
class SubmissionSettings(Section):
    """What to do with the manifests of a job."""

    PANEL = KUBERNETES

    yaml: str = setting(
        "",
        "Write the manifests of the job to a file for kubectl, instead of submitting it.",
        kind=Kind.FILE,
    )
    dry_run: bool = setting(
        False,
        "Validate the job against the API server without starting anything. `--dry_run` without a value means true.",
    )


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Section):
    """How the model is exported."""

    PANEL = CHECKPOINTS
    COMMANDS = TRAIN

    numbered: bool = setting(
        False,
        "Export to the next number below --output, such as 3, as TensorFlow Serving expects. `--numbered` without a "
        "value means true.",
    )


def _with_clusters(option: Setting) -> Setting:
    """The choices of --cluster are the installed backends."""
    if option.path != "cluster.kind":
        return option
    rows = " ".join(f"{name}: {backend.summary}." for name, backend in backends().items())
    return replace(option, kind=Kind.CHOICE, unit="", choices=tuple(backends()), help=rows)


OPTIONS: tuple[Setting, ...] = (
    *map(_with_clusters, settings_of(JobSettings)),
    *settings_of(FollowSettings, "follow."),
    *settings_of(SubmissionSettings, "submission."),
    *settings_of(ExportSettings, "export."),
)

# Flags that most jobs need; --help shows these, --help-all shows all.
BASIC = frozenset({
    "model_zoo", "model_def", "model_params",
    "training_data", "validation_data", "prediction_data", "label", "data_reader_params",
    "num_epochs", "updates", "minibatch_size",
    "checkpoint_dir", "checkpoint_dir_for_init", "output", "output_format", "follow",
    "cluster", "num_workers", "num_ps", "autoscale",
    "job_name", "job_dir",
})  # fmt: skip

BY_NAME: dict[str, Setting] = {option.name: option for option in OPTIONS}
BY_PATH: dict[str, Setting] = {option.path: option for option in OPTIONS}
CANONICAL: dict[str, str] = {spelling: option.name for option in OPTIONS for spelling in (option.name, *option.aliases)}


def normalize(text: str) -> str:
    """`num-ps` and `num_ps` are the same name."""
    return text.replace("-", "_")


def options_of(commands: Iterable[Command]) -> list[Setting]:
    """The flags that apply to any of `commands`, in the order of the panels."""
    wanted = frozenset(commands)
    found = [option for option in OPTIONS if option.commands & wanted]
    return sorted(found, key=lambda option: PANELS.index(option.panel))


def options_of_role(role: str) -> list[Setting]:
    """The flags of a manually started process."""
    return [option for option in OPTIONS if role in option.roles]
