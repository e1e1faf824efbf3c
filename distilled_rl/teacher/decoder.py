"""The shape of a dense decoder, from its ``config.json`` alone: parameters, and bytes of weights, cache, logits, activations.

Sizes are of the whole model: with n devices that share it, each holds about an n-th. Imports neither torch nor verl.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


@dataclass(frozen=True)
class Decoder:
    """The shape of a dense decoder of the Llama family: RMS norms, rotary embedding, a gated MLP, grouped queries."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool  # the head is the embedding
    layer_vectors: int  # parameters of a layer outside its matrices: norms and biases

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Decoder":
        """Read a ``config.json`` of Hugging Face.

        Raises ``ValueError`` that names the key that is missing or no whole number above 0, or the architecture: a mixture of
        experts, a sliding window, or a ``model_type`` outside ``ARCHITECTURES``.
        """
        kind = config.get("model_type")
        if kind not in ARCHITECTURES or any(config.get(key) for key in _EXPERTS):
            raise ValueError(
                f"config.json: model_type {kind!r} is not computed here, only the dense {', '.join(ARCHITECTURES)}: "
                "a mixture of experts or another architecture has other operations and bytes"
            )
        windows = set(config.get("layer_types") or ()) - {"full_attention"}
        if config.get("use_sliding_window") or windows:
            raise ValueError(
                f"config.json: use_sliding_window or layer_types ({', '.join(sorted(windows)) or 'by default'}) ask for "
                "attention that does not see the whole sequence, which is not computed here"
            )
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        intermediate = _size(config, "intermediate_size")
        # As transformers reads the three: a Llama may lack either key, a Qwen2 has no head_dim.
        kv_heads = _size(config, "num_key_value_heads", heads if kind == "llama" else None)
        head_dim = _size(config, "head_dim", None if kind == "qwen3" else hidden // heads)
        queries, keys = heads * head_dim, kv_heads * head_dim
        vectors = 2 * hidden + (2 * head_dim if kind == "qwen3" else 0)  # its queries and keys have norms
        if kind == "qwen2" or config.get("attention_bias"):
            vectors += queries + 2 * keys + (0 if kind == "qwen2" else hidden)
        if kind == "llama" and config.get("mlp_bias"):
            vectors += 2 * intermediate + hidden
        return cls(
            hidden=hidden,
            intermediate=intermediate,
            layers=_size(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=_size(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            layer_vectors=vectors,
        )

    @property
    def layer_weights(self) -> int:
        """Weights in the matrices of one layer."""
        attention = 2 * self.head_dim * (self.heads + self.kv_heads)  # columns of query, key, value, and output
        return self.hidden * (attention + 3 * self.intermediate)

    @property
    def parameters(self) -> int:
        """All parameters, exactly; tied embeddings count once."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (self.layer_weights + self.layer_vectors) + self.hidden + embeddings

    def weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of the parameters; as many go from host to device each time that an off-loaded teacher is used."""
        return self.parameters * _bytes(dtype)

    def kv_cache_bytes(self, tokens: float, dtype: str = "bf16") -> float:
        """Bytes of the keys and values of ``tokens`` tokens in a served model's cache, without the rest of its last block."""
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens * _bytes(dtype)

    def logits_bytes(self, tokens: float, dtype: str = "fp32") -> float:
        """Bytes of the logits of ``tokens`` tokens that are held at once: of a chunk, where the head works in chunks."""
        return tokens * self.vocabulary * _bytes(dtype)

    def activation_bytes(self, tokens: float, dtype: str = "bf16") -> float:
        """Bytes at the peak of a forward pass of ``tokens`` tokens in one micro-batch without gradient, before the head.

        The peak lies in transformers' MLP: the embeddings, the layer's input, the residual, its norm, and three times the
        intermediate size; cosines and sines of the rotary embedding beside them. Without attention scores, which flash
        attention and sdpa do not keep.
        """
        return (4 * self.hidden + 3 * self.intermediate + 2 * self.head_dim) * tokens * _bytes(dtype)


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a whole number above 0, ``default`` where the key is absent or null. Raises ``ValueError`` with the key."""
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise ValueError(f"config.json lacks {key}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key} is {value!r}, not a whole number above 0")
    return value


def _bytes(dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype is {dtype!r}: one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]
