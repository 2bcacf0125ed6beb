"""The formula against real Paddle models: their matrix multiplications, added up as they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from mlflow_tokens.flops import architecture_of, flops_per_token

HIDDEN, LAYERS, VOCABULARY, ROWS, LENGTH = 24, 3, 40, 2, 7


class Multiplications:
    """FLOPs of what passes through `nn.Linear` and `paddle.matmul`, in plain ints."""

    def __init__(self) -> None:
        self.flops = 0

    def linear(self, layer: Any, inputs: Any, _output: Any) -> None:
        width, out = layer.weight.shape
        rows = 1
        for extent in inputs[0].shape[:-1]:
            rows *= extent
        self.flops += 2 * rows * width * out

    def matmul(self, left: Any, right: Any, transpose_y: bool = False) -> Any:
        result = paddle.matmul(left, right, transpose_y=transpose_y)
        cells = left.shape[-1]
        for extent in result.shape:
            cells *= extent
        self.flops += 2 * cells
        return result

    @contextmanager
    def over(self, model: nn.Layer) -> Iterator[None]:
        linears = [layer for layer in model.sublayers() if isinstance(layer, nn.Linear)]
        handles = [layer.register_forward_post_hook(self.linear) for layer in linears]
        yield
        for handle in handles:
            handle.remove()


class Heads(nn.Layer):
    """Grouped-query attention, or with a query and a key rank the latent one."""

    def __init__(self, count: Multiplications, config: dict[str, Any]) -> None:
        super().__init__()
        self.count, self.heads, self.latent = count, config["num_attention_heads"], "kv_lora_rank" in config
        if self.latent:
            self.rope, self.value = config["qk_rope_head_dim"], config["v_head_dim"]
            self.key = config["qk_nope_head_dim"] + self.rope
            self.groups = self.heads
            rank = config["kv_lora_rank"]
            self.q_a = nn.Linear(HIDDEN, config["q_lora_rank"])
            self.q = nn.Linear(config["q_lora_rank"], self.heads * self.key)
            self.kv_a = nn.Linear(HIDDEN, rank + self.rope)
            self.kv_b = nn.Linear(rank, self.heads * (self.key - self.rope + self.value))
        else:
            self.key = self.value = config.get("head_dim", HIDDEN // self.heads)
            self.groups = config["num_key_value_heads"]
            self.q = nn.Linear(HIDDEN, self.heads * self.key)
            self.k = nn.Linear(HIDDEN, self.groups * self.key)
            self.v = nn.Linear(HIDDEN, self.groups * self.value)
        self.o = nn.Linear(self.heads * self.value, HIDDEN)

    def forward(self, x: Any) -> Any:
        rows, length, _ = x.shape
        if self.latent:
            q = self.q(self.q_a(x))
            low, rotated = paddle.split(self.kv_a(x), [self.kv_b.weight.shape[0], self.rope], axis=-1)
            high = self.kv_b(low).reshape([rows, length, self.heads, -1])
            nope, v = paddle.split(high, [self.key - self.rope, self.value], axis=-1)
            rotated = rotated.unsqueeze(2).expand([rows, length, self.heads, self.rope])
            k = paddle.concat([nope, rotated], axis=-1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q = q.reshape([rows, length, self.heads, self.key])
        k = k.reshape([rows, length, self.groups, self.key]).repeat_interleave(self.heads // self.groups, 2)
        v = v.reshape([rows, length, self.groups, self.value]).repeat_interleave(self.heads // self.groups, 2)
        q, k, v = (part.transpose([0, 2, 1, 3]) for part in (q, k, v))
        scores = F.softmax(self.count.matmul(q, k, transpose_y=True))
        mixed = self.count.matmul(scores, v)
        return self.o(mixed.transpose([0, 2, 1, 3]).reshape([rows, length, -1]))


class Dense(nn.Layer):
    def __init__(self, width: int, gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, width), nn.Linear(width, HIDDEN)
        self.gate = nn.Linear(HIDDEN, width) if gated else None

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Layer):
    """Each token goes to the experts of its highest scores, and to the shared one."""

    def __init__(self, config: dict[str, Any], experts: int, width: int, shared: int, gated: bool) -> None:
        super().__init__()
        self.top_k, self.num_experts = config["num_experts_per_tok"], experts
        self.gate = nn.Linear(HIDDEN, experts, bias_attr=False)
        self.experts = nn.LayerList([Dense(width, True) for _ in range(experts)])
        self.shared = Dense(shared, True) if shared else None
        self.shared_gate = nn.Linear(HIDDEN, 1) if gated else None

    def forward(self, x: Any) -> Any:
        flat = x.reshape([-1, HIDDEN])
        weights, chosen = paddle.topk(F.softmax(self.gate(flat)), self.top_k)
        result = paddle.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            tokens, places = paddle.nonzero(chosen == number, as_tuple=True)
            tokens, places = tokens.flatten(), places.flatten()
            if tokens.shape[0]:
                given = expert(flat[tokens]) * weights[tokens, places].unsqueeze(-1)
                result = result + paddle.zeros_like(flat).index_add(tokens, 0, given)
        if self.shared is not None:
            shared = self.shared(flat)
            result = result + (shared if self.shared_gate is None else shared * self.shared_gate(flat))
        return result.reshape(x.shape)


class Transformer(nn.Layer):
    def __init__(self, count: Multiplications, config: dict[str, Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.attention = nn.LayerList([Heads(count, config) for _ in range(LAYERS)])
        gated = config["model_type"] != "gpt"
        blocks = [Dense(config["intermediate_size"], gated) for _ in range(LAYERS)]
        if config["model_type"] == "mixtral":
            blocks = [Experts(config, 4, config["intermediate_size"], 0, False) for _ in range(LAYERS)]
        if config["model_type"] == "qwen2_moe":
            blocks = [Experts(config, 6, 10, 14, True) for _ in range(LAYERS)]
        if config["model_type"] == "deepseek_v2":
            blocks[1:] = [Experts(config, 6, 10, 2 * 10, False) for _ in range(LAYERS - 1)]
        self.blocks = nn.LayerList(blocks)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        for attention, block in zip(self.attention, self.blocks, strict=True):
            x = x + attention(x)
            x = x + block(x)
        return self.head(x)


BASE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 56,
    "vocab_size": VOCABULARY,
}
QWEN = {
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 14,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
DEEPSEEK = {
    "moe_intermediate_size": 10,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": 9,
    "kv_lora_rank": 11,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 3,
    "v_head_dim": 7,
}


@pytest.mark.parametrize(
    "config",
    [
        {**BASE, "model_type": "gpt"},
        {**BASE, "model_type": "llama", "num_key_value_heads": 2},
        {**BASE, "model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 10},
        {**BASE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        {**BASE, "model_type": "qwen2_moe", **QWEN},
        {**BASE, "model_type": "deepseek_v2", **DEEPSEEK},
    ],
    ids=lambda config: config["model_type"],
)
def test_what_a_model_multiplies(config: dict[str, Any]) -> None:
    paddle.seed(1)
    count = Multiplications()
    model = Transformer(count, config)
    with count.over(model):
        model(paddle.randint(0, VOCABULARY, [ROWS, LENGTH]))
    architecture = architecture_of(config)
    assert architecture is not None
    assert flops_per_token(architecture, LENGTH) * ROWS * LENGTH == 3 * count.flops


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
SPARSE = {**SMALL, "num_key_value_heads": 2, "num_experts_per_tok": 2}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


@pytest.mark.parametrize("library", ["paddlenlp", "paddleformers"])
@pytest.mark.parametrize(
    ("name", "options", "skipped"),
    [
        ("Llama", {**SMALL, "num_key_value_heads": 2}, ()),
        ("Mistral", {**SMALL, "num_key_value_heads": 2}, ()),
        ("Gemma", {**SMALL, "num_key_value_heads": 1, "head_dim": 16}, ()),
        ("Qwen2", {**SMALL, "num_key_value_heads": 2}, ()),
        ("Qwen3", {**SMALL, "num_key_value_heads": 2, "head_dim": 16}, ()),
        ("GPT", SMALL, ("position_embeddings",)),
        ("Mixtral", {**SPARSE, "num_local_experts": 4}, ()),
        (
            "Qwen2Moe",
            {**SPARSE, "num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
            (),
        ),
        ("Qwen3Moe", {**SPARSE, "num_experts": 6, "moe_intermediate_size": 24, "head_dim": 16}, ()),
        ("Glm4Moe", {**SPARSE, "n_routed_experts": 6, "moe_intermediate_size": 24}, ()),
        ("DeepseekV2", {**LATENT, "q_lora_rank": None}, ()),
        ("DeepseekV2", {**LATENT, "q_lora_rank": 12}, ()),
        ("DeepseekV3", {**LATENT, "q_lora_rank": 12}, ()),
        ("Bert", SMALL, ("pooler", "seq_relationship")),
        ("Ernie", SMALL, ("pooler", "seq_relationship")),
    ],
)
def test_the_weights_of_a_library_s_model(
    library: str, name: str, options: dict[str, Any], skipped: tuple[str, ...]
) -> None:
    """The matrices of a real model, those of experts by the share that a token is sent to."""
    transformers = pytest.importorskip(f"{library}.transformers")
    head = "ForMaskedLM" if name in ("Bert", "Ernie") else "ForCausalLM"
    try:
        if not hasattr(transformers, f"{name}{head}"):
            pytest.skip(f"{library} has no {name}")
        config = getattr(transformers, f"{name}Config")(**options)
        model = getattr(transformers, f"{name}{head}")(config)
    except ImportError as error:  # PaddleFormers makes most models with paddlefleet, which PyPI has not
        pytest.skip(f"{library} cannot make {name} here: {error}")
    experts = options.get("num_experts", options.get("n_routed_experts", options.get("num_local_experts", 1)))
    chosen = options.get("num_experts_per_tok", 1)
    multiplied = 0
    for path, layer in model.named_sublayers():
        if isinstance(layer, nn.Embedding) or any(part in path for part in skipped):
            continue
        for parameter in layer.parameters(include_sublayers=False):
            if parameter.ndim != 2:
                continue
            weights = parameter.shape[0] * parameter.shape[1]
            multiplied += weights * chosen if ".experts." in path else weights * experts
    architecture = architecture_of(config, language_head=True)
    assert architecture is not None
    assert architecture.active_weights * experts == multiplied
