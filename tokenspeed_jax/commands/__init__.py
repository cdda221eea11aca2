"""The commands of `tokenspeed-jax`, a module each."""
