"""Times every kernel on one GPU: the ceilings first, then the tables of the benchmarks beside this file.

    python bench/kernels.py [--only attention experts ...] [--json FILE]

The JSON holds the ceilings, and of each benchmark its tables, row by row under the names of the columns.
"""

import argparse
import contextlib
import importlib
import io
import json
import sys
import time
from typing import Any, TextIO

import jax
import jax.numpy as jnp
from attention import ceilings

BENCHMARKS = (
    "attention",
    "latent_attention",
    "experts",
    "recurrence",
    "linear",
    "prologue",
    "decoder_tail",
    "sampling",
)


class Tee(io.StringIO):
    """Keeps what is printed, and prints it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, s: str, /) -> int:
        self._stream.write(s)
        self._stream.flush()
        return super().write(s)


def matrix_rate(size: int = 8192) -> float:
    """Operations per second of a large bf16 product of random numbers."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    product = jax.jit(jnp.matmul)
    product(a, b).block_until_ready()
    begin = time.perf_counter()
    for _ in range(20):
        out = product(a, b)
    out.block_until_ready()
    return 20 * 2 * size**3 / (time.perf_counter() - begin)


def rows_of(text: str) -> list[dict[str, str]]:
    """The rows of all Markdown tables in a text."""
    rows: list[dict[str, str]] = []
    header: list[str] | None = None
    for line in text.splitlines():
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if header is None:
            header = cells
        elif set("".join(cells)) - set("-: "):
            rows.append(dict(zip(header, cells, strict=False)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS)
    parser.add_argument("--json", help="write what was measured to this file")
    args = parser.parse_args()
    copy, read = ceilings()
    matrix = matrix_rate()
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}: copy {copy / 1e9:,.0f} GB/s, read {read / 1e9:,.0f} GB/s, ", end="")
    print(f"bf16 product {matrix / 1e12:.0f} TFLOP/s")
    found: dict[str, Any] = {"device": device, "copy": copy, "read": read, "matrix": matrix}
    for name in args.only:
        print(f"\n## {name}\n", flush=True)
        printed = Tee(sys.stdout)
        sys.argv = [name]
        with contextlib.redirect_stdout(printed):
            importlib.import_module(name).main()
        found[name] = rows_of(printed.getvalue())
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
