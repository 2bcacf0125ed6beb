"""`mlflow-tokens` in a child of the fork server: a process of its own, as a user starts it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mlflow_tokens import cli
from tests.faults.zygote import Voice


def main(voice: Voice, arguments: Sequence[str], gate: str, forked: float) -> None:
    """Run the command; its exit status is the process's."""
    sys.exit(cli.main(arguments))
