"""Scores, rivals, predictions and reports."""

from causalqwen.evaluation.evaluate import evaluate, write_metrics
from causalqwen.evaluation.predict import TablePredictor, predict_file, predict_rows
from causalqwen.evaluation.surveys import TableSurvey, survey_file
from causalqwen.modeling.grafting import compare_with_backbone

__all__ = [
    "TablePredictor",
    "TableSurvey",
    "compare_with_backbone",
    "evaluate",
    "predict_file",
    "predict_rows",
    "survey_file",
    "write_metrics",
]
