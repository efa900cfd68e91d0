from .evaluator import Evaluation as Evaluation
from .evaluator import SidecarEvaluator as SidecarEvaluator
