"""`handle_restartable_error`: turns the loss of a cluster into the exit code on which platforms restart a program."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from elasticcb.errors import GO_ON, ClusterLostError, ConnectionLostError, UsageError
from elasticcb.process.log_files import say


@contextlib.contextmanager
def handle_restartable_error(exit_code: int = GO_ON) -> Iterator[None]:
    """Context manager: if the cluster is lost, or on SIGTERM, the program exits so that its platform restarts it.

    - A `ClusterLostError` or `ConnectionLostError` (processes are gone and can't be replaced) is printed to standard
      error and becomes a `SystemExit`. Other errors pass through.
    - SIGTERM, which platforms send before they reclaim a machine, ends the program like Ctrl-C, with the same exit
      code: a running `fit` finishes its batches and saves the servers' state. A second SIGTERM ends it at once.

    With a `Cluster(job_dir=…)`, the next run of the program resumes where this one stopped.

    Args:
        exit_code: 75 (EX_TEMPFAIL of sysexits.h), or the exit code on which the platform restarts a program, such as
            143 for Kubeflow's restart policy ExitCode.

    Raises:
        SystemExit: see above.
        UsageError: `exit_code` does not indicate a failure.

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
        say(f"{error}\nThe cluster is lost. The program exits with code {exit_code}, so that it can be restarted.")
        raise SystemExit(exit_code) from error
    except KeyboardInterrupt as error:
        if not terminated:
            raise
        say(f"Received SIGTERM. The program exits with code {exit_code}, so that it can be restarted.")
        raise SystemExit(exit_code) from error
    finally:
        if before is not None:  # else this is another thread, or C has installed the handler
            signal.signal(signal.SIGTERM, before)
