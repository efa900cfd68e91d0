"""Records that can't be converted: found among the others, counted, and kept as they came."""

from __future__ import annotations

import pytest
import tensorflow as tf

from elasticcb.data import open_reader, read
from elasticcb.data.bad_records import BadRecords
from elasticcb.data.unbounded import Partition, UnboundedSource
from elasticcb.errors import DataChangedError, DataError


@pytest.fixture
def reader(tmp_path):
    lines = [str(n) if n % 7 else f"bad {n}" for n in range(1, 31)]
    (tmp_path / "data.csv").write_text("\n".join(lines) + "\n")
    return open_reader(str(tmp_path / "data.csv"))


def converter(reader, size=4):
    def convert(name, start, end):
        records = [*reader.read(name, start, end)]
        for place in range(0, len(records), size):
            batch = records[place : place + size]
            if bad := [each for each in batch if b"bad" in each]:
                raise DataError(f"{bad[0]} is not a number")
            yield [int(each) for each in batch]

    return convert


@pytest.mark.parametrize("keeps_order", [True, False])
def test_good_records_are_converted_once_and_bad_ones_counted(reader, tmp_path, keeps_order):
    bad = BadRecords(reader, converter(reader), keeps_order, str(tmp_path / "bad"))
    (source,) = reader.sources()
    batches = [*bad.good_batches(source.name, 0, 30, 4, len)]
    assert sorted(n for batch in batches for n in batch) == [n for n in range(1, 31) if n % 7]
    count, first = bad.take()
    assert count == 4
    assert first.startswith("Record 6 of ")
    assert "bad 7" in first
    assert bad.take() == (0, "")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "bad").iterdir()}
    assert sorted(kept.values())[-4:] == [b"bad 14", b"bad 21", b"bad 28", b"bad 7"]
    assert len(kept) == 8


def test_a_batch_counts_the_bad_records_up_to_the_end_of_its_part(reader):
    """So a count never reaches a record that is not converted, and the parts end where tasks are split."""
    bad = BadRecords(reader, converter(reader), True, "")
    place, ends = 0, []
    for batch in bad.good_batches(reader.sources()[0].name, 0, 30, 4, len):
        place += len(batch) + bad.passed()
        ends.append(place)
        assert all(n % 7 == 0 for n in range(batch[-1] + 1, place + 1))
    assert {4, 8, 12, 16, 20, 24, 28, 30} <= {*ends}


def test_records_of_names_that_differ_in_other_characters_are_kept_apart(tmp_path):
    names = ["a/b.csv", "a_b.csv", "a b.csv", "ä/" + 300 * "x" + ".csv"]
    for name in names:
        path = tmp_path / "in" / name[-200:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"bad {name}\n")
    reader = open_reader(str(tmp_path / "in"))
    bad = BadRecords(reader, converter(reader), True, str(tmp_path / "bad"))
    for source in reader.sources():
        assert [*bad.good_batches(source.name, 0, 1, 4, len)] == []
    assert sorted(path.read_text() for path in (tmp_path / "bad").glob("*.record")) == sorted(
        f"bad {name}" for name in names
    )


def test_data_without_bad_records_is_converted_in_one_go(reader):
    asked = []

    def convert(name, start, end):
        asked.append((start, end))
        yield from converter(reader)(name, start, end)

    bad = BadRecords(reader, convert, True, "")
    assert len([*bad.good_batches(reader.sources()[0].name, 7, 13, 4, len)]) == 2
    assert asked == [(7, 13)]


def test_changed_data_is_no_bad_record(reader):
    def convert(name, start, end):
        raise DataChangedError("it was changed")
        yield

    bad = BadRecords(reader, convert, True, "")
    with pytest.raises(DataChangedError):
        [*bad.good_batches("a", 0, 4, 4, len)]


def test_a_file_that_is_gone_has_no_bad_records(reader, tmp_path):
    bad = BadRecords(reader, converter(reader), True, "")
    (source,) = reader.sources()
    (tmp_path / "data.csv").unlink()
    with pytest.raises(DataError, match="can't be read any more"):
        [*bad.good_batches(source.name, 0, 30, 4, len)]


def test_a_source_that_can_t_be_reached_has_no_bad_records():
    class Away(UnboundedSource):
        element_spec = tf.TensorSpec((), tf.int64)

        def partitions(self, known):
            return {"a": Partition(0, 0, 10)}

        def beginning(self, records):
            return "a", 0, records

        def read(self, name, start, end):
            yield from range(start, 6)
            raise ConnectionError("away")

    batches = read(Away(), feed_batch=lambda records, mode, metadata: (records, records)).batches("training", 4)
    bad = BadRecords(Away(), lambda *given: batches.batches([given]), True, "")
    with pytest.raises(DataError, match="ConnectionError: away"):
        [*bad.good_batches("a", 0, 8, 4, len)]
    assert bad.take() == (0, "")


def test_offsets_without_a_record_before_a_bad_one_repeat_nothing():
    class Sparse:
        may_skip = True

    def convert(name, start, end):
        for place in range(start, end, 4):
            batch = [n for n in range(place, min(place + 4, end)) if n % 2]
            if 201 in batch:
                raise DataError("201 is bad")
            yield batch

    bad = BadRecords(Sparse(), convert, True, "")
    found = [n for batch in bad.good_batches("a", 0, 1000, 2, len) for n in batch]
    assert found == [n for n in range(1000) if n % 2 and n != 201]


def test_a_folder_that_can_t_be_written_is_an_error(reader, tmp_path):
    (tmp_path / "file").touch()
    bad = BadRecords(reader, converter(reader), True, str(tmp_path / "file"))
    with pytest.raises(DataError, match="can't be kept in"):
        [*bad.good_batches(reader.sources()[0].name, 0, 30, 4, len)]


@pytest.mark.parametrize("feed", [False, True])
def test_lines_with_other_numbers_of_fields_are_bad_records_if_they_may_be(tmp_path, feed):
    path = tmp_path / "data.csv"
    path.write_text("a,b\n1,2\n3\n4,5\n6,7,8\n9,10\n")
    with pytest.raises(DataError, match=r"record 1 \(line 3\) has 1 field, but the header has 2.*check_fields"):
        open_reader(str(path), {"header": True}).sources()
    reader = open_reader(str(path), {"header": True, "check_fields": False})
    (source,) = reader.sources()

    def feed_batch(records, mode, metadata):
        a, b = tf.io.decode_csv(records, [0, 0])
        return {"a": a}, b

    records = read(reader, **({"feed_batch": feed_batch} if feed else {"label": "b"}))
    batches = records.batches("training", 2)

    def convert(name, start, end):
        return batches.batches([(name, start, end)])

    bad = BadRecords(reader, convert, True, "")
    found = [*bad.good_batches(source.name, 0, source.count, 2, lambda batch: len(batch[1]))]
    assert [int(each) for batch in found for each in batch[0]["a"]] == [1, 4, 9]
    assert bad.take()[0] == 2
