"""From a model's attention layers and the engine's numbers to a `CacheSetup`: the registry of cache families."""

from collections.abc import Callable

from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.models.attention import LayerSpec
from tokenspeed_jax.recipes.base import CacheRecipe, CacheSetup, SchedulerLimits
from tokenspeed_jax.recipes.hybrid import HybridRecipe, KdaHybridRecipe
from tokenspeed_jax.recipes.ordinary import OrdinaryRecipe

CACHE_FAMILIES: dict[str, Callable[..., CacheRecipe]] = {
    OrdinaryRecipe.family: OrdinaryRecipe,
    HybridRecipe.family: HybridRecipe,
    KdaHybridRecipe.family: KdaHybridRecipe,
}
"""Cache family -> recipe class, one line per family."""


def cache_setup(
    layers: tuple[LayerSpec, ...],
    *,
    limits: SchedulerLimits,
    prefix_granularity: int,
    kv_dtype: str,
    budget_bytes: int,
    token_limit: int | None = None,
    checkpoint_granularity: int | None = None,
    family: str = OrdinaryRecipe.family,
) -> CacheSetup:
    """Plans the cache of a model; nothing is allocated.

    Args:
        layers: `config.attention_layers()` of the model.
        limits: what the scheduler may hold at once; `limits.max_context_len` is the engine's max_model_len.
        prefix_granularity: P, tokens.
        kv_dtype: dtype name of keys and values.
        budget_bytes: bytes for the arena and its workspace.
        token_limit: cap on the reported capacity.
        checkpoint_granularity: G, tokens between two state blocks of a request; None takes the family's.
        family: `config.cache_family` of the model, a key of `CACHE_FAMILIES`.

    Raises:
        ConfigError: the configuration cannot fit or cannot be packed; the message has the limiting number and what
            to change.
    """
    if checkpoint_granularity is not None and prefix_granularity % checkpoint_granularity:
        raise ConfigError(
            f"checkpoint_granularity {checkpoint_granularity} does not divide prefix_granularity {prefix_granularity}",
            field="checkpoint_granularity",
        )
    recipe = CACHE_FAMILIES[family](
        layers,
        kv_dtype=kv_dtype,
        prefix_granularity=prefix_granularity,
        checkpoint_granularity=checkpoint_granularity,
        budget_bytes=budget_bytes,
        token_limit=token_limit,
        limits=limits,
    )
    try:
        return recipe.setup()
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"the cache of this model cannot be laid out: {error}") from error
