"""The tiny golden checkpoints by what their layers are; `tests/golden/README.md` says more of each."""

DENSE = ("llama", "mistral", "qwen3", "gemma3", "olmo3")
EXPERTS = ("qwen3_moe", "minimax_m2", "gpt_oss", "deepseek_v3")
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "minimax", "mamba2", "falcon_mamba", "lfm2")
ALL = (*DENSE, *EXPERTS, *RECURRENT)
