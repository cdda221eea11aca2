"""A process that starts one engine and says what it compiled; `python start_once.py FAMILY FOLDER`."""

import collections
import json
import sys
from pathlib import Path

import jax

from tokenspeed_jax import Engine, EngineConfig, SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden"


def main(family: str, folder: str) -> None:
    events: collections.Counter[str] = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rsplit("/", 1)[-1]]))
    config = EngineConfig(
        model=str(GOLDEN / "tiny" / family),
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        prefix_granularity=16,
        kv_cache_memory_bytes=4 << 20,
        compilation_cache_dir=folder,
        disable_progress_bars=True,
    )
    with Engine(config) as engine:
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
