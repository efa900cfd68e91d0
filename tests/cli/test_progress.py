from __future__ import annotations

import dataclasses
import io
import json
import re

import pytest
from rich.console import Console

from elasticcb.cli.figures import epoch_line, format_seconds, status_parts
from elasticcb.cli.job import show_header
from elasticcb.cli.progress import LiveDisplay, PlainDisplay, make_display, start_spinner, summary_lines
from elasticcb.master.snapshot import EpochEnd, JobSnapshot, ProcessCounts, SavedModelInput
from elasticcb.process.log_files import FORMAT_VARIABLE
from elasticcb.settings import Command, JobSettings, ModelSettings

STATUS = JobSnapshot(
    command=Command.TRAIN,
    phase="training",
    ready=True,
    epoch=2,
    epochs=3,
    records_per_epoch=(1000, 500),
    records_total=3000,
    records_per_second=812.4,
    version=47,
    loss=0.123456789,
    metrics={"accuracy": 0.95123},
    workers=ProcessCounts(up=1, planned=2),
    servers=ProcessCounts(up=1, planned=1),
    tasks={("training", "todo"): 10, ("evaluation", "todo"): 2, ("training", "doing"): 2},
    seconds_left=75.0,
)
EPOCH = EpochEnd(
    epoch=2,
    epochs=10,
    seconds=12.34,
    steps=400,
    logs={"loss": 0.655, "auc": 0.71, "val_loss": 0.66724, "val_auc": 0.0001234},
)
SUMMARY = JobSnapshot(
    command=Command.TRAIN,
    seconds=61.2,
    records_per_epoch=(1500, 1500),
    records_evaluated=297,
    records_repeated=64,
    tasks_retried=1,
    workers=ProcessCounts(lost=1, replaced=1),
    version=47,
    metrics={"accuracy": 0.95},
    saved_model_path="/tmp/my export",
    checkpoint_path="/tmp/checkpoints/version-47",
    export_path="s3://models/my clicks",
    export_version=46,
    directory="/tmp/jobs/digits",
)


class Clock:
    """Shows the time it is set to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_come_every_ten_seconds_and_at_once_for_a_new_phase_and_when_all_processes_are_up():
    clock, stream = Clock(), io.StringIO()
    display = PlainDisplay("digits", stream, clock=clock)
    moments = [(0.0, 0), (5.0, 1), (12.0, 2), (25.0, 2), (45.0, 3)]
    for clock.now, version in moments:
        display.update(dataclasses.replace(STATUS, version=version))
    lines = stream.getvalue().splitlines()
    assert [line.split("version ")[1].split(",")[0] for line in lines[1:]] == ["2", "3"]
    assert len(lines) == 3
    display.update(dataclasses.replace(STATUS, version=3, phase="evaluating"))
    display.update(dataclasses.replace(STATUS, version=4))  # the phases of each epoch would be many lines
    assert [line.startswith("[digits] evaluating:") for line in stream.getvalue().splitlines()[3:]] == [True]
    for up in (1, 2, 2):
        display.update(dataclasses.replace(STATUS, version=4 + up, workers=ProcessCounts(up=up, planned=2)))
    assert ["workers 2/2" in line for line in stream.getvalue().splitlines()[4:]] == [True]


def test_a_plain_line_holds_all_figures():
    stream = io.StringIO()
    PlainDisplay("digits", stream).update(STATUS)
    assert stream.getvalue() == (
        "[digits] training: epoch 2/3, 50% (1,500/3,000 records), 812 records/s, version 47, loss 0.1235, "
        "val_accuracy 0.9512, workers 1/2, servers 1/1, tasks 12 to do, 2 running, 1:15 left\n"
    )


@pytest.fixture
def as_json(monkeypatch):
    monkeypatch.setenv(FORMAT_VARIABLE, "json")


def test_all_that_a_master_prints_is_json_where_its_log_is(as_json, capsys):
    show_header(JobSettings(command=Command.TRAIN, name="digits", directory="/job", model=ModelSettings()))
    display = PlainDisplay("digits")
    display.update(STATUS)
    display.message('worker 1 was lost: "a\nb"')
    display.finish(SUMMARY)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["message"].splitlines()[0] for line in lines] == [
        "[digits] The job's folder is /job",
        "[digits] Status: elasticcb status /job",
        f"[digits] training: {', '.join(status_parts(STATUS))}",
        '[digits] worker 1 was lost: "a',
        "Training is done, in 1:01.",
    ]
    assert lines[-1]["message"].splitlines() == summary_lines(SUMMARY)
    assert {(line["role"], line["level"], line["logger"]) for line in lines} == {("master", "INFO", "elasticcb.output")}
    assert all(line["time"].endswith("Z") for line in lines)


def test_a_person_at_a_terminal_gets_no_json(as_json):
    stream = io.StringIO()
    stream.isatty = lambda: True
    PlainDisplay("digits", stream).message("It begins")
    assert stream.getvalue() == "[digits] It begins\n"


def test_the_live_display_shows_the_figures_and_leaves_the_summary_unbroken():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=60, legacy_windows=False)
    display = LiveDisplay(console)
    display.update(STATUS)
    display.message("worker 1 was lost [and this is no markup]")
    display.update(dataclasses.replace(STATUS, version=48))
    display.finish(SUMMARY)
    display.close()
    shown = stream.getvalue()
    assert "epoch 2/3" in shown
    assert "[and this is no markup]" in shown
    assert "  saved_model_cli show --dir '/tmp/my export' --tag_set serve" in shown


def test_the_end_of_an_epoch_is_one_line_that_stays():
    live, plain = io.StringIO(), io.StringIO()
    for display in (LiveDisplay(Console(file=live, width=100)), PlainDisplay("digits", plain)):
        display.evaluated("Evaluation at version 47: loss 0.6672, auc 0.7000", of_epoch=True)
        display.epoch_ended(EPOCH)
        display.evaluated("Evaluation at version 50: loss 0.6000", of_epoch=False)
    line = "Epoch  2/10  12.3s  31ms/step  loss 0.6550  auc 0.7100  val_loss 0.6672  val_auc 0.0001234"
    assert live.getvalue().splitlines() == [line, "Evaluation at version 50: loss 0.6000"]
    assert plain.getvalue().splitlines() == [
        "[digits] Evaluation at version 47: loss 0.6672, auc 0.7000",
        f"[digits] {line}",
        "[digits] Evaluation at version 50: loss 0.6000",
    ]


def test_the_line_of_an_epoch_leaves_out_what_has_no_room_or_is_not_known():
    assert epoch_line(EPOCH, 75) == "Epoch  2/10  12.3s  loss 0.6550  val_loss 0.6672  val_auc 0.0001234"
    assert epoch_line(EPOCH, 50) == "Epoch  2/10  12.3s  loss 0.6550  val_loss 0.6672"
    assert epoch_line(EPOCH, 1) == ""
    assert epoch_line(dataclasses.replace(EPOCH, steps=0, logs={})) == "Epoch  2/10"  # it was of another master
    for other in ({"steps": 0}, {"seconds": 1.2}, {"epoch": 10, "steps": 4000}):
        assert epoch_line(dataclasses.replace(EPOCH, **other)).index("loss") == epoch_line(EPOCH).index("loss")


@pytest.mark.parametrize("width", [20, 60, 200])
@pytest.mark.parametrize("status", [STATUS, JobSnapshot(phase="waiting for parameter servers")])
def test_the_grid_never_wraps(width, status):
    stream = io.StringIO()
    display = LiveDisplay(Console(file=stream, force_terminal=True, width=width, legacy_windows=False))
    display.update(status)
    display.close()
    lines = re.sub("\x1b\\[[?\\d;]*\\w", "", stream.getvalue()).replace("\r", "\n").splitlines()
    assert lines
    assert max(map(len, lines)) < width


def grid(width, status=STATUS):
    """The labels that a terminal so wide has room for."""
    stream = io.StringIO()
    display = LiveDisplay(Console(file=stream, force_terminal=True, width=width, color_system=None))
    display.update(status)
    display.close()
    return next(line.split() for line in stream.getvalue().splitlines() if "loss" in line)


def test_the_grid_keeps_loss_and_workers_where_there_is_little_room():
    assert grid(200) == ["records/s", "version", "loss", "val_accuracy", "workers", "servers", "tasks"]
    assert grid(60) == ["records/s", "loss", "val_accuracy", "workers", "servers"]
    assert grid(40) == ["records/s", "loss", "workers", "servers"]
    assert grid(20) == ["loss", "workers"]


def test_a_terminal_that_has_become_narrower_keeps_no_rest_of_broken_lines():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    display = LiveDisplay(console)
    display.update(STATUS)
    display.message("before")
    console.width = 50
    display.message("after")
    display.close()
    rows_up = stream.getvalue().partition("before")[2].partition("after")[0].count("\x1b[1A")
    assert rows_up >= 2 + 3  # three lines, each of which fills a second row now


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_are_left_out_where_they_are_not_wanted(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    stream = io.StringIO()
    display = LiveDisplay(Console(file=stream, force_terminal=True, width=80))
    display.update(STATUS)
    display.close()
    assert "\x1b[3" not in stream.getvalue()


def test_a_terminal_that_can_not_redraw_lines_gets_plain_ones(monkeypatch):
    settings = JobSettings(command=Command.TRAIN, name="a", directory="/job", model=ModelSettings())
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(settings), PlainDisplay)
    start_spinner(settings).stop()
    assert terminal.getvalue() == ""
    monkeypatch.setenv("TERM", "xterm")
    display = make_display(settings)
    display.close()
    assert isinstance(display, LiveDisplay)
    terminal.isatty = lambda: False
    assert isinstance(make_display(settings), PlainDisplay)


@pytest.mark.parametrize(("kind", "begins"), [("dumb", "[a] The job's folder"), ("xterm", "The job's folder")])
def test_the_first_lines_have_the_name_of_the_job_where_the_others_have_it(kind, begins, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", kind)
    show_header(JobSettings(command=Command.TRAIN, name="a", directory="/job", model=ModelSettings()))
    assert terminal.getvalue().startswith(begins)


def test_a_display_that_is_closed_early_gives_the_terminal_back():
    stream = io.StringIO()
    display = LiveDisplay(Console(file=stream, force_terminal=True, width=60))
    display.close()
    display.update(STATUS)
    display.update(STATUS)
    display.close()
    assert "\x1b[?25l" not in stream.getvalue()  # the cursor was never hidden


def test_the_summary_has_metrics_and_paths_first_then_the_accounting_then_faults_and_logs():
    lines = summary_lines(SUMMARY)
    assert lines[0] == "Training is done, in 1:01."
    assert lines[2:4] == ["Metrics of the last evaluation:", "  accuracy  0.9500"]
    assert lines[5] == "SavedModel: /tmp/my export"
    assert lines[lines.index("The model, as a checkpoint: /tmp/checkpoints/version-47") + 1 :] == [
        "",
        "Exports for serving, up to version 46: s3://models/my clicks",
        "Serve the newest with: elasticcb serve 's3://models/my clicks'",
        "",
        "  records trained                   3,000 (2 epochs of 1,500)",
        "  records evaluated, once each      297",
        "  model version                     47",
        "",
        "  workers lost                      1 (1 replaced)",
        "  task retries                      1",
        "  duplicate records (at most)       64",
        "",
        "Logs: /tmp/jobs/digits/logs",
    ]


def test_a_job_in_which_nothing_went_wrong_has_no_faults_in_its_summary():
    lines = summary_lines(JobSnapshot(command=Command.TRAIN, seconds=1.0, records_per_epoch=(20,), version=3))
    assert lines == [
        "Training is done, in 1.0 s.",
        "",
        "  records trained                   20 (1 epoch of 20)",
        "  model version                     3",
    ]


@pytest.mark.parametrize(
    ("records", "shown"),
    [
        ((), "0"),
        ((100_000,) * 4, "400,000 (4 epochs of 100,000)"),
        ((120, 120, 96), "336 (2 epochs of 120, 1 of 96)"),
        ((5, 7, 7), "19 (1 epoch of 5, 2 of 7)"),
        (range(10, 20), "145 (10 epochs of 10 to 19)"),
    ],
)
def test_epochs_with_equally_many_records_share_a_place_in_the_summary(records, shown):
    lines = summary_lines(JobSnapshot(command=Command.TRAIN, records_per_epoch=tuple(records)))
    assert f"  {'records trained':<34}{shown}" in lines


def test_a_fault_of_servers_tells_how_long_the_slowest_recovery_took():
    job = JobSnapshot(
        command=Command.TRAIN,
        servers=ProcessCounts(lost=2, replaced=1),
        longest_recovery_seconds=2.5,
        updates_lost=1200,
    )
    lines = summary_lines(job)
    assert f"  {'parameter servers lost':<34}2 (1 replaced, the slowest in 2.5 s)" in lines
    assert f"  {'updates lost with them':<34}1,200" in lines


def test_the_summarys_python_lines_are_python():
    inputs = (SavedModelInput(name="image", dtype="float32", shape=(None, 8, 8)),)
    odd = (SavedModelInput(name="hours-per-week", dtype="string", shape=(None, 1)),)
    for known, expected in (
        ((), "structured_input_signature"),
        (inputs, "image=tf.zeros([1, 8, 8], 'float32')"),
        (odd, "**{'hours-per-week': tf.zeros([1, 1], 'string')}"),
    ):
        lines = summary_lines(dataclasses.replace(SUMMARY, saved_model_inputs=known))
        start = lines.index("  import tensorflow as tf")
        code = "\n".join(line.strip() for line in lines[start : start + 3])
        compile(code, "summary", "exec")
        assert expected in code


def test_seconds_are_told_in_the_unit_that_fits():
    assert [format_seconds(s) for s in (0.42, 59.9, 75, 3700)] == ["0.4 s", "59.9 s", "1:15", "1:01:40"]
