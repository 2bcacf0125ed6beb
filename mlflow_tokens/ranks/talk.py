"""One connection of a rank, from its hello to the moment when its last was heard."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlflow_tokens.ranks import gate
from mlflow_tokens.ranks.relay import News
from mlflow_tokens.ranks.wire import LINE_LIMIT, Encoder, Origin, Question, Said, line, split

if TYPE_CHECKING:
    from mlflow_tokens.ranks.client import RankClient

#: Seconds between looks at whether the step asked for is finished, and most that nothing is looked at.
_LOOK, _IDLE = 0.02, 1.0
#: Seconds after which a rank that has not finished the step asked for answers with what it has.
_PATIENCE, _PATIENCE_LIVE = 4.0, 0.5
#: Seconds that the node's first rank has to say welcome, and to have rank 0 hear what a rank says last.
_WELCOME, _HEARD = 5.0, 0.5
#: Seconds for which a rank that has said its last still answers, unless rank 0 asks for the last: snapshots
#: of earlier steps may wait there, and other ranks of the node for this one.
_STAY = 3.0


class Refusal(Exception):
    """Rank 0 does not take what this rank says, and will not."""


class Talk:
    """Says what is due, for this rank and those that it relays for.

    relayed: the other side is not rank 0 but the node's first rank.

    Raises, from `run`:
        Refusal: see there.
        OSError: the connection is of no more use.
    """

    def __init__(self, client: RankClient, connection: socket.socket, *, relayed: bool) -> None:
        self._client, self._connection, self._relayed = client, connection, relayed
        self.welcomed = False
        self._began = time.monotonic()
        self._encoder = Encoder()
        self._buffer = b""
        self._announced: list[Origin] = []
        self._number = 0
        self._question: Question | None = None
        """What is to be answered, until the first line of answers is on its way."""
        self._patient_until = 0.0
        self._answers: dict[int, Said] = {}
        self._fine = False
        self._said_last: set[int] = set()
        self._asked_last = False
        self.heard = False
        """Whether rank 0 has heard what this rank says last."""

    def run(self) -> bool:
        """Talk until all was said and heard, which it returns, or the client is over."""
        client = self._client
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ, self._connection)
            selector.register(client.waker.socket, selectors.EVENT_READ)
            self._announced = self._origins(News() if client.relay is None else client.relay.news())
            self._connection.sendall(gate.hello(client.job_name, self._announced))
            while not client.over:
                news = News() if client.relay is None else client.relay.news()
                self._say(news)
                if self.heard and self._may_leave(news):
                    break
                self._lose_patience()
                for key, _ in selector.select(_LOOK if self._question is not None else self._idle()):
                    if key.data is None:
                        client.waker.heard()
                    else:
                        self._receive()
        return self.heard

    def _origins(self, news: News) -> list[Origin]:
        return [self._client.origin, *news.origins]

    def _say(self, news: News) -> None:
        client = self._client
        origins = self._origins(news)
        if [origin[:3] for origin in origins] != [origin[:3] for origin in self._announced]:
            self._announced = origins
            self._connection.sendall(line({"ranks": origins}))
        last = [*news.last, *([client.last] if client.last is not None else [])]
        last = [said for said in last if said.reading.rank not in self._said_last]
        self._said_last |= {said.reading.rank for said in last}
        self._send(0, last)
        self._answers |= {said.reading.rank: said for said in news.answers}
        if self._question is not None:
            self._answer_itself(self._question)
            mine = client.rank in self._answers or client.last is not None
            if not mine or not (news.complete or time.monotonic() > self._patient_until):
                return
            self._question = None
        answers, self._answers = list(self._answers.values()), {}
        self._send(self._number, answers)

    def _answer_itself(self, question: Question) -> None:
        client = self._client
        if client.rank in self._answers or (client.last is not None and question.live):
            return
        reading = client.read(question.step, question.live)
        if reading is None and client.last is None and time.monotonic() > self._patient_until:
            reading = client.read(0, True)
        if reading is not None:
            self._answers[client.rank] = client.said(reading)

    def _send(self, number: int, said: list[Said]) -> None:
        for text in self._encoder.lines(number, said, fine=self._fine):
            self._connection.sendall(text)

    def _may_leave(self, news: News) -> bool:
        """Whether nobody needs this rank any more, or it takes too long."""
        client = self._client
        if time.monotonic() > client.closed_at + _STAY:
            return True
        return self._asked_last and (client.relay is None or (not news.last and client.relay.all_said_last()))

    def _lose_patience(self) -> None:
        now, client = time.monotonic(), self._client
        if not self._relayed:
            return
        if not self.welcomed and now > self._began + _WELCOME:
            raise ConnectionError("the first rank of the node does not say welcome")
        if client.last is not None and not self.heard and now > max(client.closed_at, self._began) + _HEARD:
            raise ConnectionError("the first rank of the node does not hand on what this one says last")

    def _idle(self) -> float:
        return _IDLE if self._client.last is None else 5 * _LOOK

    def _receive(self) -> None:
        data = self._connection.recv(65536)
        if not data:
            raise ConnectionError("the other side has closed the connection")
        lines, self._buffer = split(self._buffer, data)
        try:
            if len(self._buffer) > LINE_LIMIT:
                raise ValueError("a line has no end")
            for text in lines:
                self._understand(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConnectionError(f"the other side is no rank of this job: {error!r:.100}") from None

    def _understand(self, message: Mapping[str, Any]) -> None:
        client = self._client
        if "refused" in message:
            raise Refusal(f"{message['refused']!s:.200}")
        if "welcome" in message:
            self.welcomed = True
            client.reached = client.reached or bool(message["welcome"])
        elif "heard" in message:
            ranks = set(map(int, message["heard"]))
            client.reached = True
            self.heard = self.heard or (client.rank in ranks and client.last is not None)
            if client.relay is not None:
                client.relay.heard(ranks - {client.rank})
        else:
            self._asked(Question(int(message["step"]), bool(message["live"]), bool(message["last"])), message)

    def _asked(self, question: Question, message: Mapping[str, Any]) -> None:
        client = self._client
        self._number, root = int(message["number"]), int(message["root"])
        client.root = client.root or root
        client.reached = True
        self._asked_last = self._asked_last or question.last
        self._question, self._answers, self._fine = question, {}, question.live
        self._patient_until = time.monotonic() + (_PATIENCE_LIVE if question.live else _PATIENCE)
        if client.relay is not None:
            client.relay.ask(question, root)
