"""Broken messages to real parameter servers; `python tests/fuzzing/fuzz.py` sends more of them."""

import logging

from server_calls import ServerFuzzer, serving


def test_broken_messages_are_refused_in_words_and_the_server_goes_on(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    with serving(tmp_path / "job") as addresses:
        fuzzer = ServerFuzzer(0, addresses, tmp_path)
        fuzzer.run(1_000)
        assert not fuzzer.surprises
        assert min(fuzzer.codes["INVALID_ARGUMENT"], fuzzer.codes["OK"]) > 100
        assert fuzzer.still_serves()
        fuzzer.close()
