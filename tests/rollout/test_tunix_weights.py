"""Parameters of Tunix's models get the names and the layout that checkpoints have."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tokenspeed_jax.errors import WeightUpdateError
from tokenspeed_jax.rollout.tunix_weights import hf_tensors

HIDDEN, HEADS, DIM, WIDE, VOCAB = 6, 2, 4, 5, 7


def numbered(*shape: int) -> nnx.Param:
    return nnx.Param(jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape))


def test_every_parameter_of_a_layer() -> None:
    attention = {name: {"w": numbered(HIDDEN, HEADS, DIM)} for name in ("q_proj", "k_proj", "v_proj")}
    attention |= {"o_proj": {"w": numbered(HEADS, DIM, HIDDEN)}, "q_norm": {"w": numbered(DIM)}}
    layer = {
        "attn": attention,
        "mlp": {"gate_proj": {"kernel": numbered(HIDDEN, WIDE)}},
        "input_layernorm": {"w": numbered(HIDDEN)},
    }
    state = nnx.State(
        {
            "embedder": {"input_embedding": numbered(VOCAB, HIDDEN)},
            "layers": {3: layer},
            "final_norm": {"w": numbered(HIDDEN)},
            "lm_head": {"w": numbered(HIDDEN, VOCAB)},
        }
    )
    tensors = {name: np.asarray(value) for name, value in hf_tensors(state).items()}
    prefix = "model.layers.3."
    assert set(tensors) == {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", f"{prefix}input_layernorm.weight",
        f"{prefix}mlp.gate_proj.weight", f"{prefix}self_attn.q_norm.weight",
        *(f"{prefix}self_attn.{name}_proj.weight" for name in "qkvo"),
    }  # fmt: skip
    x = np.linspace(-1, 1, HIDDEN)
    query = np.einsum("d,dnh->nh", x, attention["q_proj"]["w"][...])
    np.testing.assert_allclose(tensors[f"{prefix}self_attn.q_proj.weight"] @ x, query.ravel(), rtol=1e-5)
    mixed = np.linspace(-1, 1, HEADS * DIM)
    out = np.einsum("nh,nhd->d", mixed.reshape(HEADS, DIM), attention["o_proj"]["w"][...])
    np.testing.assert_allclose(tensors[f"{prefix}self_attn.o_proj.weight"] @ mixed, out, rtol=1e-5)
    assert tensors["lm_head.weight"].shape == (VOCAB, HIDDEN)
    assert tensors["model.embed_tokens.weight"].shape == (VOCAB, HIDDEN)
    assert tensors[f"{prefix}mlp.gate_proj.weight"].shape == (WIDE, HIDDEN)


def test_a_parameter_of_another_model_is_named() -> None:
    with pytest.raises(WeightUpdateError, match=r"layers\.0\.mlp\.router\.kernel") as error:
        hf_tensors(nnx.State({"layers": {0: {"mlp": {"router": {"kernel": numbered(2, 2)}}}}}))
    assert error.value.parameter == "layers.0.mlp.router.kernel"
