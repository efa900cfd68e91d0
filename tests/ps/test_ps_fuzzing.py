"""Broken messages to real parameter servers; `python tests/fuzzing/fuzz.py` sends more of them."""

import gc
import logging
import threading

import pytest
from waiting import wait_until

from elasticcb.rpc import shared_frames
from server_calls import ServerFuzzer, serving


@pytest.mark.parametrize("shares", [True, False])
def test_broken_messages_are_refused_in_words_and_the_server_goes_on(tmp_path, caplog, shares, monkeypatch):
    monkeypatch.setattr(shared_frames, "is_supported", lambda: shares)
    caplog.set_level(logging.CRITICAL)
    with serving(tmp_path / "job") as addresses:
        fuzzer = ServerFuzzer(0, addresses, tmp_path)
        fuzzer.run(1_000)
        assert not fuzzer.surprises
        assert min(fuzzer.codes["INVALID_ARGUMENT"], fuzzer.codes["OK"]) > 100
        assert fuzzer.still_serves()
        fuzzer.close()


@pytest.fixture
def no_collector():
    """What is abandoned stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def links():
    return sum(thread.name == "link" for thread in threading.enumerate())


def test_models_that_take_the_place_of_others_leave_no_connections(tmp_path, no_collector):
    before = links()
    with serving(tmp_path / "job") as addresses:
        fuzzer = ServerFuzzer(0, addresses, tmp_path)
        (move,) = (calls for calls in fuzzer._sequences if any(call.method == "Move" for call in calls))
        for _ in range(5):
            for call in (fuzzer._beginning(), *move):
                fuzzer._send(call, broken=False)
        most = before + 2 * len(addresses)  # the fuzzer's
        wait_until(lambda: links() <= most, 10)
        fuzzer.close()
