"""Files that are added while a job trains: each is read once, when it is complete."""

from __future__ import annotations

import os
import time

import fsspec
import pytest
from stores import S3Server

from elasticcb.data import open_reader
from elasticcb.errors import DataError, SourceError, StreamError, UsageError


def write(folder, name, first, last, age=100.0):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{n},{n % 2}\n" for n in range(first, last)))
    os.utime(path, (time.time() - age, time.time() - age))
    return str(path)


@pytest.fixture
def growing(tmp_path):
    return open_reader(str(tmp_path), follow=True)


def test_complete_files_become_partitions_in_the_order_of_their_names(tmp_path, growing):
    a, b = write(tmp_path, "a.csv", 0, 3), write(tmp_path, "sub/b.csv", 3, 8)
    young = write(tmp_path, "c.csv", 8, 9, age=0)
    write(tmp_path, "_d.csv", 9, 10)
    found = growing.partitions(())
    assert [(name, each.end) for name, each in found.items()] == [(a, 3), (b, 5)]
    assert growing.partitions(found) == {}
    (tmp_path / "_SUCCESS").touch()
    assert [*growing.partitions(found)] == [young]
    (tmp_path / "_d.csv").rename(tmp_path / "0.csv")
    assert [*growing.partitions([*found, young])] == [str(tmp_path / "0.csv")]
    assert list(growing.read(b, 1, 3)) == [b"4,0", b"5,1"]
    assert growing.beginning(2) == (a, 0, 2)


def test_a_file_that_can_t_be_read_yet_holds_up_no_other(tmp_path, growing, monkeypatch):
    first, away, last = (write(tmp_path, name, 0, 3) for name in ("a.csv", "b.csv", "c.csv"))
    survey = growing.files.survey

    def fails(name):
        if name == away:
            raise SourceError(f"{name} can't be opened")
        return survey(name)

    monkeypatch.setattr(growing.files, "survey", fails)
    found = growing.partitions(())
    assert [*found] == [first, last]
    with pytest.raises(StreamError, match=r"b\.csv can't be opened"):
        growing.partitions(found)
    monkeypatch.setattr(growing.files, "survey", survey)
    assert [*growing.partitions(found)] == [away]


def test_files_known_from_before_are_not_counted_again(tmp_path, growing):
    known = write(tmp_path, "a.csv", 0, 3)
    write(tmp_path, "b.csv", 0, 4)
    assert [each.end for each in growing.partitions([known]).values()] == [4]


def test_empty_files_before_the_first_records_are_passed_over(tmp_path, growing):
    empty, first = write(tmp_path, "a.csv", 0, 0), write(tmp_path, "b.csv", 0, 3)
    assert growing.beginning(2) == (first, 0, 2)
    assert [(name, each.end) for name, each in growing.partitions(()).items()] == [(empty, 0), (first, 3)]


def test_a_file_of_other_columns_is_an_error_that_names_it(tmp_path):
    growing = open_reader(str(tmp_path), {"header": True}, follow=True)
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "_SUCCESS").touch()
    assert len(growing.partitions(())) == 1
    growing.trained({str(tmp_path / "a.csv"): 1})
    (tmp_path / "a.csv").unlink()  # it is not needed any more
    (tmp_path / "c.csv").write_text("x,y\n1,2\n")
    assert len(growing.partitions([])) == 1
    (tmp_path / "b.csv").write_text("x,z\n1,2\n")
    with pytest.raises(DataError, match=r"b\.csv has .*same layout"):
        growing.partitions([str(tmp_path / "a.csv")])


def test_a_file_of_another_format_is_an_error_that_names_it(tmp_path, growing):
    known = write(tmp_path, "a.csv", 0, 3)
    assert [*growing.partitions(())] == [known]
    write(tmp_path, "notes.txt", 0, 3)
    with pytest.raises(DataError, match=r"mixes formats: .*a\.csv \(csv\), .*notes\.txt \(text\)"):
        growing.partitions([known])


def test_a_file_that_gets_another_name_by_a_link_is_not_read_again(tmp_path, growing, caplog):
    known = write(tmp_path, "b.csv", 0, 3)
    assert [*growing.partitions(())] == [known]
    (tmp_path / "a.csv").symlink_to(known)
    with caplog.at_level("INFO"):
        for _ in range(3):
            assert growing.partitions([known]) == {}
    assert len([each for each in caplog.messages if "the same file" in each]) == 1


def test_a_closed_reader_can_be_used_again_for_all_files(tmp_path, growing):
    name = write(tmp_path, "a.csv", 0, 3)
    for _ in range(2):
        assert [*growing.partitions(())] == [name]
        growing.close()


def test_settling_is_a_parameter(tmp_path):
    write(tmp_path, "a.csv", 0, 3, age=5)
    assert not open_reader(str(tmp_path), follow=True).partitions(())
    assert open_reader(str(tmp_path), {"settle_seconds": 2}, follow=True).partitions(())
    with pytest.raises(UsageError, match="settle_seconds"):
        open_reader(str(tmp_path), {"settle_seconds": "soon"}, follow=True)


def test_custom_readers_of_known_data_can_t_follow(tmp_path):
    def custom(data_origin):
        return open_reader(data_origin)

    write(tmp_path, "a.csv", 0, 3)
    with pytest.raises(UsageError, match="`follow`"):
        open_reader(str(tmp_path), custom=custom, follow=True)


def test_files_that_are_added_at_a_url_are_found(monkeypatch):
    with S3Server("follow") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        store = fsspec.filesystem("s3", **server.options)
        growing = open_reader("s3://follow/clicks", {"settle_seconds": 0}, follow=True)
        known = []
        for name in ("a", "b/c", "d"):
            for _ in range(2):  # with nothing new
                known += growing.partitions(known)
            store.pipe_file(f"follow/clicks/{name}.csv", b"1,2\n")
            known += growing.partitions(known)
            known += growing.partitions(known)
            assert known[-1] == f"s3://follow/clicks/{name}.csv"
