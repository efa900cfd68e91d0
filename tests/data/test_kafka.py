"""Messages of Kafka as records, and where a job begins and ends in a topic."""

from __future__ import annotations

import contextlib
import time

import pytest
from brokers import FaultyBrokers, broker
from waiting import wait_until

from elasticcb.data import Kafka
from elasticcb.errors import DataError, StreamError, UsageError


@pytest.fixture(scope="module")
def kafka():
    with broker() as found:
        yield found


@pytest.fixture
def source(kafka):
    """A function that sends values to a new topic with one partition, and returns it."""
    with contextlib.ExitStack() as open_ones:

        def made(values, **given):
            name = f"t{time.monotonic_ns()}"
            kafka.topic(name, 1)
            kafka.send(name, values, 1)
            found = Kafka(kafka.address, name, **given)
            open_ones.callback(found.close)
            return found

        yield made


GOOD = b'{"a": 1, "s": "x"}'


def test_json_of_several_lines_is_a_record(source):
    found = source([GOOD, b' \n{"a": 2,\n "z": {"q": []}, "s": "\xc5\xbc"}\r\n'], columns={"a": "int64", "s": "string"})
    (chunk,) = found.read_chunks(f"{found.topic}/0", 0, 2)
    assert chunk["a"].tolist() == [1, 2]
    assert chunk["s"].tolist() == [b"x", b"\xc5\xbc"]


def test_values_that_are_no_object_are_errors_that_name_the_offset(source):
    bad = [b"null", b"", b" ", b"x", GOOD + GOOD, b'{"a": 1, "s": "\xff"}', b'{"a": 1', b', "b": 2}' + GOOD, b"{}null"]
    for value in bad:  # with others that make up for the number of objects
        values = [GOOD, value, b"", GOOD] if value == GOOD + GOOD else [GOOD, value, GOOD]
        found = source(values, columns={"a": "float32", "s": "string"})
        with pytest.raises(DataError, match=r"offset 1 of .* is not a JSON object with the columns"):
            [*found.read_chunks(f"{found.topic}/0", 0, len(values))]
    alone = source([b"null"], columns={"a": "float32"})
    with pytest.raises(DataError, match="offset 0"):
        [*alone.read_chunks(f"{alone.topic}/0", 0, 1)]


def test_latest_is_where_the_topic_ended_when_the_source_was_asked_first(source, kafka):
    found = source([], start="latest")
    assert found.partitions(())[f"{found.topic}/0"].start == 0
    kafka.send(found.topic, [b"1", b"2"], 1)  # while the job is built
    assert found.beginning(8) == (f"{found.topic}/0", 0, 2)
    assert found.partitions(())[f"{found.topic}/0"].start == 0
    found.close()  # the next job
    assert found.partitions(())[f"{found.topic}/0"].start == 2


def test_a_job_that_stops_at_the_newest_record_does_not_wait_for_the_first(source):
    with pytest.raises(DataError, match="has no record"):
        source([], stop="latest").beginning(8)


def test_no_record_of_a_later_time_comes_before_the_stop(source, monkeypatch):
    found = source([b"1", b"2", b"3"], stop=time.time() - 1)
    for first, stop in [(None, None), (2, 2)]:
        monkeypatch.setattr("elasticcb.data.kafka._first_from", lambda *given, first=first: first)
        assert found.partitions(())[f"{found.topic}/0"].stop == stop
    late = source([b"1"], stop=time.time() - 100)
    monkeypatch.setattr("elasticcb.data.kafka._first_from", lambda *given: None)
    assert late.partitions(())[f"{late.topic}/0"].stop == 1


def test_a_broker_that_answers_only_for_the_end_does_not_make_records_removed():
    offsets, not_leader, storage, not_there = 2, 6, 56, 8
    with contextlib.closing(FaultyBrokers()) as brokers, contextlib.closing(Kafka(brokers.address, "clicks")) as found:
        brokers.topic("clicks")
        brokers.send("clicks", [GOOD] * 20)

        def has_all():
            return {(each.first, each.end) for each in found.partitions(()).values()} == {(0, 10)}

        for error in (not_leader, storage, not_there) * 3:
            brokers.fail(offsets, error)
            with pytest.raises(StreamError, match="does not answer"):
                found.partitions(())
            assert has_all()
        for partition in (0, 1):
            brokers.lead("clicks", partition, 1)
        assert has_all()
        brokers.set_up(1, False)
        with pytest.raises(StreamError, match="does not answer"):
            found.partitions(())
        for partition in (0, 1):
            brokers.lead("clicks", partition, 2)

        def has_all_again():
            with contextlib.suppress(StreamError):
                return has_all()

        wait_until(has_all_again)


def test_a_topic_that_is_made_anew_has_another_id(kafka):
    found = [""]
    with contextlib.closing(Kafka(kafka.address, "anew")) as source:

        def has_new_id():
            return source.partitions(["anew/0"])["anew/0"].id not in found

        for _ in range(2):
            kafka.topic("anew", 1)
            wait_until(has_new_id)
            found.append(source.partitions(["anew/0"])["anew/0"].id)
            kafka.delete("anew")


@pytest.mark.parametrize(
    "wrong",
    [{"columns": {"a": "float16"}}, {"columns": {"a": "longdouble"}}, {"start": float("nan")}, {"stop": float("inf")}],
)
def test_arguments_that_can_t_be_used_are_errors(wrong):
    with pytest.raises(UsageError, match="of Kafka is invalid"):
        Kafka("broker:9092", "clicks", **wrong)
