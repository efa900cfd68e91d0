"""Uploads to a real S3 endpoint (moto's server) and a real SFTP server (OpenSSH), both on loopback."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import keras
import numpy as np
import pytest
from stores import S3Server, free_port, sftp_server

from elasticcb.callbacks import Dispatcher, ModelUploader, Place, SavedModelExporter
from elasticcb.errors import CallbackError, ModelFileError

FILES = {"saved_model.pb": b"graph", "variables/variables.index": b"i", "variables/variables.data": b"d" * 9}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What an exporter leaves, in small."""
    for name, content in FILES.items():
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "model"


def uploader(url: str, folder: Path, **options: Any) -> Dispatcher:
    options = {"retries": 2, "backoff_seconds": 0.01, **options}
    callback = ModelUploader(url, **options)
    return Dispatcher([callback], Place.WORKER, {"saved_model_path": str(folder), "worker_id": 0}, None)


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """`storage_options` of an S3 endpoint with the bucket "models"."""
    with S3Server("models") as server:
        yield server.options


@pytest.fixture(scope="module")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """`storage_options` of an SFTP server."""
    with sftp_server(tmp_path_factory.mktemp("sshd")) as options:
        yield options


def remote_content(url: str, options: dict[str, Any]) -> dict[str, bytes]:
    fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    return {path.removeprefix(root).lstrip("/"): fs.cat_file(path) for path in fs.find(root)}


def check_upload_and_overwrite(url: str, options: dict[str, Any], folder: Path) -> None:
    dispatcher = uploader(url, folder, storage_options=options)
    dispatcher.call("on_train_begin", {})
    dispatcher.call("on_train_end", {})
    content = remote_content(url, options)
    marker = json.loads(content.pop("_SUCCESS"))
    assert content == FILES
    assert {name: entry["size"] for name, entry in marker["files"].items()} == {
        name: len(data) for name, data in FILES.items()
    }

    # The next model has one file less, one changed in place with the same size.
    (folder / "variables/variables.index").unlink()
    (folder / "saved_model.pb").write_bytes(b"GRAPH")
    uploader(url, folder, storage_options=options).call("on_train_end", {})
    content = remote_content(url, options)
    assert json.loads(content.pop("_SUCCESS"))["files"].keys() == content.keys()
    assert content == {"saved_model.pb": b"GRAPH", "variables/variables.data": b"d" * 9}


def test_s3_gets_the_model_with_the_marker_last_and_the_next_one_over_it(s3, folder) -> None:
    check_upload_and_overwrite("s3://models/digits", s3, folder)


def test_sftp_gets_the_model_with_the_marker_last_and_the_next_one_over_it(sftp, folder, tmp_path) -> None:
    check_upload_and_overwrite(f"sftp://127.0.0.1{tmp_path}/remote/digits", sftp, folder)


def test_exported_model_is_uploaded_whichever_is_listed_first(s3, tmp_path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    callbacks = [ModelUploader("s3://models/exported", storage_options=s3), SavedModelExporter()]
    params = {"saved_model_path": str(tmp_path / "model"), "worker_id": 0}
    dispatcher = Dispatcher(callbacks, Place.WORKER, params, model)
    dispatcher.call("on_train_begin", {})
    dispatcher.call("on_train_end", {})
    local = {
        path.relative_to(tmp_path / "model").as_posix(): path.read_bytes()
        for path in (tmp_path / "model").rglob("*")
        if path.is_file()
    }
    content = remote_content("s3://models/exported", s3)
    content.pop("_SUCCESS")
    assert content == local
    assert "saved_model.pb" in content


def test_model_that_is_there_already_is_not_sent_again(s3, folder) -> None:
    url = "s3://models/again"
    uploader(url, folder, storage_options=s3).call("on_train_end", {})
    fs = fsspec.filesystem("s3", **s3)
    before = {path: fs.info(path)["LastModified"] for path in fs.find("models/again")}
    fs.pipe_file("models/again/notes.txt", b"the user's own")
    uploader(url, folder, storage_options=s3).call("on_train_end", {})
    fs.invalidate_cache()
    assert {path: fs.info(path)["LastModified"] for path in before} == before
    assert fs.cat_file("models/again/notes.txt") == b"the user's own"


def test_a_retry_removes_the_files_of_the_model_before_and_logs_no_password(folder, monkeypatch, caplog) -> None:
    url = "memory://models/retried"
    uploader(url, folder).call("on_train_end", {})
    (folder / "variables/variables.index").unlink()
    remove = fsspec.get_filesystem_class("memory").rm_file
    answers_lost = iter([True])

    def remove_once_without_answer(self: Any, path: str) -> None:
        remove(self, path)
        if next(answers_lost, False):
            raise OSError("no answer from sftp://user:secret@host")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "rm_file", remove_once_without_answer)
    monkeypatch.setattr(logging.getLogger("elasticcb"), "propagate", True)
    uploader(url, folder).call("on_train_end", {})
    assert remote_content(url, {}).keys() == {"_SUCCESS", "saved_model.pb", "variables/variables.data"}
    assert "no answer" in caplog.text
    assert "secret" not in caplog.text


def test_damaged_remote_file_is_sent_again(s3, folder) -> None:
    url = "s3://models/damaged"
    uploader(url, folder, storage_options=s3).call("on_train_end", {})
    fsspec.filesystem("s3", **s3).pipe_file("models/damaged/saved_model.pb", b"GRAPH")  # of the same size
    uploader(url, folder, storage_options=s3).call("on_train_end", {})
    assert remote_content(url, s3)["saved_model.pb"] == b"graph"


def test_remote_that_is_down_fails_in_words_and_leaves_the_model(folder, monkeypatch) -> None:
    options = {
        "endpoint_url": f"http://127.0.0.1:{free_port()}",
        "key": "key",
        "secret": "secret",
        "config_kwargs": {"retries": {"max_attempts": 0}},
    }
    s3fs = pytest.importorskip("s3fs")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # its own, with pauses, inside each of ours
    dispatcher = uploader("s3://models/digits", folder, storage_options=options)
    with pytest.raises(CallbackError) as caught:
        dispatcher.call("on_train_end", {})
    message = str(caught.value)
    assert "Callback ModelUploader failed in on_train_end on worker 0" in message
    assert "could not be uploaded to s3://models/digits" in message
    assert "Tried 3 time(s)" in message
    assert "The local model is complete" in message
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {Path(name).name for name in FILES}


def test_remote_that_comes_back_gets_the_rest(s3, folder, monkeypatch) -> None:
    """The connection breaks after the first file; the second attempt sends the other two and the marker."""
    import s3fs

    sent: list[str] = []
    put_file = s3fs.S3FileSystem._put_file

    async def flaky(self, lpath, rpath, **kwargs):
        if len(sent) == 1:
            sent.append("broken")
            raise ConnectionResetError("the remote went away")
        sent.append(rpath.rsplit("/", 1)[1])
        return await put_file(self, lpath, rpath, **kwargs)

    monkeypatch.setattr(s3fs.S3FileSystem, "_put_file", flaky)
    uploader("s3://models/flaky", folder, storage_options=s3).call("on_train_end", {})
    assert sent == ["saved_model.pb", "broken", "variables.data", "variables.index"]
    assert remote_content("s3://models/flaky", s3).keys() == {*FILES, "_SUCCESS"}


def test_sftp_server_that_is_down_fails_in_words(folder) -> None:
    pytest.importorskip("paramiko")
    url = f"sftp://me:topsecret@127.0.0.1:{free_port()}/models"
    with pytest.raises(CallbackError, match=r"sftp://me:\*\*\*@127.*Tried 3 time\(s\)") as caught:
        uploader(url, folder).call("on_train_end", {})
    assert "topsecret" not in str(caught.value)


def test_bucket_that_does_not_exist_is_not_tried_again(s3, folder) -> None:
    with pytest.raises(CallbackError, match=r"Tried 1 time\(s\)"):
        uploader("s3://nowhere/digits", folder, storage_options=s3).call("on_train_end", {})


def test_local_url_works_and_leaves_no_marker_while_incomplete(folder, tmp_path) -> None:
    target = tmp_path / "copy"
    uploader(target.as_uri(), folder).call("on_train_end", {})
    assert (target / "_SUCCESS").is_file()
    (folder / "saved_model.pb").write_bytes(np.random.default_rng(0).bytes(100))
    (target / "saved_model.pb").unlink()
    (target / "saved_model.pb").mkdir()  # nothing can be written there
    with pytest.raises(CallbackError):
        uploader(target.as_uri(), folder).call("on_train_end", {})
    assert not (target / "_SUCCESS").exists()


def test_missing_model_and_missing_path_are_told_in_words(tmp_path) -> None:
    with pytest.raises(CallbackError, match="found no SavedModel"):
        uploader(tmp_path.as_uri(), tmp_path / "nothing").call("on_train_end", {})
    with pytest.raises(CallbackError, match="no folder to upload"):
        Dispatcher([ModelUploader("file:///x")], Place.WORKER, {}, None).call("on_train_begin", {})


def test_unusable_url_and_numbers_are_refused_at_once() -> None:
    for url in ("", None, "nosuchprotocol://host/path"):
        with pytest.raises(ModelFileError, match="ModelUploader"):
            ModelUploader(url)
    for options in ({"retries": -1}, {"backoff_seconds": -1.0}, {"timeout_seconds": 0}):
        with pytest.raises(ModelFileError, match="expects retries >= 0"):
            ModelUploader("file:///x", **options)
