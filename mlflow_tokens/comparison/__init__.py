"""Runs read back and ranked by what a million tokens cost."""

from mlflow_tokens.comparison.reader import Curve, Experiment, Reader, ReadError, RunRow

__all__ = ["Curve", "Experiment", "ReadError", "Reader", "RunRow"]
