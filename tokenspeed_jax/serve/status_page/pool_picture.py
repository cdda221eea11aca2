"""The arena's parents as a row of cells, few enough to send and to draw."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

MAX_CELLS = 1200


def pool_picture(uses: npt.NDArray[np.int32], group_ids: list[str]) -> Mapping[str, object]:
    """The picture of a pool.

    Args:
        uses: `Activity.parent_uses`.
        group_ids: of group 0 and so on.

    Returns:
        `parents` in all, `free` ones, and per group those `in_use` and only `cached`; `cells`, run by run as
        [use, how many cells], where the use is that of most of the `parents_per_cell` parents, in use before cached
        before free when there are as many.
    """
    num_groups = len(group_ids)
    per_cell = max(1, -(-len(uses) // MAX_CELLS))
    # In the order in which ties are broken.
    codes = [*range(1, num_groups + 1), *range(-1, -num_groups - 1, -1), 0]
    places = np.empty(2 * num_groups + 1, np.int64)
    for place, code in enumerate(codes):
        places[code] = place
    cells = np.arange(len(uses)) // per_cell
    num_cells = -(-len(uses) // per_cell)
    counts = np.bincount(cells * len(codes) + places[uses], minlength=num_cells * len(codes))
    counts = counts.reshape(num_cells, len(codes))
    totals = dict(zip(codes, counts.sum(axis=0).tolist(), strict=True))
    chosen = np.array(codes)[counts.argmax(axis=1)]
    return {
        "parents": len(uses),
        "parents_per_cell": per_cell,
        "free": totals[0],
        "groups": [
            {"group_id": group_id, "in_use": totals[index + 1], "cached": totals[-index - 1]}
            for index, group_id in enumerate(group_ids)
        ],
        "cells": _runs(chosen),
    }


def _runs(values: npt.NDArray[np.int64]) -> list[list[int]]:
    starts = np.flatnonzero(np.r_[True, values[1:] != values[:-1]]) if len(values) else np.array([], np.int64)
    lengths = np.diff(np.r_[starts, len(values)])
    return [[int(value), int(length)] for value, length in zip(values[starts], lengths, strict=True)]
