"""More than one model: which of them are trained, and which one the user has named."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

import mlflow_tokens
from tests.conftest import Stored
from tests.loops import PAD, VOCABULARY, Model, Recount, dataset, outside, train


class Generator(nn.Layer):
    """Makes soft tokens of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6 * 8)

    def forward(self, noise: Any) -> Any:
        return self.linear(noise).reshape([-1, 6, 8])


class Discriminator(nn.Layer):
    """Tells ids from what the generator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        return self.head(self.embedding(x) if x.dtype == paddle.int64 else x).mean()


def gan(rounds: int, order: str) -> tuple[int, list[float]]:
    """Steps of both in turn; returns the ids that the discriminator was fed, and the losses."""
    paddle.seed(4)
    generator, discriminator = Generator(), Discriminator()
    optimizers = {
        "g": paddle.optimizer.AdamW(1e-2, parameters=generator.parameters()),
        "d": paddle.optimizer.AdamW(1e-2, parameters=discriminator.parameters()),
    }
    fed, losses = 0, []
    for ids, _labels in dataset(rounds):
        for which in order:
            if which == "d":
                real = discriminator(paddle.to_tensor(ids))
                fake = discriminator(generator(paddle.randn([2, 4])).detach())
                loss = fake - real
                fed += len(ids) * len(ids[0])
            else:
                loss = -discriminator(generator(paddle.randn([2, 4])))
            loss.backward()
            losses.append(float(loss))
            optimizers[which].step()
            for optimizer in optimizers.values():
                optimizer.clear_grad()
    return fed, losses


@pytest.mark.parametrize("order", ["dg", "gd", "ddg"])
def test_of_a_gan_the_ids_that_a_trained_model_is_fed_count(stored: Stored, order: str) -> None:
    """Neither noise nor soft tokens are tokens, and a step on those alone is no step."""
    _, without = gan(4, order)
    mlflow_tokens.autolog(pad="none")
    fed, losses = gan(4, order)
    mlflow_tokens.autolog(disable=True)
    assert losses == without
    metrics = stored.metrics()
    assert (metrics["tokens/computed"], metrics["tokens/valid"]) == (fed, fed)
    assert stored.points("tokens/computed")[-1][0] == 4 * order.count("d")


class Classifier(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, pixels: Any) -> Any:
        return self.linear(pixels)


def pixels_alone(models: int) -> None:
    layers = [Classifier() for _ in range(models)]
    optimizers = [paddle.optimizer.SGD(1e-2, parameters=layer.parameters()) for layer in layers]
    for _ in range(4):
        for layer, optimizer in zip(layers, optimizers, strict=True):
            layer(paddle.randn([2, 4])).mean().backward()
            optimizer.step()


@pytest.mark.parametrize("models", [1, 2])
def test_where_no_model_is_fed_ids_tokens_are_unknown_and_cost_is_not(
    stored: Stored, models: int, capsys: pytest.CaptureFixture[str]
) -> None:
    gc.collect()  # optimizers of other tests
    mlflow_tokens.autolog(price="1 USD/device-hour")
    pixels_alone(models)
    mlflow_tokens.autolog(disable=True)
    metrics = stored.metrics()
    assert not [name for name in metrics if name.startswith("tokens/")]
    assert metrics["cost/total"] > 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if " WARNING " in line]
    assert "Classifier was called with" in line


@pytest.mark.parametrize("name", ["inputs_embeds", "input_embeddings"])
def test_embeddings_instead_of_ids_are_tokens_that_are_not_seen(stored: Stored, name: str) -> None:
    class Reader(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)

        def forward(self, input_ids: Any = None, **embedded: Any) -> Any:
            (x,) = embedded.values() or (self.embedding(input_ids),)
            return self.linear(x)

    mlflow_tokens.autolog(pad="none")
    model = Reader()
    optimizer = paddle.optimizer.SGD(1e-2, parameters=model.parameters())
    for number in range(4):
        given = {name: paddle.randn([2, 3, 8])} if number == 2 else {"input_ids": paddle.to_tensor([[7, 8]])}
        model(**given).mean().backward()
        optimizer.step()
    mlflow_tokens.autolog(disable=True)
    assert not [name for name in stored.metrics() if name.startswith("tokens/")]


def no_grad(teacher: Any, ids: Any) -> Any:
    with paddle.no_grad():
        return teacher(ids)


def in_eval(teacher: Any, ids: Any) -> Any:
    teacher.eval()
    return no_grad(teacher, ids)


def in_eval_with_gradients(teacher: Any, ids: Any) -> Any:
    teacher.eval()
    return teacher(ids).detach()


def left_in_training(teacher: Any, ids: Any) -> Any:
    return teacher(ids).detach()


@pytest.mark.parametrize("teach", [no_grad, in_eval, in_eval_with_gradients, left_in_training])
@pytest.mark.parametrize("first", ["teacher", "student"])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("idle", [True, False])
def test_a_teacher_s_tokens_do_not_count(
    stored: Stored, teach: Any, first: str, *, named: bool, idle: bool
) -> None:
    """idle: there is an optimizer that never steps, so that models are looked for until the end."""
    student, teacher = Model(), Model()
    waiting = [paddle.optimizer.SGD(1e-2, parameters=Model().parameters()) for _ in range(idle)]
    mlflow_tokens.autolog(pad_token_id=PAD, model=student if named else None)

    def distil(model: Any, ids: Any, labels: Any) -> Any:
        goal = teach(teacher, ids) if first == "teacher" else None
        logits = model(ids)
        goal = teach(teacher, ids) if goal is None else goal
        return F.cross_entropy(logits, labels) + F.mse_loss(logits, goal)

    recount, _ = train(distil, dataset(6), model=student, accumulate=2)
    assert len(waiting) == idle
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics()), (recount, stored.metrics())


def test_of_two_models_that_are_both_trained_one_has_no_labels(stored: Stored) -> None:
    """The second one learns from the first one alone: how many of its tokens are trained on is not known."""
    models = [Model(), Model()]
    optimizers = [paddle.optimizer.AdamW(1e-2, parameters=model.parameters()) for model in models]
    mlflow_tokens.autolog(pad_token_id=PAD)
    for ids, labels in dataset(3):
        goal = models[1](paddle.to_tensor(ids))
        logits = models[0](paddle.to_tensor(ids))
        loss = F.cross_entropy(logits, paddle.to_tensor(labels)) + F.mse_loss(goal, logits.detach())
        loss.backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
            optimizer.clear_grad()
    mlflow_tokens.autolog(disable=True)
    assert "tokens/computed" in stored.metrics()
    assert "tokens/trained" not in stored.metrics()


def test_an_average_of_the_weights_is_not_another_model(stored: Stored) -> None:
    """A copy that follows the model by hand is called in training mode, too, and validates."""
    mlflow_tokens.autolog(pad_token_id=PAD)
    model = Model()
    average = copy.deepcopy(model)
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    recount = Recount()
    for ids, labels in dataset(5):
        outside(model, paddle.to_tensor(ids), paddle.to_tensor(labels)).backward()
        optimizer.step()
        optimizer.clear_grad()
        recount.add(ids, labels)
        with paddle.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.set_value(0.9 * mean + 0.1 * weight)
        outside(average, paddle.to_tensor(ids), paddle.to_tensor(labels))
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())
    assert stored.points("tokens/computed")[-1][0] == 5


@pytest.mark.parametrize("kind", ["ModelAverage", "LookAhead"])
def test_paddle_s_averaging_optimizers_make_no_steps_of_their_own(stored: Stored, kind: str) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    model, recount = Model(), Recount()
    inner = paddle.optimizer.SGD(1e-2, parameters=model.parameters())
    incubate = paddle.incubate
    if kind == "LookAhead":
        steps = [incubate.LookAhead(inner, alpha=0.5, k=2)]
    else:
        average = incubate.ModelAverage(
            0.15, parameters=model.parameters(), min_average_window=2, max_average_window=4
        )
        steps = [inner, average]
    for ids, labels in dataset(5):
        outside(model, paddle.to_tensor(ids), paddle.to_tensor(labels)).backward()
        for optimizer in steps:
            optimizer.step()
        inner.clear_grad()
        recount.add(ids, labels)
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())
    assert stored.points("tokens/computed")[-1][0] == 5


@pytest.mark.parametrize("groups", [1, 2])
def test_parameter_groups(stored: Stored, groups: int) -> None:
    mlflow_tokens.autolog(pad_token_id=PAD)
    model, recount = Model(), Recount()
    parts = [model.embedding, model.head][:groups]
    optimizer = paddle.optimizer.AdamW(
        1e-2, parameters=[{"params": part.parameters(), "weight_decay": 0.1} for part in parts]
    )
    for ids, labels in dataset(4):
        outside(model, paddle.to_tensor(ids), paddle.to_tensor(labels)).backward()
        optimizer.step()
        optimizer.clear_grad()
        recount.add(ids, labels)
    mlflow_tokens.autolog(disable=True)
    assert recount.equals(stored.metrics())
    assert stored.points("tokens/computed")[-1][0] == 4


def actor_and_critic(actor: Any, critic: Any) -> dict[str, Recount]:
    """Four rounds; both are fed ids and trained, the critic in every other round alone."""
    optimizers = [paddle.optimizer.AdamW(1e-2, parameters=model.parameters()) for model in (actor, critic)]
    recounts = {"actor": Recount(), "critic": Recount()}
    for number, (ids, labels) in enumerate(dataset(4)):
        outside(actor, paddle.to_tensor(ids), paddle.to_tensor(labels)).backward()
        recounts["actor"].add(ids, labels)
        optimizers[0].step()
        if number % 2:
            outside(critic, paddle.to_tensor(ids), paddle.to_tensor(labels)).backward()
            recounts["critic"].add(ids, labels)
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.clear_grad()
    return recounts


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("name", "steps"), [("actor", 4), ("critic", 2)])
def test_a_named_model_is_counted_and_no_other(stored: Stored, name: str, steps: int, before: bool) -> None:
    models = {"actor": Model(), "critic": Model()}
    if before:
        actor_and_critic(**models)
    mlflow_tokens.autolog(pad_token_id=PAD, model=models[name])
    called = vars(nn.Layer)["__call__"]
    recounts = actor_and_critic(**models)
    assert vars(nn.Layer)["__call__"] is called, "there is nothing to look for"
    mlflow_tokens.autolog(disable=True)
    assert recounts[name].equals(stored.metrics())
    assert stored.points("tokens/computed")[-1][0] == steps


@pytest.mark.parametrize("container", [list, tuple])
def test_several_named_models_are_counted(stored: Stored, container: Any) -> None:
    """A part that is named beside what it is part of is not counted twice."""
    models = {"actor": Model(), "critic": Model()}
    named = container([*models.values(), models["actor"].embedding])
    mlflow_tokens.autolog(pad_token_id=PAD, model=named)
    recounts = actor_and_critic(**models)
    mlflow_tokens.autolog(disable=True)
    total = sum(recount.computed for recount in recounts.values())
    assert stored.metrics()["tokens/computed"] == total
    assert stored.points("tokens/computed")[-1][0] == 6


def test_a_named_model_within_another_layer_and_in_a_static_function(stored: Stored) -> None:
    inner = Model()

    class Task(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = inner, nn.Linear(1, 1)

        def forward(self, batch: Any) -> Any:
            return F.cross_entropy(self.inner(batch["ids"]), batch["targets"])

    task = Task()
    mlflow_tokens.autolog(pad_token_id=PAD, model=inner)
    recount, _ = train(
        lambda model, ids, labels: model({"ids": ids, "targets": labels}), dataset(4), model=task
    )

    def step(input_ids: Any, labels: Any) -> Any:
        return F.cross_entropy(inner(input_ids), labels)

    static = paddle.jit.to_static(step, full_graph=True)
    again, _ = train(lambda _model, ids, labels: static(ids, labels), dataset(4), model=inner)
    mlflow_tokens.autolog(disable=True)
    metrics = stored.metrics()
    assert metrics["tokens/computed"] == recount.computed + again.computed
    assert metrics["tokens/trained"] == recount.trained + again.trained


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ("gpt", TypeError, "paddle.nn.Layer"),
        (lambda: paddle.Model(Model()), TypeError, r"\.network"),
        (lambda: [Model(), 3], TypeError, "builtins.int"),
        (list, ValueError, "empty"),
        (nn.Dropout, ValueError, "Dropout"),
    ],
)
def test_a_model_that_cannot_be_counted_is_refused(model: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        mlflow_tokens.autolog(model=model() if callable(model) else model)
    assert mlflow_tokens.current() is None


def test_a_trainer_s_callback_names_a_model_as_well(stored: Stored) -> None:
    models = {"actor": Model(), "critic": Model()}
    with pytest.raises(TypeError, match=r"paddle\.nn\.Layer"):
        mlflow_tokens.TrainerCallback(model="gpt")
    assert mlflow_tokens.TrainerCallback(pad_token_id=PAD) is not None
    callback = mlflow_tokens.TrainerCallback(pad_token_id=PAD, model=models["critic"])
    callback.on_init_end()
    recounts = actor_and_critic(**models)
    callback.on_train_end()
    assert recounts["critic"].equals(stored.metrics())


def test_a_named_model_is_not_kept_alive(stored: Stored) -> None:
    model = Model()
    mlflow_tokens.autolog(pad_token_id=PAD, model=model)
    train(outside, dataset(2), model=model)
    gone = weakref.ref(model)
    mlflow_tokens.autolog(disable=True)
    del model
    gc.collect()
    assert gone() is None
