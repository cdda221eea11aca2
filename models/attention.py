"""What a layer's attention computes, and how a model calls it.

A model declares one spec per layer: an `AttentionSpec`, a `LatentAttentionSpec` or a `RecurrentSpec`. Its layers call
`attend` or `attend_projected`, `attend_latent`, `convolve` and `recur` with the step they are given, and name no cache
group: serving passes a step that writes and reads caches, scoring and training pass a `models.plain_step.PlainStep`
without any. Blocks with experts ask the step too, which may note or replace what their router chooses.
"""

import dataclasses
from typing import NamedTuple, Protocol

from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.attention_prologue import AttentionPrologue
from tokenspeed_jax.pallas_kernels.recurrences import RecurrenceInputs


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The mask and geometry of one layer's attention.

    Attributes:
        layer_id: position of the layer in the model, from 0.
        scale: factor on q.k before the mask.
        sliding_window: tokens a query sees, itself included; None sees all before it.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None leaves them.
    """

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise ValueError(f"sliding_window must be positive, got {self.sliding_window}")


@dataclasses.dataclass(frozen=True)
class LatentAttentionSpec:
    """One layer of multi-head latent attention: all heads share one cached row per token (arXiv 2405.04434, 2.1).

    The row is the compressed latent beside a key part that carries the position; keys and values of each head are
    expanded from the latent, or the expansion is absorbed into the query and the output.

    Attributes:
        layer_id: position of the layer in the model, from 0.
        latent_dim: channels of the latent (`kv_lora_rank`).
        rope_dim: channels of the shared positional key; rotated or not is the model's business.
        nope_dim: channels of a head's key that come from the latent.
        value_dim: channels of a head's value.
        scale: factor on q.k before the mask.
    """

    layer_id: int
    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float


@dataclasses.dataclass(frozen=True)
class RecurrentSpec:
    """What one recurrent layer carries from token to token.

    Attributes:
        layer_id: position of the layer in the model, from 0.
        convolution: (channels, width) of the causal convolution, None without one; it carries width - 1 raw inputs.
        state_shape: the recurrence's state, float32; None for a layer that is a convolution only.
        channel_gates: whether the recurrence is the gated delta rule with a gate for each channel of the key.
    """

    layer_id: int
    convolution: tuple[int, int] | None
    state_shape: tuple[int, ...] | None
    channel_gates: bool = False

    def __post_init__(self) -> None:
        if self.convolution is None and self.state_shape is None:
            raise ValueError(f"recurrent layer {self.layer_id} carries neither a convolution nor a state")


LayerSpec = AttentionSpec | LatentAttentionSpec | RecurrentSpec


class LatentExpansion(NamedTuple):
    """A layer's weights from the latent to each head's key and value.

    Attributes:
        key: a head's `nope_dim` key channels from the latent.
        value: a head's value from the latent.
    """

    key: Float[Array, "heads nope_dim latent_dim"]
    value: Float[Array, "heads value_dim latent_dim"]


class AttentionStep(Protocol):
    """One forward pass's view of what came before its tokens."""

    def attend(
        self,
        q: Float[Array, "tokens heads dim"],
        k: Float[Array, "tokens kv_heads dim"],
        v: Float[Array, "tokens kv_heads dim"],
        layer: AttentionSpec,
        sinks: Float[Array, " heads"] | None,
    ) -> Float[Array, "tokens heads dim"]:
        """Attends each token to its own sequence up to itself; keys and values are those of the step's tokens."""
        ...

    def attend_projected(
        self,
        projected: Float[Array, "tokens columns"],
        prologue: AttentionPrologue,
        layer: AttentionSpec,
        sinks: Float[Array, " heads"] | None,
    ) -> Float[Array, "tokens heads dim"]:
        """`attend` from the layer's fused projections, of which the prologue makes queries, keys and values."""
        ...

    def attend_latent(
        self,
        q: Float[Array, "tokens heads query_dim"],
        rows: Float[Array, "tokens row_dim"],
        expansion: LatentExpansion,
        layer: LatentAttentionSpec,
    ) -> Float[Array, "tokens heads value_dim"]:
        """Latent attention of each token to its own sequence up to itself."""
        ...

    def convolve(
        self,
        x: Float[Array, "tokens channels"],
        weight: Float[Array, "channels width"],
        bias: Float[Array, " channels"] | None,
        layer: RecurrentSpec,
    ) -> Float[Array, "tokens channels"]:
        """The causal convolution of each token's own sequence, no activation."""
        ...

    def recur(self, inputs: RecurrenceInputs, layer: RecurrentSpec) -> Float[Array, "tokens ..."]:
        """The recurrence over each token's own sequence up to itself."""
        ...

    def routed(self, expert_ids: Int[Array, "tokens top_k"], layer_id: int) -> Int[Array, "tokens top_k"]:
        """The experts that a layer's tokens go to, given those that its router chose."""
        ...


def attend(
    q: Float[Array, "tokens heads dim"],
    k: Float[Array, "tokens kv_heads dim"],
    v: Float[Array, "tokens kv_heads dim"],
    layer: AttentionSpec,
    step: AttentionStep,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "tokens heads dim"]:
    """Attention of one layer: causal within each sequence, masked as `layer` says, softmax in float32.

    Args:
        sinks: a logit per query head that joins the softmax's denominator and brings no value (model-families.md 1.3).
    """
    return step.attend(q, k, v, layer, sinks)


def attend_projected(
    projected: Float[Array, "tokens columns"],
    prologue: AttentionPrologue,
    layer: AttentionSpec,
    step: AttentionStep,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "tokens heads dim"]:
    """`attend` for layers whose projections are one product and whose heads are normed, if at all, one by one.

    A step can then norm and rotate heads where it stores them.

    Args:
        projected: a token's query heads, then its key heads, then its value heads; columns behind them are not read.
        prologue: norms and rotation of queries and keys.
        sinks: as in `attend`.
    """
    return step.attend_projected(projected, prologue, layer, sinks)


def attend_latent(
    q: Float[Array, "tokens heads query_dim"],
    rows: Float[Array, "tokens row_dim"],
    expansion: LatentExpansion,
    layer: LatentAttentionSpec,
    step: AttentionStep,
) -> Float[Array, "tokens heads value_dim"]:
    """Multi-head latent attention of one layer, causal within each sequence, softmax in float32.

    Args:
        q: a head's `nope_dim` channels, then its `rope_dim` channels.
        rows: what is cached of each token: the normed latent (`latent_dim`), then the positional key (`rope_dim`).
    """
    return step.attend_latent(q, rows, expansion, layer)


def convolve(
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "channels width"],
    layer: RecurrentSpec,
    step: AttentionStep,
    *,
    bias: Float[Array, " channels"] | None = None,
) -> Float[Array, "tokens channels"]:
    """The causal convolution of a recurrent layer, one filter a channel, `weight[c, -1]` for the token itself."""
    return step.convolve(x, weight, bias, layer)


def recur(inputs: RecurrenceInputs, layer: RecurrentSpec, step: AttentionStep) -> Float[Array, "tokens ..."]:
    """The recurrence of a recurrent layer; which one, the type of `inputs` says."""
    return step.recur(inputs, layer)
