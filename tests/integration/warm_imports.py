"""What the process that tests fork (warm.py) imports before it is forked."""

import gc
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from elasticcb.launch.fork_process import import_roles

import_roles()
gc.collect()
gc.freeze()
