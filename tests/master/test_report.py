"""What the master tells a person, and what of that the job's page keeps."""

from elasticcb.cli.progress import Display
from elasticcb.master.report import KeptDisplay
from elasticcb.master.snapshot import EpochEnd, JobSnapshot

# Of the command that made the display, which ends it itself.
NOT_OF_THE_MASTER = {"finish", "close"}


class Heard:
    """A display that writes down how it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))


def test_the_master_has_all_that_a_display_is_told_by_it():
    asked = {name for name in vars(Display) if not name.startswith("_")} - NOT_OF_THE_MASTER
    kept = KeptDisplay(Heard(), lambda kind, text: None)
    assert {name for name in asked if callable(getattr(kept, name, None))} == asked


def test_messages_and_evaluations_are_kept_and_shown():
    display, kept = Heard(), []
    both = KeptDisplay(display, lambda kind, text: kept.append((kind, text)))
    end = EpochEnd(epoch=1, epochs=2, seconds=3.0, steps=4, logs={"loss": 0.5})
    both.message("A worker is lost.")
    both.evaluated("Evaluation at version 3: loss 0.5", of_epoch=True)
    both.epoch_ended(end)
    both.update(JobSnapshot())
    assert kept == [
        ("note", "A worker is lost."),
        ("note", "Evaluation at version 3: loss 0.5"),
        ("note", "Epoch 1/2 is done in 3.0 s: loss 0.5000"),
    ]
    assert display.calls == [
        ("message", "A worker is lost."),
        ("evaluated", "Evaluation at version 3: loss 0.5", True),
        ("epoch_ended", end),
        ("update", JobSnapshot()),
    ]
