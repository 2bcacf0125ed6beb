"""Model FLOPs per token: published models worked out by hand, and small ones recounted layer by layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlflow_tokens.flops import Architecture, architecture_of, flops_per_token, grouped_attention

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "vocab_size": 50257,
}
LLAMA_2_7B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
LLAMA_3_8B = {**LLAMA_2_7B, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
MIXTRAL_8X7B = {
    **LLAMA_3_8B,
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN_MOE_A2_7B = {
    "model_type": "qwen2_moe",
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "vocab_size": 151936,
}
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 27,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
}


def known(config: Any, **options: Any) -> Architecture:
    architecture = architecture_of(config, **options)
    assert architecture is not None
    return architecture


@pytest.mark.parametrize(
    ("config", "weights", "sequence_length", "flops"),
    [
        # 12 x (4 x 768^2 + 2 x 768 x 3072) = 12 x 7,077,888 = 84,934,656; head 50257 x 768 = 38,597,376.
        # Attention: 12 x 12 x 768 x 1024 = 113,246,208.
        (GPT2, 123_532_032, 1024, 741_192_192 + 113_246_208),
        # 32 x (4 x 4096^2 + 3 x 4096 x 11008) = 32 x 202,375,168; head 32000 x 4096 = 131,072,000.
        # With as many for the embedding, and 65 norms of 4096, that is the model's 6,738,415,616.
        # Attention: 12 x 32 x 4096 x 4096 = 6,442,450,944.
        (LLAMA_2_7B, 6_738_415_616 - 131_072_000 - 65 * 4096, 4096, 39_642_464_256 + 6_442_450_944),
        # 32 x (2 x 4096^2 + 2 x 4096 x 1024 + 3 x 4096 x 14336) = 32 x 218,103,808; head 525,336,576. With
        # the embedding and the norms 8,030,261,248. Attention 12 x 32 x 4096 x 8192, and 16 times that.
        (LLAMA_3_8B, 8_030_261_248 - 525_336_576 - 65 * 4096, 8192, 45_027_950_592 + 12_884_901_888),
        (LLAMA_3_8B, 7_504_658_432, 131_072, 45_027_950_592 + 206_158_430_208),
        # 32 x (41,943,040 + 2 experts x 176,160,768 + router 4096 x 8) = 32 x 394,297,344; head 131,072,000:
        # 12.88 billion active parameters with the embedding. Attention 12 x 32 x 4096 x 32768.
        (MIXTRAL_8X7B, 12_748_587_008, 32_768, 76_491_522_048 + 51_539_607_552),
        # 24 x (4 x 2048^2 + 4 x 8,650,752 + shared 34,603,008 + router 122,880 + shared gate 2,048)
        # = 24 x 86,108,160; head 311,164,928: "A2.7B" with the embedding. Attention 12 x 24 x 2048 x 8192.
        (QWEN_MOE_A2_7B, 2_377_760_768, 8192, 14_266_564_608 + 4_831_838_208),
        # Attention of a layer: 2048 x 16 x 192 + 2048 x 576 + 512 x 16 x 256 + 16 x 128 x 2048 = 13,762,560;
        # x 27 = 371,589,120; a dense layer 3 x 2048 x 10944 = 67,239,936; 26 x (8 x 8,650,752 + 131,072)
        # = 1,802,764,288; head 209,715,200. Comparing: 3 x 27 x 2 x 16 x (192 + 128) x 4096.
        (DEEPSEEK_V2_LITE, 2_451_308_544, 4096, 14_707_851_264 + 3_397_386_240),
    ],
)
def test_published_models(config: dict[str, Any], weights: int, sequence_length: int, flops: int) -> None:
    for form in (config, SimpleNamespace(**config)):
        architecture = known(form)
        assert architecture.active_weights == weights
        assert flops_per_token(architecture, sequence_length) == flops


def test_six_n_is_what_is_left_without_attention() -> None:
    architecture = known(LLAMA_2_7B)
    one_key = 12 * 32 * 4096
    assert flops_per_token(architecture, 1) == 6 * architecture.active_weights + one_key


def test_a_query_rank_puts_a_bottleneck_before_the_queries() -> None:
    # DeepSeek-V2: 1536 wide. 2048 x 1536 + 1536 x 16 x 192 instead of 2048 x 16 x 192, in 27 layers.
    more = 27 * (2048 * 1536 + 1536 * 3072 - 2048 * 3072)
    assert known({**DEEPSEEK_V2_LITE, "q_lora_rank": 1536}).active_weights == 2_451_308_544 + more


def test_head_width_is_not_always_hidden_by_heads() -> None:
    config = {**LLAMA_3_8B, "model_type": "qwen3", "head_dim": 64}
    # Queries and output 2 x 4096 x 2048, keys and values 2 x 4096 x 512: half of before.
    assert known(config).active_weights == 7_504_658_432 - 32 * 41_943_040 // 2
    assert flops_per_token(known(config), 8192) == 6 * known(config).active_weights + 12_884_901_888 // 2


def test_a_window_bounds_the_keys_of_its_layers() -> None:
    mistral = known({**LLAMA_3_8B, "model_type": "mistral", "sliding_window": 4096})
    body = 6 * mistral.active_weights
    assert flops_per_token(mistral, 2048) - body == 12 * 32 * 4096 * 2048
    assert flops_per_token(mistral, 8192) - body == 12 * 32 * 4096 * 4096
    unused = known({**LLAMA_3_8B, "model_type": "mistral", "sliding_window": False})
    assert flops_per_token(unused, 8192) - body == 12 * 32 * 4096 * 8192
    kinds = ["sliding_attention", "full_attention"] * 16
    mixed = known({**LLAMA_3_8B, "model_type": "qwen2", "sliding_window": 4096, "layer_types": kinds})
    assert flops_per_token(mixed, 8192) - body == 12 * 4096 * 16 * (4096 + 8192)


def test_the_head_of_an_encoder_is_its_task() -> None:
    bert = {
        "model_type": "bert",
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
    }
    assert architecture_of(bert) is None
    assert known(bert, language_head=False).active_weights == 84_934_656
    assert known(bert, language_head=True).active_weights == 84_934_656 + 768 * 768 + 768 * 30522
    assert known(GPT2, language_head=False).active_weights == 84_934_656


def test_experts_after_the_first_dense_layers_and_in_a_range_of_layers() -> None:
    assert known({**DEEPSEEK_V2_LITE, "first_k_dense_replace": 3}).moe_layers == 24
    assert known({**DEEPSEEK_V2_LITE, "moe_layer_freq": 2}).moe_layers == 13  # 2, 4, ... 26
    dense = {**DEEPSEEK_V2_LITE, "n_routed_experts": None, "n_shared_experts": None}
    assert known(dense).moe_layers == 0
    ernie = {
        **LLAMA_3_8B,
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 1536,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    }
    assert known(ernie).moe_layers == 31
    assert known(ernie).shared_ffn == 3072
    assert known({**ernie, "moe_layer_end_index": 10, "moe_layer_interval": 2}).moe_layers == 5  # 1, 3 ... 9
    assert architecture_of({**ernie, "moe_num_experts": [64, 64]}) is None


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        object(),
        {**LLAMA_2_7B, "model_type": "a_new_family"},
        {**LLAMA_2_7B, "model_type": ["llama"]},
        {key: value for key, value in LLAMA_2_7B.items() if key != "model_type"},
        *({key: value for key, value in LLAMA_2_7B.items() if key != left_out} for left_out in (
            "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
        )),
        {**LLAMA_2_7B, "num_layers": 24},  # two spellings, two values
        {**LLAMA_2_7B, "hidden_size": 4096.0},
        {**LLAMA_2_7B, "hidden_size": "4096"},
        {**LLAMA_2_7B, "hidden_size": True},
        {**LLAMA_2_7B, "hidden_size": -4096},
        {**LLAMA_2_7B, "num_attention_heads": 33},
        {**LLAMA_2_7B, "num_key_value_heads": 5},
        {**LLAMA_2_7B, "num_experts": 8},  # a dense family with experts
        {**LLAMA_2_7B, "kv_lora_rank": 512},
        {**LLAMA_2_7B, "num_nextn_predict_layers": 1},
        {**LLAMA_2_7B, "sliding_window": 4096},
        {**LLAMA_2_7B, "layer_types": ["linear_attention"] * 32},
        {**LLAMA_2_7B, "layer_types": ["full_attention"] * 31},
        {**LLAMA_2_7B, "layer_types": ["sliding_attention"] * 32},  # how wide?
        {**QWEN_MOE_A2_7B, "use_sliding_window": True},
        {**QWEN_MOE_A2_7B, "decoder_sparse_step": 2},
        {**QWEN_MOE_A2_7B, "mlp_only_layers": [0]},
        {**QWEN_MOE_A2_7B, "num_experts_per_tok": 61},
        {**QWEN_MOE_A2_7B, "num_experts_per_tok": None},
        {**QWEN_MOE_A2_7B, "n_shared_experts": 2},
        {**QWEN_MOE_A2_7B, "num_experts": 0},
        {**MIXTRAL_8X7B, "n_shared_experts": 1},
        {**DEEPSEEK_V2_LITE, "kv_lora_rank": None},
        {**DEEPSEEK_V2_LITE, "v_head_dim": None},
        {**DEEPSEEK_V2_LITE, "moe_layer_freq": [0, 1]},
        {**DEEPSEEK_V2_LITE, "moe_intermediate_size": None},
    ],
)  # fmt: skip
def test_what_a_configuration_does_not_say_is_unknown(config: Any) -> None:
    assert architecture_of(config) is None


def test_a_configuration_that_cannot_be_read_is_unknown() -> None:
    class Broken:
        @property
        def model_type(self) -> str:
            raise RuntimeError("not loaded")

    assert architecture_of(Broken()) is None


def test_a_sequence_has_positions() -> None:
    with pytest.raises(ValueError, match="0 positions"):
        flops_per_token(Architecture(1, 8, grouped_attention(8, 2, 2, 4), 16, False, 50), 0)
