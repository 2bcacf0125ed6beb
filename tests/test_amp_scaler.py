"""Steps that a loss scaler leaves out: their tokens were computed, and are not effective."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType, SimpleNamespace
from typing import Any

import mlflow
import paddle
import pytest
from paddle.amp.auto_cast import amp_global_state
from paddle.nn import functional as F

import mlflow_tokens
from tests.conftest import Stored
from tests.loops import PAD, Model

# Rows of 4 ids, of which 3 are text.
IDS = [[7, 8, 9, PAD], [10, 11, 12, PAD]]
COMPUTED, VALID = 8, 6


@pytest.fixture(autouse=True)
def scaling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Paddle turns loss scaling off on a CPU and outside of float16; its arithmetic works there as well."""
    place = SimpleNamespace(is_gpu_place=lambda: True)
    monkeypatch.setattr(
        "paddle.amp.grad_scaler._dygraph_tracer", lambda: SimpleNamespace(_expected_place=place)
    )
    state = amp_global_state()
    before, state.amp_dtype = state.amp_dtype, "float16"
    yield
    state.amp_dtype = before


def totals(stored: Stored) -> dict[str, float]:
    """Totals by kind, and the number of steps."""
    metrics = stored.metrics()
    kinds = ("computed", "valid", "trained", "effective", "skipped")
    found = {kind: metrics[f"tokens/{kind}"] for kind in kinds if f"tokens/{kind}" in metrics}
    return {**found, "steps": stored.points("tokens/computed")[-1][0]}


def expected(steps: int, skipped: int, accumulate: int = 1) -> dict[str, float]:
    every = (steps + skipped) * accumulate
    counts = {
        "computed": COMPUTED * every,
        "valid": VALID * every,
        "trained": COMPUTED * every,
        "effective": VALID * steps * accumulate,
        "steps": steps,
    }
    return {**counts, "skipped": VALID * skipped * accumulate} if skipped else counts


def backward(scaler: Any, model: Any, factor: float = 1.0, ids: Any = None) -> Any:
    ids = paddle.to_tensor(IDS) if ids is None else ids
    scaled = scaler.scale(F.cross_entropy(model(ids), ids) * factor)
    scaled.backward()
    return scaled


def step_and_update(scaler: Any, optimizer: Any, _scaled: Any) -> None:
    scaler.step(optimizer)
    scaler.update()


def unscale_first(scaler: Any, optimizer: Any, _scaled: Any) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def minimize(scaler: Any, optimizer: Any, scaled: Any) -> None:
    scaler.minimize(optimizer, scaled)


class Asks(paddle.amp.GradScaler):
    """A scaler of the script's own that asks its optimizer nothing."""

    def step(self, optimizer: Any) -> None:
        self._unscale(optimizer)
        if not bool(self._found_inf):
            optimizer.step()
        self._cache_found_inf = bool(self._found_inf)
        self._optimizer_states.clear()


class Around:
    """A scaler of the script's own around Paddle's."""

    def __init__(self, **options: Any) -> None:
        self._scaler = paddle.amp.GradScaler(**options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scaler, name)


class Wrapper:
    """An optimizer of the script's own that Paddle's scaler cannot tell what it has found."""

    def __init__(self, inner: Any) -> None:
        self.inner, self._parameter_list = inner, inner._parameter_list

    def step(self) -> None:
        self.inner.step()

    def minimize(self, loss: Any) -> Any:
        return self.inner.minimize(loss)

    def clear_grad(self) -> None:
        self.inner.clear_grad()


def run(
    bad: set[int],
    *,
    steps: int = 6,
    accumulate: int = 1,
    update: Any = step_and_update,
    scaler: Any = paddle.amp.GradScaler,
    optimizer: Any = paddle.optimizer.AdamW,
    wrapper: Any = lambda optimizer: optimizer,
    **options: Any,
) -> list[float]:
    """Steps 1 to `steps`, those in `bad` with gradients that are inf; returns the weights after each."""
    paddle.seed(5)
    model = Model()
    optimizer = wrapper(optimizer(1e-2, parameters=model.parameters()))
    scaler = scaler(init_loss_scaling=8.0, **options)
    weights = []
    for number in range(1, steps + 1):
        for part in range(accumulate):
            # The first micro-batch of the step alone is bad.
            scaled = backward(scaler, model, float("inf") if number in bad and part == 0 else 1.0)
        update(scaler, optimizer, scaled)
        optimizer.clear_grad()
        weights.append(float(model.head.weight.square().sum()))
    return weights


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Momentum", "Adam", "Lamb"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_skipped_step_is_no_step_with_any_optimizer(stored: Stored, optimizer: str, dynamic: bool) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    weights = run({2, 5}, optimizer=getattr(paddle.optimizer, optimizer), use_dynamic_loss_scaling=dynamic)
    assert weights[0] == weights[1] != weights[2], "Paddle has left out the second step"
    mlflow_tokens.autolog(disable=True)
    assert totals(stored) == expected(steps=4, skipped=2)


@pytest.mark.parametrize("update", [step_and_update, unscale_first, minimize])
@pytest.mark.parametrize("bad", [{1}, {1, 2}, {6}, {3, 4, 6}], ids=str)
def test_the_first_the_last_and_several_in_a_row(stored: Stored, update: Any, bad: set[int]) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    run(bad, update=update)
    mlflow_tokens.autolog(disable=True)
    assert totals(stored) == expected(steps=6 - len(bad), skipped=len(bad))


@pytest.mark.parametrize("update", [step_and_update, minimize])
def test_all_micro_batches_of_a_skipped_step_are_skipped(stored: Stored, update: Any) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    run({1, 4}, accumulate=3, update=update)
    mlflow_tokens.autolog(disable=True)
    assert totals(stored) == expected(steps=4, skipped=2, accumulate=3)


def test_a_scaler_that_is_off_skips_nothing(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    run({2}, enable=False)
    mlflow_tokens.autolog(disable=True)
    assert totals(stored) == expected(steps=6, skipped=0)


@pytest.mark.parametrize("scaler", [Asks, Around])
def test_a_scaler_of_the_scripts_own(stored: Stored, scaler: Any) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    run({2, 3}, scaler=scaler)
    mlflow_tokens.autolog(disable=True)
    assert totals(stored) == expected(steps=4, skipped=2)


def test_a_scaler_class_that_is_written_after_autolog(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    run({2}, scaler=type("Later", (paddle.amp.GradScaler,), {"step": Asks.step}))
    mlflow_tokens.autolog(disable=True)
    assert totals(stored) == expected(steps=5, skipped=1)


@pytest.mark.parametrize("update", [step_and_update, minimize])
@pytest.mark.parametrize("bad", [{1, 3}, {6}], ids=str)
def test_an_optimizer_that_the_scaler_leaves_out_by_itself(
    stored: Stored, update: Any, bad: set[int]
) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    run(bad, wrapper=Wrapper, update=update)
    mlflow_tokens.autolog(disable=True)
    assert totals(stored) == expected(steps=6 - len(bad), skipped=len(bad))


def test_an_optimizer_that_does_not_ask_has_stepped(stored: Stored) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)

    class Plain(paddle.optimizer.SGD):
        def step(self) -> None:
            for parameter in self._parameter_list:
                parameter.set_value(parameter - 1e-2 * parameter.grad)

    weights = run({3}, optimizer=Plain)
    assert weights[2] != weights[1], "it takes the step that is not finite"
    mlflow_tokens.autolog(disable=True)
    assert totals(stored) == expected(steps=6, skipped=0)


@pytest.mark.parametrize(
    ("first", "second", "steps", "skipped"),
    [({2}, {2}, 3, 1), ({2}, set(), 4, 0), (set(), {3}, 4, 0), ({4}, {4}, 3, 1), ({4}, set(), 4, 0)],
    ids=str,
)
@pytest.mark.parametrize("updates", [True, False])
def test_two_optimizers_over_one_model_skip_a_step_if_both_do(
    stored: Stored, updates: bool, first: set[int], *, second: set[int], steps: int, skipped: int
) -> None:
    """One that updates its part of the model has trained on the batch."""
    mlflow_tokens.autolog(pad_token_id=PAD)
    model = Model()
    parts = (model.embedding, first), (model.head, second)
    optimizers = [paddle.optimizer.SGD(1e-2, parameters=part.parameters()) for part, _ in parts]
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0, use_dynamic_loss_scaling=updates)
    for number in range(1, 5):
        backward(scaler, model)
        for (part, bad), optimizer in zip(parts, optimizers, strict=True):
            if number in bad:
                with paddle.no_grad():
                    part.parameters()[0].grad.fill_(float("inf"))
            scaler.step(optimizer)
            optimizer.clear_grad()
        if updates:
            scaler.update()
    mlflow_tokens.autolog(disable=True)
    assert totals(stored) == expected(steps=steps, skipped=skipped)


def test_of_two_models_in_turn_one_skips_and_the_other_does_not(stored: Stored) -> None:
    """Three rounds of two models; the first model's step is left out in rounds 1 and 3."""
    mlflow_tokens.autolog(pad_token_id=PAD)
    models = [Model(), Model()]
    optimizers = [paddle.optimizer.AdamW(1e-2, parameters=model.parameters()) for model in models]
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    for number in range(3):
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(scaler, model, float("inf") if index == 0 and number != 1 else 1.0)
            scaler.step(optimizer)
            optimizer.clear_grad()
        scaler.update()
    mlflow_tokens.autolog(disable=True)
    assert totals(stored) == expected(steps=4, skipped=2)


def test_evaluation_after_a_skipped_step_is_evaluation_from_its_beginning(stored: Stored) -> None:
    tracker = mlflow_tokens.autolog(pad_token_id=PAD)
    assert tracker is not None
    model = Model()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    for factor in (1.0, float("inf")):
        backward(scaler, model, factor)
        scaler.step(optimizer)
        optimizer.clear_grad()
        scaler.update()
    train = tracker.meter.clock.seconds()["train"]
    model.eval()
    model(paddle.to_tensor(IDS))
    assert tracker.meter.clock.seconds()["train"] <= train
    mlflow_tokens.autolog(disable=True)
    assert totals(stored) == expected(steps=1, skipped=1)


@pytest.mark.parametrize("found", [int, bool, paddle.to_tensor], ids=["int", "bool", "tensor"])
def test_fleet_s_scalers_say_it_in_other_ways(stored: Stored, found: Any) -> None:
    """They replace what looks at the gradients; that of mixed precision leaves a number."""

    def unscale(self: Any, optimizer: Any) -> None:
        finite = all(bool(p.grad.isfinite().all()) for p in optimizer._parameter_list)
        self._found_inf = found(not finite)

    def made(**options: Any) -> Any:
        scaler = paddle.amp.GradScaler(**options)
        scaler._unscale = MethodType(unscale, scaler)
        return scaler

    mlflow_tokens.autolog(pad_token_id=PAD)
    run({1, 4}, scaler=made)
    mlflow_tokens.autolog(disable=True)
    assert totals(stored) == expected(steps=4, skipped=2)


def test_a_loop_that_counts_skipped_steps_as_steps_has_ours_beside_its_loss(stored: Stored) -> None:
    """PaddleNLP's and PaddleFormers' Trainers do: they log step 24 when 22 steps were taken."""
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
    model = Model()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    scaler = paddle.amp.GradScaler(init_loss_scaling=2.0**15)
    with mlflow.start_run():
        for number in range(1, 25):
            for _ in range(2):
                scaled = backward(scaler, model, float("inf") if number in {3, 13} else 1.0)
            step_and_update(scaler, optimizer, scaled)
            optimizer.clear_grad()
            if number % 2 == 0:
                mlflow.log_metric("loss", 1.0, step=number)
        mlflow_tokens.autolog(disable=True)
    ours = dict(stored.points("tokens/computed"))
    joined = [step for step, _ in stored.points("loss") if step in ours]
    # The first sight of a new numbering is a line without ours.
    assert [step for step in (2, 6, 8, 10, 12, 16, 18, 20, 22, 24) if step not in joined] == []
    assert ours[24] == 24 * 2 * COMPUTED
    assert stored.metrics()["tokens/skipped"] == 2 * 2 * VALID


def test_losses_are_the_same_to_the_bit_with_skipped_steps(stored: Stored) -> None:
    without = run({2, 3})
    mlflow_tokens.autolog(pad_token_id=PAD, log_every_steps=1)
    assert run({2, 3}) == without
    mlflow_tokens.autolog(disable=True)
    assert totals(stored) == expected(steps=4, skipped=2)
