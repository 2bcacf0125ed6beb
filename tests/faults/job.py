"""The training job: a tiny model, a raw loop, a ledger kept by hand, and what goes wrong within a process.

After every finished step it says what it has trained so far, counted with plain loops, and how long our
calls took. It runs in a child of the fork server.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import mlflow
import numpy as np

import mlflow_tokens
from mlflow_tokens.sinks import writer
from tests.faults.batches import IGNORE, PAD, VOCABULARY, Counted, Rows, micro_batches, recount
from tests.faults.stopwatch import Stopwatch
from tests.faults.zygote import Voice

#: Seconds that a child which ought to be dead waits for its death.
_LAST_WAIT = 60.0


def main(voice: Voice, plan: Mapping[str, Any], gate: str, forked: float) -> None:
    """Train as planned. Says "step" after every step, "checkpoint", "gate", "closing", "raised"."""
    _hasten()
    voice.say("begun", forked=forked, born=time.monotonic(), wall=time.time())
    _Job(voice, plan, gate).run()


def _hasten() -> None:
    """Shorten the rests between writes, so that short jobs write more than once or twice."""
    assert hasattr(writer, "REST"), "the rest between writes has another name now"
    writer.REST = 3.0


class _Job:
    def __init__(self, voice: Voice, plan: Mapping[str, Any], gate: str) -> None:
        self._voice, self._plan, self._gate = voice, plan, gate
        self._rank: int = plan["rank"]
        self._watch = Stopwatch()
        self._total = Counted()
        self._took: list[float] = []
        self._blocked = 0.0
        self._shift = 0.0
        self._real_time = time.time
        self._tracker: Any = None
        self._model = _PaddleModel() if plan["trainer"] == "paddle" else _NumpyModel()

    def run(self) -> None:
        plan = self._plan
        with self._script_run():
            tracker = self._tracker = self._timed("Tracker", self._make_tracker)
            if tracker is None:
                return
            if plan["state"] is not None:
                self._timed("load_state_dict", lambda: tracker.load_state_dict(plan["state"]))
            with tracker if plan["block"] else nullcontext():
                self._loop()
                self._voice.say("closing", wall=self._real_time())
                self._deeds(plan["steps"], "closing")

    def _script_run(self) -> AbstractContextManager[Any]:
        """The run that the script itself keeps, if this one does."""
        if not self._plan["script_run"] or self._rank:
            return nullcontext()
        return _ScriptRun(self._voice)

    def _make_tracker(self) -> Any:
        return mlflow_tokens.Tracker(
            price=self._plan["price"],
            log_every_steps=self._plan["every"],
            pad_token_id=PAD,
            journal_dir=self._plan["journal"],
        )

    def _loop(self) -> None:
        tracker, plan = self._tracker, self._plan
        self._deeds(plan["first"], "after")
        for step in range(plan["first"] + 1, plan["steps"] + 1):
            self._took, self._blocked = [], 0.0
            made = micro_batches(plan["seed"], self._rank, step)
            for ids, labels in made:
                batch = self._model.batch(ids, labels)
                self._timed("count", partial(tracker.count, batch))
                self._model.train(batch)
            if plan["pace"]:
                time.sleep(plan["pace"])  # what a step of a model that is worth training takes
            self._deeds(step, "counted")
            before = time.monotonic()
            self._timed("step", tracker.step)
            self._total += recount(made)
            self._voice.say(
                "step",
                step=step,
                computed=self._total.computed,
                valid=self._total.valid,
                trained=self._total.trained,
                before=before,
                after=time.monotonic(),
                took=[round(seconds, 6) for seconds in self._took],
                blocked=round(self._blocked, 6),
            )
            if step in plan["checkpoints"] and not self._rank:
                self._took, self._blocked = [], 0.0
                state = self._timed("state_dict", tracker.state_dict)
                self._voice.say(
                    "checkpoint", step=step, state=state, took=self._took, blocked=round(self._blocked, 6)
                )
            self._deeds(step, "after")

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        """One of our calls. It must never raise: what it raises is said, and training goes on."""
        try:
            with self._watch:
                return call()
        except Exception as error:
            self._voice.say("raised", call=name, error=repr(error)[:500])
            return None
        finally:
            self._took.append(self._watch.seconds)
            self._blocked = max(self._blocked, self._watch.blocked)

    # ---- what goes wrong --------------------------------------------------------------------------

    def _deeds(self, step: int, when: str) -> None:
        for deed in self._plan["deeds"]:
            if (deed["step"], deed["when"]) == (step, when):
                getattr(self, f"_do_{deed['do']}")(deed)

    def _do_gate(self, deed: Mapping[str, Any]) -> None:
        """Wait for the test."""
        self._voice.say("gate", name=deed["name"])
        with open(self._gate, "rb", buffering=0) as gate:
            gate.read(1)

    def _do_clock(self, deed: Mapping[str, Any]) -> None:
        """Set the clock of this process, as NTP or an operator does."""
        self._shift += deed["shift"]
        shift, real_time = self._shift, self._real_time
        time.time = lambda: real_time() + shift
        self._voice.say("did", what="clock", shift=shift)

    def _do_disk(self, deed: Mapping[str, Any]) -> None:
        """Let no file grow beyond `room` bytes more than the journal has; None gives the space back.

        A limit is what a full disk is to a process: a write takes a part or nothing, with EFBIG for ENOSPC.
        """
        limit = resource.RLIM_INFINITY
        if deed["room"] is not None:
            self._say_nothing()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            sizes = [path.stat().st_size for path in Path(self._plan["journal"]).glob("*.jsonl")]
            limit = max(sizes, default=0) + deed["room"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        self._voice.say("did", what="disk", limit=limit)

    @staticmethod
    def _say_nothing() -> None:
        """The limit is one of the output, too, which is not on the disk that is full."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.close(nowhere)

    def _do_raise(self, deed: Mapping[str, Any]) -> None:
        raise RuntimeError("the script fails")

    def _do_sys_exit(self, deed: Mapping[str, Any]) -> None:
        sys.exit(deed["status"])

    def _do_os_exit(self, deed: Mapping[str, Any]) -> None:
        os._exit(deed["status"])

    def _do_signal(self, deed: Mapping[str, Any]) -> None:
        """Kill this process, as another would, and wait for the death."""
        self._voice.say("signal", number=deed["number"], at=time.monotonic())
        os.kill(os.getpid(), deed["number"])
        deadline = time.monotonic() + _LAST_WAIT
        while time.monotonic() < deadline:
            time.sleep(0.01)
        self._voice.say("survived", number=deed["number"])
        os._exit(99)


class _ScriptRun:
    """`with mlflow.start_run()`, but that it fails where the server is away is the script's own trouble."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice

    def __enter__(self) -> None:
        mlflow.start_run()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            mlflow.end_run("FINISHED" if kind is None else "FAILED")
        except Exception as trouble:
            self._voice.say("script_failed", error=repr(trouble)[:500])


class _NumpyModel:
    """Bigrams: enough to have a loss."""

    def __init__(self) -> None:
        self._logits = np.zeros((VOCABULARY, VOCABULARY))

    def batch(self, ids: Rows, labels: Rows) -> dict[str, Any]:
        return {"input_ids": np.array(ids), "labels": np.array(labels)}

    def train(self, batch: Mapping[str, Any]) -> None:
        ids, labels = batch["input_ids"].ravel(), batch["labels"].ravel()
        kept = labels != IGNORE
        rows = self._logits[ids[kept]]
        chances = np.exp(rows - rows.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        chances[np.arange(len(chances)), labels[kept]] -= 1.0
        np.add.at(self._logits, ids[kept], -0.1 * chances)


class _PaddleModel:
    """The same with Paddle, whose tensors are what we count."""

    def __init__(self) -> None:
        import paddle

        self._paddle = paddle
        self._logits = paddle.nn.Embedding(VOCABULARY, VOCABULARY)
        self._optimizer = paddle.optimizer.SGD(0.1, parameters=self._logits.parameters())

    def batch(self, ids: Rows, labels: Rows) -> dict[str, Any]:
        return {"input_ids": self._paddle.to_tensor(ids), "labels": self._paddle.to_tensor(labels)}

    def train(self, batch: Mapping[str, Any]) -> None:
        logits = self._logits(batch["input_ids"])
        loss = self._paddle.nn.functional.cross_entropy(logits, batch["labels"])
        loss.backward()
        self._optimizer.step()
        self._optimizer.clear_grad()
