"""Files of logs: they are replaced when they are full, nothing of them is lost, and they are read on to the end."""

import logging
import os
import subprocess
import sys

import pytest
from waiting import wait_until

from elasticcb.process import log_files
from elasticcb.process.log_files import FILE_VARIABLE, LogFile, LogReader, last_lines

PROGRAM = """
import logging, os
from elasticcb.process.log_files import limit_log_files, own_log, setup_logging
setup_logging("worker-0", "INFO", own_log())
limit_log_files(4_000, 100)
for number in range(100):
    print("printed", number, flush=True)
    os.write(2, f"native {number}\\n".encode())
    logging.getLogger("elasticcb.test").info("logged %d", number)
assert "ELASTICCB_LOG_FILE" not in os.environ
"""


@pytest.fixture
def log(tmp_path):
    """A log whose files are full with 20 bytes, of which three older ones stay."""
    file = LogFile(str(tmp_path / "ps-0.log"))
    file.limit(20, 3)
    yield file
    file.close()


def write(log, *lines):
    for line in lines:
        log.handle(logging.makeLogRecord({"msg": line}))


def test_a_full_file_is_replaced_and_so_many_before_it_stay(log, tmp_path):
    write(log, *(f"line {number:5}" for number in range(12)))  # 11 bytes each
    texts = [(tmp_path / f"ps-0.log{suffix}").read_text() for suffix in (".3", ".2", ".1", "")]
    assert "".join(texts).split() == " ".join(f"line {number}" for number in range(4, 12)).split()
    assert len(list(tmp_path.iterdir())) == 4


def test_a_file_without_a_limit_grows(tmp_path):
    log = LogFile(str(tmp_path / "ps-0.log"))
    log.limit(0, 3)
    write(log, *["line"] * 1_000)
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["ps-0.log"]


def test_what_is_printed_and_what_native_code_writes_follows_to_the_next_file(tmp_path):
    path = tmp_path / "worker-0.log"
    with path.open("ab") as file:
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            stdout=file,
            stderr=file,
            env=os.environ | {FILE_VARIABLE: str(path)},
            check=True,
        )
    with LogReader(path) as reader:
        lines = [line.split(": ")[-1].rstrip("\n") for line in reader.last(1_000)]
    assert lines == [f"{how} {number}" for number in range(100) for how in ("printed", "native", "logged")]
    older = [each for each in tmp_path.iterdir() if each != path]
    assert len(older) > 1
    assert all(each.stat().st_size < 4_200 for each in older)


def test_a_file_that_only_prints_fill_is_replaced_too(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "_LOOK_SECONDS", 0.01)
    printed = os.open(os.devnull, os.O_WRONLY)
    path = tmp_path / "worker-0.log"
    log = LogFile(str(path))
    with log.taking(printed):
        log.limit(20, 3)
        os.write(printed, b"a line of more than 20 bytes\n")
        wait_until(lambda: os.fstat(printed).st_size == 0)
        os.write(printed, b"next\n")
    os.write(printed, b"into nothing\n")
    log.close()
    os.close(printed)
    assert path.read_text() == "next\n"
    assert (tmp_path / "worker-0.log.1").read_text() == "a line of more than 20 bytes\n"


def test_a_reader_goes_on_from_file_to_file(log, tmp_path):
    lines = [f"line {number}\n" for number in range(10)]
    write(log, *(line.rstrip() for line in lines[:3]))
    with LogReader(tmp_path / "ps-0.log") as reader:
        assert reader.last(100) == lines[:3]
        assert list(reader.more()) == []
        for number in range(3, 7):  # several files at once
            write(log, lines[number].rstrip())
        assert list(reader.more()) == lines[3:7]
        write(log, lines[7].rstrip())
        assert list(reader.more()) == lines[7:8]


def test_a_reader_whose_file_is_gone_goes_on_with_the_oldest_that_is_left(log, tmp_path):
    write(log, "first")
    with LogReader(tmp_path / "ps-0.log") as reader:
        reader.last(1)
        write(log, *(f"line {number:5}" for number in range(20)))
        assert list(reader.more()) == [f"line {number:5}\n" for number in (0, 1, *range(12, 20))]


def interrupting(at, call):
    """A tracer that calls `call` before line number `at` of all that a reader executes, which `.seen` counts."""

    def trace(frame, event, _):
        if frame.f_code.co_filename != log_files.__file__:
            return None
        if event == "line":
            if trace.seen == at:
                call()
            trace.seen += 1
        return trace

    trace.seen = 0
    return trace


@pytest.mark.parametrize("first", [True, False])
def test_a_rename_at_any_moment_has_no_line_read_twice_or_left_out(tmp_path, monkeypatch, first):
    """`first`: while a reader finds the last lines, or those that came since."""
    monkeypatch.setattr(log_files, "_SWITCH_SECONDS", 0.0)
    at = seen = 0
    while at <= seen:
        path = tmp_path / str(at) / "ps-0.log"
        path.parent.mkdir()
        written = []

        def go_on(path=path, written=written):
            """As a process does whose file is full."""
            for number in range(len(written), 0, -1):
                older = path.with_name(f"ps-0.log.{number - 1}" if number > 1 else "ps-0.log")
                older.rename(path.with_name(f"ps-0.log.{number}"))
            written.append(f"line {len(written)}\n")
            path.write_text(written[-1])

        for _ in range(3):
            go_on()
        trace = interrupting(at, go_on)
        with LogReader(path) as reader:
            sys.settrace(trace if first else None)
            lines = reader.last(100)
            sys.settrace(None)
            assert lines == written[: len(lines)]
            if not first:
                for _ in range(2):
                    go_on()
            sys.settrace(None if first else trace)
            lines += reader.more()
            sys.settrace(None)
            lines += reader.more()
        assert lines == written
        at, seen = at + 1, trace.seen
    assert at > 20


def test_the_last_lines_are_those_of_several_files(log, tmp_path):
    write(log, *(f"line {number:5}" for number in range(8)))
    path = tmp_path / "ps-0.log"
    assert len(path.read_text().splitlines()) < 5
    assert last_lines(path, 5).split("\n") == [f"line {number:5}" for number in range(3, 8)]
    assert last_lines(tmp_path / "ps-1.log", 5) == ""


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r", "\r\n", "é"])
def test_the_last_lines_are_the_same_whatever_blocks_are_read(tmp_path, monkeypatch, end):
    path = tmp_path / "ps-0.log"
    older = "".join(f"l\u00efne {number}\n" for number in range(20)) + "half \r of a bar\r\n\n"
    path.with_name("ps-0.log.1").write_text(older, newline="")
    path.write_text(f"näxt\nlast{end}", newline="")
    with path.with_name("ps-0.log.1").open() as first, path.open() as second:
        lines = [*first, *second]
    for block in range(1, 40):
        monkeypatch.setattr(log_files, "_BLOCK_BYTES", block)
        for count in range(1, len(lines) + 3):
            with LogReader(path) as reader:
                assert reader.last(count) == lines[-count:]
                assert list(reader.more()) == []


def test_only_the_end_of_a_long_log_is_read(tmp_path, monkeypatch):
    path = tmp_path / "ps-0.log"
    path.write_text("a line\n" * 1_000_000)
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *given: read.append(pread(*given)) or read[-1])
    with LogReader(path) as reader:
        assert reader.last(20_000) == ["a line\n"] * 20_000
    assert sum(map(len, read)) < 300_000


def test_a_file_that_can_not_be_renamed_goes_on_and_is_not_tried_at_each_line(log, tmp_path, monkeypatch):
    tried = []

    def refuse(*names):
        tried.append(names)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    write(log, *["a line"] * 20)
    assert (tmp_path / "ps-0.log").read_text() == "a line\n" * 20
    assert len(tried) == 1


def test_a_forked_child_does_not_take_the_file_of_its_parent(log, tmp_path):
    write(log, "a line that is longer than that")
    child = os.fork()
    if child == 0:
        write(log, "of the child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["ps-0.log"]


def test_a_process_goes_on_in_the_new_file_that_another_of_its_place_has_begun(log, tmp_path):
    write(log, "one")
    (tmp_path / "ps-0.log").rename(tmp_path / "ps-0.log.1")
    (tmp_path / "ps-0.log").write_text("two\n")
    write(log, "three")
    assert (tmp_path / "ps-0.log").read_text() == "two\nthree\n"
    assert (tmp_path / "ps-0.log.1").read_text() == "one\n"


def test_a_line_for_which_there_is_no_room_is_left_out_in_silence(capfd):
    log = LogFile("/dev/full")
    log.handle(logging.LogRecord("elasticcb", logging.INFO, "", 0, "It begins", None, None))
    assert capfd.readouterr() == ("", "")
    log.stream = None  # what is left in its buffer can't be written when it is closed
