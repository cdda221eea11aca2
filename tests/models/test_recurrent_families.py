"""What every family with recurrent layers must do, whatever its layers are."""

import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tokenspeed_jax.models.attention import AttentionSpec, LatentAttentionSpec, RecurrentSpec
from tokenspeed_jax.models.plain_step import PlainStep
from tokenspeed_jax.models.registry import resolve_model
from tokenspeed_jax.pallas_kernels.causal_convolution import causal_convolution
from tokenspeed_jax.pallas_kernels.gated_delta_rule import DeltaRuleInputs, gated_delta_rule
from tokenspeed_jax.pallas_kernels.linear_attention import LinearAttentionInputs, linear_attention
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentRows
from tokenspeed_jax.pallas_kernels.selective_scan import SelectiveScanInputs, selective_scan
from tokenspeed_jax.weights import load_model, open_checkpoint

from ..families import RECURRENT

LENGTH = 32
RECURRENCES = {
    DeltaRuleInputs: gated_delta_rule,
    LinearAttentionInputs: linear_attention,
    SelectiveScanInputs: selective_scan,
}
FLOAT32_TENSORS = ("A_log", "dt_bias", "e_score_correction_bias")


class ResumingStep:
    """One sequence in pieces: a step starts from what the step before left in `carried`, and replaces it.

    Args:
        positions: of the piece's tokens; LENGTH for those behind its end.
        count: tokens of the piece.
        carried: of each layer, whole rows of keys and values or latents, or a window and a state.
    """

    def __init__(self, positions, count, carried):
        self.positions = positions
        self.rows = RecurrentRows.without_checkpoints(jnp.stack([jnp.zeros_like(count), count]))
        self.carried = dict(carried)

    def attend(self, q, k, v, layer, sinks):
        keys, values = (self._extended(layer, name, x) for name, x in (("k", k), ("v", v)))
        return self._at_positions(self._plain().attend(self._spread(q), keys, values, layer, sinks))

    def attend_projected(self, projected, prologue, layer, sinks):
        q, k, v = prologue.heads(projected, layer.num_heads, layer.num_kv_heads, layer.head_dim)
        return self.attend(q, k, v, layer, sinks)

    def attend_latent(self, q, rows, expansion, layer):
        rows = self._extended(layer, "latent", rows)
        return self._at_positions(self._plain().attend_latent(self._spread(q), rows, expansion, layer))

    def convolve(self, x, weight, bias, layer):
        name = f"{layer.layer_id}.window"
        result = causal_convolution(x, weight, bias, self.carried[name], self.rows)
        self.carried[name] = result.final_states
        return result.output

    def recur(self, inputs, layer):
        name = f"{layer.layer_id}.state"
        result = RECURRENCES[type(inputs)](inputs, self.carried[name], self.rows)
        self.carried[name] = result.final_states
        return result.output

    def routed(self, expert_ids, layer_id):
        return expert_ids

    def _plain(self):
        return PlainStep(jnp.zeros(LENGTH, int), jnp.arange(LENGTH))

    def _spread(self, x):
        return jnp.zeros_like(x).at[self.positions].set(x, mode="drop")

    def _at_positions(self, x):
        return x.at[self.positions].get(mode="clip")

    def _extended(self, layer, name, x):
        name = f"{layer.layer_id}.{name}"
        self.carried[name] = self.carried[name].at[self.positions].set(x, mode="drop")
        return self.carried[name]


def nothing_carried(config):
    carried = {}
    for layer in config.attention_layers():
        match layer:
            case AttentionSpec():
                shape = (LENGTH, layer.num_kv_heads, layer.head_dim)
                carried |= {f"{layer.layer_id}.{name}": jnp.zeros(shape) for name in "kv"}
            case LatentAttentionSpec():
                carried[f"{layer.layer_id}.latent"] = jnp.zeros((LENGTH, layer.latent_dim + layer.rope_dim))
            case RecurrentSpec():
                if layer.convolution is not None:
                    channels, width = layer.convolution
                    carried[f"{layer.layer_id}.window"] = jnp.zeros((1, channels, width - 1))
                if layer.state_shape is not None:
                    carried[f"{layer.layer_id}.state"] = jnp.zeros((1, *layer.state_shape))
    return carried


@nnx.jit
def run_piece(model, ids, positions, count, carried):
    step = ResumingStep(positions, count, carried)
    return model.logits(model(ids, positions, step)), step.carried


def run_in_pieces(model, ids, lengths):
    """(logits of each token, what is carried after the last); one program whatever the lengths are."""
    carried, start, logits = nothing_carried(model.config), 0, []
    for count in lengths:
        piece = np.full(LENGTH, 7)  # what stands behind the piece's end must not matter
        piece[:count] = ids[start : start + count]
        positions = np.where(np.arange(LENGTH) < count, start + np.arange(LENGTH), LENGTH)
        scores, carried = run_piece(model, jnp.asarray(piece), jnp.asarray(positions), jnp.asarray(count), carried)
        logits.append(np.asarray(scores[:count]))
        start += count
    return np.concatenate(logits), carried


@pytest.fixture(scope="module")
def golden_model(tiny_checkpoint) -> Callable:
    """The tiny model of a family; its weights make layers matter, where random ones of small scale do not."""
    models = {}

    def load(family):
        if family not in models:
            models[family] = load_model(open_checkpoint(str(tiny_checkpoint(family))), dtype=jnp.float32)
        return models[family]

    return load


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(3, 512, count)


@pytest.mark.parametrize("family", RECURRENT, scope="module")
def test_a_sequence_in_pieces_is_the_sequence_in_one(family, golden_model):
    """Invariants 12 and 36: at any cut, and token by token."""
    model, ids = golden_model(family), tokens(LENGTH)
    whole, _ = run_in_pieces(model, ids, [LENGTH])
    assert np.ptp(whole, axis=0).max() > 1
    for lengths in ([1, 31], [2, 30], [3, 29], [16, 16], [31, 1], [5, 1, 1, 25], [1] * LENGTH):
        pieces, _ = run_in_pieces(model, ids, lengths)
        np.testing.assert_allclose(pieces, whole, atol=2e-4, err_msg=str(lengths))


@pytest.mark.parametrize("family", [family for family in RECURRENT if family != "minimax"])  # has no convolutions
def test_a_window_holds_the_last_raw_inputs_and_no_more(family, golden_model):
    """Invariant 17, at the first layer, whose inputs depend on one token each."""
    model, ids = golden_model(family), tokens(12)
    kept = model.config.attention_layers()[0].convolution[1] - 1

    def window(ids, lengths=(12,)):
        return run_in_pieces(model, ids, lengths)[1]["0.window"]

    expected = window(ids)
    np.testing.assert_allclose(window(np.concatenate([tokens(12 - kept, 1), ids[-kept:]])), expected, atol=1e-6)
    np.testing.assert_allclose(window(ids, (12 - kept + 1, kept - 1)), expected, atol=1e-6)
    for place in range(12 - kept, 12):
        other = ids.copy()
        other[place] = (ids[place] + 100) % 500
        changed = (np.abs(window(other) - expected) > 1e-6).any(axis=(0, 1))
        assert changed.tolist() == [index == place - (12 - kept) for index in range(kept)]


@nnx.jit
def score(model, ids, segment_ids, positions):
    return model.logits(model(ids, positions, PlainStep(segment_ids, positions, num_segments=3)))


@pytest.mark.parametrize("family", RECURRENT, scope="module")
def test_packed_sequences_and_padding_do_not_see_each_other(family, golden_model):
    model = golden_model(family)
    a, b, lengths = tokens(20, 1), tokens(30, 2), [20, 30, 14]

    def run(*parts):
        segments = np.repeat(np.arange(len(parts)), list(map(len, parts)))
        positions = np.concatenate([np.arange(len(part)) for part in parts])
        return score(model, *map(jnp.asarray, (np.concatenate(parts), segments, positions)))

    packed, repadded = run(a, b, tokens(14, 3)), run(a, b, tokens(14, 4))
    np.testing.assert_array_equal(packed[:50], repadded[:50])
    np.testing.assert_allclose(packed[20:50], run(b, tokens(34, 5))[:30], atol=2e-4)
    assert (np.asarray(packed[sum(lengths[:2]) :]) != np.asarray(repadded[sum(lengths[:2]) :])).any()


@pytest.mark.parametrize("family", RECURRENT, scope="module")
def test_gradients_reach_every_parameter_that_a_token_passes(family, golden_model):
    model, ids, positions = golden_model(family), jnp.asarray(tokens(24)), jnp.arange(24)

    def loss(model):
        step = PlainStep(jnp.zeros(24, int), positions, num_segments=1)
        scores = jax.nn.log_softmax(model.logits(model(ids, positions, step)))
        return -jnp.take_along_axis(scores[:-1], ids[1:, None], axis=-1).mean()

    value, gradients = nnx.jit(nnx.value_and_grad(loss))(model)
    assert np.isfinite(value)
    for path, gradient in nnx.to_flat_state(gradients):
        assert np.isfinite(gradient[...]).all(), path
        assert np.abs(gradient[...]).max() > 0 or path[-1] == "selection_bias", path


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in RECURRENT),
        ("qwen3_next", {"mlp_only_layers": [1]}),
        ("lfm2", {"conv_bias": True}),
        ("mamba2", {"use_bias": True}),
        ("falcon_mamba", {"use_conv_bias": False, "tie_word_embeddings": True}),
    ],
)
def test_weight_map_names_each_parameter_once_and_decays_stay_float32(family, changes, tiny_checkpoint):
    fields = json.loads((tiny_checkpoint(family) / "config.json").read_text())
    resolved, config = resolve_model(fields | changes)
    model = nnx.eval_shape(lambda: resolved.build(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    parameters = dict(nnx.to_flat_state(nnx.state(model)))
    rules = {rule.parameter: rule for rule in resolved.weight_map(config)}
    assert rules.keys() == parameters.keys()
    # The latent's expansion is one tensor, and two parameters here: keys and values.
    tensors = [name for rule in rules.values() for name in rule.tensors if "kv_b_proj" not in name]
    assert len(set(tensors)) == len(tensors)
    for path, rule in rules.items():
        exact = rule.tensors[0].endswith(FLOAT32_TENSORS)
        assert parameters[path].dtype == (jnp.float32 if exact else jnp.bfloat16), path
