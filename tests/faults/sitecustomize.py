"""Python imports this first, in each process of a job that a test starts with `Faults` (faults.py)."""

import os

if "ELASTICCB_FAULTS" in os.environ:
    import faulty_process

    faulty_process.wait_for_role()
