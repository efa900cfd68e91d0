"""Settings of the commands themselves, which are not part of a job."""

from __future__ import annotations

from dataclasses import dataclass

from elasticcb.settings.definition import CHECKPOINTS, EVALUATE, JOB, KUBERNETES, TRAIN, Kind, Section, setting


@dataclass(frozen=True, kw_only=True)
class FollowSettings(Section):
    """Whether and how long `evaluate` follows a folder of checkpoints."""

    PANEL = CHECKPOINTS
    COMMANDS = EVALUATE

    timeout: float = setting(
        0.0,
        "With {follow}: exit if no new checkpoint appears for this long; 0: no limit.",
        name="follow_timeout",
        unit="SECONDS",
        minimum=0,
    )
    max_evaluations: int = setting(
        0, "With {follow}: exit after N checkpoints; 0: no limit.", unit="CHECKPOINTS", minimum=0
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
        "`train`: train one batch with one worker, without hooks of callbacks, show what the job would do, and keep "
        "nothing. With {cluster:kubernetes}: validate the job against the API server without starting anything. "
        "`{dry_run}` without a value means true.",
        panel=JOB,
    )


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Section):
    """How the model is exported."""

    PANEL = CHECKPOINTS
    COMMANDS = TRAIN

    numbered: bool = setting(
        False,
        "Export to the next number below {output}, such as 3, as TensorFlow Serving expects. `{numbered}` without a "
        "value means true.",
    )
