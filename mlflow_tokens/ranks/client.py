"""Another rank's side: a background thread that answers rank 0, itself or through its node's first rank."""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable

from mlflow_tokens.meter import Reading
from mlflow_tokens.notices import logger
from mlflow_tokens.ranks.job import Address, Job
from mlflow_tokens.ranks.relay import Relay
from mlflow_tokens.ranks.talk import Refusal, Talk
from mlflow_tokens.ranks.waker import Waker
from mlflow_tokens.ranks.wire import Origin, Said

#: Seconds between attempts to reach rank 0, and for which the node's first rank is tried before it.
_RETRY, _RELAY_PATIENCE = 0.5, 5.0
_CONNECT_TIMEOUT = 5.0

#: This process, among those that are the same rank one after the other.
_PROCESS = secrets.randbits(48) | 1
_trackers = itertools.count(1)


class RankClient:
    """Answers rank 0 from `read`, and for the ranks that `relay` has, from what these say.

    `read(step, live)` gives the totals that a `Question` asks for, or None while `step` is not finished.
    """

    def __init__(
        self,
        job: Job,
        address: Address,
        read: Callable[[int, bool], Reading | None],
        relay: Relay | None = None,
        *,
        process: int = _PROCESS,
    ) -> None:
        self._job, self._address = job, address
        self.read, self.relay = read, relay
        self.last: Said | None = None
        """What this rank says last, once it has to."""
        self.closed_at = 0.0
        self.over = False
        self.reached = False
        """Whether rank 0 has been heard of."""
        self.waker = Waker()
        self.root = 0
        self._process, self._tracker = process, next(_trackers)
        self._serials = itertools.count(1)
        self._done, self._taken = threading.Event(), False
        if relay is not None:
            relay.tell(self.waker.wake)
        self._thread = threading.Thread(target=self._run, name="mlflow_tokens-rank", daemon=True)
        self._thread.start()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._job.rank

    @property
    def job_name(self) -> str:
        """The job's, for a hello."""
        return self._job.name

    @property
    def origin(self) -> Origin:
        """Where this rank's readings come from."""
        return Origin(self._job.rank, self._process, self._tracker, self.root)

    def said(self, reading: Reading) -> Said:
        """The reading with its number."""
        return Said(next(self._serials), reading)

    def close(self, last: Reading, timeout: float) -> bool:
        """Send the last reading; whether rank 0 took it within `timeout` s.

        A rank 0 that was never reached (it does not use us) is waited for no longer than a connection takes.
        """
        self.closed_at = time.monotonic()
        self.last = self.said(last)
        self.waker.wake()
        first = min(timeout, 2 * _RETRY)
        if not self._done.wait(first) and self.reached:
            self._done.wait(timeout - first)
        self.over = True
        self.waker.wake()
        return self._taken

    def _run(self) -> None:
        try:
            self._report()
        except Exception as error:
            logger.warning("Rank %d no longer reports to rank 0: %r", self._job.rank, error)
        finally:
            self._done.set()
            if self.relay is not None:
                self.relay.close()
            self.waker.close()

    def _report(self) -> None:
        # A node's first rank has `relayed`, and reaches rank 0 itself.
        first = None if self._job.relayed else self._job.relay
        until = time.monotonic() + _RELAY_PATIENCE
        while not self.over:
            talk: Talk | None = None
            try:
                with socket.create_connection(first or self._address, _CONNECT_TIMEOUT) as connection:
                    if connection.getsockname() == connection.getpeername():
                        raise ConnectionError("a port that nobody listens on was given to this connection")
                    talk = Talk(self, connection, relayed=first is not None)
                    self._taken = talk.run()
                return
            except Refusal as refusal:
                logger.warning("Rank %d does not report to rank 0: %s", self._job.rank, refusal)
                return
            except OSError:
                # Nobody is there yet, or no longer: try again without a word.
                if talk is not None and talk.heard:
                    self._taken = True
                    return
            if first is not None:
                lost = talk is not None and talk.welcomed
                if lost or self.last is not None or time.monotonic() > until:
                    first = None
                    continue
            self._pause()

    def _pause(self) -> None:
        """Until it is worth another try."""
        if self.last is None:
            self.waker.wait(_RETRY)
        else:
            time.sleep(_RETRY / 10)
