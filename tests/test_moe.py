"""Routed tokens, tokens x experts chosen, of models whose gates are Paddle's or look like a library's.

Paddle's MoELayer does not run on CPUs: `number_count` has no kernel there ("Do not support expert count op
for cpu kernel now"). Its gates do, the two with a capacity with that op taken out.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.incubate.distributed.models.moe.gate import (
    GShardGate,
    NaiveGate,
    SwitchGate,
    gshard_gate,
    switch_gate,
)
from paddle.nn import functional as F

import mlflow_tokens
from mlflow_tokens.paddle.moe_hooks import _gates_of
from tests.conftest import Stored

HIDDEN, EXPERTS, VOCABULARY, BLOCKS = 8, 4, 50, 2


class Block(nn.Layer):
    """Experts behind a gate that returns weights and indices; all of them compute, for brevity."""

    def __init__(self, gate: nn.Layer) -> None:
        super().__init__()
        self.gate = gate
        self.experts = nn.LayerList([nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS)])

    def forward(self, x: Any) -> Any:
        flat = x.reshape([-1, HIDDEN])
        values, chosen = self.gate(flat)
        weights = (F.one_hot(chosen.clip(min=0), EXPERTS) * values.unsqueeze(-1)).sum(1)
        mixed = sum(expert(flat) * weights[:, n : n + 1] for n, expert in enumerate(self.experts))
        return x + mixed.reshape(x.shape)


class LinearGate(nn.Layer):
    """As Mixtral's: the gate is a linear layer, and the block chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.top_k = EXPERTS, 3
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias_attr=False)
        self.experts = nn.LayerList([nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS)])

    def forward(self, x: Any) -> Any:
        weights, _chosen = paddle.topk(F.softmax(self.gate(x.reshape([-1, HIDDEN]))), self.top_k)
        return x + self.experts[0](x) * weights.sum(-1).reshape([*x.shape[:2], 1])


class Hidden(nn.Layer):
    """Experts whose gate is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_weight = self.create_parameter([HIDDEN, EXPERTS])
        self.experts = nn.LayerList([nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS)])

    def forward(self, x: Any) -> Any:
        return x + self.experts[0](x) * F.softmax(x @ self.gate_weight)[..., :1]


def naive() -> nn.Layer:
    return Block(NaiveGate(HIDDEN, EXPERTS, 1, topk=2))


class Language(nn.Layer):
    def __init__(self, block: Callable[[], nn.Layer] = naive, call: Any = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.LayerList([block() for _ in range(BLOCKS)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.call = call

    def forward(self, input_ids: Any) -> Any:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x) if self.call is None else self.call(block, x)
        return self.head(x)


def reentrant(layer: Any, x: Any) -> Any:
    return recompute(layer, x, use_reentrant=True)


def not_reentrant(layer: Any, x: Any) -> Any:
    return recompute(layer, x, use_reentrant=False)


def ids(rows: int = 3) -> Any:
    return paddle.randint(0, VOCABULARY, [rows, 5])


def train(model: Any, micro_batches: int = 4, accumulate: int = 1, between: Any = None) -> list[float]:
    optimizer = paddle.optimizer.SGD(1e-2, parameters=model.parameters())
    losses = []
    for number in range(1, micro_batches + 1):
        inputs = ids()
        loss = F.cross_entropy(model(inputs), inputs)
        loss.backward()
        losses.append(float(loss))
        if number % accumulate == 0:
            optimizer.step()
            optimizer.clear_grad()
        if between is not None:
            between()
    return losses


def routed(stored: Stored) -> float | None:
    mlflow_tokens.autolog(disable=True)
    assert stored.metrics()["tokens/computed"] == 60.0  # 4 micro-batches of 3 x 5
    return stored.metrics().get("tokens/routed")


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("call", [None, reentrant, not_reentrant])
def test_tokens_times_experts_chosen(stored: Stored, call: Any, accumulate: int) -> None:
    mlflow_tokens.autolog(pad="none")
    train(Language(call=call), accumulate=accumulate)
    # 4 micro-batches x 15 tokens x 2 blocks x 2 experts: once, though recompute passes the gates twice.
    assert routed(stored) == 240


def test_recomputing_the_whole_model_counts_once(stored: Stored) -> None:
    mlflow_tokens.autolog(pad="none")
    model = Language()
    optimizer = paddle.optimizer.SGD(1e-2, parameters=model.parameters())
    for _ in range(4):
        inputs = ids()
        F.cross_entropy(recompute(model, inputs, use_reentrant=False), inputs).backward()
        optimizer.step()
    assert routed(stored) == 240


def test_the_linear_gate_of_a_block(stored: Stored) -> None:
    mlflow_tokens.autolog(pad="none")
    train(Language(LinearGate))
    assert routed(stored) == 4 * 15 * 2 * 3


@pytest.mark.parametrize(("kind", "chosen"), [(GShardGate, 2), (SwitchGate, 1)])
def test_gates_with_a_capacity_count_what_they_choose(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, kind: Any, chosen: int
) -> None:
    def drop_the_first(choice: Any, *_args: Any, **_kwargs: Any) -> Any:
        """In place of the op that has no kernel here: the first token finds its expert full."""
        kept = paddle.arange(choice.shape[0]).unsqueeze(-1) > 0
        return None, None, paddle.where(kept, choice, paddle.full_like(choice, -1))

    for module in (gshard_gate, switch_gate):
        monkeypatch.setattr(module, "limit_by_capacity", drop_the_first)
    options = {"random_routing": False} if kind is GShardGate else {}
    mlflow_tokens.autolog(pad="none")
    train(Language(lambda: Block(kind(HIDDEN, EXPERTS, 1, **options))))
    assert routed(stored) == 4 * 15 * 2 * chosen


def test_validation_and_calls_without_gradients_do_not_count(stored: Stored) -> None:
    mlflow_tokens.autolog(pad="none")
    model = Language()

    def validate() -> None:
        with paddle.no_grad():
            model(ids(7))
        model.eval()
        model(ids(7))
        model.train()

    train(model, between=validate)
    assert routed(stored) == 240


def test_a_teacher_s_gates_do_not_count(stored: Stored) -> None:
    mlflow_tokens.autolog(pad="none")
    teacher = Language()  # left in training mode, with gradients on
    train(Language(), between=lambda: teacher(ids()))
    assert routed(stored) == 240


def test_frozen_gates_of_a_trained_model_count(stored: Stored) -> None:
    mlflow_tokens.autolog(pad="none")
    model = Language()
    for parameter in model.blocks.parameters():
        parameter.stop_gradient = True
    train(model)
    assert routed(stored) == 240


def test_through_data_parallel(stored: Stored) -> None:
    mlflow_tokens.autolog(pad="none")
    train(paddle.DataParallel(Language()))
    assert routed(stored) == 240


def test_a_part_called_once_more_on_its_own_routes_once_more(stored: Stored) -> None:
    mlflow_tokens.autolog(pad="none")
    model = Language(call=reentrant)
    part = model.blocks[0]
    train(model, between=lambda: part(paddle.rand([3, 5, HIDDEN])))
    # After each micro-batch 15 more tokens choose 2 experts of the first block; the last time after the end
    # of the last step, which is not the record's.
    assert routed(stored) == 240 + 3 * 30


def test_experts_without_a_visible_gate_are_unknown(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow_tokens.autolog(pad="none")
    blocks = iter([naive(), Hidden()])
    train(Language(lambda: next(blocks)))  # the gate of the first is seen, and would be half of the truth
    assert routed(stored) is None
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "Routed" in line]
    assert line.endswith("Routed tokens are unknown: no gate is seen that chooses experts in Hidden.")


@pytest.mark.parametrize("full_graph", [True, False])
@pytest.mark.parametrize("block", [LinearGate, naive])
def test_gates_in_a_static_graph_are_unknown(stored: Stored, block: Any, full_graph: bool) -> None:
    mlflow_tokens.autolog(pad="none")
    model = paddle.jit.to_static(Language(block), full_graph=full_graph)
    train(model)
    assert routed(stored) is None
    assert not any(layer._forward_pre_hooks for layer in model.sublayers())


def test_a_compiled_function_that_calls_the_model(stored: Stored) -> None:
    mlflow_tokens.autolog(pad="none")
    model = Language()
    optimizer = paddle.optimizer.SGD(1e-2, parameters=model.parameters())

    def call(inputs: Any) -> Any:
        return model(inputs)

    compiled = paddle.jit.to_static(call, full_graph=False)
    for _ in range(4):
        inputs = ids()
        F.cross_entropy(compiled(inputs), inputs).backward()
        optimizer.step()
        optimizer.clear_grad()
    assert routed(stored) == 240


def test_a_gate_that_does_not_show_its_tokens_makes_the_total_unknown(stored: Stored) -> None:
    class Keyword(Block):
        def forward(self, x: Any) -> Any:
            values, _chosen = self.gate(inp=x)
            return x + values.sum(-1, keepdim=True)

    mlflow_tokens.autolog(pad="none")
    train(Language(lambda: Keyword(NaiveGate(HIDDEN, EXPERTS, 1))))
    assert routed(stored) is None


def test_a_dense_model_has_no_routed_tokens(stored: Stored) -> None:
    mlflow_tokens.autolog(pad="none")
    train(Language(lambda: nn.Linear(HIDDEN, HIDDEN)))
    assert routed(stored) is None


def test_a_copy_s_gates_do_not_count_and_nothing_of_ours_is_pickled(stored: Stored) -> None:
    mlflow_tokens.autolog(pad="none")
    model = Language()
    train(model, micro_batches=2)
    pickled = pickle.dumps(model)
    assert b"mlflow_tokens" not in pickled
    for other in (copy.deepcopy(model), pickle.loads(pickled)):
        other(ids())
    train(model, micro_batches=2)
    assert routed(stored) == 240


def test_training_is_the_same_to_the_bit_and_the_hooks_come_out(stored: Stored) -> None:
    def run() -> list[float]:
        paddle.seed(3)
        return train(Language())

    without = run()
    mlflow_tokens.autolog(pad="none")
    assert run() == without
    assert routed(stored) == 240
    model = Language()
    mlflow_tokens.autolog(pad="none")
    train(model)
    mlflow_tokens.autolog(disable=True)
    assert not any(layer._forward_pre_hooks for layer in model.sublayers(include_self=True))


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "num_experts_per_tok": 3,
}


@pytest.mark.parametrize(
    ("name", "options", "sparse_layers"),
    [
        ("Mixtral", {"num_local_experts": 5}, 3),
        (
            "Qwen2Moe",
            {"num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
            3,
        ),
        (
            "DeepseekV2",
            {
                "n_routed_experts": 8,
                "n_shared_experts": 2,
                "moe_intermediate_size": 24,
                "first_k_dense_replace": 1,
                "q_lora_rank": None,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 4,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
                "topk_method": "greedy",
            },
            2,
        ),
    ],
)
def test_paddlenlp_s_gates_are_found(name: str, options: dict[str, Any], sparse_layers: int) -> None:
    """Found, not run: the experts of PaddleNLP 3.0.0b4 fail on Paddle 3.3 in their own indexing."""
    transformers = pytest.importorskip("paddlenlp.transformers")
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this PaddleNLP has no {name}")
    config = getattr(transformers, f"{name}Config")(**SMALL, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    gates, hidden = _gates_of(model)
    assert hidden is None
    assert [chosen() for _gate, chosen in gates] == [3] * sparse_layers
    fields = ("num_local_experts", "num_experts", "n_routed_experts")
    (experts,) = [options[field] for field in fields if field in options]
    assert {gate.weight.shape[-1] for gate, _chosen in gates} == {experts}
