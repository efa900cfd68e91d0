"""Broken messages to a real master; `python tests/fuzzing/fuzz.py` sends more of them."""

from master_calls import MasterFuzzer, begin_job, serving


def test_broken_messages_are_refused_in_words_and_the_master_goes_on():
    with serving() as master:
        fuzzer = MasterFuzzer(0, master.address)
        for _ in range(30):
            begin_job(master)
            fuzzer.run(100)
        fuzzer.close()
    assert not fuzzer.surprises
    assert fuzzer.codes["OK"] > 300
    assert fuzzer.codes["FAILED_PRECONDITION"] > 50
