"""A model that is served while it is exported: what it reads, and when it keeps what it has."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest
from stores import S3Server
from waiting import wait_until

import elasticcb
from elasticcb.errors import CheckpointError, StoreError, UsageError
from elasticcb.serving import served_model
from elasticcb.serving.exports import CURRENT
from elasticcb.serving.served_folder import ServedFolder
from elasticcb.serving.served_model import ServedModel
from elasticcb.storage import job_store, remote_files
from made_exports import DIM, FEATURES, MadeExports

OUTPUTS = ["score", "user_row", "item_row"]


def agrees(model: ServedModel, exports: MadeExports) -> None:
    answer = model.predict(FEATURES)
    assert answer.version == model.version == exports.version
    assert list(answer) == OUTPUTS or set(answer) == set(OUTPUTS)
    for name, expected in zip(OUTPUTS, exports.expected(FEATURES), strict=True):
        np.testing.assert_allclose(answer[name], expected, atol=1e-6)


@pytest.fixture
def exports(tmp_path):
    made = MadeExports(tmp_path / "exports")
    made.train(0)
    made.full(10)
    return made


@pytest.mark.parametrize("servers", [1, 2])
def test_served_model_answers_as_the_trained_one_at_every_version(tmp_path, servers):
    exports = MadeExports(tmp_path / "exports", servers=servers)
    exports.full(1)  # without a row
    with ServedModel(exports.folder) as model:
        agrees(model, exports)
        for version in range(2, 12):
            exports.train(version)
            if version % 3 == 0:
                exports.remove("items", [version % 2, 3])
                exports.remove("users", [version % 5])
            exports.full(version) if version == 7 else exports.delta(version)
            if version % 2:
                model.look()
                agrees(model, exports)
        assert model.problem == ""
        assert 0 <= model.age < 600
    with ServedModel(exports.folder) as model:  # from the newest full export on
        agrees(model, exports)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_answers_don_t_copy_a_table_which_stays_in_its_file(tmp_path):
    def memory_mb() -> int:
        gc.collect()
        (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon"))
        return int(line.split()[1]) >> 10

    exports = MadeExports(tmp_path / "exports")
    rows = 9 << 20  # 72 MB
    exports.model.get_layer("items").hold(np.arange(rows), np.ones((rows, DIM), np.float32))
    exports.full(10)
    disk = tmp_path / "rows"
    disk.mkdir()
    with ServedModel(exports.folder, rows_on_disk=disk) as model:
        agrees(model, exports)
        exports.train(1)
        exports.delta(20)
        model.look()
        before = memory_mb()
        agrees(model, exports)
        assert memory_mb() - before < 36
        assert Path("/proc/self/maps").read_text().count(str(disk)) == 1  # not also the one before
        assert not list(disk.iterdir())


def test_new_full_export_is_not_loaded_where_a_delta_leads_to_it(exports, caplog):
    with ServedModel(exports.folder) as model:
        exports.train(1)
        exports.full(20)
        exports.train(2)
        exports.delta(30)
        shutil.rmtree(exports.folder / "full-00000020")
        model.look()
        agrees(model, exports)


def damaged(exports, name):
    path = exports.folder / name / "0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def missing(exports, name):
    shutil.rmtree(exports.folder / name)


def foreign(exports, name):
    """Of another run of the exporter."""
    path = exports.folder / name / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["extra"]["export"]["exporter"] = "other"
    path.write_text(json.dumps({key: manifest[key] for key in manifest if key not in ("sealed", "checksum")}))


def of_another_model(exports, name):
    path = exports.folder / name / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["variables"][0]["shape"] = [7, 7]
    path.write_text(json.dumps({key: manifest[key] for key in manifest if key not in ("sealed", "checksum")}))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (damaged, "is damaged"),
        (missing, "is not there, or not finished"),
        (foreign, "exported by run other"),
        (of_another_model, "belongs to another model"),
    ],
)
def test_what_was_served_before_a_bad_delta_stays_until_the_next_full_export(exports, harm, says, caplog):
    with ServedModel(exports.folder) as model:
        exports.train(1)
        exports.delta(11)
        model.look()
        before = model.predict(FEATURES)
        exports.train(2)
        name = exports.delta(12)
        shutil.copytree(exports.folder / name, exports.folder.parent / "whole")
        harm(exports, name)
        exports.train(3)
        exports.delta(13)
        for _ in range(3):
            model.look()
        assert says in model.problem
        assert len([line for line in caplog.messages if says in line]) == 1
        answer = model.predict(FEATURES)
        assert answer.version == before.version == 11
        np.testing.assert_array_equal(answer["score"], before["score"])
        with ServedModel(exports.folder) as restarted:  # comes as far
            assert (restarted.version, says in restarted.problem) == (11, True)
        exports.full(20)
        model.look()
        assert model.problem == ""
        agrees(model, exports)


def test_delta_that_becomes_whole_is_applied(exports):
    with ServedModel(exports.folder) as model:
        exports.train(1)
        name = exports.delta(11)
        (exports.folder / name).rename(exports.folder / "away")
        model.look()
        assert model.problem
        (exports.folder / "away").rename(exports.folder / name)
        model.look()
        assert model.problem == ""
        agrees(model, exports)


def test_damaged_full_export_is_replaced_by_the_one_before_it(exports):
    exports.train(1)
    exports.delta(11)
    exports.train(2)
    exports.full(20)
    (exports.folder / "full-00000020" / "saved_model.pb").write_bytes(b"")
    with ServedModel(exports.folder) as model:
        assert model.version == 11
        assert "saved_model.pb is damaged" in model.problem


def test_restarted_exporter_begins_a_new_chain(exports):
    exports.train(1)
    exports.delta(11)
    with ServedModel(exports.folder) as model:
        again = MadeExports(exports.folder, exports.model)
        again.train(5)
        again.full(12)
        again.train(6)
        again.delta(13)
        model.look()
        agrees(model, again)


@pytest.mark.parametrize("damage", [lambda text: "{", lambda text: text.replace("-00000011", "-00000012")])
def test_damaged_current_json_changes_nothing(exports, damage):
    exports.train(1)
    exports.delta(11)
    with ServedModel(exports.folder) as model:
        current = exports.folder / CURRENT
        current.write_text(damage(current.read_text()))
        model.look()
        assert model.problem
        assert model.version == 11
        agrees(model, exports)


def test_folder_without_exports_is_an_error_or_waited_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no current\.json"):
        ServedModel(tmp_path / "none")
    with ServedModel(tmp_path / "exports", wait=True) as model:
        with pytest.raises(CheckpointError, match="No model is served yet"):
            model.predict(FEATURES)
        assert (model.version, model.age) == (None, None)
        model.follow(0.01)
        exports = MadeExports(tmp_path / "exports")
        exports.full(1)
        wait_until(lambda: model.version == 1)
        agrees(model, exports)
    looked = threading.Event()
    with ServedModel(exports.folder, wait=True) as model:
        assert (model.version, model.problem) == (None, "")  # health can be told before a large model is loaded
        model.follow(60.0, looked.set)
        assert looked.wait(60)
        assert model.version == 1


def test_all_who_follow_a_folder_go_back_and_forth_with_it(exports):
    folder = ServedFolder(exports.folder)
    expected = {10: exports.expected(FEATURES)[0]}
    for version in (11, 12):
        exports.train(version)
        exports.delta(version)
        expected[version] = exports.expected(FEATURES)[0]
    with ServedModel(exports.folder) as model, ServedModel(exports.folder, version=12) as other:
        for version in (10, 11, 12):
            folder.pin(version)
            model.look()
            other.look()
            assert (model.version, other.version) == (version, 12)
            np.testing.assert_allclose(model.predict(FEATURES)["score"], expected[version], atol=1e-6)
        folder.pin(11)
        model.look()
        folder.unpin()
        model.look()
        assert model.version == 12
        with pytest.raises(UsageError, match=r"does not keep version 7.*10, 11, 12"):
            folder.pin(7)


def test_a_pinned_version_that_is_removed_remains_served_without_a_problem(exports):
    with ServedModel(exports.folder) as model:
        exports.train(1)
        exports.full(20)
        ServedFolder(exports.folder).pin(10)
        shutil.rmtree(exports.folder / "full-00000010")
        model.look()
        assert (model.version, model.problem) == (10, "")


def test_a_store_that_did_not_answer_is_asked_again_soon(exports, monkeypatch):
    monkeypatch.setattr(served_model, "_PATIENCE", 1_000_000)
    with ServedModel(exports.folder) as model:
        current = model._folder.current

        def away():
            raise StoreError("The store is away.")

        monkeypatch.setattr(model._folder, "current", away)
        model.follow(0.01)
        wait_until(lambda: "is away" in model.problem)
        exports.train(1)
        exports.delta(11)
        monkeypatch.setattr(model._folder, "current", current)
        wait_until(lambda: model.version == 11)


def test_a_store_that_is_away_for_a_moment_makes_nobody_load_a_full_export(exports, monkeypatch):
    with ServedModel(exports.folder) as model:
        files, loaded = model._folder.files, model._ready()

        def without_deltas(name):
            if name.startswith("delta"):
                raise StoreError("The store is away.")
            return files(name)

        exports.train(1)
        exports.full(20)
        monkeypatch.setattr(model._folder, "files", without_deltas)
        model.look()
        assert (model.version, model.problem) == (10, "The store is away.")
        monkeypatch.setattr(model._folder, "files", files)
        model.look()
        assert model._ready() is loaded
        agrees(model, exports)


def test_the_end_does_not_wait_for_a_store_that_does_not_answer(exports, monkeypatch):
    monkeypatch.setattr(served_model, "_END_SECONDS", 0.01)
    asked, answers = threading.Event(), threading.Event()
    with ServedModel(exports.folder) as model:
        monkeypatch.setattr(model._folder, "pinned", lambda: (asked.set(), answers.wait(), 10)[-1])
        model.follow(0.01)
        asked.wait()
    assert not answers.is_set()
    answers.set()


def test_exports_of_a_url_are_served_and_pinned(exports, monkeypatch):
    url, expected, opened = "s3://served/clicks", exports.expected(FEATURES)[0], []
    monkeypatch.setattr(job_store, "opened", lambda place: opened.append(place) or remote_files.opened(place))
    with S3Server("served") as server:
        monkeypatch.setitem(fsspec.config.conf, "s3", server.options)
        store = fsspec.filesystem("s3", **server.options)
        store.put(str(exports.folder), url, recursive=True)
        with ServedModel(url) as model:
            agrees(model, exports)
            exports.train(1)
            name = exports.delta(11)
            for each in (name, CURRENT):
                store.put(str(exports.folder / each), f"{url}/{each}", recursive=True)
            model.look()
            agrees(model, exports)
            assert opened == [url]  # one connection for all
            ServedFolder(url).pin(10)
            model.look()
            np.testing.assert_allclose(model.predict(FEATURES)["score"], expected, atol=1e-6)
            assert (model.version, model.problem) == (10, "")


@pytest.mark.parametrize("name", ["clicks", "a#b?c%20d::e"])
def test_exports_of_a_url_are_served(exports, name):
    exports.train(1)
    exports.delta(11)
    exports.folder = exports.folder.rename(exports.folder.with_name(name))
    for place in (f"file://{exports.folder}", exports.folder):
        with ServedModel(place) as model:
            agrees(model, exports)


@pytest.mark.parametrize("place", ["nosuch://clicks", "s3://", __file__])
def test_place_that_can_not_be_used_is_refused(place):
    with pytest.raises(UsageError, match=r"can't be used|names no bucket|is a file"):
        ServedModel(place, wait=True)


def test_no_request_sees_parts_of_two_versions(exports):
    exports.set_all(10)
    exports.full(11)
    wrong, done = [], threading.Event()
    features = {"user": [["ann"]], "item": [[3, 4]]}

    def ask(model):
        while not done.is_set():
            answer = model.predict(features)
            values = {float(value) for output in answer.values() for value in output.flat}
            if values != {float(answer.version - 1)}:
                wrong.append((answer.version, values))

    with ServedModel(exports.folder) as model:
        threads = [threading.Thread(target=ask, args=[model]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for version in range(12, 42):
            exports.set_all(version - 1, ids=(3, 4, version))
            exports.delta(version)
            model.look()
        done.set()
        for thread in threads:
            thread.join()
        assert model.version == 41
    assert not wrong


@pytest.mark.parametrize(
    ("features", "says"),
    [
        ([1], "Expected features by name"),
        ({"user": [["ann"]]}, "Expected 'item', 'user'"),
        ({"user": [["ann"]], "item": [["x", "y"]]}, "'item' is not int64"),
        ({"user": [["ann"]], "item": [3]}, r"has the shape \[1\]"),
        ({"user": [["ann"]], "item": [[1, -2]]}, "ids out of range"),
    ],
)
def test_features_that_do_not_fit_are_refused_in_words(served, features, says):
    with pytest.raises(UsageError, match=says):
        served.predict(features)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    exports = MadeExports(tmp_path_factory.mktemp("served") / "exports")
    exports.full(1)
    with elasticcb.ServedModel(exports.folder) as model:
        yield model


def test_unknown_signature_is_refused(served):
    with pytest.raises(UsageError, match=r"no signature 'other'.*'serving_default'"):
        served.predict(FEATURES, "other")


def test_a_forked_process_is_refused_in_words(served, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 0)  # a fork of a process with many threads would endanger other tests
    for use in (lambda: served.predict(FEATURES), served.follow, served.look):
        with pytest.raises(UsageError, match="Make one in each process"):
            use()
