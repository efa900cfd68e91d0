"""Options of submitting a job with `--cluster=kubernetes`."""

from __future__ import annotations

from dataclasses import dataclass

from elasticcb.settings.definition import KUBERNETES, Kind, Section, setting


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
