"""`WeightStore`: the one place of an engine's weights. Steps and scorers take them from here at every dispatch.

Arrays are either the engine's own (loaded, moved or converted by it) or shared with whoever gave them, such as a
trainer. Own arrays may be overwritten or freed by the engine; shared ones never are, but their other owner may delete
them, and the engine has to notice.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from tokenspeed_jax.engine.split_model import ModelStructure, SplitModel, Weights
from tokenspeed_jax.errors import EngineStateError
from tokenspeed_jax.weights.checkpoint_export import checkpoint_tensors
from tokenspeed_jax.weights.parameter_layout import Assignment, ParameterLayout
from tokenspeed_jax.weights.weight_conversion import PreparedWeights, WeightConversions


@dataclass(frozen=True)
class WeightUpdate:
    """What an update did.

    Attributes:
        version: the weights' version from now on.
        bytes_moved: of the parameters that were moved, cast or fused; 0 when all arrays were used as they are.
        seconds: from the call to the moment when the new weights lay ready, the wait for running requests included.
        arrays_kept, arrays_converted: parameters whose array is the caller's own, and all others.
    """

    version: int
    bytes_moved: int
    seconds: float
    arrays_kept: int
    arrays_converted: int


class WeightStore:
    """The weights of one engine and their version.

    `prepare` may run on any thread, one call at a time; `adopt` and `free` belong to the step loop's thread.

    Attributes:
        layout: what the weights have to be.
        version: that of the arrays here, 0 at first.
    """

    def __init__(self, structure: ModelStructure, layout: ParameterLayout, arrays: Weights, *, is_shared: bool) -> None:
        self._structure = structure
        self.layout = layout
        self._arrays = arrays
        self._shared = frozenset(range(len(arrays)) if is_shared else ())
        self._absence: str | None = None
        self._borrowing = threading.Lock()
        self._conversions = WeightConversions()
        self._compile_seconds = 0.0
        self.version = 0

    @classmethod
    def of(cls, model: nnx.Module, *, is_shared: bool) -> "WeightStore":
        """The weights of a model whose arrays exist; `is_shared` if somebody else has them too."""
        split = SplitModel.of(model)
        return cls(split.structure, ParameterLayout.of(model), split.weights, is_shared=is_shared)

    @property
    def structure(self) -> ModelStructure:
        """What makes a module of the arrays."""
        return self._structure

    @property
    def arrays(self) -> Weights:
        """The argument of every compiled step. Only for the step loop's thread, which alone replaces them."""
        return self._arrays

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Weights]:
        """The arrays, for another thread to dispatch with; the loop does not overwrite them within the context.

        Raises:
            EngineStateError: there are none.
        """
        with self._borrowing:
            self.check_present()
            yield self._arrays

    def missing(self) -> str | None:
        """Why the weights cannot be used, or None."""
        if self._absence is not None:
            return f"the engine has no weights: {self._absence}; call update_weights"
        arrays, shared = self._arrays, self._shared
        for place in shared if arrays else ():
            if arrays[place].is_deleted():
                name = self.layout.parameters[place].name
                return (
                    f"the array of parameter {name}, which the engine shares with its caller, was deleted or donated; "
                    "call update_weights"
                )
        return None

    def check_present(self) -> None:
        """Raises `EngineStateError` naming a parameter where `missing`."""
        if (reason := self.missing()) is not None:
            raise EngineStateError(reason)

    @property
    def compilations(self) -> int:
        """Conversion programs compiled so far."""
        return self._conversions.compilations

    @property
    def compile_seconds(self) -> float:
        """Time spent preparing updates for which a program had to be compiled."""
        return self._compile_seconds

    def prepare(self, assignments: Sequence[Assignment], *, check_finite: bool) -> PreparedWeights:
        """See `WeightConversions.prepare`; changes nothing here."""
        before, start = self.compilations, time.perf_counter()
        prepared = self._conversions.prepare(assignments, check_finite=check_finite)
        if self.compilations > before:
            self._compile_seconds += time.perf_counter() - start
        return prepared

    def adopt(self, prepared: PreparedWeights, version: int) -> None:
        """Puts the new weights in place of the old ones, and waits for nothing."""
        with self._borrowing:
            converted = self._converted(prepared) if prepared.converted else {}
            new = {**prepared.kept, **prepared.moved, **converted}
            self._arrays = tuple(new[place] for place in range(len(self.layout.parameters)))
            self._shared = frozenset(prepared.kept)
            self._absence = None
            self.version = version

    def _converted(self, prepared: PreparedWeights) -> dict[int, jax.Array]:
        foreign = prepared.converted
        if self._absence is None:
            foreign = tuple(place for place in foreign if place in self._shared)
        arrays = self._conversions.scratch(self.layout.parameters, foreign) if foreign else {}
        for place in set(prepared.converted) - set(foreign):
            arrays[place] = self._arrays[place]
        replaced = tuple(arrays[place] for place in prepared.converted)
        try:
            made = prepared.program(replaced, prepared.parts)
        except Exception:
            if any(array.is_deleted() for array in replaced):
                self._absence = "an update failed while it overwrote them"
            raise
        return dict(zip(prepared.converted, made, strict=True))

    def wait_until_ready(self) -> None:
        """Waits for the arrays that the engine has made."""
        jax.block_until_ready([array for place, array in enumerate(self._arrays) if place not in self._shared])

    def free(self) -> None:
        """Lets go of the arrays, and deletes those that are the engine's own."""
        with self._borrowing:
            for place, array in enumerate(self._arrays):
                if place not in self._shared:
                    array.delete()
            self._absence = "sleep(level=2) freed them"
            self._arrays, self._shared = (), frozenset()

    def export(self, naming: str) -> Any:
        """The weights under the model's own names or a checkpoint's; see `Engine.export_weights`."""
        with self.borrowed() as arrays:
            if naming == "hf":
                exported: Any = checkpoint_tensors(self.layout, arrays)
                given_out = {id(tensor) for tensor in exported.values()}
            else:
                exported = jax.tree.unflatten(self._structure.tree, arrays)
                given_out = {id(array) for array in arrays}
            # The caller has these too from now on, so that no update may overwrite them.
            self._shared |= {place for place, array in enumerate(arrays) if id(array) in given_out}
            return exported
