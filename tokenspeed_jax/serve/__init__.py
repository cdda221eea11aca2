"""The HTTP server: OpenAI's protocol in front of one `Engine`. Start it with `python -m tokenspeed_jax.serve`."""
