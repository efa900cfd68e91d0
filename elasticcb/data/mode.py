"""What is done with the data of a task, as messages say it."""

from __future__ import annotations

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.settings import Mode

# By type of a task, of those that have data; the proto and `Mode` have the same names.
MODES = {pb.TaskType.Value(mode.name): mode for mode in Mode}
