"""What `--cluster=kubernetes` does beside submitting the job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SubmissionSettings:
    """What becomes of the manifests of a job."""

    yaml: str = ""  # file that they are written to, instead of being submitted
    dry_run: bool = False  # the API server only checks them
