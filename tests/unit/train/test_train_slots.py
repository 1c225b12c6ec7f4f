"""Slots: the plan is contiguous and complete, rows are aligned, every token is scored once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.contracts import TrainSample
from engines.numerics import ROW_BLOCK
from engines.train.slots import (
    num_rows,
    pack_slot,
    plan_micro_batches,
    plan_slot_parts,
    plan_slots,
)
from model_specs.errors import EngineError


def sample(name: str, prompt: int, completion: int) -> TrainSample:
    return TrainSample(
        request_id=name,
        prompt_token_ids=tuple(range(1, prompt + 1)),
        token_ids=tuple(range(101, 101 + completion)),
    )


@given(st.integers(0, 5), st.integers(1, 9))
def test_plan_deals_every_sample_once_in_order(power: int, size: int) -> None:
    slots = plan_slots(2**power * size, num_slots=2**power)
    assert [index for slot in slots for index in slot] == list(range(2**power * size))
    assert {len(slot) for slot in slots} == {size}


@pytest.mark.parametrize("count", [0, 6])
def test_plan_refuses_samples_that_cannot_be_dealt_evenly(count: int) -> None:
    with pytest.raises(EngineError, match=f"{count} samples"):
        plan_slots(count, num_slots=4)


@given(st.lists(st.tuples(st.integers(1, 150), st.integers(1, 150)), min_size=1, max_size=4))
def test_sequences_are_aligned_and_every_completion_token_is_scored_once(
    sizes: list[tuple[int, int]],
) -> None:
    samples = [sample(str(i), *size) for i, size in enumerate(sizes)]
    slot = pack_slot(samples)
    assert all(start % ROW_BLOCK == 0 for start in slot.starts)
    assert len(slot.ids) % ROW_BLOCK == 0
    assert slot.num_head_rows % ROW_BLOCK == 0
    assert int((~slot.padding).sum()) == sum(slot.lengths)
    tokens = slot.targets[slot.head_rows].split(slot.counts)
    rows = slot.split(slot.scored_rows)
    for one, start, length, targets, scored in zip(
        samples, slot.starts, slot.lengths, tokens, rows, strict=True
    ):
        text = (*one.prompt_token_ids, *one.token_ids)
        assert slot.ids[start : start + length].tolist() == list(text[:-1])
        assert slot.positions[start : start + length].tolist() == list(range(length))
        assert tuple(targets.tolist()) == one.token_ids
        # The row that scores token t holds the token before it.
        assert [text[row - start + 1] for row in scored.tolist()] == list(one.token_ids)


def test_first_tokens_cut_as_split_does() -> None:
    slot = pack_slot([sample("a", 3, 4), sample("b", 2, 1), sample("c", 9, 5)])
    values = torch.arange(slot.num_tokens)
    assert slot.first_tokens == (0, 4, 5)
    assert [int(part[0]) for part in slot.split(values)] == list(slot.first_tokens)


@pytest.mark.parametrize(("prompt", "completion"), [(0, 3), (3, 0)])
def test_sample_without_prompt_or_completion_is_refused_by_name(
    prompt: int, completion: int
) -> None:
    with pytest.raises(EngineError, match="7/x/0"):
        pack_slot([sample("7/x/0", prompt, completion)])


def test_the_head_rows_before_the_least_length_are_marked() -> None:
    assert pack_slot([sample("a", 3, 4)]).forbidden is None
    samples = [
        replace(sample(name, 3, length), forbidden_ids=(7, 9), forbidden_until=until)
        for name, length, until in (("a", 70, 66), ("b", 2, 5), ("c", 4, 0))
    ]
    forbidden = pack_slot(samples).forbidden
    assert forbidden is not None
    assert forbidden.ids.tolist() == [7, 9]
    assert forbidden.rows.tolist() == (
        [True] * 66 + [False] * 62 + [True] * 2 + [False] * 62 + [False] * 64
    )


def test_a_token_where_it_was_forbidden_is_refused_with_its_place() -> None:
    drawn = replace(sample("7/x/0", 3, 4), forbidden_ids=(9, 102), forbidden_until=2)
    with pytest.raises(EngineError, match=r"7/x/0: token 102 at position 1 .* before position 2"):
        pack_slot([drawn])
    assert pack_slot([replace(drawn, forbidden_until=1)]).forbidden is not None
    other = replace(sample("b", 3, 4), forbidden_ids=(5,), forbidden_until=1)
    with pytest.raises(EngineError, match=r"different forbidden ids: \[\(5,\), \(9, 102\)\]"):
        pack_slot([replace(drawn, forbidden_until=1), other])


@given(
    st.lists(st.integers(1, 9), max_size=30),
    st.one_of(st.none(), st.integers(9, 40)),
    st.integers(1, 6),
)
def test_micro_batches_hold_every_sample_once_in_order_and_fit(
    rows: list[int], bound: int | None, most: int
) -> None:
    plan = plan_micro_batches(rows, max_rows=bound, max_samples=most)
    assert [index for batch in plan for index in batch] == list(range(len(rows)))
    assert all(1 <= len(batch) <= most for batch in plan)
    assert all(bound is None or sum(rows[i] for i in batch) <= bound for batch in plan)
    # Greedy: a batch was only ended where the next sample would not have fitted.
    for batch, following in itertools.pairwise(plan):
        together = sum(rows[i] for i in batch) + rows[following[0]]
        assert len(batch) == most or (bound is not None and together > bound)


def test_a_sample_above_the_bound_is_refused_with_both_numbers() -> None:
    with pytest.raises(EngineError, match=r"sample 1 takes 192 rows, .*max_tokens_per_rank=128"):
        plan_micro_batches([64, 192], max_rows=128, max_samples=8)


@given(
    st.integers(0, 3).flatmap(
        lambda power: st.integers(1, 5).flatmap(
            lambda size: st.tuples(
                st.just(2**power),
                st.lists(
                    st.integers(1, 9).map(lambda blocks: 64 * blocks),
                    min_size=size * 2**power,
                    max_size=size * 2**power,
                ),
            )
        )
    ),
    st.one_of(st.none(), st.integers(576, 3000)),
)
def test_parts_of_slots_keep_order_fit_and_are_as_many_in_every_slot(
    slots_and_rows: tuple[int, list[int]], bound: int | None
) -> None:
    num_slots, rows = slots_and_rows
    slots = plan_slots(len(rows), num_slots=num_slots)
    plan = plan_slot_parts(rows, slots, max_rows=bound)
    assert tuple(tuple(index for part in parts for index in part) for parts in plan) == slots
    assert len({len(parts) for parts in plan}) == 1
    sizes = [[sum(rows[i] for i in part) for part in parts] for parts in plan]
    assert all(size > 0 and (bound is None or size <= bound) for part in sizes for size in part)
    # No more parts than the slot that needs most of them.
    greedy = [
        plan_micro_batches([rows[i] for i in slot], max_rows=bound, max_samples=len(slot))
        for slot in slots
    ]
    assert len(plan[0]) == max(len(parts) for parts in greedy)
    # A function of lengths alone: the same again, and of one slot as of all that need as many.
    assert plan == plan_slot_parts(list(rows), [list(slot) for slot in slots], max_rows=bound)


def test_a_slot_of_the_peer_scripts_limit_is_cut_by_rows_not_by_samples() -> None:
    rows = [4096, 4096, 4096, 64, 9216, 64, 64, 64]
    plan = plan_slot_parts(rows, [(0, 1, 2, 3), (4, 5, 6, 7)], max_rows=9216)
    assert plan == (((0, 1), (2, 3)), ((4,), (5, 6, 7)))
    assert plan_slot_parts([64] * 4, [(0, 1), (2, 3)], max_rows=None) == (((0, 1),), ((2, 3),))
    uneven = plan_slot_parts([64, 64, 128, 128], [(0, 1), (2, 3)], max_rows=128)
    assert uneven == (((0,), (1,)), ((2,), (3,)))


def test_a_sample_above_the_bound_is_refused_in_a_slot_too() -> None:
    with pytest.raises(EngineError, match=r"takes 192 rows, .*max_tokens_per_rank=128"):
        plan_slot_parts([64, 192], [(0,), (1,)], max_rows=128)


@given(st.integers(1, 150), st.integers(1, 150))
def test_rows_of_a_sample_are_those_that_it_is_packed_in(prompt: int, completion: int) -> None:
    one = sample("a", prompt, completion)
    assert num_rows(one) == len(pack_slot([one]).ids)
