"""The numbers of a decoder-only transformer that decide its memory, and its parameter count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and gated (three-matrix) MLPs.

    Args:
        intermediate: width of a dense layer's MLP.
        experts: routed experts of a mixture-of-experts layer; 0 for a dense model.
        expert_intermediate: width of one routed expert.
        shared_intermediate: width of the expert that every token passes; 0 without one.
        dense_layers: layers of a mixture-of-experts model with a dense MLP.
        qkv_bias: query, key and value projections have biases (Qwen2, Qwen2.5).
        qk_norm: queries and keys are normalised per head (Qwen3).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0

    @property
    def query_width(self) -> int:
        """Values of all query heads of one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Values of all key heads, or of all value heads, of one token."""
        return self.kv_heads * self.head_dim

    @property
    def expert_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def embedding_parameters(self) -> int:
        """One vocabulary matrix."""
        return self.vocab * self.hidden

    @property
    def vocabulary_parameters(self) -> int:
        """Embedding and language-model head; one matrix where they are tied."""
        return self.embedding_parameters * (1 if self.tied_embeddings else 2)

    @property
    def attention_parameters(self) -> int:
        """Attention and both norms of one layer: q and o are h·Hd, k and v are h·KVd."""
        projections = 2 * self.hidden * (self.query_width + self.kv_width)
        biases = self.query_width + 2 * self.kv_width if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return projections + biases + norms

    @property
    def expert_parameters(self) -> int:
        """All routed experts of the whole model: gate, up and down of each."""
        return self.expert_layers * self.experts * 3 * self.hidden * self.expert_intermediate

    @property
    def total_parameters(self) -> int:
        """All parameters."""
        return self.vocabulary_parameters + self.dense_parameters + self.expert_parameters

    @property
    def dense_parameters(self) -> int:
        """Everything but vocabulary matrices and routed experts."""
        per_expert_layer = self.hidden * (self.experts + 3 * self.shared_intermediate)
        mlps = 3 * self.hidden * self.intermediate * (self.layers - self.expert_layers)
        mlps += self.expert_layers * per_expert_layer
        return self.layers * self.attention_parameters + mlps + self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through."""
        if not self.experts:
            return self.total_parameters
        routed = self.expert_parameters * self.experts_per_token // self.experts
        return self.vocabulary_parameters + self.dense_parameters + routed

    @property
    def mlp_width(self) -> int:
        """MLP values of one token in the widest kind of layer."""
        if not self.expert_layers:
            return self.intermediate
        return self.experts_per_token * self.expert_intermediate + self.shared_intermediate

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer on average, the unit that sharded training gathers."""
        whole = self.dense_parameters - self.hidden + self.expert_parameters
        return whole // self.layers
