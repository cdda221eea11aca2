"""Packings that make the exact fields of several groups tile the planes they share (cache-runtime.md 5.3)."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from tokenspeed_jax.recipes.spec import Group


def exact_ratio_packing(groups: Sequence[Group]) -> dict[str, int]:
    """The smallest packings with `K_a * bytes_a == K_b * bytes_b` wherever exact fields of a and b share a plane.

    Groups bound to no other group get no entry. A system without a solution yields no entries at all: the caller's
    default then meets the exact check, which names the field at fault.
    """
    exact_bytes: dict[str, dict[str, int]] = {}
    for spec, fields in groups:
        for field in fields:
            if field.exact_page_stride:
                tenants = exact_bytes.setdefault(field.plane_id, {})
                tenants[spec.group_id] = tenants.get(spec.group_id, 0) + field.payload_bytes

    edges: dict[str, list[tuple[str, Fraction]]] = {}
    for tenants in exact_bytes.values():
        ordered = sorted(tenants)
        for a, b in itertools.pairwise(ordered):
            ratio = Fraction(tenants[a], tenants[b])  # K_b / K_a
            edges.setdefault(a, []).append((b, ratio))
            edges.setdefault(b, []).append((a, 1 / ratio))

    packing: dict[str, int] = {}
    for start in sorted(edges):
        if start in packing:
            continue
        component = _component_ratios(start, edges)
        if component is None:
            return {}
        # The start has ratio 1, so the scaled counts have no common factor and are the smallest.
        scale = math.lcm(*(ratio.denominator for ratio in component.values()))
        packing.update({group_id: int(ratio * scale) for group_id, ratio in component.items()})
    return packing


def _component_ratios(start: str, edges: dict[str, list[tuple[str, Fraction]]]) -> dict[str, Fraction] | None:
    """Packing of each group reachable from `start`, relative to it; None if two paths disagree."""
    ratios = {start: Fraction(1)}
    pending = [start]
    while pending:
        here = pending.pop()
        for there, ratio in edges[here]:
            expected = ratios[here] * ratio
            if there not in ratios:
                ratios[there] = expected
                pending.append(there)
            elif ratios[there] != expected:
                return None
    return ratios
