"""The flags of the job commands: the settings of a job, and of the command line itself."""

from __future__ import annotations

from collections.abc import Iterable

from elasticcb.cluster.registry import backends
from elasticcb.settings import Command, written
from elasticcb.settings.definition import PANELS, Setting
from elasticcb.settings.names import SETTINGS

# Flags that most jobs need; --help shows these, --help-all shows all.
BASIC = frozenset({
    "model_zoo", "model_def", "model_params",
    "training_data", "validation_data", "prediction_data", "label", "data_reader_params",
    "num_epochs", "updates", "minibatch_size",
    "checkpoint_dir", "checkpoint_dir_for_init", "output", "output_format", "follow",
    "cluster", "num_workers", "num_ps", "autoscale",
    "job_name", "job_dir",
})  # fmt: skip


def options_of(commands: Iterable[Command]) -> list[Setting]:
    """The flags that apply to any of `commands`, in the order of the panels."""
    wanted = frozenset(commands)
    found = [option for option in SETTINGS.values() if option.commands & wanted]
    return sorted(found, key=lambda option: PANELS.index(option.panel))


def help_of(option: Setting) -> str:
    """The help of a flag."""
    if option.name == "cluster":
        return " ".join(f"{name}: {backend.summary}." for name, backend in backends().items())
    return written(option.help, False)


def metavar_of(option: Setting) -> str:
    """The placeholder of a flag's value."""
    return "|".join(backends()) if option.name == "cluster" else option.metavar
