"""How ranks hand their readings to rank 0: over sockets of our own, asked for by rank 0.

No training communicator is used and nobody waits for anybody without a limit (see
docs/decisions/0002). Rank 0 listens; other ranks connect from a background thread, those of another node
to its first rank, which relays, and answer "what are your totals at the end of step k?" once they have
finished step k. Readings are cumulative, so a lost answer costs nothing but freshness.

    job     who we are and who listens where, from the environment
    wire    lines of JSON: what is said, and readings as rows of numbers
    gate    who is let in, and what is said of who is not
    roll    who reports, what each said last, who is still waited for: no sockets
    restart what one rank that was restarted alone leaves known
    server  the sockets of one that listens: rank 0, or a relay
    client  a rank that answers
    relay   the first rank of a node between the others there and rank 0
"""

from mlflow_tokens.ranks.client import RankClient
from mlflow_tokens.ranks.job import Job, job_from_environment
from mlflow_tokens.ranks.relay import Relay, relay_of
from mlflow_tokens.ranks.server import RankServer
from mlflow_tokens.ranks.wire import Question

__all__ = ["Job", "Question", "RankClient", "RankServer", "Relay", "job_from_environment", "relay_of"]
