"""`handle_restartable_error`: a lost cluster becomes the exit code on which platforms start a program again."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from elasticcb.errors import GO_ON, ClusterLostError, ConnectionLostError, UsageError
from elasticcb.process.logs import say


@contextlib.contextmanager
def handle_restartable_error(exit_code: int = GO_ON) -> Iterator[None]:
    """Within it, the loss of a cluster, or SIGTERM, ends the program so that its platform starts it again.

    - A `ClusterLostError` or `ConnectionLostError` (processes are gone, and nothing may take their places) is told on
      standard error and becomes a `SystemExit`. All other errors, of the program itself, pass through.
    - SIGTERM, by which platforms take machines away, ends the program like Ctrl-C, with the same exit code: a `fit`
      under way finishes its batches and writes down what the servers hold. A second one ends it at once.

    With a `Cluster(job_dir=…)`, the next run of the program goes on where this one was.

    Args:
        exit_code: 75 (EX_TEMPFAIL of sysexits.h), or what the platform takes for a program to be started again, as
            143 for Kubeflow's restart policy ExitCode.

    Raises:
        SystemExit: see above.
        UsageError: `exit_code` is none that says that something failed.

    Example:

        with elasticcb.handle_restartable_error(), elasticcb.Cluster(num_workers=4, job_dir="jobs/digits") as cluster:
            cluster.fit(model, x, y, epochs=10)
    """
    if isinstance(exit_code, bool) or not isinstance(exit_code, int) or not 1 <= exit_code <= 255:
        raise UsageError(f"`exit_code` must be a whole number between 1 and 255. Received: exit_code={exit_code!r}")
    terminated = False

    def terminate(number: int, frame: object) -> None:
        nonlocal terminated
        terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if main else None
    try:
        yield
    except (ClusterLostError, ConnectionLostError) as error:
        say(f"{error}\nThe cluster is lost; the program ends with the exit code {exit_code}, to be started again.")
        raise SystemExit(exit_code) from error
    except KeyboardInterrupt as error:
        if not terminated:
            raise
        say(f"SIGTERM came; the program ends with the exit code {exit_code}, to be started again.")
        raise SystemExit(exit_code) from error
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
