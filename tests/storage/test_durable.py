"""Files that a job relies on: whole or not there, at whatever moment the writer or the machine ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ps_clients import save_as_server

from elasticcb.checkpoint.manifest import read_manifest, verify
from elasticcb.checkpoint.parts import Loaded, load
from elasticcb.checkpoint.remote import Files
from elasticcb.checkpoint.shard_file import Part, write_part
from elasticcb.checkpoint.versions import begin_version, find_latest, finish_version, put_back, server_file
from elasticcb.cli.resume import resumed_settings
from elasticcb.errors import CheckpointError, JobFailedError, ReplacedError, UsageError
from elasticcb.master.journal import Journal
from elasticcb.master.recovery_files import RecoveryFiles
from elasticcb.optimizers.state import OptimizerState
from elasticcb.sharding.partition import ShardMap, VariableSpec, partition
from elasticcb.storage import durable

SPECS = [VariableSpec("dense/kernel", (2, 3), "float32", True)]
SLICES = partition(SPECS, 1, True)


def part(version: int) -> Part:
    weights = np.arange(6, dtype=np.float32).reshape(2, 3) + version
    return Part(version, {0: weights}, OptimizerState(shared={"iterations": np.array(version)}, optimizers=("SGD",)))


class Disk:
    """Notes what could be in a folder if the process, or the machine, ended: around each call of the writer's to the
    system. A file's content is on the disk for certain after its fsync, its name after that of its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.states: list[dict[str, bytes]] = []
        self._synced: dict[int, bytes] = {}  # by inode
        self._names: dict[str, int] = {}
        for path in self._files():
            self._synced[path.stat().st_ino] = path.read_bytes()
        self._names = self._names_now()

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def write(self, descriptor: int, content: bytes) -> int:
        for size in {1, len(content) // 2} & set(range(1, len(content))):
            before = os.fstat(descriptor).st_size
            os.write(descriptor, content[:size])
            self._note()
            os.ftruncate(descriptor, before)
            os.lseek(descriptor, before, os.SEEK_SET)
        return self._done(os.write(descriptor, content))

    def replace(self, source: Path, target: Path) -> None:
        self._done(os.replace(source, target))

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            self._names = self._names_now()
        else:
            self._synced[path.stat().st_ino] = path.read_bytes()
        self._note()

    def _done(self, answer):
        self._note()
        return answer

    def _files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def _names_now(self) -> dict[str, int]:
        return {str(path.relative_to(self.folder)): path.stat().st_ino for path in self._files()}

    def _note(self) -> None:
        now = {path.stat().st_ino: path.read_bytes() for path in self._files()}
        for names in (self._names, self._names_now()):
            for contents in (self._synced, {**self._synced, **now}):
                state = {name: contents.get(inode, b"") for name, inode in names.items()}
                if state not in self.states:
                    self.states.append(state)

    def lay_out(self, state: dict[str, bytes], folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        for name, content in state.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return folder


@pytest.fixture
def crash(tmp_path, monkeypatch) -> Callable[[Callable[[Path], None], Callable[[Path], object]], Iterator[object]]:
    """What `load` makes of a folder, at each moment at which `change` of it may be cut short."""

    def run(change, load, folder="job"):
        disk = Disk(tmp_path / folder)
        with monkeypatch.context() as patch:
            patch.setattr(durable, "os", disk)
            change(tmp_path / folder)
        assert len(disk.states) > 4
        return [load(disk.lay_out(state, tmp_path / "after")) for state in disk.states]

    (tmp_path / "job").mkdir()
    return run


def flips(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The content with one bit turned over, at each byte."""
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        yield place, bytes(flipped)


def test_a_document_that_is_replaced_is_the_old_or_the_new_one_at_each_moment(tmp_path, crash):
    path = tmp_path / "job" / "a.json"
    durable.write_document(path, {"value": 1})
    found = crash(
        lambda folder: durable.write_document(folder / "a.json", {"value": "x" * 9000}),
        lambda folder: durable.read_document(folder / "a.json")["value"],
    )
    assert set(found) == {1, "x" * 9000}


def test_a_journal_that_is_rewritten_tells_the_old_or_the_new_at_each_moment(tmp_path, crash):
    journal = Journal(tmp_path / "job" / "journal.log")
    journal.add(version=1, queue={"a": 1})

    def load(folder):
        memory = Journal(folder / "journal.log").memory
        return memory.version, memory.queue, len(memory.states)

    def change(folder):
        journal.add(version=2, queue={"b": 2})
        journal.rewrite([(0, {"loss": [np.zeros(3)]})])
        journal.add(version=3)

    durable.sync(tmp_path / "job" / "journal.log")
    one, two = (1, {"a": 1}, 0), (2, {"a": 1, "b": 2}, 0)
    assert set(map(str, crash(change, load))) == {
        str(each) for each in (one, two, (2, {"a": 1, "b": 2}, 1), (3, {"a": 1, "b": 2}, 1))
    }


def load_first(folder: Path) -> Loaded:
    return load(Files(str(folder)), read_manifest(folder), SPECS, SLICES[0], 0, ShardMap(1))


def test_recovery_files_hold_the_old_or_the_new_at_each_moment(tmp_path, crash, monkeypatch):
    files = RecoveryFiles(tmp_path / "job", "abc", SPECS)
    save_as_server(files, part(3), SLICES, {1: 2})

    def load(folder):
        found = load_first(folder)
        assert found.part.weights[0][0, 0] == found.part.version
        return found.part.version, found.answered[1]

    def change(folder):
        save_as_server(files, part(5), SLICES, {1: 4})
        monkeypatch.setattr("elasticcb.master.recovery_files._SMALLEST_TOTAL", 0)
        files._files[0][-1] = replace(files._files[0][-1], bytes=10**9)
        save_as_server(files, part(7), SLICES, {1: 6})

    assert set(crash(change, load)) == {(3, 2), (5, 4), (7, 6)}


def test_a_checkpoint_is_there_whole_or_not_at_all_at_each_moment(tmp_path, crash):
    def write(folder, version):
        unfinished = begin_version(folder, version)
        saved = write_part(unfinished / server_file(0, 1), part(version))
        finish_version(unfinished, version=version, specs=SPECS, parts=SLICES, files=[saved])

    write(tmp_path / "job", 1)
    found = crash(lambda folder: write(folder, 2), lambda folder: verify(find_latest(folder))["version"])
    assert set(found) == {1, 2}


def test_a_checkpoint_that_was_about_to_be_replaced_by_the_same_version_gets_its_name_again(tmp_path):
    def write():
        unfinished = begin_version(tmp_path, 1)
        saved = write_part(unfinished / server_file(0, 1), part(1))
        return finish_version(unfinished, version=1, specs=SPECS, parts=SLICES, files=[saved])

    write()
    path = write()
    path.rename(tmp_path / f"{durable.TEMPORARY}{path.name}-0123abcd-old")  # and the job was killed
    with pytest.raises(CheckpointError):
        find_latest(tmp_path)
    put_back(tmp_path)
    assert verify(find_latest(tmp_path))["version"] == 1


def test_no_flipped_bit_of_a_document_goes_unnoticed(tmp_path):
    path = tmp_path / "a.json"
    document = {"format": 1, "files": [{"name": "a", "bytes": 12}], "run": "abc", "rate": 0.5}
    durable.write_document(path, document)
    for place, flipped in flips(path.read_bytes()):
        path.write_bytes(flipped)
        with contextlib.suppress(durable.DamagedFileError, durable.NewerFormatError):
            assert durable.document_in(path.read_bytes(), path, 1) == document, place  # white space
        assert path.read_bytes() == flipped


def test_a_journal_with_a_flipped_bit_is_refused_and_nothing_is_changed(tmp_path):
    path = tmp_path / "journal.log"
    journal = Journal(path)
    journal.add(run="abc", version=1)
    journal.add(queue={"a": 1}, version=2, states=[(0, {"loss": [np.arange(2.0)]})])
    journal.add(ended_epochs=1)
    journal.close()
    for place, flipped in flips(path.read_bytes()):
        path.write_bytes(flipped)
        with pytest.raises(JobFailedError, match=r"is damaged from byte .* Restore the journal"):
            Journal(path)
        assert path.read_bytes() == flipped, place
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("cut", [0, 5], ids=["empty", "cut off"])
def test_a_journal_that_lost_its_first_entry_is_refused(tmp_path, cut):
    path = tmp_path / "journal.log"
    Journal(path).close()
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(JobFailedError, match=r"is damaged from byte 0 on|is empty"):
        Journal(path)
    assert path.stat().st_size == cut


# ------------------------------------------------------------ a full disk


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> None:
    with (folder / "filler").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass


def test_a_journal_on_a_full_disk_keeps_what_it_had_and_goes_on_when_there_is_room(small_disk):
    path = small_disk / "journal.log"
    journal = Journal(path)
    journal.add(run="abc", version=6)
    fill(small_disk)
    version = 6
    with contextlib.suppress(JobFailedError):
        while True:
            journal.add(version=version + 1, queue={"text": "x" * 700, "number": version})
            version += 1
    with pytest.raises(JobFailedError, match=r"can't be written: .*No space left.*Free disk space"):
        journal.add(version=1)  # smaller, but something before it is missing
    with pytest.raises(JobFailedError, match="No space left"):
        journal.rewrite([])
    journal.close()
    known = Journal(path).memory
    assert known.version == version
    assert known.run == "abc"
    with pytest.raises(JobFailedError, match="No space left"):
        Journal(path).add(version=known.version + 1, queue={"text": "x" * 9000})
    assert Journal(path).memory == known
    (small_disk / "filler").unlink()
    journal = Journal(path)
    journal.add(version=known.version + 1)
    journal.close()
    assert Journal(path).memory.version == known.version + 1
    assert not list(small_disk.glob(".tmp-*"))


def test_files_on_a_full_disk_are_as_before_and_written_when_there_is_room(small_disk):
    files = RecoveryFiles(small_disk / "recovery", "abc", SPECS)
    save_as_server(files, part(3), SLICES)
    durable.write_document(small_disk / "a.json", {"value": 1})
    fill(small_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        save_as_server(files, part(5), SLICES)
    with pytest.raises(OSError, match="No space left"):
        durable.write_document(small_disk / "a.json", {"value": "x" * 9000})
    assert durable.read_document(small_disk / "a.json") == {"value": 1}
    assert load_first(files.folder).part.version == 3
    (small_disk / "filler").unlink()
    save_as_server(files, part(5), SLICES)
    assert load_first(files.folder).part.version == 5


# ------------------------------------------------------------ masters that follow one another


def test_a_master_that_was_replaced_can_not_write_the_journal(tmp_path):
    path = tmp_path / "journal.log"
    old = Journal(path)
    old.add(version=1)
    old.add(version=2)
    new = Journal(path)
    new.begin()
    assert new.term == old.term + 1
    for write in (lambda: old.add(version=9), lambda: old.rewrite([]), old.check_is_ours):
        with pytest.raises(ReplacedError, match="Another master took over"):
            write()
    new.add(version=3)
    new.close()
    assert (Journal(path).memory.version, Journal(path).memory.term) == (3, 2)


# ------------------------------------------------------------ other releases


def test_files_of_a_later_release_are_refused_in_words(tmp_path):
    words = "of a later release of ElasticCB"
    durable.write_document(tmp_path / "manifest.json", {"format": 99})
    with pytest.raises(CheckpointError, match=words):
        read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        RecoveryFiles(tmp_path, "abc", SPECS).manifest()
    journal = Journal(tmp_path / "journal.log")
    journal.add(format=99)
    with pytest.raises(JobFailedError, match=words):
        Journal(tmp_path / "journal.log")


def test_a_damaged_job_file_is_refused(tmp_path):
    path = tmp_path / "job.json"
    durable.write_document(path, {"directory": str(tmp_path)})
    path.write_bytes(path.read_bytes().replace(b"directory", b"dirictory"))
    with pytest.raises(UsageError, match=r"is damaged.*Nothing was changed"):
        resumed_settings(tmp_path)
