"""Evaluation beside training: checkpoints are evaluated as they come. See docs/evaluation_beside_training.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticcb.sidecar.evaluator import Evaluation, SidecarEvaluator

__all__ = ["Evaluation", "SidecarEvaluator"]


def __getattr__(name: str) -> Any:
    # Following a folder needs no Keras, whose import takes seconds; the command line is glad of that.
    if name in __all__:
        from elasticcb.sidecar import evaluator

        return getattr(evaluator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
