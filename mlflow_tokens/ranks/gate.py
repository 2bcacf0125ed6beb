"""Who is let in: anybody may connect to a port, and most jobs run where ports are scanned.

Each kind of stranger is worth one line, however many of them come.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping
from typing import Any

from mlflow_tokens import __version__
from mlflow_tokens.notices import say_once
from mlflow_tokens.ranks.wire import FIELDS, PROTOCOL, Origin, line, origins_of

#: Seconds that a connection may take to say who it is, and how many may be about to.
PATIENCE, STRANGERS = 10.0, 256
#: Connections that may wait to be looked at: of ranks that begin together, and of strangers among them.
BACKLOG = 1024
#: Files that are left to the training script, of those that the process may open.
_FILES_LEFT = 256

_FOREIGN = "Something that is no rank of this job connects to the port of its ranks (%s): refused."


class Refused(Exception):
    """A connection that is ended, with the line about it; reason: what it is told, if it is one of ours."""

    def __init__(self, topic: str, message: str, *values: object, reason: str = "") -> None:
        super().__init__(message)
        self.topic, self.message, self.values, self.reason = topic, message, values, reason

    def say(self) -> None:
        """One line, for the first of its kind."""
        say_once(f"ranks {self.topic}", self.message, *self.values)


def hello(job: str, origins: list[Origin]) -> bytes:
    """What a rank says first."""
    return line(
        {"job": job, "protocol": PROTOCOL, "fields": FIELDS, "version": __version__, "ranks": origins}
    )


def check_hello(job: str, world_size: int, text: bytes) -> list[Origin]:
    """Whose readings the connection brings.

    Raises:
        Refused: it is not a rank of this job that speaks as we do.
    """
    try:
        message = json.loads(text)
        name, protocol = message["job"], message["protocol"]
    except Exception:  # whatever the parser makes of it
        raise Refused("foreign", _FOREIGN, f"it says {text[:30]!r}") from None
    if name != job:
        raise Refused(
            "job",
            "Ranks of another job connect to the port of this one's: refused. Their "
            "PADDLE_TRAINER_ENDPOINTS differ.",
            reason="this is another job",
        )
    if protocol != PROTOCOL or message.get("fields") != FIELDS:
        version = message.get("version", "of another version")
        raise Refused(
            "version",
            "Rank %s runs mlflow_tokens %s, whose readings differ from those of %s here: it is refused. "
            "Install one version on all ranks.",
            _rank_of(message),
            f"{version!s:.20}",
            __version__,
            reason=f"rank 0 runs mlflow_tokens {__version__}, and this is {version!s:.20}",
        )
    try:
        return check_origins(world_size, message)
    except Exception as error:
        raise Refused("foreign", _FOREIGN, f"{error!r:.80}") from None


def check_origins(world_size: int, message: Mapping[str, Any]) -> list[Origin]:
    """The origins that a message names; raises what `origins_of` does."""
    origins = origins_of(message)
    for origin in origins:
        if not 0 < origin.rank < world_size:
            raise ValueError(f"there is no rank {origin.rank} to report in this job")
    return origins


def damaged(ranks: list[int], error: Exception) -> Refused:
    """A rank that was let in says what nobody understands."""
    who = ", ".join(map(str, ranks))
    return Refused("damaged", "What rank %s reports is not understood: %s", f"{who:.40}", f"{error!r:.120}")


def too_long(data: bytes) -> Refused:
    """A line that does not end."""
    return Refused("long", _FOREIGN, f"its first line has no end: {data[:20]!r}…")


def silent() -> Refused:
    """A connection that does not say who it is in time, or is closed before it has."""
    return Refused("silent", _FOREIGN, "it does not say who it is; a port scan, or a check of health")


def too_many() -> Refused:
    """No more files can be opened, or may be."""
    return Refused(
        "files", "More ranks connect to rank 0 than it may open files for: not all report. Raise ulimit -n."
    )


def most_connections() -> int:
    """How many connections may be open, so that the script can open files, too."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if limit == resource.RLIM_INFINITY else max(limit - _FILES_LEFT, limit // 2)


def _rank_of(message: Mapping[str, Any]) -> str:
    ranks = message.get("ranks")
    number = ranks[0][0] if isinstance(ranks, list) and ranks and isinstance(ranks[0], list) else None
    return f"{message.get('rank', '?') if number is None else number!s:.10}"
