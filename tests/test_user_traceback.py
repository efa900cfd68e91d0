"""What of a traceback is shown to users."""

import types

import tensorflow as tf

from elasticcb.errors import ElasticCBError, describe, user_traceback


def test_user_traceback_keeps_library_frames_when_there_are_no_others():
    module = types.ModuleType("site")
    code = compile("def fail():\n    raise ValueError('inside')", "/x/site-packages/library.py", "exec")
    exec(code, module.__dict__)
    try:
        tf.nest.map_structure(lambda _: module.fail(), [1])
    except ValueError as error:
        text = user_traceback(error)
    assert "test_user_traceback.py" in text
    assert "library.py" not in text
    assert text.endswith("ValueError: inside\n")


class Silent(Exception):
    def __str__(self):
        raise RuntimeError


def test_messages_can_be_sent_whatever_the_users_errors_say():
    error = ValueError("a name that is not UTF-8: \udcff")
    for text in (describe(error), user_traceback(error), str(ElasticCBError(str(error)))):
        assert "\\udcff" in text.encode().decode()
    assert describe(Silent()) == "Silent: (its message can't be shown)"
