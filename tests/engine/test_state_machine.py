"""Random sequences of everything that can happen to an engine.

After every event each request must be where it would be alone: the tokens it has are the first tokens
it produces alone, and the blocks it drafted are the first blocks it drafts alone. Pages that nobody
holds are poisoned with NaN throughout.

    HYPOTHESIS_PROFILE=long DFLASH_JAX_MACHINE=8x4 pytest tests/engine/test_state_machine.py

runs longer, on 8 slots with pages of 4 tokens.
"""

from __future__ import annotations

import dataclasses
import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_jax.engine.admit import admit
from dflash_jax.engine.check import check_state
from dflash_jax.engine.host import preempt
from tests.engine.budgets import blocks_along, with_budget
from tests.engine.poison import poison, poison_slots
from tests.memory_maps import let_go_of_programs
from tests.pairs import HYBRID, alone, engine, prompts, step_in_order

SLOTS, PAGE_SIZE = (int(n) for n in os.environ.get("DFLASH_JAX_MACHINE", "4x16").split("x"))
SAMPLINGS = [
    {"max_tokens": 20},
    {"max_tokens": 3},
    {"max_tokens": 14, "temperature": 1.0, "seed": 4},
    {"max_tokens": 10, "speculation": False},
]


def prompts_of(pair):
    """Some that share beginnings, and a very short one."""
    return [tuple(prompt) for prompt in prompts(pair)[:4]] + [tuple(prompts(pair)[3][:33]), (60, 3)]


class EngineMachine(RuleBasedStateMachine):
    pair = "recall-dflash2"

    @initialize(pages=st.sampled_from([96, 128, 480]), cache=st.booleans(), chunk=st.sampled_from([128, 16]))
    def start(self, pages, cache, chunk):
        let_go_of_programs()
        sizes = {"max_slots": SLOTS, "page_size": PAGE_SIZE, "prefill_chunk": chunk, "prefix_cache": cache}
        self.engine = engine(self.pair, pages=pages // PAGE_SIZE, **sizes)
        self.asked = {}
        self.done = {}

    @rule(number=st.integers(0, 5), sampling=st.sampled_from(SAMPLINGS))
    def add(self, number, sampling):
        if len(self.asked) < 12:
            prompt = prompts_of(self.pair)[number]
            request_id = self.engine.add_request(prompt, {"ignore_eos": True, **sampling})
            self.asked[request_id] = (prompt, tuple(sampling.items()))

    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        for _ in range(steps):
            for update in self.engine.step():
                if update.completion is not None:
                    self.done[update.id] = update.completion
            self.spoil()

    @precondition(lambda self: len(self.engine.host.running))
    @rule(data=st.data())
    def preempt(self, data):
        sequence = data.draw(st.sampled_from(list(self.engine.host.running)))
        self.engine.host = preempt(self.engine.host, sequence.id)

    @precondition(lambda self: self.engine.host.in_flight)
    @rule(data=st.data())
    def abort(self, data):
        sequence = data.draw(st.sampled_from(list(self.engine.host.in_flight)))
        self.done[sequence.id] = self.engine.abort(sequence.id)

    @rule(data=st.data(), holes=st.integers(0, 2))
    def step_with_rows_in_any_order(self, data, holes):
        """A step whose plan has its rows permuted, in a batch that may be larger than they need."""

        def order(count):
            return data.draw(st.permutations([*range(count), *[-1] * holes]) if count else st.just([]))

        step_in_order(self.engine, order)
        self.spoil()

    def spoil(self):
        """NaN in whatever nobody has."""
        poison(self.engine)
        poison_slots(self.engine)

    @rule()
    def fork(self):
        """The fork goes on; what becomes of the original must not matter to it."""
        original, self.engine = self.engine, self.engine.fork()
        original.step()
        poison(original)

    @invariant()
    def every_request_is_where_it_would_be_alone(self):
        if not hasattr(self, "engine"):
            return
        host = self.engine.host
        check_state(self.engine.models, host, self.engine.state)
        looked_up_again = admit(dataclasses.replace(host, refusal=None))
        assert list(admit(host).running) == list(looked_up_again.running), "a refusal outlived its reason"
        for sequence in self.engine.host.in_flight:
            self.compare(sequence, tuple(sequence.output), tuple(sequence.drafted_blocks))
        for completion in self.done.values():
            assert completion.finish_reason in ("length", "abort"), completion.error
            self.compare(completion, completion.token_ids, completion.drafted_blocks)

    def compare(self, sequence, tokens, blocks):
        """The tokens and blocks of a request so far, a `Sequence` or a `Completion`, against what it does alone."""
        wanted = alone(self.pair, *self.asked[sequence.id])
        assert tokens == wanted.token_ids[: len(tokens)]
        assert blocks == wanted.drafted_blocks[: len(blocks)]

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        while self.engine.has_work:
            self.step(1)
        self.every_request_is_where_it_would_be_alone()
        assert set(self.done) == set(self.asked)
        for request_id, completion in self.done.items():
            if completion.finish_reason == "length":
                self.compare_whole(request_id, completion)
        assert self.engine.host.pool.available == self.engine.host.pool.num_pages

    def compare_whole(self, request_id, completion):
        assert completion.token_ids == alone(self.pair, *self.asked[request_id]).token_ids


class WidthMachine(EngineMachine):
    """The same, with rounds that verify any number of drafted tokens, or draft nothing.

    What greedy requests say is what they would say alone, and each block is what would be drafted from their tokens so
    far. How many rounds that takes, and what sampled requests draw, depends on the widths.
    """

    @rule(per_row=st.sampled_from([1, 1.5, 2, 3.25, 8]), steps=st.integers(1, 4))
    def step_with_a_budget(self, per_row, steps):
        run = self.engine._run
        with_budget(self.engine, lambda plan: int(per_row * len(plan.decodes)))
        self.step(steps)
        self.engine._run = run

    def compare(self, sequence, tokens, blocks):
        prompt, sampling = self.asked[sequence.id]
        if "temperature" in dict(sampling):
            return
        wanted = alone(self.pair, prompt, sampling).token_ids
        assert tokens == wanted[: len(tokens)]
        along, count = blocks_along(self.pair, prompt, wanted), 1
        for produced, block in zip(sequence.produced_per_round, blocks, strict=True):
            assert not block or block == along[count]
            count += produced

    def compare_whole(self, request_id, completion):
        if "temperature" not in dict(self.asked[request_id][1]):
            super().compare_whole(request_id, completion)


class HybridMachine(EngineMachine):
    """The same on a target with recurrent states."""

    pair = HYBRID


_SETTINGS = settings(
    settings.default,
    stateful_step_count=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = _SETTINGS
TestWidthMachine = WidthMachine.TestCase
TestWidthMachine.settings = settings(_SETTINGS, max_examples=max(1, settings.default.max_examples // 2))
TestHybridMachine = HybridMachine.TestCase
TestHybridMachine.settings = settings(_SETTINGS, max_examples=max(1, settings.default.max_examples // 2))
