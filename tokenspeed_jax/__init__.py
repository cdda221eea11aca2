"""TokenSpeed-JAX: serve large language models on NVIDIA GPUs, or sample inside a JAX trainer."""

__version__ = "0.1.0"
