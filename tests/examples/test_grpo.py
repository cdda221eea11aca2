"""The GRPO example in a short form: few digits, few samples, thirty updates."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo" / "train.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("grpo_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses and nnx look a class's module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_thirty_updates_raise_the_reward_and_keep_sampler_and_trainer_together(example, tmp_path, monkeypatch) -> None:
    options = ["--updates=30", "--prompts=8", "--group-size=8", "--digits=1", "--learning-rate=0.003"]
    monkeypatch.setattr(sys, "argv", ["train.py", *options, f"--output={tmp_path}"])
    example.main()
    updates = json.loads((tmp_path / "metrics.json").read_text())["updates"]
    rewards, differences = (np.array([update[name] for update in updates]) for name in example.Metrics._fields)
    assert len(updates) == 30
    assert rewards[-5:].mean() > rewards[:5].mean() + 0.1
    # The mean difference is that of rounding, and does not grow with the updates.
    assert differences.max() <= 1e-5
    assert differences[-10:].mean() <= 10 * max(differences[:10].mean(), 1e-7)
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")


def test_advantages_compare_samples_of_one_prompt(example) -> None:
    advantages = example.group_advantages(np.array([[0.0, 1.0], [0.5, 0.5], [3.0, 5.0]]))
    np.testing.assert_allclose(advantages, [[-1, 1], [0, 0], [-1, 1]])
    assert example.reward([1, 2, 3, example.COPY], [1, 9, 3]) == pytest.approx(2 / 3)
