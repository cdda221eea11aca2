"""`python -m tokenspeed_jax.commands`: the same as the console script `tokenspeed-jax`."""

import sys

from tokenspeed_jax.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
