"""A device that remembers what was written where, so that a wrong block table shows up as a wrong read.

Every cache row holds the identity of the token prefix that it was computed from. A step writes the rows of its inputs
and then reads, for each query, every key that the group's mask lets it see; each must hold the identity of this very
request's prefix. A block of a state group holds one such identity, of everything that its snapshot summarises: a step
reads the snapshot at its start and leaves one at its end, a prefill also one at the last boundary it crosses. Steps run
in the order of their plans, as a device stream does, and sampled tokens stay on the device until they are landed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .scenario import Group, Step


def prefix_identities(tokens: Sequence[int]) -> list[int]:
    """identity[i] names tokens[0..i]; equal prefixes have equal identities."""
    identities: list[int] = []
    last = 0
    for token in tokens:
        last = hash((last, token))
        identities.append(last)
    return identities


@dataclass
class DeviceRequest:
    tokens: list[int]  # prompt and everything sampled, landed or not
    computed: int = 0  # rows written
    variant: int = 0  # continuations of one prompt differ by it


@dataclass(frozen=True)
class Landing:
    request_id: str
    tokens: list[int]
    is_decode: bool
    slot: int


@dataclass
class SimulatedDevice:
    groups: Sequence[Group]
    prefix_granularity: int
    width: int  # tokens per decode step
    accept: Callable[[], int]  # how many tokens of a decode step are accepted, 1..width
    requests: dict[str, DeviceRequest] = field(default_factory=dict)
    rows: dict[tuple[int, int, int], int] = field(default_factory=dict)  # (group, block, row) -> identity
    sampled: int = 0

    def granularity(self, group: int) -> int:
        return self.groups[group].granularity or self.prefix_granularity

    def run(self, step: Step) -> list[Landing]:
        """Executes a plan; returns what must be landed, in row order."""
        self.zero(step)
        self.copy(step)
        return self.forward(step)

    def zero(self, step: Step) -> None:
        for name, blocks in step.zeroed.items():
            group = int(name[1:])
            for block in blocks:
                for row in range(self.granularity(group)):
                    self.rows.pop((group, block, row), None)

    def copy(self, step: Step) -> None:
        for name, copies in step.copied.items():
            self._copy(int(name[1:]), copies)

    def forward(self, step: Step) -> list[Landing]:
        landings = []
        for index, (request_id, slot) in enumerate(zip(step.ids, step.batch.request_pool_indices, strict=True)):
            tables = [step.row(request_id, group) for group in range(len(self.groups))]
            if index < step.batch.num_extends():
                landings.append(Landing(request_id, self._prefill(step, index, tables), False, slot))
            else:
                landings.append(Landing(request_id, self._decode(request_id, tables), True, slot))
        return landings

    def _copy(self, group: int, copies: Sequence[tuple[int, int]]) -> None:
        assert not {source for source, _ in copies} & {destination for _, destination in copies}
        for source, destination in copies:
            for row in range(self.granularity(group)):
                self.rows.pop((group, destination, row), None)
                if (group, source, row) in self.rows:
                    self.rows[group, destination, row] = self.rows[group, source, row]

    def _sample(self, request: DeviceRequest, count: int) -> list[int]:
        self.sampled += 1
        # Few distinct values, so that outputs of different requests coincide and are shared.
        fresh = [(request.tokens[-1] * 7 + index + request.variant) % 3 for index in range(count)]
        request.tokens += fresh
        return fresh

    def _prefill(self, step: Step, index: int, tables: list[list[int]]) -> list[int]:
        request = self.requests[step.ids[index]]
        start, length = step.prefixes[index], step.inputs[index]
        offset = sum(step.inputs[:index])
        assert step.batch.input_ids[offset : offset + length] == request.tokens[start : start + length]
        self._compute(request, tables, start, length, step.replays[index])
        self._scan_prefill(request, tables, start, length)
        request.computed = start + length
        if start + length < step.batch.prefill_lengths[index]:
            return []
        return self._sample(request, 1)

    def _decode(self, request_id: str, tables: list[list[int]]) -> list[int]:
        request = self.requests[request_id]
        position = len(request.tokens) - 1
        assert request.computed == position, "a decode step follows all that came before it"
        # The drafts beyond the accepted tokens are written too, and overwritten by the next step.
        accepted = self._sample(request, self.accept())
        self._compute(request, tables, position, len(accepted))
        self._scan_decode(request, tables, position, len(accepted))
        for draft in range(len(accepted), self.width):
            for group, table in enumerate(tables):
                slot = (position + draft) // self.granularity(group)
                assert table[slot] > 0, "a draft has a block to go to"
        request.computed = position + len(accepted)
        return accepted

    def _scan(self, request: DeviceRequest, group: int, table: list[int], start: int, writes: dict[int, int]) -> None:
        """A recurrent layer: `writes` gives the token count summarised by what is written to each slot, 0 = rubbish."""
        g = self.granularity(group)
        identities = prefix_identities(request.tokens)
        if start > 0:
            block = table[(start - 1) // g]
            assert block > 0, f"the snapshot of group {group} at {start} must be there"
            assert self.rows.get((group, block, 0)) == identities[start - 1], "another snapshot was read"
        for slot, tokens in writes.items():
            assert table[slot] > 0, f"the snapshot of group {group} in slot {slot} has nowhere to be written"
            self.rows[group, table[slot], 0] = identities[tokens - 1] if tokens > 0 else 0

    def _scan_prefill(self, request: DeviceRequest, tables: list[list[int]], start: int, length: int) -> None:
        end = start + length
        boundary = end - end % self.prefix_granularity
        written = {boundary, end} if boundary > start else {end}
        for group, table in enumerate(tables):
            if self.groups[group].state:
                g = self.granularity(group)
                self._scan(request, group, table, start, {(tokens - 1) // g: tokens for tokens in sorted(written)})

    def _scan_decode(self, request: DeviceRequest, tables: list[list[int]], start: int, accepted: int) -> None:
        """Every slot that a rejected draft might have gone to is spoilt."""
        for group, table in enumerate(tables):
            if self.groups[group].state:
                g = self.granularity(group)
                writes = {(start + draft) // g: 0 for draft in range(self.width)}
                self._scan(request, group, table, start, writes | {(start + accepted - 1) // g: start + accepted})

    def _compute(
        self, request: DeviceRequest, tables: list[list[int]], start: int, length: int, replay: int = 0
    ) -> None:
        """The first `replay` tokens are fed again: they only bring back the rows of replayable groups."""
        identities = prefix_identities(request.tokens[: start + length])
        for group, table in enumerate(tables):
            if self.groups[group].state:
                continue
            g = self.granularity(group)
            window = self.groups[group].window
            begin = start + replay
            for position in range(start if self.groups[group].replayable else begin, start + length):
                block = table[position // g]
                assert block > 0, f"position {position} of group {group} has nowhere to be written"
                self.rows[group, block, position % g] = identities[position]
            first = 0 if window is None else max(0, begin - window + 1)
            for position in range(first, start + length):
                block = table[position // g]
                assert block > 0, f"position {position} of group {group} is still visible and must be there"
                assert self.rows.get((group, block, position % g)) == identities[position], "a foreign row was read"
