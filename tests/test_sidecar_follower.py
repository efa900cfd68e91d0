"""The follower with real folders and files: whole checkpoints are given, torn ones are not."""

from __future__ import annotations

import json
import logging
import shutil
import threading

import h5py
import keras
import numpy as np
import pytest

from elasticcb.checkpoint.manifest import MANIFEST
from elasticcb.checkpoint.versions import begin_version, version_folder
from elasticcb.errors import UsageError
from elasticcb.sidecar.follower import CheckpointFollower, CheckpointKind

SOON = 0.1  # seconds, for what is not to come


def manifest(version):
    return json.dumps({"format": 4, "version": version, "variables": [], "servers": [], "extra": {}})


def write_version(folder, version):
    path = folder / version_folder(version)
    path.mkdir(parents=True)
    (path / MANIFEST).write_text(manifest(version))
    return path


def make_model(steps=0):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    if steps:
        model.fit(np.ones((steps, 3)), np.ones((steps, 2)), batch_size=1, verbose=0)
    return model


@pytest.fixture
def messages(caplog, monkeypatch):
    """What is logged here; a job in this process keeps the package's messages from getting further."""
    logger = logging.getLogger("elasticcb.sidecar")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    return caplog


@pytest.fixture
def follow(tmp_path):
    followers = []

    def make(path=tmp_path, **options):
        followers.append(CheckpointFollower(path, poll_seconds=0.01, **options))
        return followers[-1]

    yield make
    for follower in followers:
        follower.close()


def test_versions_are_given_as_they_appear_in_a_folder_that_is_not_there_yet(tmp_path, follow):
    follower = follow(tmp_path / "checkpoints")
    assert follower.next(SOON) is None
    paths = [write_version(tmp_path / "checkpoints", version) for version in (20, 100)]
    found = [follower.next(), follower.next()]
    assert [(each.path, each.version, each.kind) for each in found] == [
        (paths[0], 20, CheckpointKind.VERSION),
        (paths[1], 100, CheckpointKind.VERSION),
    ]
    assert follower.next(SOON) is None
    write_version(tmp_path / "checkpoints", 120)
    assert follower.next().version == 120


def test_a_version_without_a_manifest_is_given_when_it_has_one(tmp_path, follow):
    follower = follow()
    folder = begin_version(tmp_path, 10)
    (tmp_path / version_folder(5)).mkdir()
    (folder / "server-00000-of-00001.safetensors").write_bytes(b"half")
    assert follower.next(SOON) is None
    (folder / MANIFEST).write_text(manifest(10))
    assert follower.next(SOON) is None  # still under its temporary name
    folder.rename(tmp_path / version_folder(10))
    assert follower.next().version == 10


def test_a_version_whose_manifest_cant_be_read_is_passed_over(tmp_path, follow, messages):
    (write_version(tmp_path, 10) / MANIFEST).write_text('{"format": 1, "ver')
    write_version(tmp_path, 20)
    assert follow().next().version == 20
    assert "Skipped" in messages.text
    assert "version-00000010" in messages.text


@pytest.mark.parametrize("name", ["a.keras", "a.weights.h5"])
def test_a_file_of_keras_tells_its_version_and_is_copied(tmp_path, follow, name):
    model = make_model(steps=7)
    model.save(tmp_path / name) if name.endswith(".keras") else model.save_weights(tmp_path / name)
    follower = follow()
    found = follower.next()
    assert (found.path, found.version) == (tmp_path / name, 7)
    assert found.content.read_bytes() == found.path.read_bytes()
    assert found.is_there
    found.path.unlink()
    assert not found.is_there
    follower.close()
    assert not found.content.exists()


def test_a_file_without_an_optimizer_tells_no_version(tmp_path, follow):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.save_weights(tmp_path / "a.weights.h5")
    assert follow().next().version is None


@pytest.mark.parametrize(("name", "share"), [("a.keras", 0.999), ("a.weights.h5", 0.0), ("a.weights.h5", 0.5)])
def test_a_truncated_file_is_given_when_it_is_whole(tmp_path, follow, name, share, messages):
    model = make_model(steps=1)
    whole = tmp_path / "elsewhere" / name
    whole.parent.mkdir()
    model.save(whole) if name.endswith(".keras") else model.save_weights(whole)
    content = whole.read_bytes()
    (tmp_path / name).write_bytes(content[: int(share * len(content))])
    follower = follow()
    assert follower.next(SOON) is None
    assert messages.text.count("Skipped until it changes") == 1  # not at every look
    (tmp_path / name).write_bytes(content)
    assert follower.next().content.read_bytes() == content


def test_a_damaged_keras_file_is_not_given(tmp_path, follow):
    make_model().save(tmp_path / "a.keras")
    content = bytearray((tmp_path / "a.keras").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (tmp_path / "a.keras").write_bytes(content)
    assert follow().next(SOON) is None


def test_a_file_that_is_open_for_writing_is_left_alone(tmp_path, follow):
    follower = follow()
    with h5py.File(tmp_path / "a.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.zeros(100_000)
        assert follower.next(SOON) is None
        file["layers/dense/vars/1"] = np.zeros(100_000)
    found = follower.next()
    with h5py.File(found.path, "a") as file:  # nor does the copy keep anybody from writing
        file["more"] = 1
    with h5py.File(found.content) as file:
        assert set(file["layers/dense/vars"]) == {"0", "1"}


def test_files_can_be_left_out(tmp_path, follow):
    make_model().save(tmp_path / "a.keras")
    assert follow(files=False).next(SOON) is None


def test_other_files_are_no_checkpoints(tmp_path, follow):
    (tmp_path / "notes.txt").write_text("version-00000010")
    (tmp_path / "old.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    (tmp_path / "folder.keras").mkdir()
    assert follow().next(SOON) is None


def test_stop_from_another_thread_ends_the_wait(follow):
    follower = follow()
    found = []
    thread = threading.Thread(target=lambda: found.append(follower.next()))
    thread.start()
    follower.stop()
    thread.join(10)
    assert found == [None]


def test_a_folder_that_is_deleted_and_made_again_is_followed_on(tmp_path, follow):
    folder = tmp_path / "checkpoints"
    follower = follow(folder)
    write_version(folder, 1)
    assert follower.next().version == 1
    shutil.rmtree(folder)
    assert follower.next(SOON) is None
    write_version(folder, 2)
    assert follower.next().version == 2


def test_what_cant_be_followed_is_told(tmp_path):
    with pytest.raises(UsageError, match=f"a single checkpoint.*Pass the folder.*{tmp_path}"):
        CheckpointFollower(write_version(tmp_path, 3))
    (tmp_path / "model.h5").touch()
    with pytest.raises(UsageError, match=r"not a supported checkpoint file.*\.keras or \.weights\.h5"):
        CheckpointFollower(tmp_path / "model.h5")
    with pytest.raises(UsageError, match="poll_seconds=0 is invalid"):
        CheckpointFollower(tmp_path, poll_seconds=0)
