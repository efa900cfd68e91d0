"""From a data origin to a reader: files, folders, globs, URLs, and custom readers."""

from __future__ import annotations

import errno
import gzip
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from elasticcb.data import Metadata, Reader, Source, checked_sources, files, open_reader
from elasticcb.data.files import list_files
from elasticcb.errors import DataError, ModelFileError, UsageError


def names_of(origin: str) -> list[str]:
    return [Path(source.name).name for source in open_reader(origin).sources()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    for name in ("b.csv", "a.csv", "deep/c.csv", ".hidden.csv", "_SUCCESS"):
        (tmp_path / name).write_text("1,2\n")
    (tmp_path / "empty.csv").write_text("")
    return tmp_path


def test_a_folder_is_its_visible_files_with_records_in_order(folder: Path) -> None:
    assert names_of(str(folder)) == ["a.csv", "b.csv", "c.csv"]


def test_a_glob_and_a_list_are_their_files(folder: Path) -> None:
    assert names_of(f"{folder}/*.csv") == ["a.csv", "b.csv"]
    assert names_of(f"{folder}/b.csv, {folder}/deep,{folder}/b.csv") == ["b.csv", "c.csv"]


def test_links_to_folders_are_followed_but_not_in_circles(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "d.csv").write_text("1,2\n")
    (folder / "link").symlink_to(elsewhere)
    for name in ("again", "back", "up"):
        (elsewhere / name).symlink_to(folder)
    for origin in (str(folder), f"{folder}/**/*.csv", f"{folder}/**"):
        assert names_of(origin) == ["a.csv", "b.csv", "c.csv", "d.csv"]


def test_link_to_nothing_is_an_error(folder: Path) -> None:
    (folder / ".#a.csv").symlink_to("nobody")  # hidden, as all of that kind
    (folder / "lost.csv").symlink_to("nowhere.csv")
    for origin in (str(folder), f"{folder}/*.csv", f"{folder}/**/*.csv", f"{folder}/**"):
        with pytest.raises(DataError, match=r"lost\.csv is a link to nowhere\.csv, which does not exist"):
            list_files(origin)
    assert list_files(f"{folder}/a*") == [str(folder / "a.csv")]


def test_a_file_that_links_give_several_names_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "2026-01").mkdir()
    (tmp_path / "2026-01/a.csv").write_text("1,2\n")
    (tmp_path / "latest").symlink_to("2026-01")
    (tmp_path / "z.csv").symlink_to("latest/a.csv")
    with caplog.at_level("INFO"):
        for origin in (str(tmp_path), f"{tmp_path}/**/*.csv", f"{tmp_path}/*", f"{tmp_path}/latest,{tmp_path}/2026-01"):
            assert list_files(origin) == [str(tmp_path / "2026-01/a.csv")]
    assert list_files(f"{tmp_path}/latest") == [str(tmp_path / "latest/a.csv")]
    assert f"z.csv: it is the same file as {tmp_path}/2026-01/a.csv" in caplog.text


def test_wildcards_pass_over_folders_that_may_not_be_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scandir = os.scandir

    def refusing(path: Any) -> Any:  # root may list every folder
        if Path(path).name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    (folder / "lost+found").mkdir()
    monkeypatch.setattr(os, "scandir", refusing)
    for origin in (f"{folder}/*", f"{folder}/**", f"{folder}/**/*.csv", f"{folder}/*/*.csv,{folder}/*.csv"):
        assert names_of(origin) == ["a.csv", "b.csv", "c.csv"]
        assert "lost+found because it can't be listed: [Errno 13]" in caplog.text
        caplog.clear()
        files._log_once.cache_clear()
    with pytest.raises(DataError, match=r"can't be listed: PermissionError.*lost\+found"):
        list_files(str(folder))


def test_wildcards_pass_over_what_is_not_finished(tmp_path: Path) -> None:
    for name in ("x/part-0", "_temporary/0/part-1", "x/.tmp/part-2", "x/_part-3", "part-4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1,2\n")

    def found(origin: str) -> list[str]:
        return [os.path.relpath(name, tmp_path) for name in list_files(origin)]

    assert found(f"{tmp_path}/**/part-*") == ["part-4", "x/part-0"]
    assert found(f"{tmp_path}/*") == ["part-4", "x/part-0"]
    assert found(f"{tmp_path}/_temporary/*/part-*") == ["_temporary/0/part-1"]
    assert found(f"{tmp_path}/x/_part-*") == ["x/_part-3"]


def test_wildcards_pass_over_what_is_not_finished_at_a_remote_place() -> None:
    files = fsspec.filesystem("memory")
    files.pipe({f"/bucket/{name}": b"1,2\n" for name in ("x/part-0", "_temporary/0/part-1", "part-4")})
    try:
        for origin in ("memory://bucket/**/part-*", "memory://bucket/*", "memory://bucket"):
            assert list_files(origin) == ["memory://bucket/part-4", "memory://bucket/x/part-0"]
        assert list_files("memory://bucket/_temporary/*/part-*") == ["memory://bucket/_temporary/0/part-1"]
    finally:
        files.rm("/bucket", recursive=True)


def test_relative_paths_become_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert open_reader("a.csv").sources() == [Source(str(folder / "a.csv"), 1)]


def test_a_comma_may_be_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "a,b.csv").write_text("1\n")
    assert names_of(str(tmp_path / "a,b.csv")) == ["a,b.csv"]


def test_a_name_that_is_no_text_is_told(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.csv")).write_text("1\n")
    with pytest.raises(DataError, match=r"file b'.*\\xff.csv' is not UTF-8"):
        open_reader(str(tmp_path))


@pytest.mark.parametrize("origin", ["{0}/nothing.csv", "{0}/*.nothing", "memory://nothing/here.csv", " , "])
def test_data_that_is_not_there_is_named(tmp_path: Path, origin: str) -> None:
    origin = origin.format(tmp_path)
    with pytest.raises(DataError, match=r"(There is no data at|is empty)") as caught:
        open_reader(origin)
    assert origin.strip(" ,") in str(caught.value)


def test_empty_files_alone_are_no_data(tmp_path: Path) -> None:
    for name in ("a.csv", "b.tfrecord", "c.npy", "d.parquet", "e.array_record"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(DataError, match=f"There are no records in .*{name}"):
            open_reader(str(tmp_path / name)).sources()
    (tmp_path / "h.csv").write_text("a,b\n")
    with pytest.raises(DataError, match="no record"):
        open_reader(str(tmp_path / "h.csv"), {"header": True}).sources()


def test_mixed_formats_are_refused(folder: Path) -> None:
    (folder / "x.tsv").write_text("1\t2\n")
    with pytest.raises(DataError, match=r"mixes formats: .*a\.csv \(csv\), .*x\.tsv \(tsv\)"):
        open_reader(str(folder))


def test_an_unknown_ending_is_explained_and_can_be_overridden(tmp_path: Path) -> None:
    (tmp_path / "part-00000").write_text("1;2\n")
    with pytest.raises(DataError, match=r"part-00000 has no known file extension.*`format`"):
        open_reader(str(tmp_path))
    reader = open_reader(str(tmp_path), {"format": "csv", "delimiter": ";"})
    assert reader.sources()[0].count == 1
    with pytest.raises(UsageError, match=r"format is 'xls'. Expected one of: csv"):
        open_reader(str(tmp_path), {"format": "xls"})


@pytest.mark.parametrize(
    "name", ["a.txt.gz", "a.txt.GZ", "a.txt-00000-of-00002.gz", "a.txt.gz-00000-of-00002", "a-00000-of-00002.txt.gz"]
)
def test_compression_is_told_by_the_name_wherever_the_number_of_the_part_stands(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"1\n2\n3\n"))
    reader = open_reader(str(tmp_path))
    assert list(reader.read(str(tmp_path / name), 1, 3)) == [b"2", b"3"]


def test_a_data_set_may_have_more_files_than_a_process_may_keep_open(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = len(os.listdir("/proc/self/fd")) + 50
    for i in range(count):
        (tmp_path / f"{i}.txt").write_text(f"{i}\n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        reader = open_reader(str(tmp_path))
        sources = reader.sources()
        assert {record for source in sources for record in reader.read(source.name, 0, 1)} == {
            str(i).encode() for i in range(count)
        }
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n")
    reader = open_reader(str(tmp_path))
    (source,) = reader.sources()
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt.*FileNotFoundError.*Restore"):
        list(reader.read(source.name, 0, 1))


def test_remote_files_are_listed_and_read_by_ranges() -> None:
    files = fsspec.filesystem("memory")
    files.pipe({"/bucket/a.csv": b"1,2\n3,4\n", "/bucket/b.csv": b"5,6\n", "/bucket/_SUCCESS": b""})
    try:
        for origin in (
            "memory://bucket",
            "memory://bucket/*.csv",
            "memory://bucket/a.csv,memory://bucket/b.csv",
        ):
            reader = open_reader(origin)
            assert reader.sources() == [Source("memory://bucket/a.csv", 2), Source("memory://bucket/b.csv", 1)]
            assert list(reader.read(reader.sources()[0].name, 1, 2)) == [b"3,4"]
    finally:
        files.rm("/bucket", recursive=True)


def test_remote_files_of_the_other_formats_are_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    module = pytest.importorskip("array_record.python.array_record_module")
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    pyarrow.parquet.write_table(arrow.table({"x": [0, 1, 2]}), tmp_path / "a.parquet")
    writer = module.ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for i in range(3):
        writer.write(b"%d" % i)
    writer.close()
    files = fsspec.filesystem("memory")
    try:
        for name, expected in (("a.npz", {"x": 1}), ("a.parquet", {"x": 1}), ("a.array_record", b"1")):
            files.pipe(f"/bucket/{name}", (tmp_path / name).read_bytes())
            reader = open_reader(f"memory://bucket/{name}")
            assert list(reader.read(reader.sources()[0].name, 1, 2)) == [expected]
    finally:
        files.rm("/bucket", recursive=True)


class Squares(Reader):
    def __init__(self, data_origin: str, count: int = 5) -> None:
        self.count = count

    def sources(self) -> list[Source]:
        return [Source("squares", self.count)]

    def read(self, name: str, start: int, end: int) -> Iterator[Any]:
        return (str(i * i) for i in range(start, end))


def test_a_custom_reader_gets_the_origin_and_its_parameters() -> None:
    reader = open_reader("anything", {"count": 7}, custom=Squares)
    assert checked_sources(reader) == [Source("squares", 7)]
    assert next(reader.read_chunks("squares", 2, 4)).tolist() == [b"4", b"9"]


@pytest.mark.parametrize("returned", [None, 3, "a.csv", object()])
def test_a_custom_reader_that_is_none_is_explained(returned: object) -> None:
    def custom_data_reader(data_origin: str) -> object:
        return returned

    with pytest.raises(ModelFileError, match=r"custom_data_reader.*elasticcb.data.Reader"):
        open_reader("x", {}, custom=custom_data_reader)


def test_parameters_that_a_custom_reader_does_not_take_are_explained() -> None:
    with pytest.raises(ModelFileError, match=r"can't be called with data_origin, size.*'size'"):
        open_reader("x", {"size": 3}, custom=Squares)


def test_an_error_in_a_custom_reader_keeps_the_users_traceback() -> None:
    def custom_data_reader(data_origin: str) -> object:
        raise KeyError("nowhere")

    with pytest.raises(ModelFileError, match="raised KeyError: 'nowhere'") as caught:
        open_reader("x", {}, custom=custom_data_reader)
    assert 'raise KeyError("nowhere")' in caught.value.user_traceback
    assert "open_custom_reader" not in caught.value.user_traceback


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "found no records in 0 sources"),
        ([Source("a", 0)], "found no records in 1 source."),
        ([Source("a", 1), Source("a", 2)], "contains 'a' twice"),
        ([("a", 3)], r"returned \('a', 3\). Expected a list of"),
    ],
)
def test_sources_that_no_job_can_work_with_are_explained(sources: list[Any], message: str) -> None:
    class Given(Squares):
        def sources(self) -> list[Source]:
            return sources

    with pytest.raises(DataError, match=message):
        checked_sources(Given("x"))


class ElasticDLStyle:
    """As ElasticDL's model zoo has them: a task in, a generator of rows out."""

    def __init__(self, shards: Any) -> None:
        self.shards = shards
        self.metadata = Metadata(column_names=("a", "b"))

    def create_shards(self) -> Any:
        return self.shards

    def read_records(self, task: Any) -> Iterator[Any]:
        assert (task.shard.name, task.shard.start, task.shard.end) == (task.shard_name, task.start, task.end)
        for i in range(task.start, task.end):
            yield [f"{task.shard_name}{i}", "x"]

    @property
    def records_output_types(self) -> Any:
        import tensorflow as tf

        return tf.string


def test_an_elasticdl_reader_is_adapted() -> None:
    seen: dict[str, Any] = {}

    def custom_data_reader(data_origin: str, records_per_task: int | None = None, **kwargs: Any) -> Any:
        seen.update(kwargs, data_origin=data_origin, records_per_task=records_per_task)
        return ElasticDLStyle({"f": (100, 10)})

    reader = open_reader("origin", {"sep": ","}, custom_data_reader, records_per_task=64)
    assert seen == {"data_origin": "origin", "records_per_task": 64, "sep": ","}
    assert reader.sources() == [Source("f", 10)]
    assert reader.metadata.column_names == ("a", "b")
    chunk = next(reader.read_chunks("f", 2, 4))
    assert chunk.tolist() == [[b"f102", b"x"], [b"f103", b"x"]]


def test_elasticdl_shards_that_follow_each_other_are_one_source() -> None:
    shards = [("f", 0, 5), ("f", 5, 5), ("g", 0, 3), ("f", 20, 2)]
    reader = open_reader("origin", {}, lambda data_origin: ElasticDLStyle(shards))
    assert reader.sources() == [Source("f[0:10]", 10), Source("g", 3), Source("f[20:22]", 2)]
    assert next(reader.read("f[20:22]", 1, 2)) == ["f21", "x"]


def test_elasticdl_shards_of_another_form_are_explained() -> None:
    reader = open_reader("origin", {}, lambda data_origin: ElasticDLStyle({"f": 10}))
    with pytest.raises(ModelFileError, match=r"create_shards\(\) returned \{'f': 10\}. Expected"):
        reader.sources()


def test_importing_the_package_and_indexing_need_no_tensorflow(folder: Path) -> None:
    code = (
        "import sys, elasticcb.data as data\n"
        f"print(len(data.open_reader({str(folder)!r}).sources()), 'tensorflow' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["3", "False"]
