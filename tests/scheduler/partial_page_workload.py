"""What ended requests leave of unfinished prefix pages, modelled by brute force beside any random workload."""

from collections.abc import Sequence
from dataclasses import dataclass

from .scenario import Step
from .workload import Live, P, Workload

MOST_BEHIND_ONE = 8

type Copies = dict[str, list[tuple[int, int]]]


@dataclass
class PartialPage:
    tokens: tuple[int, ...]
    blocks: dict[tuple[int, int], int]  # (group, slot) -> block


class PartialPages(Workload):
    """To be mixed into a workload. `never_evicts`: the pool is so large that exactly what the model says is found."""

    never_evicts = False

    def __init__(self, *args: object, **fields: object) -> None:
        super().__init__(*args, **(fields | {"reuse_partial_pages": True}))  # pyright: ignore[reportArgumentType]
        self.left: dict[tuple[int, ...], list[PartialPage]] = {}  # by all tokens before; the one left last is last
        self.ended: list[list[int]] = []
        self.copying_rows = 0
        self.found_less = 0  # first rows behind which more was once left than is found

    def submit(self, prompt: int | None = None, new: int | None = None, declared: bool | None = None) -> bool:
        """Every other prompt goes on where one that has just ended ended, or a little before."""
        if prompt is not None or not self.ended or self.random.random() < 0.5:
            return super().submit(prompt, new, declared)
        tokens = self.random.choice(self.ended[-4:])
        tokens = tokens[: len(tokens) - self.random.randint(0, 2)]
        tokens = [*tokens, *(self.random.randint(0, 2) for _ in range(self.random.randint(1, 4)))]
        new = self.random.randint(1, 12)
        room = new + self.width * (1 + self.depth)
        if len(tokens) + room > min(self.scheduler.max_single_request_tokens(), 60):
            return False
        self.enter([self.describe(tokens, new, room if self.random.random() < 0.7 else 0)])
        return True

    # What is left ---------------------------------------------------------------------------------------------------

    def land(self) -> None:
        before = dict(self.live)
        super().land()
        for request_id, request in before.items():
            if request_id in self.live:
                continue
            self.ended.append(request.tokens)
            if request.tables is not None:
                self.leave(request)

    def leave(self, request: Live) -> None:
        written = request.tokens[:-1]
        begin = len(written) // P * P
        tail = tuple(written[begin:])
        if not tail:
            return
        pages = self.left.setdefault(tuple(written[:begin]), [])
        page = next((page for page in pages if page.tokens == tail), PartialPage(tail, {}))
        assert request.tables is not None
        for group, table in enumerate(request.tables):
            for slot in self.slots(group, begin, len(written)):
                if table[slot] > 0:
                    page.blocks.setdefault((group, slot), table[slot])
        if page.blocks:
            pages[:] = [*(other for other in pages if other is not page), page][-MOST_BEHIND_ONE:]

    def slots(self, group: int, first: int, end: int) -> Sequence[int]:
        """Of the rows [first, end)."""
        g = self.device.granularity(group)
        return sorted({row // g for row in range(first, end)})

    # What is found --------------------------------------------------------------------------------------------------

    def read(self, group: int, begin: int, resume: int) -> Sequence[int]:
        """Slots of the page from `begin` on that whoever computes from `resume` on reads."""
        window = self.groups[group].window
        return self.slots(group, begin if window is None else max(begin, resume - window + 1), resume)

    def best(self, tokens: Sequence[int], begin: int) -> tuple[int, PartialPage | None]:
        """How far a prompt of which these tokens may be reused gets behind `begin`, and by which page."""
        best: tuple[int, PartialPage | None] = (0, None)
        for page in reversed(self.left.get(tuple(tokens[:begin]), [])):
            for count in range(1, len(page.tokens) + 1):
                resume = begin + count
                if tuple(tokens[begin:resume]) != page.tokens[:count] or resume > len(tokens):
                    break
                groups = range(len(self.groups))
                needed = [(group, slot) for group in groups for slot in self.read(group, begin, resume)]
                if count > best[0] and all(place in page.blocks for place in needed):
                    best = count, page
        return best

    def find_takers(self, step: Step) -> set[str]:
        held = {
            (group, block)
            for request_id, request in self.live.items()
            for group, table in enumerate(request.tables or [])
            # A decode of this step may have exchanged blocks for equal ones that were cached before.
            for block in (*table, *(step.row(request_id, group) if request_id in step.ids else ()))
        }
        # Publishing may have put other blocks into the tables of this very round.
        held |= {
            (group, block) for name in step.ids for group in range(len(self.groups)) for block in step.row(name, group)
        }
        partial: Copies = {
            name: [pair for pair in copies if (int(name[1:]), pair[0]) not in held]
            for name, copies in step.copied.items()
        }
        self.of_forks = {
            name: [pair for pair in copies if pair not in partial[name]] for name, copies in step.copied.items()
        }
        takers = super().find_takers(step)
        expected: Copies = {f"g{group}": [] for group in range(len(self.groups))}
        for row, request_id in enumerate(step.ids[: step.batch.num_extends()]):
            if self.live[request_id].tables is None and request_id not in takers:
                self.follow_prompt(step, row, expected, takers)
        assert {name: sorted(d for _, d in copies) for name, copies in partial.items() if copies} == {
            name: sorted(d for _, d in copies) for name, copies in expected.items() if copies
        }
        if self.never_evicts:
            assert {n: copies for n, copies in partial.items() if copies} == {n: c for n, c in expected.items() if c}
        return takers

    def follow_prompt(self, step: Step, row: int, expected: Copies, takers: set[str]) -> None:
        request_id, resume = step.ids[row], step.prefixes[row]
        begin = resume // P * P
        prompt = self.live[request_id].tokens[: step.batch.prefill_lengths[row]]
        reusable = prompt[: max(len(prompt) - max(self.config.prefix_replay_tokens, 1), 0)]
        count, page = self.best(reusable, begin)
        assert resume - begin == count if self.never_evicts else resume - begin <= count
        self.found_less += resume - begin < count
        if resume == begin:
            return
        assert page is not None
        self.copying_rows += 1
        takers.add(request_id)
        for group in range(len(self.groups)):
            table = step.row(request_id, group)
            read = self.read(group, begin, resume)
            expected[f"g{group}"] += [(page.blocks.get((group, slot), 0), table[slot]) for slot in read]
            below = [slot for slot in self.slots(group, begin, resume) if slot < min(read, default=resume)]
            assert not any(table[slot] for slot in below if (slot + 1) * self.device.granularity(group) <= resume)
