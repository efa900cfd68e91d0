"""Messages that users of `Cluster.fit` may see name what they know: no model file, and no flags."""

import ast
import re

from test_layering import FILES

# Only jobs of a model file reach these, or all jobs of a command.
OF_MODEL_FILES = {
    "elasticcb.master.keras_host", "elasticcb.master.prediction_output", "elasticcb.master.job",
}  # fmt: skip
ROOMS = ("api", "callbacks", "compute", "layers", "master", "optimizers", "ps", "worker")
UNKNOWN = re.compile(r"`feed`|custom_model|[Mm]odel file|eval_metrics_fn|--[a-z_]+")


def messages_of(module):
    """Texts in a module that are no docstrings, as `Cluster` shows them."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    texts = {id(node): node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            texts.pop(id(node.value), None)
    return {text for text in texts.values() if isinstance(text, str) and " " in text}


def test_messages_for_programs_speak_of_no_model_file_and_no_flags():
    modules = [name for name in FILES if name.split(".")[1:2] and name.split(".")[1] in ROOMS]
    found = {
        (module, text)
        for module in modules
        if module not in OF_MODEL_FILES
        for text in messages_of(module)
        if UNKNOWN.search(re.sub(r"`(elasticcb|truncate) [^`]*", "", text))
    }
    assert not found
