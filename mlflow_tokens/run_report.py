"""What a run says of itself when it has ended: its tokens and its money."""

from __future__ import annotations

from dataclasses import dataclass

from mlflow_tokens.ledger import Ledger
from mlflow_tokens.report import TokenReport, report_of
from mlflow_tokens.statement import Statement, statement_of


@dataclass(frozen=True, slots=True)
class RunReport:
    """For the sinks to keep with the run."""

    tokens: TokenReport
    statement: Statement


def run_report_of(ledger: Ledger, status: str) -> RunReport:
    """The report of a run that has ended with `status`."""
    return RunReport(report_of(ledger.account, ledger.profile), statement_of(ledger.account, status))
