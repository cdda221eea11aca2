"""Who names the kernels of attention does not thereby ask for the prologue's, which serves other shapes."""

from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed_jax.attention import paged
from tokenspeed_jax.models.attention import AttentionSpec

SPEC = AttentionSpec(0, num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5)


class Asked(Exception):
    """Carries what the step asked the prologue for."""


@pytest.mark.parametrize(
    ("attention", "prologue"), [(None, None), ("mosaic", None), ("xla", "xla"), ("reference", "reference")]
)
def test_the_prologue_is_never_forced_into_its_kernel(
    monkeypatch: pytest.MonkeyPatch, attention: Any, prologue: str | None
) -> None:
    def ask(*_: Any, implementation: str | None, **__: Any) -> None:
        raise Asked(implementation)

    monkeypatch.setattr(paged, "attention_prologue", ask)
    step = object.__new__(paged.PagedStep)
    step.planes = {}
    parts = {
        "_bindings": (SimpleNamespace(group_id="g", field=lambda name: name),),
        "_router": SimpleNamespace(kernel_page_size=lambda group: 64),
        "_arena": SimpleNamespace(page_view=lambda *arguments: None),
        "_routed": SimpleNamespace(write_locations=lambda binding: None),
        "_implementation": attention,
    }
    for name, part in parts.items():
        setattr(step, name, part)
    nothing: Any = None
    with pytest.raises(Asked) as asked:
        step.attend_projected(nothing, nothing, SPEC, None)
    assert asked.value.args == (prologue,)
