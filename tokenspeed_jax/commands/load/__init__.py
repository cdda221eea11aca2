"""Load for `tokenspeed-jax bench`: what is asked, how it is sent, what is measured."""
