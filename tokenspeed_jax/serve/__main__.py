"""`python -m tokenspeed_jax.serve`."""

import sys

from tokenspeed_jax.serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
