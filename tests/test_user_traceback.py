"""What of a traceback is shown to users."""

import types

import tensorflow as tf

from elasticcb.errors import user_traceback


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
