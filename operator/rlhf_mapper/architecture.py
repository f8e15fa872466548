"""Shape of a decoder model from its config.json, and the numbers of parameters that follow from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

from rlhf_api.problems import choice
from rlhf_api.spec.lora import Lora

CUT = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that the trainer can cut into stages; others may scale their input, and would do so in each stage.
The mapper chooses several stages or tensor shards for these types and for MIXTURES, except ONLY_EXPERTS."""
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3")
"""Mixtures of experts that the trainer can cut into pipeline stages and parts of the experts."""
ONLY_EXPERTS = ("olmoe", "deepseek_v3")
"""Mixtures that the mapper does not cut: the trainer cannot cut their attention, or the mapper does not model that."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts in config.json."""
CONTEXTS = (1, 2, 4, 8)
"""Context sizes that the mapper tries where a sequence may be longer than a micro-batch."""
SCALED = ("linear", "dynamic", "yarn")
"""Types of rotary embeddings whose `factor` extends a model's context beyond `max_position_embeddings`."""
PLAIN_HEADS = ("llama", "mistral", "qwen2", "deepseek_v3")
"""Model types that do not normalize queries and keys."""
FUSED = ("phi3",)
"""Model types that join the query, key and value matrices into one."""
MlpMatrices = tuple[tuple[str, int], ...]
"""(name, width as a multiple of the MLP's) of each matrix of an MLP."""
GATED: MlpMatrices = (("gate_proj", 1), ("up_proj", 1), ("down_proj", 1))
JOINED: MlpMatrices = (("gate_up_proj", 2), ("down_proj", 1))
MLPS = {
    **dict.fromkeys(("phi3", "glm4"), JOINED),
    **dict.fromkeys(("apertus", "arcee", "jais2", "nemotron"), GATED[1:]),
    **dict.fromkeys(("gpt2", "starcoder2"), (("c_fc", 1), ("c_proj", 1))),
    **dict.fromkeys(("nanochat", "phi"), (("fc1", 1), ("fc2", 1))),
}
"""Matrices of the MLP by model type; `GATED` for all other types. An MLP of two matrices has no gate."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shape of a decoder model: Llama, Qwen and similar models."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    """Width of the MLP; in a mixture of experts, the width of one expert."""
    vocabulary: int
    tied: bool = False
    """Whether the output head shares the weights of the input embedding."""
    experts: int = 1
    experts_per_token: int = 1
    may_be_cut: bool = True
    """Whether the mapper may choose pipeline stages and tensor shards for the model; if not, only data parallelism."""
    is_fused: bool = False
    """Whether the query, key and value matrices are joined into one (see `FUSED`)."""
    mlp: MlpMatrices = GATED
    norms_heads: bool = False
    """Whether attention normalizes queries and keys (as in Qwen3)."""
    positions: int = 0
    """Largest number of tokens of a sequence that the model reads, with scaled rotary embeddings; 0: unknown."""
    attention: int = 0
    """Parameters of a layer's attention with latent heads (MLA, as in DeepSeek-V3); 0: computed from the heads."""
    shared: int = 0
    """Width of the shared experts, the MLP that all tokens go through; 0: none."""
    dense: tuple[int, int] = (0, 0)
    """(number of layers without experts, width of their MLP)."""
    scores: bool = False
    """Whether the model is a reward model, cost model or critic, whose head gives one value a token."""

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one layer: attention, MLP (all experts), router and two norms."""
        idle_experts = self.experts - self.experts_per_token
        return self.active_layer_parameters + idle_experts * self.mlp_parameters + 2 * self.hidden

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of all experts of a layer; 0 without experts."""
        return self.experts * self.mlp_parameters * (self.experts > 1)

    @cached_property
    def active_layer_parameters(self) -> int:
        """Number of parameters of one layer that multiply a token: attention, router, and the experts chosen for it."""
        attention = self.attention or self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        shared = self.mlp_parameters * self.shared // self.ffn
        return attention + self.experts_per_token * self.mlp_parameters + router + shared

    @cached_property
    def mlp_parameters(self) -> int:
        """Parameters of the MLP of one layer; in a mixture of experts, of one expert."""
        return sum(width for _, width in self.mlp) * self.hidden * self.ffn

    def cannot_be_cut(
        self, *, pipeline: int = 1, tensor: int = 1, expert: int = 1, generates: bool = False
    ) -> tuple[str, str] | None:
        """Return (name of a size, clause that says why the size is impossible); None if the cut is possible.

        generates: whether the cut is that of a generator. Its surplus tensor ranks hold copies of key-value heads.
        """
        if expert > 1 and self.experts % expert:
            what = "does not divide" if expert < self.experts else "is more than"
            whose = f"which {what} the model's {self.experts} experts; expected {_divisors_of(self.experts)}"
            return "expert", f"is {expert}, {whose if self.experts > 1 else 'but the model has no experts'}"
        if pipeline > self.layers:
            return "pipeline", f"is {pipeline}, but the model has {self.layers} layers"
        for what, number in (
            ("attention heads", self.heads),
            ("key-value heads", 0 if generates and tensor % self.kv_heads == 0 else self.kv_heads),
            ("columns of the feed-forward layer", self.ffn),
        ):
            if number % tensor:
                fits = _divisors_of(gcd(self.heads, self.kv_heads, self.ffn))
                return "tensor", f"is {tensor}, which does not divide the model's {number} {what}; expected {fits}"
        return None

    @cached_property
    def head_parameters(self) -> int:
        """Parameters of the output head: hidden size times the vocabulary, or times 1 for a model that scores."""
        return self.hidden * (1 if self.scores else self.vocabulary)

    @cached_property
    def parameters(self) -> int:
        """Number of all parameters; an embedding that is also the head counts once."""
        own_head = 0 if self.tied and not self.scores else self.head_parameters
        dense, width = self.dense
        routed = self.experts * (self.mlp_parameters + self.hidden)
        less = routed + self.mlp_parameters * (self.shared - width) // self.ffn
        of_layers = self.layers * self.layer_parameters - dense * less
        return of_layers + self.vocabulary * self.hidden + self.hidden + own_head

    @cached_property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(count, elements of one matrix) by kind of weight matrix of the model; no norms, routers and tied head."""
        queries, keys = (self.hidden * self.head_size * each for each in (self.heads, self.kv_heads))
        own_head = () if self.tied and not self.scores else ((1, self.head_parameters),)
        mlp = ((self.experts, width * self.hidden * self.ffn) for _, width in self.mlp)
        of_layers = ((2, queries), (2, keys), *mlp)
        return (
            *((self.layers * count, size) for count, size in of_layers),
            (1, self.vocabulary * self.hidden),
            *own_head,
        )

    def trained_parameters(self, lora: Lora | None) -> int:
        """Return the number of trained parameters: all, or with LoRA those of the adapter and of a scoring head.

        In a mixture of experts, a shared expert and the layers without experts are not counted.
        """
        if lora is None:
            return self.parameters
        queries, keys = (each * self.head_size for each in (self.heads, self.kv_heads))
        joined, apart = {"qkv_proj": queries + 2 * keys}, {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        ends = {**(joined if self.is_fused else apart), "o_proj": queries}
        ends |= {name: width * self.ffn for name, width in self.mlp} if self.experts == 1 else {}
        adapted = sum(self.hidden + other for name, other in ends.items() if not lora.targets or name in lora.targets)
        return self.layers * lora.rank * adapted + self.head_parameters * self.scores


def _divisors_of(number: int) -> str:
    """Return the divisors of a number as words, at most the smallest 12."""
    return choice([str(each) for each in range(1, number + 1) if number % each == 0][:12])


def experts_in(config: Mapping[str, Any]) -> int | None:
    """Return the number of experts of a layer by a config.json; None for a dense model."""
    return next((config[name] for name in EXPERT_COUNTS if config.get(name)), None)


def architecture_of(config: Mapping[str, Any], *, scores: bool = False) -> Architecture:
    """Return the architecture that a config.json describes. Raises KeyError with the name of a missing field."""
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    experts, head_size = experts_in(config) or 1, int(config.get("head_dim") or hidden // heads)
    return Architecture(
        **(_latent(config) if config.get("model_type") == "deepseek_v3" else _plain(config, head_size)),
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        ffn=int(config.get("moe_intermediate_size") or config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        may_be_cut=config.get("model_type", CUT[0]) in {*CUT, *MIXTURES}.difference(ONLY_EXPERTS),
        norms_heads=config.get("model_type", PLAIN_HEADS[0]) not in PLAIN_HEADS,
        is_fused=config.get("model_type") in FUSED,
        mlp=MLPS.get(config.get("model_type", ""), GATED),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=int(config.get("num_experts_per_tok") or 1) if experts > 1 else 1,
        positions=positions_of(config),
        scores=scores,
    )


def _plain(config: Mapping[str, Any], head_size: int) -> dict[str, Any]:
    """Return the fields of an Architecture that DeepSeek-V3's config.json gives in another way (`_latent`)."""
    return {
        "head_size": head_size,
        "shared": int(config.get("shared_expert_intermediate_size") or 0),
        "dense": (len(config.get("mlp_only_layers") or ()), int(config.get("intermediate_size") or 0)),
    }


def _latent(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an Architecture by a config.json with latent heads (MLA), as in DeepSeek-V3."""
    names = ("num_attention_heads", "hidden_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    heads, hidden, latent, plain, rotary, value = (int(config[name]) for name in names)
    queries = int(config.get("q_lora_rank") or 0)
    of_queries = heads * (plain + rotary) * (queries or hidden) + hidden * queries
    of_keys = hidden * (latent + rotary) + latent * heads * (plain + value)
    return {
        "head_size": (plain + rotary + value) // 2,  # mean of query and key heads, and value heads
        "attention": of_queries + of_keys + heads * value * hidden,
        "shared": int(config.get("n_shared_experts") or 0) * int(config["moe_intermediate_size"]),
        "dense": (int(config.get("first_k_dense_replace") or 0), int(config["intermediate_size"])),
    }


def positions_of(config: Mapping[str, Any]) -> int:
    """Return the most tokens that a model of a config.json reads; 0 if it does not tell."""
    most = config.get("max_position_embeddings", config.get("n_positions"))
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(most, int) or not isinstance(rope, Mapping | None):
        return 0
    kind = (rope or {}).get("rope_type", (rope or {}).get("type"))
    known = (rope or {}).get("original_max_position_embeddings") or (most if kind in SCALED else 0)
    return max(most, int(known * ((rope or {}).get("factor") or 0)))
