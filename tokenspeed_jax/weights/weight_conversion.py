"""From assigned arrays to a model's arrays: used as they are, moved, or cast and fused in one compiled program.

What has to be cast or fused is written into the arrays that it replaces where these are the engine's own (they are
donated), so that an update needs no second copy of the model.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from tokenspeed_jax.errors import WeightUpdateError
from tokenspeed_jax.weights.parameter_layout import Assignment, GivenArray, Parameter

Placed = tuple[jax.Array, ...]


@dataclass(frozen=True)
class PreparedWeights:
    """Everything that can be done ahead of an update, done.

    Attributes:
        kept: by place in the model's leaves, the caller's arrays that are used as they are.
        moved: arrays that only had to be brought to the device; nobody else has them.
        converted: places that the program fills, and `parts` of what.
        program: `(arrays to overwrite, parts) -> arrays`; None when there is nothing for it to do.
    """

    kept: dict[int, jax.Array]
    moved: dict[int, jax.Array]
    converted: tuple[int, ...]
    parts: tuple[Placed, ...]
    program: Any
    bytes_moved: int


class WeightConversions:
    """Prepares updates, with one compiled program for each kind of them. Not thread-safe.

    Attributes:
        compilations: programs compiled so far.
    """

    def __init__(self) -> None:
        self._programs: dict[Any, Any] = {}
        self._scratch: dict[tuple[int, ...], Any] = {}
        self.compilations = 0

    def prepare(self, assignments: Sequence[Assignment], *, check_finite: bool) -> PreparedWeights:
        """Moves what is elsewhere to the model's device, and compiles the program if this kind of update is new.

        Raises:
            WeightUpdateError: `check_finite`, and some parameter would hold a NaN or an infinity.
        """
        kept: dict[int, jax.Array] = {}
        moved: dict[int, jax.Array] = {}
        converted: list[int] = []
        placed: list[Placed] = []
        for index, assignment in enumerate(assignments):
            parameter = assignment.parameter
            given = tuple(_local_copy(part, parameter) for part in assignment.parts)
            parts = tuple(_placed(part, parameter) for part in given)
            if not assignment.is_whole or not _fits(parts[0], parameter):
                converted.append(index)
                placed.append(parts)
            elif parts[0] is given[0]:
                kept[index] = parts[0]
            else:
                moved[index] = parts[0]
        chosen = [assignments[index] for index in converted]
        if check_finite:
            ready = {**kept, **moved}
            whole = [(assignments[index], (array,)) for index, array in ready.items()]
            _check_finite([*whole, *zip(chosen, placed, strict=True)])
        new = [*(assignments[index].parameter for index in moved), *(item.parameter for item in chosen)]
        return PreparedWeights(
            kept,
            moved,
            tuple(converted),
            tuple(placed),
            self._program(chosen, placed) if converted else None,
            bytes_moved=sum(int(np.prod(p.shape)) * p.dtype.itemsize for p in new),
        )

    def scratch(self, parameters: Sequence[Parameter], places: tuple[int, ...]) -> dict[int, jax.Array]:
        """Fresh arrays for the program to overwrite, at places whose own arrays belong to somebody else."""
        if places not in self._scratch:
            chosen = [parameters[place] for place in places]
            make = jax.jit(
                lambda: [jnp.zeros(parameter.shape, parameter.dtype) for parameter in chosen],
                out_shardings=[parameter.sharding for parameter in chosen],
            )
            self._scratch[places] = make.lower().compile()
            self.compilations += 1
        return dict(zip(places, self._scratch[places](), strict=True))

    def _program(self, assignments: Sequence[Assignment], placed: Sequence[Placed]) -> Any:
        """The compiled program of this kind of update."""
        parts = tuple(tuple(_shape_of(part) for part in item) for item in placed)
        described = tuple(tuple((part.shape, part.dtype, part.sharding) for part in item) for item in parts)
        key = (tuple((item.parameter.path, item.names) for item in assignments), described)
        if key not in self._programs:
            targets = tuple(
                jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding)
                for p in (item.parameter for item in assignments)
            )

            def convert(replaced: Placed, parts: tuple[Placed, ...]) -> Placed:
                del replaced  # only its memory is used
                return tuple(_value(item, values) for item, values in zip(assignments, parts, strict=True))

            jitted = jax.jit(
                convert,
                donate_argnums=0,
                keep_unused=True,
                out_shardings=tuple(target.sharding for target in targets),
            )
            self._programs[key] = jitted.lower(targets, parts).compile()
            self.compilations += 1
        return self._programs[key]


def _value(assignment: Assignment, parts: Placed) -> Array:
    """The parameter, as loading a checkpoint makes it of its tensors."""
    rule, dtype = assignment.rule, assignment.parameter.dtype
    return rule.value([part if rule.tensor_dtype else part.astype(dtype) for part in parts]).astype(dtype)


def _fits(part: jax.Array, parameter: Parameter) -> bool:
    """Whether the compiled steps take this array as it is."""
    in_place = part.sharding.is_equivalent_to(parameter.sharding, part.ndim)
    return part.dtype == parameter.dtype and not part.weak_type and in_place


def _local_copy(part: GivenArray, parameter: Parameter) -> GivenArray:
    """Of an array that each of several devices has whole, the copy on the parameter's device; others as they are."""
    if not isinstance(part, jax.Array) or not part.is_fully_replicated or len(part.sharding.device_set) == 1:
        return part
    copies = [shard.data for shard in part.addressable_shards if {shard.device} == parameter.sharding.device_set]
    return copies[0] if copies else part


def _placed(part: GivenArray, parameter: Parameter) -> jax.Array:
    """The array on the parameter's devices, in the dtype it has."""
    target = parameter.sharding
    if not isinstance(part, jax.Array):
        return jax.device_put(part, target, may_alias=False)
    if part.sharding.device_set == target.device_set and part.sharding.memory_kind == target.memory_kind:
        return part
    if isinstance(part.sharding, jax.NamedSharding) and part.sharding.device_set > target.device_set:
        # Gathered by the trainer's own devices: to put it there directly would take it through the host.
        spread = _replicate(jax.NamedSharding(part.sharding.mesh, jax.P()))(part)
        return jax.device_put(_local_copy(spread, parameter), target)
    return jax.device_put(part, target)


@functools.lru_cache(maxsize=16)
def _replicate(sharding: jax.sharding.Sharding) -> Any:
    return jax.jit(lambda array: array, out_shardings=sharding)


def _check_finite(given: Sequence[tuple[Assignment, Placed]]) -> None:
    names = [name for assignment, _ in given for name in assignment.names]
    arrays = [part for _, parts in given for part in parts]
    dtypes = tuple(
        None if assignment.rule.tensor_dtype else assignment.parameter.dtype.name
        for assignment, parts in given
        for _ in parts
    )
    wrong = [
        name for name, fine in zip(names, np.asarray(_all_finite(arrays, dtypes)).tolist(), strict=True) if not fine
    ]
    if wrong:
        raise WeightUpdateError(f"not finite: {', '.join(wrong[:10])}", parameter=wrong[0])


@functools.partial(jax.jit, static_argnums=1)
def _all_finite(arrays: list[jax.Array], dtypes: tuple[str | None, ...]) -> Bool[Array, " arrays"]:
    """Whether each array is finite in the dtype that it will have; packed ones are."""
    return jnp.stack(
        [
            jnp.array(True) if dtype is None else jnp.isfinite(array.astype(dtype)).all()
            for array, dtype in zip(arrays, dtypes, strict=True)
        ]
    )


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
