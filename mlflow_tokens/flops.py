"""Model FLOPs per token from the architecture: what training a token costs, whatever computes it.

The conventions are those of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), where a model's
FLOPs utilisation (MFU) is defined:

- matrix multiplications alone, 2 FLOPs a multiply-add; norms, rotations, softmax and activations are left
  out, and so is the embedding, which is a lookup. The output head is in.
- training = 3 x forward: the backward pass multiplies twice as much, by inputs and by weights. What is
  recomputed is not counted again. Where weights are frozen (LoRA) less is computed than this says.
- **attention is not halved for causal masks**: every position is charged for `sequence_length` keys, which
  is PaLM's 12 x layers x heads x head width x sequence length. A kernel that skips what the mask hides does
  half of that, so that MFU by this convention is flattering where attention outweighs the rest (Llama 3 8B
  at 128k: 82% of the FLOPs are attention's).
- of a mixture of experts the chosen and the shared experts count, and the router. A token that is dropped
  at an expert's capacity counts as if it had been computed.
- what sees one position a sequence (a pooler, a classifier over the first token) is left out.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Attention:
    """The projections of one layer's attention, and the width at which its heads compare and mix.

    weights: multiply-adds of all projections a token.
    query_width, value_width: heads x the width of a head, for queries against keys and for the values.
    """

    weights: int
    query_width: int
    value_width: int


def grouped_attention(hidden: int, heads: int, kv_heads: int, head_width: int) -> Attention:
    """Multi-head, grouped-query (arXiv:2305.13245) or multi-query attention.

    Queries and output: hidden x (heads x head width) each; keys and values: hidden x (kv_heads x head width)
    each. Sharing keys among heads saves projections, and nothing of the comparison.
    """
    width = heads * head_width
    return Attention(2 * hidden * width + 2 * hidden * kv_heads * head_width, width, width)


def latent_attention(
    hidden: int,
    heads: int,
    *,
    query_rank: int | None,
    kv_rank: int,
    nope_width: int,
    rope_width: int,
    value_width: int,
) -> Attention:
    """Multi-head latent attention as it is trained, keys and values unfolded (DeepSeek-V2, arXiv:2405.04434).

    Queries directly, or down to `query_rank` and up; keys and values down to `kv_rank` (and one rotated key
    for all heads), and up to a key of `nope_width` and a value of `value_width` a head.
    """
    query_head = nope_width + rope_width
    if query_rank is None:
        query = hidden * heads * query_head
    else:
        query = hidden * query_rank + query_rank * heads * query_head
    down = hidden * (kv_rank + rope_width)
    up = kv_rank * heads * (nope_width + value_width)
    output = heads * value_width * hidden
    return Attention(query + down + up + output, heads * query_head, heads * value_width)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A transformer, as far as its matrix multiplications go. Widths are numbers of features.

    Whether the head's weights are the embedding's does not matter here: they are multiplied all the same.

    layers, hidden: number of blocks, and width of the residual stream.
    attention: what one layer's attention is made of.
    ffn: inner width of a dense block's feed-forward network.
    gated: whether that has three matrices (SwiGLU, arXiv:2002.05202) rather than two; experts likewise.
    vocabulary: outputs of the head at every position; 0 if there is none.
    head_transform: a hidden x hidden layer before the head, as BERT's masked language model has.
    moe_layers: blocks with experts instead of a dense network.
    experts, experts_per_token, expert_ffn: routed experts, those chosen, and the inner width of each.
    shared_ffn: inner width of all experts that every token passes, together.
    shared_gated: whether what those give is weighted by a learned number a token (Qwen2-MoE).
    window, windowed_layers: keys that a position sees at most in so many of the layers.
    """

    layers: int
    hidden: int
    attention: Attention
    ffn: int
    gated: bool
    vocabulary: int
    head_transform: bool = False
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gated: bool = False
    window: int | None = None
    windowed_layers: int = 0

    @property
    def active_weights(self) -> int:
        """Weights that a token is multiplied by, the head's included and the embedding's not: N of 6N."""
        matrices = 3 if self.gated else 2
        dense = matrices * self.hidden * self.ffn
        inner = self.experts_per_token * self.expert_ffn + self.shared_ffn
        sparse = matrices * self.hidden * inner + self.hidden * (self.experts + self.shared_gated)
        head = self.hidden * (self.vocabulary + self.head_transform * self.hidden)
        return (
            self.layers * self.attention.weights
            + (self.layers - self.moe_layers) * dense
            + self.moe_layers * sparse
            + head
        )

    def keys_seen(self, sequence_length: int) -> int:
        """Keys that a position is compared with, summed over the layers; masks are not looked at."""
        windowed = 0 if self.window is None else self.windowed_layers
        seen = sequence_length if self.window is None else min(sequence_length, self.window)
        return (self.layers - windowed) * sequence_length + windowed * seen


def flops_per_token(architecture: Architecture, sequence_length: int) -> float:
    """Model FLOPs of training on one token: 6 x active weights + attention (see the module for conventions).

    Args:
        sequence_length: positions that attention goes over, padding included; of packed rows whose
            documents do not see each other, the length of a document.

    Raises:
        ValueError: the sequence has no positions.
    """
    if sequence_length < 1:
        raise ValueError(f"a sequence of {sequence_length} positions cannot be trained on")
    attention = architecture.attention
    compared = architecture.keys_seen(sequence_length) * (attention.query_width + attention.value_width)
    return float(3 * 2 * (architecture.active_weights + compared))


def architecture_of(config: Any, *, language_head: bool | None = None) -> Architecture | None:
    """The architecture that a model's configuration describes; None where it does not say for certain.

    Known are the families of `_FAMILIES`, by the configuration's `model_type`: how many matrices a
    feed-forward network has, which layers have experts and how wide those are is the family's, and not in
    the configuration. Unknown are other families (make an `Architecture` by hand), fields that are missing,
    contradict each other or are no whole numbers, layers that predict further tokens (their share differs
    between implementations), attention that is linear or windowed in a way that is read in two ways, and
    experts in some layers only where implementations disagree which.

    Args:
        config: of PaddleNLP, PaddleFormers or in the fields of Hugging Face; an object or a mapping.
        language_head: whether every position goes through a head as wide as the vocabulary. By default as
            the family is pretrained: so for decoders; unknown for encoders, whose head is the task's.
    """
    try:
        return _architecture(_Config(config), language_head)
    except _UnknownError:
        return None


class _UnknownError(Exception):
    """The configuration does not say."""


_Moe = Literal["all", "sparse_step", "first_dense", "range"]


@dataclass(frozen=True, slots=True)
class _Family:
    """What the name of a family says.

    latent: multi-head latent attention. moe: the rule for which layers have experts. windowed: that
    `sliding_window`, if set, holds in all layers.
    """

    gated: bool = True
    encoder: bool = False
    latent: bool = False
    moe: _Moe | None = None
    windowed: bool = False


_PLAIN, _ENCODER = _Family(gated=False), _Family(gated=False, encoder=True)
_FAMILIES: Mapping[str, _Family] = {
    "gpt": _PLAIN,
    "gpt2": _PLAIN,
    "bert": _ENCODER,
    "ernie": _ENCODER,
    "roberta": _ENCODER,
    "llama": _Family(),
    "gemma": _Family(),
    "qwen2": _Family(),
    "qwen3": _Family(),
    "ernie4_5": _Family(),
    "mistral": _Family(windowed=True),
    "mixtral": _Family(moe="all", windowed=True),
    "gpt_oss": _Family(moe="all"),
    "qwen2_moe": _Family(moe="sparse_step"),
    "qwen3_moe": _Family(moe="sparse_step"),
    "glm4_moe": _Family(moe="first_dense"),
    "deepseek_v2": _Family(moe="first_dense", latent=True),
    "deepseek_v3": _Family(moe="first_dense", latent=True),
    "ernie4_5_moe": _Family(moe="range"),
}

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
_HIDDEN = ("hidden_size", "d_model", "n_embd")
_HEADS = ("num_attention_heads", "num_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_FFN = ("intermediate_size", "ffn_hidden_size", "n_inner")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_NEXT = ("num_nextn_predict_layers", "num_mtp_layers")


class _Config:
    """Fields of a configuration under their many names."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def value(self, name: str) -> Any:
        """What a field holds; None if there is no such field."""
        if isinstance(self._config, Mapping):
            return self._config.get(name)
        try:
            return getattr(self._config, name, None)
        except Exception as error:
            raise _UnknownError from error

    def number(self, *names: str) -> int | None:
        """A whole number that is not negative, under any of the names; None if there is none."""
        found = {_whole(value) for name in names if (value := self.value(name)) is not None}
        if len(found) > 1:
            raise _UnknownError
        return found.pop() if found else None

    def positive(self, *names: str) -> int:
        """A number that has to be there."""
        if not (number := self.number(*names)):
            raise _UnknownError
        return number


def _whole(value: Any) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError as error:
        raise _UnknownError from error
    if number < 0:
        raise _UnknownError
    return number


def _architecture(config: _Config, language_head: bool | None) -> Architecture:
    name = config.value("model_type")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None or config.number(*_NEXT):
        raise _UnknownError
    if language_head is None:
        if family.encoder:
            raise _UnknownError
        language_head = True
    layers, hidden = config.positive(*_LAYERS), config.positive(*_HIDDEN)
    ffn = config.number(*_FFN)
    if ffn is None and name == "gpt2":  # the one family whose configuration leaves it out: 4 x hidden
        ffn = 4 * hidden
    experts = _experts(config, name, family, layers)
    moe_layers = experts.pop("moe_layers", 0)
    if not ffn and moe_layers < layers:
        raise _UnknownError
    window, windowed_layers = _windows(config, family, layers)
    return Architecture(
        layers=layers,
        hidden=hidden,
        attention=_attention(config, family, hidden),
        ffn=ffn or 0,
        gated=family.gated,
        vocabulary=config.positive("vocab_size") if language_head else 0,
        head_transform=language_head and family.encoder,
        moe_layers=moe_layers,
        window=window,
        windowed_layers=windowed_layers,
        **experts,
    )


def _attention(config: _Config, family: _Family, hidden: int) -> Attention:
    heads, latent = config.positive(*_HEADS), config.number("kv_lora_rank")
    if family.latent != bool(latent):
        raise _UnknownError
    if latent:
        return latent_attention(
            hidden,
            heads,
            query_rank=config.number("q_lora_rank") or None,
            kv_rank=latent,
            nope_width=config.positive("qk_nope_head_dim"),
            rope_width=config.positive("qk_rope_head_dim"),
            value_width=config.positive("v_head_dim"),
        )
    kv_heads, width = config.number(*_KV_HEADS), config.number("head_dim")
    kv_heads = heads if kv_heads is None else kv_heads
    if width is None and hidden % heads == 0:
        width = hidden // heads
    if not width or not kv_heads or heads % kv_heads:
        raise _UnknownError
    return grouped_attention(hidden, heads, kv_heads, width)


def _experts(config: _Config, name: str, family: _Family, layers: int) -> dict[str, Any]:
    """The fields of an Architecture that say what its experts are; none of them if there are none."""
    experts = config.number(*_EXPERTS) or 0
    if family.moe is None or experts == 0:
        if experts > 1 or family.moe not in (None, "first_dense"):
            raise _UnknownError
        return {}
    chosen = config.positive(*_CHOSEN)
    if chosen > experts:
        raise _UnknownError
    width = config.positive(*(_FFN if family.moe == "all" else ("moe_intermediate_size",)))
    shared = (config.number(*_SHARED) or 0) * width
    if (together := config.number("shared_expert_intermediate_size")) is not None:
        if shared:
            raise _UnknownError
        shared = together
    if shared and (family.moe == "all" or name == "qwen3_moe"):
        raise _UnknownError
    return {
        "moe_layers": _moe_layers(config, family, layers),
        "experts": experts,
        "experts_per_token": chosen,
        "expert_ffn": width,
        "shared_ffn": shared,
        "shared_gated": bool(shared) and name == "qwen2_moe",
    }


def _moe_layers(config: _Config, family: _Family, layers: int) -> int:
    if family.moe == "all":
        return layers
    if family.moe == "sparse_step":
        # PaddleNLP gives experts to all layers whatever these say, PaddleFormers does as they say.
        if (config.number("decoder_sparse_step") or 1) != 1 or config.value("mlp_only_layers"):
            raise _UnknownError
        return layers
    if family.moe == "first_dense":
        first = config.number("first_k_dense_replace") or 0
        every = 1 if config.value("moe_layer_freq") is None else config.positive("moe_layer_freq")
        return sum(index % every == 0 for index in range(first, layers))
    start, end = config.number("moe_layer_start_index"), config.value("moe_layer_end_index")
    every = config.positive("moe_layer_interval")
    if start is None:
        raise _UnknownError
    last = layers - 1 if end in (None, -1) else _whole(end)
    return sum((index + 1) % every == 0 for index in range(start, min(last + 1, layers)))


def _windows(config: _Config, family: _Family, layers: int) -> tuple[int | None, int]:
    """The keys that a position sees at most, and the number of layers in which that is so."""
    kinds = config.value("layer_types")
    # PaddleNLP's models write False over a window that is not used.
    unused = config.value("sliding_window") is False or config.value("use_sliding_window") is False
    if kinds is None and unused:
        return None, 0
    window = None if unused else config.number("sliding_window")
    if kinds is not None:
        if not isinstance(kinds, list | tuple) or len(kinds) != layers:
            raise _UnknownError
        windowed = sum(kind == "sliding_attention" for kind in kinds)
        if windowed + sum(kind == "full_attention" for kind in kinds) != layers or (windowed and not window):
            raise _UnknownError
        return (window, windowed) if windowed else (None, 0)
    if not window:
        return None, 0
    # Which layers have the window is read in two ways in other families (Qwen2's max_window_layers).
    if not family.windowed:
        raise _UnknownError
    return window, layers
