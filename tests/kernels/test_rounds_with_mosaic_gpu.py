"""Whole rounds with the Pallas kernels: the golden records in the simulator, and lowered for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings

from benchmarks.published_shapes import QWEN3_8B
from dflash_jax import Engine, EngineConfig
from dflash_jax.checkpoints.table import build_params, table
from dflash_jax.engine import Models
from dflash_jax.engine.state import init_state
from dflash_jax.engine.steps import prefill, run_rounds
from dflash_jax.engine.verification import verify_hidden
from dflash_jax.kernels import mosaic
from dflash_jax.models.config import ConvConfig, DraftConfig, LayerConfig, SelectorConfig, TargetConfig
from dflash_jax.models.drafters import Proposal
from dflash_jax.models.target import lm_head
from dflash_jax.sampling import Sampler
from tests.pairs import PAIRS, cases, full_blocks, models

LONG = settings.default.max_examples > 100
ROUNDS = 3


@pytest.mark.parametrize("pair", PAIRS if LONG else ["recall-dflash2-swa"])
def test_golden_rounds_are_reproduced(pair):
    case = cases(pair)[0]
    config = EngineConfig(max_slots=1, max_model_len=128, page_size=64, strict=True, rounds_per_step=1)
    produced = case["produced_per_round"][:ROUNDS]
    with mosaic.simulated():
        engine = Engine(models(pair), config, implementation="mosaic_gpu")
        sampling = {"max_tokens": 1 + sum(produced), "ignore_eos": True}
        completion = engine.generate([case["prompt"]], sampling)[0]
    assert list(completion.token_ids) == case["greedy_tokens"][: 1 + sum(produced)]
    assert list(completion.produced_per_round) == produced
    assert [list(block) for block in completion.drafted_blocks] == full_blocks(case)[:ROUNDS]


def test_the_heads_kernel_decides_as_logits_do():
    of = models("recall-dflash1")
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((2, 4, of.target_config.hidden_size)), jnp.float32)
    best = jnp.argmax(lm_head(of.target, hidden), axis=-1).astype(jnp.int32)
    # Row 0 drafts what the target says up to its last token, row 1 only its first.
    drafted = best[:, :3] + jnp.array([[0, 0, 1], [0, 1, 0]])
    proposal = Proposal(drafted, drafted[..., None], jnp.ones((*drafted.shape, 1), jnp.float32))
    nothing = jnp.zeros(2, jnp.int32)
    greedy = Sampler(jnp.zeros(2), nothing, jnp.ones(2), jnp.zeros(2), jnp.arange(2, dtype=jnp.uint32))
    one_samples = greedy.replace(temperature=jnp.array([0.0, 0.8]))

    def verdicts(implementation):
        of_sampler = jax.jit(lambda s: verify_hidden(of, hidden, proposal, nothing + 3, s, nothing, implementation))
        return jax.tree.map(np.asarray, [of_sampler(greedy), of_sampler(one_samples)])

    with mosaic.simulated():
        found = verdicts("mosaic_gpu")
    jax.tree.map(np.testing.assert_array_equal, found, verdicts("xla"))
    assert found[0].accepted.tolist() == [2, 1] and found[1].accepted[0] == 2


QWEN3_27B_DRAFT = QWEN3_8B | dict(vocab_size=248_320, hidden_size=5120, intermediate_size=17_408)


@pytest.mark.parametrize("sizes", [QWEN3_8B, QWEN3_27B_DRAFT], ids=["Qwen3-8B", "Qwen3.8-27B-DFlash2"])
def test_round_and_prefill_lower_for_cuda(sizes):
    # Of as many layers as there are kinds: the others lower to the same.
    target = TargetConfig(**sizes, layers=(LayerConfig(),))
    draft = DraftConfig(
        **sizes,
        layers=(LayerConfig(causal=False, window=2048),),
        block_size=8,
        mask_token_id=sizes["vocab_size"] - 1,
        target_layer_ids=(0,),
        conv=ConvConfig(taps=2, group_size=16),
        selector=SelectorConfig(rank=256, top_k=16),
    )
    params = (
        build_params(c, {leaf.path: jax.ShapeDtypeStruct(leaf.param_shape, jnp.bfloat16) for leaf in table(c)})
        for c in (target, draft)
    )
    of = Models(next(params), target, next(params), draft)
    state = jax.eval_shape(
        lambda of: init_state(of, rows=8, slots=16, num_pages=16_000, page_size=16, max_model_len=40_960), of
    )

    def step(of, state):
        return run_rounds(of, state, drafts=7, rounds=4, implementation="mosaic_gpu")

    # Attention of target and draft, the draft's head, its selector, and the target's head.
    assert kernels_when_lowered(step, of, state) == 5

    def chunk(of, state, tokens, rows):
        return prefill(of, state, tokens, rows, rows > 0, rows, implementation="mosaic_gpu")

    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((8, 256), jnp.int32)
    # The target's attention and head.
    assert kernels_when_lowered(chunk, of, state, tokens, rows) == 2


def kernels_when_lowered(function, *arguments) -> int:
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("@mosaic_gpu_v2(")
