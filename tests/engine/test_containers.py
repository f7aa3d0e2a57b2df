"""Immutable containers: every change leaves what was before as it was, at a cost that does not grow."""

from __future__ import annotations

import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.engine.containers import Log, Queue


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(), max_size=4)), max_size=30))
def test_logs_that_grew_out_of_each_other_do_not_see_each_others_items(events):
    logs, wanted = [Log()], [()]
    for of, items in events:
        of %= len(logs)
        logs.append(logs[of].extend(items))
        wanted.append((*wanted[of], *items))
    for log, items in zip(logs, wanted, strict=True):
        assert tuple(log) == items and len(log) == len(items) and log == items
        assert log[1:3] == items[1:3] and log[-2:] == items[-2:] and log[::-1] == items[::-1]
        if items:
            assert (log[0], log[-1]) == (items[0], items[-1])
        with pytest.raises(IndexError):
            log[len(items)]


@given(st.lists(st.tuples(st.sampled_from(["append", "prepend", "remove", "replace"]), st.integers(0, 9)), max_size=60))
def test_a_queue_is_an_ordered_mapping_and_old_ones_stay(events):
    queue, model = Queue(), {}
    history = []
    for number, (event, key) in enumerate(events):
        history.append((queue, dict(model)))
        if event in ("append", "prepend") and key not in model:
            queue = getattr(queue, event)(key, number)
            model = {**model, key: number} if event == "append" else {key: number, **model}
        elif event == "remove" and key in model:
            queue, model = queue.remove(key), {k: v for k, v in model.items() if k != key}
        elif event == "replace" and key in model:
            queue, model = queue.replace(key, number), {**model, key: number}
    history.append((queue, model))
    for queue, model in history:
        assert list(queue.items()) == list(model.items())
        assert list(queue) == list(model.values()) and len(queue) == len(model)
        assert all(queue.get(key) == model.get(key) and (key in queue) == (key in model) for key in range(10))
        if model:
            assert (queue.first, queue.last) == (next(iter(model.values())), list(model.values())[-1])
        else:
            with pytest.raises(IndexError):
                queue.first  # noqa: B018


def test_growing_costs_the_same_however_much_is_held():
    def seconds(size: int) -> float:
        def grow():
            log, queue = full
            for number in range(200):
                log, queue = log.extend([number]), queue.append(-1, 0).remove(-1)

        times = []
        for _ in range(5):
            full = Log(range(size)), Queue((n, n) for n in range(size))
            times.append(timeit.timeit(grow, number=1))
        return min(times)

    assert seconds(100_000) < 10 * seconds(100)


def test_a_queue_is_served_from_its_front_in_linear_time():
    def seconds(size: int) -> float:
        def serve():
            queue = Queue((n, n) for n in range(size))
            while queue:
                queue = queue.remove(queue.first)

        return min(timeit.repeat(serve, number=1, repeat=3))

    # Sixteen times as many; a quadratic queue would take 256 times as long.
    assert seconds(16_000) < 120 * seconds(1_000)
