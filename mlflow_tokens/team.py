"""The ranks of a job as a tracker sees them: joined at its start, asked at a snapshot, left at its end."""

from __future__ import annotations

from mlflow_tokens.meter import Meter, Reading
from mlflow_tokens.notices import say_once
from mlflow_tokens.ranks import Job, Question, RankClient, RankServer, relay_of


class Team:
    """On rank 0 the server that the other ranks report to, on these the client that reports."""

    def __init__(self, job: Job, meter: Meter) -> None:
        self.job = job
        self._meter = meter
        self._server: RankServer | None = None
        self._client: RankClient | None = None
        self._waited_for_absent = False
        self._hurrying = False
        if job.world_size == 1:
            return
        if job.address is None:
            self._say_alone("the ranks of this job cannot find each other")
        elif job.rank:
            self._client = RankClient(
                job, job.address, lambda step, live: meter.reading(step, live=live), relay_of(job)
            )
        else:
            try:
                self._server = RankServer(job, job.address)
            except OSError as error:
                self._say_alone("rank 0 cannot listen on {}:{} ({})".format(*job.address, error))

    def collect(self, question: Question, timeout: float) -> dict[int, Reading]:
        """The newest readings, rank 0's own included; waits for the others `timeout` s at most.

        Ranks that have never reported are waited for once.
        """
        own = self._meter.reading(question.step, live=question.live)
        assert own is not None, "a snapshot is asked for after its step"
        if self._server is None:
            return {0: own}
        readings = {0: own, **self._server.collect(question, timeout, not self._waited_for_absent)}
        if self._hurrying and not question.live:
            return readings
        self._waited_for_absent = True
        if len(readings) < self.job.world_size:
            self._say_alone(f"only {len(readings)} of {self.job.world_size} ranks report")
        return readings

    def hurry(self, hurry: bool) -> None:
        """While the end of a run waits, snapshots before it take what there is."""
        self._hurrying = hurry
        if self._server is not None:
            self._server.hurry(hurry)

    def leave(self, timeout: float) -> None:
        """Say this rank's last totals, or stop listening."""
        if self._client is not None:
            last = self._meter.reading(final=True)
            assert last is not None
            self._client.close(last, timeout)
        if self._server is not None:
            self._server.close()

    @staticmethod
    def _say_alone(reason: str) -> None:
        say_once("ranks", "Tokens and cost of the job are unknown: %s. Call autolog() on every rank.", reason)
