import re

import pytest
import yaml
from zoo_jobs import ZOO

from elasticcb.cli.model_file import parse_model_file

FOLDERS = sorted(path.parent for path in ZOO.glob("*/job.yaml"))
PAGE = (ZOO.parent / "docs" / "model_zoo.md").read_text()


def test_every_folder_of_the_zoo_is_a_section_of_the_page():
    assert re.findall(r"^## (\w+)$", PAGE, re.MULTILINE) == re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert {folder.name for folder in FOLDERS} == set(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE))
    assert {path.name for path in ZOO.iterdir() if path.is_dir() and path.name != "__pycache__"} == {
        folder.name for folder in FOLDERS
    }


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_job_file_names_a_model_that_exists_and_the_command_to_run_it(folder):
    text = (folder / "job.yaml").read_text()
    command = f"elasticcb train --config model_zoo/{folder.name}/job.yaml"
    assert text.startswith(f"# {command}")
    assert command in PAGE
    module, _, name = yaml.safe_load(text)["model_def"].rpartition(".")
    assert name in parse_model_file(ZOO.joinpath(*module.split(".")).with_suffix(".py")).names


@pytest.mark.parametrize("definition", re.findall(r"--model_def=([\w.]+)", PAGE))
def test_models_that_the_page_names_exist(definition):
    module, _, name = definition.rpartition(".")
    assert name in parse_model_file(ZOO.joinpath(*module.split(".")).with_suffix(".py")).names
