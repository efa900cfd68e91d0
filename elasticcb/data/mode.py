"""The purpose of a task's data, for messages."""

from __future__ import annotations

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.settings import Mode

# By type of a task with data; the proto and `Mode` use the same names.
MODES = {pb.TaskType.Value(mode.name): mode for mode in Mode}
