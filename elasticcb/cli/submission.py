"""What `--cluster=kubernetes` does beside submitting the job."""

from __future__ import annotations

from dataclasses import dataclass

from elasticcb.settings.definition import KUBERNETES, Kind, Section, setting


@dataclass(frozen=True, kw_only=True)
class SubmissionSettings(Section):
    """What becomes of the manifests of a job."""

    PANEL = KUBERNETES

    yaml: str = setting(
        "",
        "Write the manifests of the job into a file, for kubectl, and submit nothing.",
        kind=Kind.FILE,
    )
    dry_run: bool = setting(False, "Have the API server check all, and start nothing. `--dry_run` alone is true.")
