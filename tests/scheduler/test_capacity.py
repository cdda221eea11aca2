"""How much storage a workload needs, and the longest request a pool can run (scenarios S-CM; T10 and T11)."""

import itertools

import pytest

from tokenspeed_jax.scheduler import (
    CacheGroupConfig,
    CacheGroupFamily,
    CacheRetention,
    CacheTransferPolicy,
    CapacityModel,
    Scheduler,
    SchedulerConfig,
)

from .scenario import spec

Role = SchedulerConfig.Role
ROLES = [Role.P, Role.D, Role.Fused]


def full(g: int, K: int = 1) -> CacheGroupConfig:
    return CacheGroupConfig(
        f"full{g}x{K}", g, 0, cache_blocks_per_lcm_block=K, transfer_policy=CacheTransferPolicy.FullSuffix
    )


def sliding(window: int, g: int, K: int = 1) -> CacheGroupConfig:
    return CacheGroupConfig(
        f"swa{window}",
        g,
        0,
        retention=CacheRetention.SlidingWindow,
        sliding_window_tokens=window,
        cache_blocks_per_lcm_block=K,
        transfer_policy=CacheTransferPolicy.FullSuffix,
    )


def state(g: int, name: str = "state", K: int = 1) -> CacheGroupConfig:
    return CacheGroupConfig(
        name,
        g,
        0,
        family=CacheGroupFamily.State,
        cache_blocks_per_lcm_block=K,
        transfer_policy=CacheTransferPolicy.LatestSnapshot,
    )


def config(groups: list[CacheGroupConfig], P: int, C: int, **fields: object) -> SchedulerConfig:
    made = SchedulerConfig()
    made.prefix_granularity, made.max_scheduled_tokens, made.max_batch_size = P, C, 1
    for index, group in enumerate(groups):
        group.group_id = f"{index}.{group.group_id}"
    made.cache_groups = groups
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def three_kinds(role: SchedulerConfig.Role) -> CapacityModel:
    groups = [full(64, 12), state(64), sliding(128, 64, 3)]
    return CapacityModel(
        config(groups, 64, 8192, decode_input_tokens=4, overlap_schedule_depth=1, max_batch_size=16, role=role)
    )


@pytest.mark.parametrize(
    ("role", "pages", "parents", "single", "single_parents"),
    [
        (Role.Fused, [1056, 64, 194], 217, [65, 4, 65], 32),
        (Role.P, [1040, 48, 194], 200, [64, 3, 64], 31),
        (Role.D, [1056, 64, 96], 184, [65, 4, 6], 12),
    ],
)
def test_t10_cm1_cm2_demand_of_three_kinds_of_group(
    role: SchedulerConfig.Role, pages: list[int], parents: int, single: list[int], single_parents: int
) -> None:
    model = three_kinds(role)
    assert model.num_groups == 3
    assert model.concurrent_group_pages(65536, 4096) == pages
    assert model.lcm_blocks_needed_for(pages) == parents
    assert model.single_request_group_pages(4096) == single
    assert model.lcm_blocks_needed_for(single) == single_parents


def test_t11_demand_of_three_state_groups_and_its_inverse() -> None:
    groups = [full(128, 12), *(state(128, f"s{index}") for index in range(3))]
    made = config(groups, 128, 8192, decode_input_tokens=5, overlap_schedule_depth=1, max_batch_size=64)
    model = CapacityModel(made)
    context = 262144

    def parents(total: int) -> int:
        return model.lcm_blocks_needed_for(model.concurrent_group_pages(total, context))

    assert model.concurrent_group_pages(1, context) == [129, 256, 256, 256]
    assert parents(1) == 779
    assert (model.concurrent_group_pages(131072, context)[0], parents(131072)) == (1152, 864)
    assert (model.concurrent_group_pages(1048576, context)[0], parents(1048576)) == (8320, 1462)
    assert (parents(1875968), parents(1875969)) == (2000, 2001)


def test_cm3_parents_are_counted_per_group() -> None:
    model = CapacityModel(config([full(4, 12), state(4)], 4, 8))
    assert model.lcm_blocks_needed_for([25, 3]) == 6
    with pytest.raises(ValueError, match="group_pages"):
        model.lcm_blocks_needed_for([25])
    with pytest.raises(ValueError, match="group_pages"):
        model.lcm_blocks_needed_for([-1, 3])


@pytest.mark.parametrize(
    ("made", "parents", "tokens"),
    [
        pytest.param(config([state(4)], 4, 8, disable_prefix_cache=True), 2, 5, id="cm4-2"),
        pytest.param(config([state(4)], 4, 8, disable_prefix_cache=True), 3, 9, id="cm4-3"),
        pytest.param(config([state(1)], 4, 8), 3, 5, id="cm5"),
        pytest.param(config([full(2), full(2)], 2, 64), 8, 8, id="cm6"),
        pytest.param(config([full(2), full(1)], 2, 64), 8, 5, id="cm6-fine"),
        pytest.param(config([full(2), full(2)], 2, 64, overlap_schedule_depth=1), 8, 7, id="cm6-overlap"),
        pytest.param(config([sliding(4, 2, 2)], 4, 64, role=Role.D), 2, 8, id="cm7-window"),
        pytest.param(config([full(2)], 2, 64, role=Role.D), 3, 6, id="cm7-history"),
        pytest.param(config([full(2, 2), state(2)], 2, 8, role=Role.D), 8, 16, id="cm7-state"),
        pytest.param(
            config([full(128, 12), *(state(128, f"s{i}") for i in range(3))], 128, 8192), 284, 417_792, id="cm8-284"
        ),
        pytest.param(
            config([full(128, 12), *(state(128, f"s{i}") for i in range(3))], 128, 8192), 97, 130_560, id="cm8-97"
        ),
        pytest.param(
            config([full(128, 12), *(state(128, f"s{i}") for i in range(3))], 128, 8192), 98, 132_096, id="cm8-98"
        ),
    ],
)
def test_longest_single_request(made: SchedulerConfig, parents: int, tokens: int) -> None:
    assert CapacityModel(made).max_single_request_tokens(parents) == tokens


def group_sets() -> list[list[CacheGroupConfig]]:
    return [
        [full(4)],
        [full(4, 2), state(2)],
        [full(4, 3), sliding(5, 4), sliding(9, 2, 2)],
        [sliding(3, 4), state(4)],
    ]


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("role", ROLES)
def test_cm9_one_row_alone_never_needs_more_than_a_batch_of_one(which: int, role: SchedulerConfig.Role) -> None:
    for C, width, overlap, no_cache in itertools.product((4, 8, 9, 16), (1, 3), (0, 1), (False, True)):
        made = config(
            group_sets()[which],
            4,
            C,
            role=role,
            decode_input_tokens=width,
            overlap_schedule_depth=overlap,
            disable_prefix_cache=no_cache,
        )
        model = CapacityModel(made)
        previous = 0
        for limit in range(65):
            single = model.single_request_group_pages(limit)
            concurrent = model.concurrent_group_pages(limit, limit)
            assert all(many >= one for many, one in zip(concurrent, single, strict=True)), (C, width, overlap, limit)
            parents = model.lcm_blocks_needed_for(single)
            assert parents >= previous
            previous = parents


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("role", ROLES)
def test_cm9_scheduler_and_model_agree_on_the_longest_request(which: int, role: SchedulerConfig.Role) -> None:
    for C, width, overlap, no_cache in itertools.product((4, 8, 9, 16), (1, 3), (0, 1), (False, True)):
        for parents in range(2, 13):
            groups = group_sets()[which]
            for group in groups:
                group.total_pages = 1 + parents * group.cache_blocks_per_lcm_block
            made = config(
                groups,
                4,
                C,
                role=role,
                decode_input_tokens=width,
                overlap_schedule_depth=overlap,
                disable_prefix_cache=no_cache,
            )
            made.num_device_pages = parents + 1
            bound = CapacityModel(made).max_single_request_tokens(parents)
            scheduler = Scheduler(made)
            assert scheduler.max_single_request_tokens() == bound
            generated = 0 if role is Role.P else width
            if not generated < bound < 10_000:  # without a closed group the length of a request may be unbounded
                continue
            for prompt, fits in ((bound - generated, True), (bound - generated + 1, False)):
                if fits:
                    scheduler.submit_requests([spec("fits", range(prompt))])
                else:
                    with pytest.raises(ValueError, match="max_new_tokens"):
                        scheduler.submit_requests([spec("long", range(prompt))])


def test_cm10_the_model_looks_at_no_page_count_and_the_scheduler_does() -> None:
    made = config([full(4)], 4, 8)
    CapacityModel(made)
    with pytest.raises(ValueError, match="device cache"):
        Scheduler(made)
    made.overlap_schedule_depth = 2
    with pytest.raises(ValueError, match="overlap_schedule_depth"):
        CapacityModel(made)
    with pytest.raises(ValueError, match="overlap_schedule_depth"):
        Scheduler(made)


@pytest.mark.parametrize("tokens", [-1, 2**63 - 1])
def test_token_counts_out_of_range_are_refused(tokens: int) -> None:
    model = CapacityModel(config([full(4)], 4, 8))
    with pytest.raises(ValueError, match="token_limit"):
        model.single_request_group_pages(tokens)
    with pytest.raises(ValueError, match="max_total_tokens"):
        model.concurrent_group_pages(tokens, 1)
    with pytest.raises(ValueError, match="max_context_len"):
        model.concurrent_group_pages(1, tokens)


def test_absurd_batches_are_refused_rather_than_wrapped() -> None:
    extreme = 2**31 - 1
    groups = [sliding(extreme, 1)]
    made = config(groups, 1, 8, max_batch_size=extreme, decode_input_tokens=extreme, overlap_schedule_depth=1)
    with pytest.raises(ValueError, match="max_batch_size"):
        CapacityModel(made).concurrent_group_pages(2**40, 2**40)
