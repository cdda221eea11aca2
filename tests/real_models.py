"""How the two real checkpoints are served in tests.

With equal sizes the engine's tests and the server's share programs, which take longer to compile than to run.
"""

from dataclasses import dataclass

MAX_NUM_SEQS = 9
"""As many as each has golden prompts: rows of padding pass through all layers, and the head of 262,144 words, too."""


@dataclass(frozen=True)
class RealModel:
    """Sizes under which all golden prompts of a checkpoint fit at once, but not if the longest one goes on to the end.

    Attributes:
        path_fixture: the fixture in conftest.py that fetches the checkpoint.
        max_model_len: the longest prompt and 80 tokens more.
        max_num_batched_tokens: no less than the longest prompt, which has to pass in one chunk too.
        parent_bytes: bytes of one parent of its cache in float32, with blocks of 64 tokens.
    """

    path_fixture: str
    max_model_len: int
    max_num_batched_tokens: int
    parent_bytes: int

    @property
    def arena_bytes(self) -> int:
        """Three sequences of full length, and the null parent."""
        return (3 * self.max_model_len // 64 + 1) * self.parent_bytes


REAL_MODELS = {
    "smollm2-135m": RealModel("smollm2_path", 763 + 80, 1024, 64 * 30 * 2 * 3 * 64 * 4),
    "gemma3-270m": RealModel("gemma3_270m_path", 1184 + 80, 1280, 64 * 15 * 2 * 256 * 4),
}
