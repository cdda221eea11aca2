"""A process that starts one engine and says what it compiled.

`python start_once.py FAMILY FOLDER [CHANGES]`: the tiny checkpoint of a family, or, with a JSON object that changes its
configuration, random bfloat16 weights.
"""

import collections
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from tokenspeed_jax import Engine, EngineConfig, SamplingParams
from tokenspeed_jax.models.registry import MODEL_FAMILIES

GOLDEN = Path(__file__).parents[1] / "golden"


def start(config: EngineConfig, changes: str) -> Engine:
    if not changes:
        return Engine(config)
    hf_config = json.loads((Path(config.model) / "config.json").read_text())
    family = MODEL_FAMILIES[hf_config["architectures"][0]]
    model = family.build(family.config.from_hf(hf_config | json.loads(changes)), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    return Engine.from_model(model, config)


def main(family: str, folder: str, changes: str = "") -> None:
    events: collections.Counter[str] = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rsplit("/", 1)[-1]]))
    config = EngineConfig(
        model=str(GOLDEN / "tiny" / family),
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        prefix_granularity=64,
        kv_cache_memory_bytes=32 << 20,
        compilation_cache_dir=folder,
        disable_progress_bars=True,
    )
    with start(config, changes) as engine:
        ready = events.copy()
        output = engine.generate([5, 6, 7], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))[0]
        report = engine.start_report
        print(
            json.dumps(
                {
                    "programs": report.programs,
                    "from_cache": report.from_cache,
                    "compiled": events["cache_misses"],
                    "after_start": (events - ready).total(),
                    "token_ids": output.samples[0].token_ids,
                    "compilations_after_warmup": engine.stats().compilations_after_warmup,
                }
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
