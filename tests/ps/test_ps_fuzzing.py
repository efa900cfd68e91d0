"""Broken messages to a real parameter server; `python tests/ps/fuzzing.py` sends more of them."""

import logging

from fuzzing import Fuzzer


def test_broken_messages_are_refused_in_words_and_the_server_goes_on(monkeypatch, caplog):
    monkeypatch.setattr("elasticcb.frame_memory.is_supported", lambda: False)
    caplog.set_level(logging.CRITICAL)
    fuzzer = Fuzzer(seed=0)
    try:
        fuzzer.run(1_000)
        assert not fuzzer.surprises
        assert min(fuzzer.codes["INVALID_ARGUMENT"], fuzzer.codes["OK"]) > 100
        assert fuzzer.still_serves()
    finally:
        fuzzer.close()
