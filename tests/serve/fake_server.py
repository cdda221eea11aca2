"""The real listening process over a fake engine, steered through standard input: `allow N`, `fail`, `hang`."""

import sys
import threading
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from fake_engine import FakeEngine

from tokenspeed_jax.serve import cli
from tokenspeed_jax.serve.options import parse_options

STUCK_CLOSE_SECONDS = 0.5


class StuckEngine(FakeEngine):
    """Its last step never comes back from the device, once it was told to hang."""

    hangs = False

    def close(self) -> None:
        if self.hangs:
            threading.Event().wait()
        super().close()


def obey(engine: StuckEngine) -> None:
    for line in sys.stdin:
        match line.split():
            case ["allow", tokens]:
                engine.allow(int(tokens))
            case ["hang"]:
                engine.hangs = True
            case ["fail"]:
                engine.die()


def main() -> int:
    _, config = parse_options(["--model=fake/model", "--port=0", *sys.argv[1:]])
    engine = StuckEngine()
    engine.allow(0)
    threading.Thread(target=obey, args=(engine,), daemon=True).start()
    with cli.bind(config) as listener:
        code = cli.serve(engine, config, listener)
    cli.close(engine, STUCK_CLOSE_SECONDS)
    return code


if __name__ == "__main__":
    sys.exit(main())
