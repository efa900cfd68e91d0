"""The cores that a process may use, by its affinity and the quotas of its control groups."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from elasticcb.process.devices import usable_cores

V1, V2 = "cgroup cgroup rw,cpu,cpuacct", "cgroup2 cgroup2 rw"


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)


def cores(tmp_path: Path, group: str, kind: str, files: dict[str, str], root: str = "/") -> int:
    """Of a process in `group`, where `root` is mounted with these files."""
    for name, text in files.items():
        (tmp_path / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mounted" / name).write_text(text + "\n")
    (tmp_path / "cgroup").write_text(f"12:memory:/elsewhere\n{group}\n")
    (tmp_path / "mountinfo").write_text(
        "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:3 - tmpfs tmpfs rw\n"
        f"32 31 0:29 {root} {tmp_path}/mounted rw,relatime shared:4 - {kind}\n"
    )
    return usable_cores(tmp_path)


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 16), ("100000 100000", 1), ("150000 100000", 2), ("9900000 100000", 16)]
)
def test_the_quota_of_a_systemd_unit_counts(tmp_path: Path, quota: str, expected: int) -> None:
    files = {"system.slice/cpu.max": "max 100000", "system.slice/job.service/cpu.max": quota}
    assert cores(tmp_path, "0::/system.slice/job.service", V2, files) == expected


def test_the_quota_of_a_group_further_up_counts(tmp_path: Path) -> None:
    files = {"slurm/cpu.max": "400000 100000", "slurm/job/cpu.max": "max 100000", "other/cpu.max": "1 100000"}
    assert cores(tmp_path, "0::/slurm/job/step", V2, files) == 4


@pytest.mark.parametrize(("quota", "expected"), [("-1", 16), ("300000", 3)])
def test_groups_of_version_1_count(tmp_path: Path, quota: str, expected: int) -> None:
    files = {"job/cpu.cfs_quota_us": quota, "job/cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "-1"}
    assert cores(tmp_path, "3:cpuacct,cpu:/job", V1, files) == expected


@pytest.mark.parametrize("group", ["0::/", "0::/docker/abc"])
def test_a_container_sees_its_group_as_the_root(tmp_path: Path, group: str) -> None:
    assert cores(tmp_path, group, V2, {"cpu.max": "200000 100000"}, root="/" if group == "0::/" else "/docker/abc") == 2


def test_a_path_of_the_host_that_a_container_does_not_see_is_the_root(tmp_path: Path) -> None:
    assert cores(tmp_path, "0::/kubepods/pod/container", V2, {"cpu.max": "200000 100000"}, root="/..") == 2


def test_a_system_without_control_groups_has_the_cores_of_the_affinity(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "missing") == 16


def test_a_real_quota_counts() -> None:
    folder = next((path for path in map(Path, ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup")) if _has_quotas(path)), None)
    if folder is None or not os.access(folder, os.W_OK):
        pytest.skip("no control group can be made here")
    group = folder / f"elasticcb-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text("100000 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text("100000")
    except OSError:
        pytest.skip("no control group can be made here")
    program = (
        f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()));"
        "from elasticcb.process.devices import usable_cores; print(usable_cores())"
    )
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    finally:
        group.rmdir()
    assert done.stdout == "1\n"


def _has_quotas(folder: Path) -> bool:
    return (folder / "cpu.cfs_quota_us").exists() or "cpu" in _read(folder / "cgroup.subtree_control").split()


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
