"""The user's cache of indexes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elasticcb.data import index_file
from elasticcb.data.content import Identity
from elasticcb.data.file_index import FileIndex
from elasticcb.data.index_file import IndexCache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index_file, "_LEAST_BYTES", 100)
    return tmp_path / "cache/elasticcb/indexes"


def cache(*files: str, reader: str = "TextReader", parameters: str = "{}") -> IndexCache:
    return IndexCache(files, reader, parameters)


def index(size: int, version: str = "v", count: int = 1) -> bytes:
    return FileIndex(Identity(size, version, ""), count).to_bytes()


def keep(cache: IndexCache, indexes: dict[str, bytes]) -> None:
    cache.write(indexes, {file: FileIndex.from_bytes(index).identity for file, index in indexes.items()})


def test_an_index_is_found_by_files_reader_and_parameters(folder: Path) -> None:
    keep(cache("s3://a", "s3://b"), {"s3://a": index(100), "s3://b": index(100)})
    assert set(cache("s3://b", "s3://a").read()) == {"s3://a", "s3://b"}
    assert not cache("s3://a").read()
    assert not cache("s3://a", "s3://b", parameters="{1}").read()
    assert not cache("s3://a", "s3://b", reader="OtherReader").read()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_an_index_of_a_remote_file_without_a_version_is_not_kept(folder: Path) -> None:
    keep(cache("s3://a"), {"s3://a": index(100, "")})
    assert not cache("s3://a").read()


def test_indexes_of_little_data_are_not_kept(folder: Path) -> None:
    keep(cache("s3://a"), {"s3://a": index(99)})
    assert not folder.exists()


def test_a_file_that_changed_while_it_was_scanned_is_not_kept(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("1\n")
    before = cache(str(file))
    file.write_text("2\n")
    keep(before, {str(file): index(100)})
    assert not cache(str(file)).read()
    keep(cache(str(file)), {str(file): index(100)})
    assert cache(str(file)).read()
    os.replace(file, tmp_path / "b.csv")
    file.write_text("2\n")
    assert not cache(str(file)).read()


def test_those_used_longest_ago_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"s3://{name}" for name in "abc"]
    for place, name in enumerate(names[:2]):
        keep(cache(name), {name: index(100)})
        for path in folder.glob("*.zip"):
            os.utime(path, (place, path.stat().st_mtime - 1000))
    assert cache(names[0]).read()  # and so b is the oldest
    size = max(path.stat().st_size for path in folder.glob("*.zip"))
    monkeypatch.setattr(index_file, "_CACHE_BYTES", size * 5 // 2)
    keep(cache(names[2]), {names[2]: index(100)})
    assert [bool(cache(name).read()) for name in names] == [True, False, True]


def test_a_cache_that_cannot_be_used_is_done_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")
    keep(cache("s3://a"), {"s3://a": index(100)})
    assert not cache("s3://a").read()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(Path, "home", _no_home)
    keep(cache("s3://a"), {"s3://a": index(100)})
    assert not cache("s3://a").read()


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.deep)])
def test_a_damaged_cache_is_told_and_the_data_scanned_again(folder: Path, every: int) -> None:
    keep(cache("s3://a"), {"s3://a": index(100)})
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for place in range(0, 8 * len(whole), every):  # zipfile raises errors of many kinds
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        assert cache("s3://a").read() in ({}, {"s3://a": index(100)})


def test_the_cache_holds_no_parameter_and_no_name(folder: Path) -> None:
    remote = "s3://a?signature=secret"
    keep(cache(remote, parameters='{"password": "secret"}'), {remote: index(100)})
    (path,) = folder.iterdir()
    assert b"secret" not in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert cache(remote, parameters='{"password": "secret"}').read()


def test_a_folder_that_others_can_write_to_is_not_used(folder: Path) -> None:
    keep(cache("s3://a"), {"s3://a": index(100)})
    for each in (folder, folder.parent):
        mode = each.stat().st_mode
        each.chmod(0o777)
        assert not cache("s3://a").read()
        each.chmod(mode)
    assert cache("s3://a").read()
    folder.rename(folder.with_name("moved"))
    folder.symlink_to("moved")
    assert not cache("s3://a").read()


def test_an_index_that_is_larger_than_the_cache_takes_no_room_of_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(cache("s3://a"), {"s3://a": index(100)})
    monkeypatch.setattr(index_file, "_CACHE_BYTES", 10)
    keep(cache("s3://b"), {"s3://b": index(100)})
    assert cache("s3://a").read()
    assert not cache("s3://b").read()


def test_what_killed_jobs_have_left_is_removed(folder: Path) -> None:
    folder.mkdir(parents=True)
    old, new = folder / ".tmp-old.zip-00", folder / ".tmp-new.zip-00"
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    keep(cache("s3://a"), {"s3://a": index(100)})
    assert not old.exists()
    assert new.exists()
