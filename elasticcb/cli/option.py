"""What a flag is. The table of them is options.py."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from elasticcb.cli.follow import FollowSettings
from elasticcb.cli.submission import SubmissionSettings
from elasticcb.settings import (
    CheckpointSettings,
    ClusterSettings,
    Command,
    DataSettings,
    EmbeddingSettings,
    JobSettings,
    KubernetesSettings,
    ModelSettings,
    TrainingSettings,
)

TRAIN = frozenset({Command.TRAIN})
TRAIN_AND_EVALUATE = frozenset({Command.TRAIN, Command.EVALUATE})
EVALUATE = frozenset({Command.EVALUATE})
PREDICT = frozenset({Command.PREDICT})
ALL = TRAIN | EVALUATE | PREDICT


class Kind(Enum):
    """What a value is; the name shown to the user when a flag has no better one."""

    TEXT = "TEXT"
    NAME = "NAME"  # of something in the model file
    INTEGER = "INTEGER"
    NUMBER = "NUMBER"
    TRUTH = "true|false"
    CHOICE = "CHOICE"
    PARAMS = "K=V;K2=V2"
    FOLDER = "FOLDER"
    FILE = "FILE"
    DATA = "DATA"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One flag.

    `field` names the place in `JobSettings` that the value goes to, as "section.name" or "name"; the sections
    "follow" and "submission" are `FollowSettings` and `SubmissionSettings`.
    `value` is what `--help` writes behind the flag: its unit, where it has one.
    """

    name: str
    field: str
    panel: str
    kind: Kind
    help: str
    commands: frozenset[Command] = ALL
    value: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None  # like `minimum`, but not this number itself
    because: str = ""  # why the limit, as a sentence
    aliases: tuple[str, ...] = ()
    default_text: str = ""  # where the default is worked out, not stored

    @property
    def default(self) -> Any:
        """The default in the settings' dataclasses; None where it is empty or worked out."""
        default = defaults().get(self.field)
        if isinstance(default, bool):
            return str(default).lower()  # as it is written on the command line
        return None if default == "" or dataclasses.is_dataclass(default) else default

    @property
    def metavar(self) -> str:
        return self.value or ("|".join(self.choices) if self.choices else self.kind.value)


@cache
def defaults() -> dict[str, Any]:
    """Default of each settings field that has a plain one, by "section.name"; enums as their text."""
    sections: dict[str, type] = {
        "": JobSettings,
        "model.": ModelSettings,
        "data.": DataSettings,
        "training.": TrainingSettings,
        "checkpoint.": CheckpointSettings,
        "cluster.": ClusterSettings,
        "cluster.kubernetes.": KubernetesSettings,
        "embedding.": EmbeddingSettings,
        "follow.": FollowSettings,  # which is no matter of a job, as the next
        "submission.": SubmissionSettings,
    }
    found: dict[str, Any] = {}
    for prefix, section in sections.items():
        for field in dataclasses.fields(section):
            if field.default is not dataclasses.MISSING:
                default = field.default
                found[prefix + field.name] = default.value if isinstance(default, Enum) else default
    return found
