"""Checks all flags of a job before anything starts, and builds its `JobSettings`.

No check imports TensorFlow or runs the user's code.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath

from elasticcb.cli.model_file import ModelFile, check_zoo, find_model_file
from elasticcb.cluster.registry import backends, contradictions, missing_for
from elasticcb.data.files import expanded_glob
from elasticcb.data.formats import is_stream
from elasticcb.errors import UsageError
from elasticcb.process.system import missing_module
from elasticcb.settings import Command, Given
from elasticcb.settings.checks import in_words, problems_of
from elasticcb.settings.choices import PREDICTION_FORMATS
from elasticcb.settings.definition import Kind
from elasticcb.settings.names import SETTINGS
from elasticcb.storage.local_folders import problem_of_folder
from elasticcb.storage.remote_files import is_url, password_in, problem_of

_ENDINGS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".npz": "npz"}


def names_predictions(given: Given) -> bool:
    """Whether `--output` is a file of predictions.

    In a config file shared with `train`, it is the folder of the SavedModel, which `predict` ignores.
    """
    if not given["output"]:
        return False
    return "output" not in given.from_file or bool(prediction_format(given))


def prediction_format(given: Given) -> str:
    """The format of the file; "" if unknown."""
    return given["output_format"] or _ENDINGS.get(PurePath(given["output"] or "").suffix.lower(), "")


def check_prediction_output(given: Given) -> Iterator[str]:
    """Messages about problems with the flags."""
    if given.command is not Command.PREDICT:
        return
    if not names_predictions(given):
        if "output_format" in given:
            flag = given.shown("output_format")
            yield (
                f"{flag} sets the format of --output, but --output is missing. Add --output=FILE, or remove "
                "--output_format."
            )
        return
    flag = given.shown("output")
    format = prediction_format(given)
    if not format:
        yield (
            f"{flag} has no known file extension. Expected {', '.join(_ENDINGS)}; or add --output_format, one of "
            f"{', '.join(PREDICTION_FORMATS)}."
        )
    elif format == "parquet" and (missing := missing_module(flag, "parquet", "pyarrow")):
        yield missing
    if is_url(given["output"]):
        yield f"{flag} is a URL. Expected a local file. Copy it when the job is done."


def check_prediction_file(given: Given) -> Iterator[str]:
    """Messages about why the file can't be written."""
    if given.command is not Command.PREDICT or not names_predictions(given) or is_url(given["output"]):
        return
    path, flag = given.path("output"), given.name("output")
    assert path is not None
    if path.is_dir():
        yield f"{flag} names {path}, which is a folder. Expected a file for the predictions, such as {path}.csv."
        return
    if os.path.lexists(path):
        yield (
            f"{flag} names {path}, which exists; `predict` does not overwrite files. Remove the file, or choose "
            "another file."
        )
        return
    problem = problem_of_folder(path.parent)
    if problem:
        yield f"{flag} names {path}, but {path.parent} {problem}. Choose a file in another folder."


_GLOB = frozenset("*?[")


def validate(given: Given) -> dict[str, str]:
    """Checks everything; returns the resolved data origins, by flag.

    Raises:
        UsageError: the message lists all problems, not only the first.
    """
    problems = [problem for check in (*_FLAG_CHECKS, *_FILE_CHECKS) for problem in check(given)]
    origins, found = _check_files(given)
    problems.extend(found)
    if problems:
        raise UsageError(in_words(given.command.value, problems))
    return origins


def validate_flags(given: Given, check_paths: Callable[[Given], Iterator[str]]) -> None:
    """Like `validate`, for a job whose paths are those of another machine: they are not opened."""
    problems = [problem for check in (*_FLAG_CHECKS, check_paths) for problem in check(given)]
    if problems:
        raise UsageError(in_words(given.command.value, problems))


# ---------------------------------------------------------------- flags that contradict each other


def _check_settings(given: Given) -> Iterator[str]:
    settings = given.settings()
    yield from problems_of(settings, given)
    yield from contradictions(settings, given)


def _check_cluster(given: Given) -> Iterator[str]:
    backend = backends().get(given["cluster"])
    if backend is None:
        return  # already reported
    by_panel = {each.panel: each for each in backends().values() if each.panel}
    for name in sorted(given.values.keys() - given.from_file):
        needed = by_panel.get(SETTINGS[name].panel, backend)
        if needed is not backend:
            yield f"{given.shown(name)} applies only to --cluster={needed.name}."
    yield from backend.mistakes(given)


def _check_follow(given: Given) -> Iterator[str]:
    if given["follow"] and given["dry_run"] and given.command is Command.EVALUATE:
        yield "--dry_run applies only to `train`. Remove it."
    if given.command is Command.EVALUATE and not given["follow"]:
        for name in ("follow_timeout", "max_evaluations"):
            if name in given:
                yield (f"{given.shown(name)} applies only to --follow. Add --follow, or remove --{name}.")


# ---------------------------------------------------------------- files and folders


_INITIAL = ("checkpoint_dir_for_init", "init_from")  # initial checkpoints
_MAY_BE_REMOTE = frozenset({"checkpoint_dir", "export_dir", *_INITIAL})  # and the folder of a training job


def _check_folders(given: Given) -> Iterator[str]:
    for name, hint in (
        ("checkpoint_dir", ""),
        ("export_dir", ""),
        ("output", " To send the export elsewhere, add elasticcb.callbacks.ModelUploader to the callbacks."),
        ("job_dir", ""),
        *((name, "") for name in _INITIAL),
    ):
        if name == "output" and given.command is not Command.TRAIN:
            continue
        may_be_remote = name in _MAY_BE_REMOTE or (name == "job_dir" and given.command is Command.TRAIN)
        if may_be_remote and is_url(given[name] or ""):
            problem = problem_of(given[name])
            if problem:
                yield f"{given.name(name)} names a URL that {problem}"
            elif name == "job_dir" and not given["checkpoint_interval"]:
                yield (
                    f"{given.shown(name)} is a URL, from which other machines resume the job, but "
                    f"{given.shown('checkpoint_interval')} keeps nothing to resume from. Remove one of "
                    "the two."
                )
            elif given["follow"] and given.command is Command.EVALUATE:
                yield f"{given.shown(name)} is a URL. --follow needs a local folder."
        elif is_url(given[name] or ""):
            yield f"{given.shown(name)} is a URL. Expected a local folder.{hint}"
        elif name not in _INITIAL and given.command in SETTINGS[name].commands:
            path = given.path(name) or (Path.cwd() / "jobs" if name == "job_dir" else None)
            problem = "" if path is None else problem_of_folder(path)
            if problem:
                yield f"{given.name(name)} names {path}, which {problem}. Choose another folder."
            elif path is not None and name == "output" and problem_of_folder(path.parent):
                # The export is written next to its folder, and then replaces it.
                yield f"{given.name(name)} names {path}, but {path.parent} {problem_of_folder(path.parent)}."
    kept = given["bad_records"] if given.command is Command.TRAIN else ""
    if is_url(kept) and (problem := problem_of(kept)):
        yield f"{given.name('bad_records')} names a URL that {problem}"
    output = given.path("output") if given.command is Command.TRAIN else None
    if given["numbered"] and output is None:
        yield f"{given.name('numbered')} needs --output=FOLDER, below which the numbered folders are made."
    if output is not None and output.is_dir() and "://" not in given["output"]:
        yield from _check_replaceable(given, output)


def _check_replaceable(given: Given, output: Path) -> Iterator[str]:
    if given["numbered"]:
        if (output / "saved_model.pb").exists():
            yield (
                f"{given.name('output')} names {output}, which is a SavedModel itself. With --numbered, choose a "
                "folder for numbered SavedModels."
            )
    elif any(output.iterdir()) and not (output / "saved_model.pb").exists():
        yield (
            f"{given.name('output')} names {output}, which contains files but no SavedModel. The export replaces its "
            f"folder, so they would be lost. Choose a new folder, such as {output / 'saved_model'}."
        )
    checkpoints = given.path("checkpoint_dir")
    if checkpoints is not None and checkpoints.is_relative_to(output):
        yield (
            f"--checkpoint_dir {checkpoints} is inside --output {output}, which the export replaces. Choose two "
            "separate folders."
        )


def _check_machine(given: Given) -> Iterator[str]:
    yield from missing_for(given.settings().cluster)


def _check_initial(given: Given) -> Iterator[str]:
    for name in _INITIAL:
        if given.command in SETTINGS[name].commands:
            yield from _check_initial_folder(name, given)


def _check_initial_folder(name: str, given: Given) -> Iterator[str]:
    path = given.path(name)
    if path is None or "://" in given[name]:
        return
    flag = given.name(name)
    expected = "Expected a folder written by `train --checkpoint_dir`, or the folder model of a job."
    if given.command is Command.EVALUATE and given["follow"]:
        # The training job may not have written anything yet.
        if path.exists() and not path.is_dir():
            yield f"{flag} names {path}, which is not a folder. {expected}"
        elif (path / MANIFEST).is_file():
            yield f"{flag} names {path}, a single checkpoint. --follow needs the folder that contains it: {path.parent}"
    elif not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        yield f"{flag} names {path}, which {problem}. {expected}"
    # A checkpoint is valid only with its manifest, which is written last.
    elif not (path / MANIFEST).is_file() and not any(path.glob(f"*/{MANIFEST}")):
        yield f"{flag} names {path}, which contains no complete checkpoint (no {MANIFEST}). {expected}"


MANIFEST = "manifest.json"


def _check_files(given: Given) -> tuple[dict[str, str], list[str]]:
    """The model file and the data; the second list has messages about problems."""
    problems: list[str] = []
    model: ModelFile | None = None
    zoo = given.path("model_zoo")
    if zoo is not None:
        try:
            check_zoo(zoo, given.name("model_zoo"))
            if given["model_def"]:
                model = find_model_file(zoo, given["model_def"], given.shown("model_def"))
        except UsageError as error:
            problems.append(str(error))
    if model is not None:
        problems.extend(_check_model_names(given, model))
    # If the file can't be read, it is unknown whether it has a reader, which may accept other names than paths.
    custom_reader = "custom_data_reader" in given if model is None else model.may_define(given["custom_data_reader"])
    origins: dict[str, str] = {}
    for option in SETTINGS.values():
        origin = given[option.name]
        if option.kind is not Kind.DATA or given.command not in option.commands or not (origin and origin.strip()):
            continue
        may_be_empty = option.name == "training_data" and bool(given["follow"])
        base, flag = given.base(option.name), given.name(option.name)
        resolved, wrong = _resolve_origin(origin, base, flag, custom_reader, may_be_empty)
        origins[option.name] = resolved
        problems.extend(wrong)
    return origins, problems


def _check_model_names(given: Given, model: ModelFile) -> Iterator[str]:
    name = given["model_def"].rpartition(".")[2]
    if not model.may_define(name):
        yield model.complaint(name, given.shown("model_def"))
    if given.command is Command.TRAIN:
        yield from _check_trainable(given, model)
    takers = (given["callbacks"], "PredictionOutputsProcessor")
    if given.command is Command.PREDICT and not names_predictions(given) and not any(map(model.may_define, takers)):
        yield (
            f"The predictions would be lost: {model.path} has no `{given['callbacks']}`, and --output is missing. Add "
            "--output=FILE, such as --output=predictions.csv, or define callbacks in the model file."
        )
    # A default name may be missing (a compiled model needs no `loss`); an explicitly given one may not.
    for option in SETTINGS.values():
        if option.kind is Kind.NAME and option.name in given and given[option.name]:
            if given[option.name] == option.default or given.command not in option.commands:
                continue
            if not model.may_define(given[option.name]):
                yield model.complaint(given[option.name], given.name(option.name))


def _check_trainable(given: Given, model: ModelFile) -> Iterator[str]:
    loss, optimizer = given["loss"], given["optimizer"]
    if "optimizer" not in given and not model.may_define(optimizer) and not model.can_compile():
        yield (
            f"{model.path} has no optimizer to train with. Define `{optimizer}()`, which returns a Keras optimizer, or "
            "return a compiled model."
        )
    if "loss" not in given and not model.may_define(loss) and not model.can_lose():
        yield (
            f"{model.path} has no loss to train with. Define `{loss}(labels, predictions)`, or return a model that is "
            "compiled with a loss."
        )


_FLAG_CHECKS: tuple[Callable[[Given], Iterator[str]], ...] = (
    _check_settings,
    _check_follow,
    check_prediction_output,
    _check_cluster,
)
_FILE_CHECKS: tuple[Callable[[Given], Iterator[str]], ...] = (
    _check_folders,
    check_prediction_file,
    _check_machine,
    _check_initial,
)


# ---------------------------------------------------------------- origins of records


def _resolve_origin(
    origin: str, base: Path, flag: str, custom_reader: bool, may_be_empty: bool
) -> tuple[str, list[str]]:
    """Returns `origin` with local paths made absolute, relative to `base`; and messages about problems.

    It is a path, a glob, a list of these, a URL, or any text that a custom reader understands.

    With a custom reader, a part that is not a file is passed on unchanged: it may be the name of a table, for example.
    A bare word counts as a folder only without a custom reader. A part is invalid if it is empty or, without a custom
    reader, if it matches no file or folder.
    """
    parts = [origin] if is_stream(origin) else [part.strip() for part in origin.split(",")]  # of several servers
    if not all(parts):
        problem = f"{flag}={origin!r} is empty or has an empty part."
        return origin, [f"{problem} Expected a path, folder, glob or URL, or several of these separated by commas."]
    # A file name may contain a comma.
    if os.path.isfile(_absolute(base, origin)):  # not Path.exists, which fails for a long list of files
        return str(_absolute(base, origin)), []
    resolved, problems = [], []
    for part in parts:
        try:
            resolved.append(_resolve_part(part, base, flag, custom_reader, may_be_empty))
        except UsageError as error:
            problems.append(str(error))
    return ",".join(resolved), problems


def _resolve_part(part: str, base: Path, flag: str, custom_reader: bool, may_be_empty: bool) -> str:
    if "://" in part:
        if not custom_reader and (problem := password_in(part)):
            raise UsageError(f"{flag} names a URL that {problem}")
        return part
    path = _absolute(base, part)
    try:
        if path.is_file():
            return str(path)
        if path.is_dir():
            if custom_reader and os.sep not in part:
                return part
            if not custom_reader and not may_be_empty and not any(path.iterdir()):
                raise UsageError(f"{flag} names the folder {path}, which is empty. Expected files with records.")
            return str(path)
        if _GLOB & set(part):
            if may_be_empty or any(expanded_glob(str(path))):
                return str(path)
            problem = f"{flag} names {path}, which matches no file."
        else:
            problem = f"{flag} names {path}, which does not exist."
        if not custom_reader:
            problem += _nearest(path)
    except OSError as error:
        problem = f"{flag} names {path}, which can't be read: {error}."
    if custom_reader:
        return part
    raise UsageError(
        f"{problem} Expected a file, folder, glob or URL, or several of these separated by commas. (Other names need "
        "a `custom_data_reader` in the model file.)"
    )


def _absolute(base: Path, text: str) -> Path:
    return Path(os.path.abspath(base / Path(text).expanduser()))


def _nearest(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        while not parent.is_dir():
            parent = parent.parent
        return f" The path exists up to {parent}."
    close = difflib.get_close_matches(path.name, [entry.name for entry in parent.iterdir()], n=1)
    return f" Did you mean {parent / close[0]}?" if close else ""
