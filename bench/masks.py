"""Host time of constrained decoding: what a step adds for landing tokens in grammars and filling masks.

    python bench/masks.py CHECKPOINT [--rows 64]

Every row writes a JSON document of its own under one schema. Needs no GPU.
"""

import argparse
import json
import time

import numpy as np

from tokenspeed_jax import SamplingParams, StructuredOutputsParams
from tokenspeed_jax.engine.grammar_compiler import GrammarCompiler
from tokenspeed_jax.engine.masks import MaskBuilder
from tokenspeed_jax.engine.redraw import mask_words
from tokenspeed_jax.engine.request_options import RequestOptions
from tokenspeed_jax.engine.requests import RequestState, SampleState
from tokenspeed_jax.engine.stop import StopChecker
from tokenspeed_jax.text import Detokenizer
from tokenspeed_jax.weights import open_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["person", "company", "place", "event"]},
        "summary": {"type": "string"},
        "scores": {"type": "array", "items": {"type": "number"}, "maxItems": 8},
        "links": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"title": {"type": "string"}, "year": {"type": "integer"}, "url": {"type": "string"}},
                "required": ["title", "url"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "name", "kind", "summary", "scores", "links"],
    "additionalProperties": False,
}


def document(seed: int) -> str:
    rng = np.random.default_rng(seed)
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "engineers",
        "measure",
        "in",
        "Zürich",
    ]

    def text(count: int) -> str:
        return " ".join(rng.choice(words, count))

    digits = rng.bytes(16).hex()
    value = {
        "id": "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])),
        "name": text(3)[:40],
        "kind": str(rng.choice(["person", "company", "place", "event"])),
        "summary": text(60),
        "scores": [round(float(score), 3) for score in rng.random(6)],
        "links": [{"title": text(4), "year": 1999 + index, "url": f"https://a.b/{seed}"} for index in range(4)],
    }
    return json.dumps(value, ensure_ascii=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()

    tokenizer = open_checkpoint(options.checkpoint, revision=None, progress=False).tokenizer()
    vocab_size, eos = max(tokenizer.token_ids()) + 1, tokenizer.eos_token_ids
    start = time.perf_counter()
    compiler = GrammarCompiler(tokenizer, vocab_size, eos)
    made = time.perf_counter()
    constraint = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(structured_outputs=constraint, max_tokens=10_000)
    grammar = compiler.compile(constraint)
    compiled = time.perf_counter()
    masks = MaskBuilder(vocab_size, tokenizer.token_ids(), eos)
    texts = [tokenizer.encode(document(row), add_special_tokens=False) for row in range(options.rows)]
    samples = []
    for row, ids in enumerate(texts):
        request = RequestState(f"r{row}", ids, params, RequestOptions(), 10_000, print, grammar)
        stop = StopChecker(params, eos, 10_000, Detokenizer(tokenizer))
        samples.append(SampleState(f"{row}-0", request, 0, row, stop, grammar.matcher()))
    print(
        f"vocabulary of {vocab_size} read in {made - start:.2f} s, schema compiled in {(compiled - made) * 1e3:.1f} ms"
    )

    filling, landing = [], []
    for step in range(min(map(len, texts))):
        before = time.perf_counter()
        words = np.zeros((options.rows, mask_words(vocab_size)), np.int32)
        masks.fill(words, range(options.rows), samples)
        filled = time.perf_counter()
        for sample, ids in zip(samples, texts, strict=True):
            if sample.matcher is None or not sample.matcher.accept(ids[step]):
                raise RuntimeError("the document does not match its schema")
        landed = time.perf_counter()
        filling.append(filled - before)
        landing.append(landed - filled)
    for name, times in (("masks", filling), ("tokens", landing)):
        median, high = np.percentile(times, [50, 99]) * 1e3
        print(f"{name} of {options.rows} rows: median {median:.2f} ms, 99th percentile {high:.2f} ms")


if __name__ == "__main__":
    main()
