"""Text, CSV and TSV files: indexing, seeking, and each way in which they can be wrong."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticcb.data import content, file_reader, open_reader
from elasticcb.data.content import LocalFile, MemoryContent
from elasticcb.data.text_index import Dialect, index_records, split_records
from elasticcb.errors import DataError, UsageError


def records_of(path: Path, **params: object) -> list[bytes]:
    reader = open_reader(str(path), params)
    return [bytes(record) for source in reader.sources() for record in reader.read(source.name, 0, source.count)]


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_range_of_records_equals_that_part_of_a_full_read(tmp_path: Path) -> None:
    randomness = random.Random(1)
    lines = [f"{i},{'x' * randomness.randrange(300)}" for i in range(5000)]
    path = written(tmp_path / "a.csv", "\n".join(lines) + "\n")
    reader = open_reader(str(path))
    everything = list(reader.read(str(path), 0, 5000))
    assert everything == [line.encode() for line in lines]
    for _ in range(50):
        start, end = sorted(randomness.choices(range(5001), k=2))
        assert list(reader.read(str(path), start, end)) == everything[start:end]


def test_chunks_have_the_size_that_was_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "line\n" * 10)
    chunks = list(open_reader(str(path)).read_chunks(str(path), 1, 10, 4))
    assert [len(chunk) for chunk in chunks] == [4, 4, 1]


_FIELD = st.text(st.sampled_from('ab,"\n\r \té'), max_size=6)


@given(
    rows=st.integers(2, 4).flatmap(lambda n: st.lists(st.lists(_FIELD, min_size=n, max_size=n), min_size=1)),
    block_bytes=st.integers(1, 40),
    style=st.sampled_from([("\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_MINIMAL)]),
    last_line_ends=st.booleans(),
)
def test_what_the_csv_module_writes_is_found_again_wherever_blocks_are_cut(
    rows: list[list[str]], block_bytes: int, style: tuple[str, int], last_line_ends: bool
) -> None:
    text = io.StringIO(newline="")
    line_end, quoting = style
    csv.writer(text, lineterminator=line_end, quoting=quoting).writerows(rows)
    data = text.getvalue().encode()
    if not last_line_ends:
        data = data.removesuffix(line_end.encode())
    content = MemoryContent("memory", data)
    content.block_bytes = block_bytes
    dialect = Dialect(b",", b'"', True)
    index = index_records(content, dialect)
    assert index.fields == len(rows[0])
    assert index.places.count == len(rows)
    records = split_records(data, dialect)
    assert [next(csv.reader(io.StringIO(record.decode(), newline=""))) for record in records] == rows


@given(
    data=st.binary(max_size=60).map(lambda b: bytes(b"a\n\r,"[i % 4] for i in b)),
    block_bytes=st.integers(1, 9),
)
def test_lines_without_fields_are_found_wherever_blocks_are_cut(data: bytes, block_bytes: int) -> None:
    content = MemoryContent("memory", data)
    content.block_bytes = block_bytes
    dialect = Dialect(b"", b"", True)
    if b"\n" not in data and b"\r" in data[:-1]:
        with pytest.raises(DataError, match="carriage return"):
            index_records(content, dialect)
        return
    index = index_records(content, dialect)
    expected = [line.rstrip(b"\r") for line in data.split(b"\n") if line.removesuffix(b"\r")]
    assert index.places.count == len(expected)
    assert split_records(data, dialect) == expected


def test_empty_lines_at_the_end_are_no_records(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "1,2\n\n3,4\n\n\r\n\n")
    assert records_of(path) == [b"1,2", b"3,4"]
    assert records_of(path, skip_blank_lines=False) == [b"1,2", b"", b"3,4"]


def test_lines_that_end_with_a_carriage_return_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv.*carriage return"):
        open_reader(str(written(tmp_path / "a.csv", 'a,b\r1,"x\ny"\r'))).sources()
    assert records_of(written(tmp_path / "b.csv", '1,"x\ry"')) == [b'1,"x\ry"']


def test_the_header_is_no_record_and_names_the_columns(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", '\ufeffage,"job, or not"\n1,2\n3,4\n')
    reader = open_reader(str(path), {"header": True})
    assert reader.metadata.column_names == ("age", "job, or not")
    assert records_of(path, header=True) == [b"1,2", b"3,4"]


def test_given_columns_reach_the_metadata(tmp_path: Path) -> None:
    path = written(tmp_path / "a.data", "1|2\n")
    reader = open_reader(str(path), {"delimiter": "|", "columns": ["a", "b"], "column_dtypes": {"a": "int64"}})
    assert reader.metadata.column_names == ("a", "b")
    assert reader.metadata.column_dtypes == {"a": "int64"}


def test_tab_separated_files_are_split_at_tabs(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", "1\ta,b\n2\tc\n")
    assert records_of(path) == [b"1\ta,b", b"2\tc"]
    with pytest.raises(DataError, match=r"record 1 \(line 2\) has 1 field, but the first record has 2"):
        records_of(written(tmp_path / "b.tsv", "1\ta\n2,b\n"))


def test_other_encodings_arrive_as_utf8(tmp_path: Path) -> None:
    assert records_of(written(tmp_path / "a.csv", "1,é\n".encode("latin-1")), encoding="latin-1") == ["1,é".encode()]
    assert records_of(written(tmp_path / "b.csv", "1,é\n2,ü".encode("utf-16")), encoding="utf-16") == [
        "1,é".encode(),
        "2,ü".encode(),
    ]
    with pytest.raises(DataError, match=r"c.csv, line 2, is not valid cp1252"):
        records_of(written(tmp_path / "c.csv", b"1,a\n2,\x81\n"), encoding="cp1252")
    with pytest.raises(DataError, match=r"is not utf-8. Set .* encoding=utf-16"):
        records_of(written(tmp_path / "d.csv", "1,a\n2,b\n".encode("utf-16")))


@pytest.mark.parametrize("ending", [".gz", ""])
def test_compressed_files_are_read(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path / f"a.csv{ending}", gzip.compress(b"1,2\n3,4\n"))
    assert records_of(path) == [b"1,2", b"3,4"]


def test_other_compressions_than_gzip_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv.bz2", b"BZh9")
    with pytest.raises(DataError, match=r"a\.csv\.bz2 has no known file extension"):
        records_of(path)
    with pytest.raises(DataError, match=r"\.bz2.*gzip"):
        records_of(path, format="csv")


def test_a_range_of_a_large_compressed_file_equals_that_part_of_it(tmp_path: Path) -> None:
    randomness = random.Random(4)
    lines = [b"%d,%s" % (i, randomness.randbytes(6).hex().encode()) for i in range(600_000)]
    data = b"\n".join(lines)
    path = written(tmp_path / "a.csv.gz", gzip.compress(data[:5_000_000], 1) + gzip.compress(data[5_000_000:], 1))
    reader = open_reader(str(path))
    assert reader.sources()[0].count == len(lines)
    for start in (599_000, 3, 450_000):
        assert list(reader.read(str(path), start, start + 700)) == lines[start : start + 700]


@pytest.mark.parametrize("bound", ["_CACHE_DISK_BYTES", "_OPEN_FILE_BYTES"])
def test_temporary_files_of_files_read_long_ago_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    def temporary() -> int:
        files = (os.readlink(f.path) for f in os.scandir("/proc/self/fd") if os.path.islink(f.path))
        return sum("(deleted)" in file and file.startswith(str(tmp_path / "spool")) for file in files)

    (tmp_path / "spool").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "spool"))
    if bound == "_CACHE_DISK_BYTES":  # two files of 1 MB fit, and not three
        monkeypatch.setattr(file_reader, bound, 2_500_000)
        monkeypatch.setattr(content, "_OPEN_FILE_BYTES", 0)
    else:
        monkeypatch.setattr(content, bound, 6 << 30)
    paths = [written(tmp_path / f"{name}.csv", b"1,2\n" * 250_000) for name in "abcde"]
    reader = open_reader(str(tmp_path / "*.csv"), {"encoding": "latin-1"})
    for _ in range(2):
        for path in paths:
            assert list(reader.read(str(path), 249_999, 250_000)) == [b"1,2"]
    assert temporary() == 2


def test_a_full_temporary_folder_is_told_with_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = written(tmp_path / "a.csv", b"1,2\n")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DataError, match=r"a\.csv.*full.*TMPDIR"):
        records_of(path, encoding="latin-1")


def test_a_truncated_gzip_file_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv.gz", gzip.compress(b"1,2\n" * 1000)[:-20])
    with pytest.raises(DataError, match=r"a\.csv\.gz can't be decompressed.*Write it again"):
        records_of(path)


def test_a_ragged_row_is_named_with_its_record_and_line(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'x,y\n1,"a\nb"\n\n2,c,d\n')
    with pytest.raises(DataError, match=r"a\.csv, record 1 \(line 5\) has 3 fields, but the header has 2"):
        records_of(path, header=True)
    with pytest.raises(DataError, match=r"record 0 \(line 1\) has 2 fields.*`columns` names 3"):
        records_of(path, columns=["a", "b", "c"])


def test_a_ragged_row_far_into_a_file_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "1,2\n" * 700_000 + "1\n" + "1,2\n" * 10)
    with pytest.raises(DataError, match=r"record 700000 \(line 700001\) has 1 field"):
        open_reader(str(path)).sources()


def test_files_with_different_columns_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "a.csv", "1,2\n")
    written(tmp_path / "b.csv", "1,2,3\n")
    with pytest.raises(DataError, match=r"b\.csv has 3 columns, but .*a\.csv has 2 columns"):
        open_reader(str(tmp_path)).sources()


def test_a_quote_that_is_never_closed_names_its_record(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", '1,2\n3,"x\n4,5\n')
    with pytest.raises(DataError, match=r"record 1 \(line 2\) is not closed.*quote=''"):
        records_of(path)


def test_a_quote_in_the_middle_of_a_field_is_refused_or_ordinary(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", '1,2\n3,5" pipe\n4,6" pipe\n')
    with pytest.raises(DataError, match=r"a\.csv, line 2, has a quote inside a field"):
        records_of(path)
    assert records_of(path, quote="") == [b"1,2", b'3,5" pipe', b'4,6" pipe']


@pytest.mark.parametrize("block_bytes", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", '1,a\n2,"great" film\n3,b\n', "line 2, continues a field after its closing quote"),
        ("a.csv", '1,a\n2,"great\n3,"bad\n', "line 3, continues a field after its closing quote"),
        ("a.tsv", '1\ta\n2\t"great\n3\tbad"\n', "line 2, ends inside a quoted field"),
        ("a.tsv", '1\t"great\n2\tbad\n', "line 1, ends inside a quoted field"),
        ("a.txt", '1\t"great\n2\tbad"\n', "line 1, ends inside a quoted field"),
    ],
)
def test_a_field_that_begins_with_a_quote_never_merges_lines_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, message: str, block_bytes: int
) -> None:
    path = written(tmp_path / name, content)
    monkeypatch.setattr(LocalFile, "block_bytes", block_bytes)
    given = {"delimiter": "\t"} if name.endswith(".txt") else {}
    with pytest.raises(DataError, match=rf"{name}, {message}.*`quote=''`"):
        records_of(path, **given)
    assert records_of(path, quote="", **given) == [line.encode() for line in content.splitlines()]


def test_line_breaks_in_quotes_between_tabs_are_read_on_request(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", '1\t"a\tb"\n2\t"c"\n')
    assert records_of(path) == [b'1\t"a\tb"', b'2\t"c"']
    path = written(tmp_path / "b.tsv", '1\t"a\nb"\n2\t"c"\n')
    assert records_of(path, quote='"') == [b'1\t"a\nb"', b'2\t"c"']


def test_a_quoted_field_right_after_the_byte_order_mark_is_read(tmp_path: Path) -> None:
    assert records_of(written(tmp_path / "a.csv", '\ufeff"1",2\n')) == [b'"1",2']


@pytest.mark.parametrize(
    ("content", "params", "message"),
    [
        ('1,"a\nb"\n\n\n2,c\nx,d\n', {"column_dtypes": {0: "int64"}}, r"record 2 \(line 6\), column 0: 'x' .*int64"),
        (
            "age,name\n1,a\n,b\n1.5,c\n",
            {"header": True, "column_dtypes": {"age": "int64", "name": "str"}},
            r"a\.csv, record 2 \(line 4\), column age: '1.5' .*int64",
        ),
        ("age\n1\n", {"column_dtypes": {0: "float32"}}, r"'age' is not a valid float32.*header=True"),
        ("1\n300\n", {"column_dtypes": {0: "uint8"}}, "record 1 .*'300' is not a valid uint8"),
    ],
)
def test_a_value_of_the_wrong_dtype_is_named(
    tmp_path: Path, content: str, params: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        records_of(written(tmp_path / "a.csv", content), **params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"delimiter": "::"}, "delimiter is '::'.*one ASCII character"),
        ({"encoding": "utf-99"}, "which is unknown to Python"),
        ({"columns": "abc"}, "Expected a list of names"),
        ({"column_dtypes": {"b": "int64"}, "columns": ["a"]}, "contains the unknown column 'b'. The columns are a"),
        ({"column_dtypes": {0: "datetime64"}}, "'datetime64'. Expected NumPy's name"),
        ({"delimiter": "", "header": True}, "Set `delimiter`"),
        ({"header": "yes"}, "header is 'yes'. Expected true or false"),
        ({"delimeter": ";"}, "Did you mean 'delimiter'"),
    ],
)
def test_wrong_parameters_are_explained(tmp_path: Path, params: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        records_of(written(tmp_path / "a.csv", "1\n"), **params)


def test_a_range_outside_the_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "1\n2\n")
    with pytest.raises(DataError, match=r"Records \[1, 3\) of .*a\.csv were requested, but it has 2"):
        list(open_reader(str(path)).read(str(path), 1, 3))
