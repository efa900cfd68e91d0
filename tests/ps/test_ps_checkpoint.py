from __future__ import annotations

import json
import os
import re
import shutil

import keras
import numpy as np
import pytest
from ps_clients import load_slices

from deep_cases import deep_but
from elasticcb.checkpoint import remote
from elasticcb.checkpoint.manifest import MANIFEST, read_manifest, verify
from elasticcb.checkpoint.shard_file import SavedFile
from elasticcb.checkpoint.versions import (
    begin_version,
    find_latest,
    find_undamaged,
    find_versions,
    finish_version,
    prune,
)
from elasticcb.errors import CheckpointError
from elasticcb.optimizers.state import join_states
from elasticcb.optimizers.variables import described
from elasticcb.ps.parameters import Parameters
from elasticcb.sharding.partition import ShardMap, VariableSpec, partition
from helpers_ps import SPECS, Part, alone, assert_same, initial_values, movements, saved

BIG = (
    VariableSpec("embedding/embeddings", (700, 64), "float32", True),
    VariableSpec("dense/kernel", (64, 300), "bfloat16", True),
    VariableSpec("dense/bias", (300,), "float32", True),
    VariableSpec("scale/scale", (), "float32", True),
    VariableSpec("norm/moving_mean", (6,), "float32", False),
    VariableSpec("norm/count", (), "int64", False),
)


def adam():
    return keras.optimizers.Adam(0.01)


def save(directory, parts, specs=BIG, version=3):
    return saved(directory, parts, specs, version)


def trained(num_ps, make=adam, specs=BIG, split=True, extras=None):
    parts = [Part(make, initial_values(specs), specs, num_ps, index, split) for index in range(num_ps)]
    for step in range(3):
        moved = movements(step, specs)
        slots = {(index, "momentum"): array for index, array in moved.items()}
        slots[0, "norms"] = np.full((*specs[0].shape[:1], 3), step, np.float32)  # of rows
        for part in parts:
            part.push(moved, slots=slots, extras=extras or {}, shared={"iterations": np.int64(step + 1)})
    return parts


def restored(folder, num_ps, make=adam, specs=BIG, split=True):
    parts = []
    for index, slices in enumerate(partition(specs, num_ps, split)):
        loaded = load_slices(folder, specs, slices, index, ShardMap(num_ps))
        part = Part(None, initial_values(specs, seed=9), specs, num_ps, index, split)
        optimizers = described([make()], specs) if make else None
        given = specs, slices, alone(make), loaded.weights, loaded.version
        part.parameters = Parameters(*given, optimizers=optimizers)
        part.parameters.restore_optimizers(loaded)
        parts.append(part)
    return parts


def whole(parts):
    return [sum(arrays[1:], arrays[0]) for arrays in zip(*(part.values() for part in parts), strict=True)]


@pytest.mark.parametrize("num_ps", deep_but([1, 3], 3))
def test_what_two_servers_saved_goes_on_with_any_number_of_servers(tmp_path, num_ps):
    before = trained(2)
    folder = save(tmp_path, before)
    assert sum(part.variable == 0 for p in before for part in p.slices) == 2
    after = restored(folder, num_ps)
    assert after[0].parameters.version == 3
    for parts in (before, after):
        states = [part.parameters.optimizers.state() for part in parts]
        state = join_states(states, BIG, [part.slices for part in parts])
        np.testing.assert_array_equal(state.slots[0, "momentum"], movements(2, BIG)[0])
        np.testing.assert_array_equal(state.slots[0, "norms"], np.full((700, 3), 2.0))
        assert int(state.shared["iterations"]) == 3
    for part in [*before, *after]:
        part.push(movements(3, BIG))
    assert_same(whole(after), whole(before))


def test_state_that_is_not_of_a_variables_shape_moves_with_its_variable(tmp_path):
    extras = {(1, "r"): np.arange(4, dtype=np.float32)}
    before = trained(2, adam, SPECS, split=False, extras=extras)
    after = restored(save(tmp_path, before, SPECS), 3, adam, SPECS, split=False)
    held = [part.parameters.dense() for part in after if (1, "r") in part.parameters.dense().optimizers.extras]
    assert [1 in part.weights for part in held] == [True]
    np.testing.assert_array_equal(held[0].optimizers.extras[1, "r"], extras[1, "r"])


def test_a_slot_that_was_saved_before_it_had_reached_all_servers_is_left_out(tmp_path):
    before = trained(2)
    held = before[1].parameters.dense()
    del held.optimizers.slots[0, "momentum"]
    before[1].parameters.dense = lambda: held
    (after,) = restored(save(tmp_path, before), 1)
    slots = after.parameters.dense().optimizers.slots
    assert (0, "momentum") not in slots
    assert (0, "norms") in slots


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    folder = begin_version(tmp_path, 5)
    assert find_versions(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        read_manifest(folder)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        find_latest(tmp_path)


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(tmp_path):
    folder = save(tmp_path, trained(1))
    other = (VariableSpec("embedding/embeddings", (700, 32), "float32", True), *BIG[1:])
    with pytest.raises(CheckpointError, match=r"float32\[700, 64\].*float32\[700, 32\]"):
        restored(folder, 1, specs=other)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    folder = save(tmp_path, trained(1))
    with pytest.raises(CheckpointError, match="optimizer Adam, but the job has SGD"):
        restored(folder, 1, lambda: keras.optimizers.SGD(0.1))


def test_weights_without_slots_start_the_slots_afresh(tmp_path, caplog):
    folder = save(tmp_path, [Part(None, initial_values(BIG), BIG)])
    (part,) = restored(folder, 1)
    assert "has no optimizer state" in caplog.text
    np.testing.assert_array_equal(part.values()[0], initial_values(BIG)[0])


def test_the_newest_versions_are_kept(tmp_path):
    part = Part(None, initial_values())
    for version in (1, 2, 10):
        save(tmp_path, [part], SPECS, version)
    begin_version(tmp_path, 11)
    assert find_latest(tmp_path).name == "version-00000010"
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-00000002", "version-00000010"]
    manifest = verify(find_latest(tmp_path / "version-00000010"))
    assert manifest["extra"] == {"epoch": 2}
    assert json.dumps(manifest)


def test_the_version_written_last_is_kept_below_newer_ones(tmp_path):
    part = Part(None, initial_values())
    for place, version in enumerate((300, 310, 210)):  # the last job began from an older version
        folder = save(tmp_path, [part], SPECS, version)
        os.utime(folder / MANIFEST, (1000 + place, 1000 + place))
    prune(tmp_path, 1)
    assert [folder.name for folder in find_versions(tmp_path)] == ["version-00000210", "version-00000310"]
    folder = save(tmp_path, [part], SPECS, 220)
    os.utime(folder / MANIFEST, (2000, 2000))
    prune(tmp_path, 1)
    assert [folder.name for folder in find_versions(tmp_path)] == ["version-00000220", "version-00000310"]
    prune(tmp_path, 0)
    assert len(find_versions(tmp_path)) == 2


def test_what_a_link_in_the_folder_leads_to_is_not_deleted(tmp_path):
    part, archive, folder = Part(None, initial_values()), tmp_path / "archive", tmp_path / "checkpoints"
    folder.mkdir()
    for version in (1, 2):
        save(archive, [part], SPECS, version)
        (folder / f"version-0000000{version}").symlink_to(archive / f"version-0000000{version}")
    (folder / ".tmp-version-00000003-link").symlink_to(archive / "version-00000001")
    save(folder, [part], SPECS, 3)
    save(folder, [part], SPECS, 4)
    prune(folder, 1, run="own")
    (folder / "version-00000005").mkdir()
    content = {"version": 5, "specs": [], "parts": [], "files": []}
    remote.finish(f"file://{folder}/version-00000005", 1, **content)
    assert [path.name for path in find_versions(folder)] == [f"version-0000000{version}" for version in (1, 2, 5)]
    for version in (1, 2):
        verify(archive / f"version-0000000{version}")


def flip(folder):
    path = file_of(folder)
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)


def cut(folder):
    os.truncate(file_of(folder), 100)


def delete(folder):
    file_of(folder).unlink()


def empty_manifest(folder):
    (folder / MANIFEST).write_text("")


def manifest_without_files(folder):
    (folder / MANIFEST).write_text(json.dumps({"format": 4, "version": 30}))


def manifest_of_something_else(folder):
    (folder / MANIFEST).write_text("[]")


def manifest_with_another_type(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["servers"][1]["files"] = [7]
    (folder / MANIFEST).write_text(json.dumps({**manifest, "checksum": None, "sealed": None}))


def file_of(folder):
    return sorted(folder.glob("*.safetensors"))[-1]


@pytest.fixture
def three_versions(tmp_path):
    """A folder of the versions 10, 20 and 30, of two servers."""
    parts = [Part(None, initial_values(), SPECS, 2, index) for index in range(2)]
    for version in (10, 20, 30):
        save(tmp_path, parts, SPECS, version)
    return tmp_path


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (flip, r"server-00001-of-00002\.safetensors is damaged"),
        (cut, r"server-00001-of-00002\.safetensors is damaged: it has 100 bytes"),
        (delete, r"server-00001-of-00002\.safetensors can't be read: .*No such file"),
        (empty_manifest, r"manifest\.json can't be read: .*JSONDecodeError"),
        (manifest_without_files, r"manifest\.json can't be read: variables is missing, or of another type"),
        (manifest_with_another_type, r"manifest\.json can't be read: servers\[1\]\.files\[0\] is missing, or"),
        (manifest_of_something_else, r"manifest\.json can't be read: .*damaged: TypeError"),
    ],
)
def test_a_damaged_version_is_passed_over_with_its_fault(three_versions, damage, fault):
    damage(three_versions / "version-00000030")
    folder, skipped = find_undamaged(three_versions)
    assert folder.name == "version-00000020"
    (warning,) = skipped
    assert re.match(f"Skipped version-00000030: .*{fault}", warning)


def test_damaged_versions_alone_are_an_error_that_names_each_with_its_fault(three_versions):
    for folder, damage in zip(find_versions(three_versions), (empty_manifest, delete, flip), strict=True):
        damage(folder)
    with pytest.raises(CheckpointError) as caught:
        find_undamaged(three_versions)
    first, *faults = str(caught.value).splitlines()
    assert str(three_versions) in first
    assert [fault.partition(": ")[0] for fault in faults] == [f"version-000000{number}" for number in (30, 20, 10)]
    for fault, words in zip(faults, ("is damaged", "No such file", "JSONDecodeError"), strict=True):
        assert words in fault


def test_a_damaged_version_that_was_named_has_no_replacement(three_versions):
    folder = three_versions / "version-00000030"
    flip(folder)
    assert find_undamaged(folder) == (folder, ())
    with pytest.raises(CheckpointError, match=rf"{file_of(folder).name} is damaged.*another version"):
        restored(folder, 2, None, SPECS)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="There is no complete checkpoint in"):
        find_undamaged(folder)


def test_a_file_that_the_master_does_not_see_is_no_part_of_a_checkpoint(tmp_path):
    folder = begin_version(tmp_path, 1)
    with pytest.raises(CheckpointError, match="share"):
        finish_version(folder, version=1, specs=SPECS, parts=[[]], files=[SavedFile("server", 10, "", 1)])
