"""The exception that a failed call raises: the user's own exception, as Keras would raise it, or a short one of
ours."""

from __future__ import annotations

import types

import keras

from elasticcb.errors import CallbackError, ElasticCBError, ModelFileError, UsageError, is_users_own
from elasticcb.settings.arguments import in_a_program


def as_the_user_expects(error: BaseException, hint: str) -> BaseException:
    """The exception to raise for `error`, without a cause.

    Args:
        hint: where to find details, for errors other than the user's own exception.
    """
    cause: BaseException | None = error
    while isinstance(cause, (CallbackError, ModelFileError)):
        cause = cause.__cause__
    if cause is not None and not isinstance(cause, ElasticCBError):
        return cause if cause is error else cause.with_traceback(_users_part(cause.__traceback__))
    if not isinstance(error, ElasticCBError):
        return error
    shown = "" if isinstance(error, UsageError) else hint  # its message is all there is
    parts = [in_a_program(str(error)), error.user_traceback.rstrip(), shown]
    return type(error)("\n\n".join(filter(None, parts)), error.user_traceback)


def _users_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The frames of the user's code if there are any, unless Keras is configured to show all frames."""
    if not keras.config.is_traceback_filtering_enabled():
        return trace
    own: list[types.TracebackType] = []
    frame = trace
    while frame is not None:
        if is_users_own(frame.tb_frame.f_code.co_filename):
            own.append(frame)
        frame = frame.tb_next
    shown: types.TracebackType | None = None
    for frame in reversed(own):
        shown = types.TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown or trace
