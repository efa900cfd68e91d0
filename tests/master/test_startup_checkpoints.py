"""The checkpoint folders of a job that starts."""

from __future__ import annotations

from types import SimpleNamespace

from elasticcb.checkpoint.manifest import MANIFEST
from elasticcb.checkpoint.versions import find_versions, version_folder
from elasticcb.master.checkpoint_writer import warn_of_later_versions
from elasticcb.settings import CheckpointSettings, Command, JobSettings


def test_later_versions_are_told_apart_by_their_numbers(tmp_path):
    for version in (99_999_999, 100_000_000):
        (tmp_path / version_folder(version)).mkdir()
        (tmp_path / version_folder(version) / MANIFEST).touch()
    (tmp_path / "version-1").mkdir()
    assert [path.name for path in find_versions(tmp_path)] == ["version-99999999", "version-100000000"]
    told = []
    settings = JobSettings(command=Command.TRAIN, checkpoint=CheckpointSettings(directory=str(tmp_path)))
    order = SimpleNamespace(settings=settings, report=SimpleNamespace(message=told.append))
    warn_of_later_versions(order, 100_000_000)
    assert not told
    warn_of_later_versions(order, 99_999_999)
    assert "already contains the checkpoint version-100000000" in told[0]
