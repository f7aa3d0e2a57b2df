"""Small edits of the package that a gate must notice, each with the test that has to go red and why.

A gate that has never been seen red proves nothing. `run.py` applies each mutant to a copy of the
package and requires its gate to fail for the stated reason.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """An edit and its gate.

    Attributes:
      name: what it does, as a phrase.
      edits: (file under dflash_jax/, text that occurs exactly once, its replacement).
      gate: pytest node that must fail.
      reason: regular expression that its output must contain.
    """

    name: str
    edits: tuple[tuple[str, str, str], ...]
    gate: str
    reason: str


_SITUATIONS = "tests/engine/test_situations.py::"
_GOLDEN = "tests/engine/test_golden_records.py::"
_MODELS = "tests/models/test_golden.py::"
_KERNELS = "tests/kernels/"
_SAMPLING = "tests/sampling/test_distribution.py::"

# What `assert_is_golden` prints when drafted blocks differ while tokens do not.
_BLOCKS = r"(drafted\[: len\(full_blocks\(case\)\)\] == full_blocks|produced_per_round\) == case|record\()"

_READ = "    context = state.draft_context(idx_mapping)\n"
_WRITE = "        draft_pages = draft_context.write(entries, count, packing=packing, implementation=implementation)\n"
_CONTINUOUS = "    continuous = ~drafting | (slots.draft_len[slot] == slots.position[slot])\n"
_ROWS = "jnp.where(idx_mapping >= 0, jnp.arange(idx_mapping.shape[0]), -1)"
_UNCHECKED = ("engine/invariants.py", _CONTINUOUS, "    continuous = jnp.ones_like(drafting)\n")

_OF_GOLDEN_PAIRS = (
    Mutant(
        "key the draft's context by row instead of slot",
        (
            ("engine/steps.py", _READ, f"    context = state.draft_context({_ROWS})\n"),
            _UNCHECKED,
        ),
        _SITUATIONS + "test_survivor_of_condense_drafts_what_it_would_have_drafted_alone[recall-dflash2]",
        _BLOCKS,
    ),
    Mutant(
        "on a position mismatch, stop drafting for that request",
        (
            (
                "engine/steps.py",
                "    speculating = live & slots.speculating[slot] & (slots.position[slot] <= slots.draft_limit[slot])\n",
                "    speculating = live & slots.speculating[slot] & (slots.position[slot] <= slots.draft_limit[slot])\n"
                "    moved = (slot != jnp.arange(slot.shape[0])) & (slots.position[slot] > 20)\n"
                "    speculating &= ~moved\n",
            ),
            _UNCHECKED,
        ),
        _SITUATIONS + "test_survivor_of_condense_drafts_what_it_would_have_drafted_alone[recall-dflash2]",
        _BLOCKS,
    ),
    Mutant(
        "delete the continuity check and let a moved request draft from an empty context",
        (
            (
                "engine/steps.py",
                _READ,
                _READ
                + "    moved = idx_mapping != jnp.arange(idx_mapping.shape[0])\n"
                + "    empty = context.lengths.at[jnp.where(moved, idx_mapping, -1)].set(0)\n"
                + "    context = context.replace(lengths=jnp.where(jnp.any(moved), empty, context.lengths))\n",
            ),
            _UNCHECKED,
        ),
        _SITUATIONS + "test_survivor_of_condense_drafts_what_it_would_have_drafted_alone[recall-trained]",
        _BLOCKS,
    ),
    Mutant(
        "delete the continuity check",
        (_UNCHECKED,),
        "tests/engine/test_invariants.py::test_the_violating_request_fails_by_name_and_its_neighbour_is_bit_identical[context_continuity]",
        r"finish_reason == .error.",
    ),
    Mutant(
        "never call propose",
        (("engine/plan.py", "    if not drafting:\n", "    if drafting:\n"),),
        _SITUATIONS + "test_metrics_count_as_vllm_does",
        r"drafted_request_steps == len\(rounds\)",
    ),
    Mutant(
        "take the context of slot s + 1",
        (
            (
                "engine/steps.py",
                _READ,
                "    context = state.draft_context(\n"
                "        jnp.where(idx_mapping >= 0, (idx_mapping + 1) % state.slots.position.shape[0], -1)\n"
                "    )\n",
            ),
        ),
        _GOLDEN + "test_all_cases_at_once_are_as_alone[recall-dflash2]",
        _BLOCKS,
    ),
    Mutant(
        "shift context positions by one page after a prefix hit",
        (
            (
                "engine/steps.py",
                "        positions = pack(position[:, None] + jnp.arange(width), packing)\n",
                "        positions = pack(position[:, None] + jnp.arange(width), packing)\n"
                "        after_hit = ~state.slots.decoding[slot] & (position > 0)\n"
                "        positions += jnp.where(after_hit, state.target_pages.k.shape[2], 0)[:, None]\n",
            ),
        ),
        _SITUATIONS + "test_a_shared_beginning_drafts_the_same_blocks_cold_and_warm[2]",
        _BLOCKS,
    ),
    Mutant(
        "skip the context write of the last accepted token",
        (("engine/steps.py", _WRITE, _WRITE.replace("(entries, count,", "(entries, jnp.maximum(count - 1, 1),")),),
        _GOLDEN + "test_each_case_alone_is_the_golden_record[recall-dflash2]",
        _BLOCKS,
    ),
    Mutant(
        "drop the sliding window on non-causal layers",
        (
            (
                "models/draft.py",
                "            window=layer.window,\n",
                "            window=layer.window if layer.causal else None,\n",
            ),
        ),
        _SITUATIONS + "test_a_sliding_draft_sees_only_its_window",
        r"block\[0\] == block\[1\]",
    ),
    Mutant(
        "make every window one token wider",
        (
            (
                "models/draft.py",
                "            window=layer.window,\n",
                "            window=layer.window and layer.window + 1,\n",
            ),
        ),
        _MODELS + "test_draft_hidden_states_are_the_references[recall-dflash2-swa]",
        r"Not equal to tolerance",
    ),
    Mutant(
        "reuse the proposal's random draw when resampling",
        (("sampling/keys.py", "position * len(Purpose) + purpose)", "position * len(Purpose) + 0 * purpose)"),),
        _SAMPLING + "test_speculated_tokens_follow_the_targets_joint_distribution[{}-2]",
        r"p = ",
    ),
    Mutant(
        "reuse the acceptance's random draw when resampling",
        (("sampling/verify.py", "Purpose.TARGET)[:, 0]", "Purpose.ACCEPT)[:, 0]"),),
        _SAMPLING + "test_speculated_tokens_follow_the_targets_joint_distribution[{}-2]",
        r"p = ",
    ),
    Mutant(
        "accept with q instead of p",
        (("sampling/verify.py", "draw * q_drafted < p_drafted", "draw < q_drafted"),),
        _SAMPLING + "test_speculated_tokens_follow_the_targets_joint_distribution[{}-2]",
        r"p = ",
    ),
    Mutant(
        "resample from p instead of the residual",
        (
            (
                "sampling/verify.py",
                "weights = jnp.where(residual.sum(-1, keepdims=True) > 0, residual, p_next)",
                "weights = p_next",
            ),
        ),
        _SAMPLING + "test_speculated_tokens_follow_the_targets_joint_distribution[{}-1]",
        r"p = ",
    ),
    Mutant(
        "draw by row instead of by seed",
        (
            (
                "engine/steps.py",
                "    return sampler.replace(temperature=",
                "    sampler = sampler.replace(seed=jnp.arange(slot.shape[0]).astype(jnp.uint32))\n    return sampler.replace(temperature=",
            ),
        ),
        "tests/engine/test_sampled.py::test_a_requests_tokens_and_drafts_do_not_depend_on_company_or_row[recall-dflash2]",
        r"record\(",
    ),
    Mutant(
        "free a shared page while it is referenced",
        (
            (
                "engine/pages.py",
                "        if left == 0:\n            del references[page]\n",
                "        if page in references:\n            del references[page]\n            left = 0\n",
            ),
        ),
        _SITUATIONS + "test_a_shared_beginning_drafts_the_same_blocks_cold_and_warm[2]",
        r"pages_conserved",
    ),
    Mutant(
        "hash a page without what comes before it",
        (("engine/pages.py", "hashlib.sha256((_ROOT if parent is None else parent) + ", "hashlib.sha256("),),
        "tests/engine/test_pages.py::test_the_same_page_after_another_beginning_is_another_page",
        r"assert",
    ),
    Mutant(
        "share pages that lack the draft's half",
        (("engine/absorb.py", " and shares_pages(host.policy, sequence):", ":"),),
        _SITUATIONS + "test_pages_without_a_drafts_half_are_never_shared",
        _BLOCKS,
    ),
    Mutant(
        "take features one layer too early",
        (
            (
                "models/target.py",
                "        if index in feature_layers:\n            features[index] = x\n",
                "        if index + 1 in feature_layers:\n            features[index + 1] = x\n        if index == 0 and 0 in feature_layers:\n            features[0] = params.embedding[tokens]\n",
            ),
        ),
        _GOLDEN + "test_each_case_alone_is_the_golden_record[recall-dflash2]",
        _BLOCKS,
    ),
    Mutant(
        "write what has no page to page 0",
        (
            (
                "kernels/context.py",
                "        physical = jnp.where(keep, physical, num_pages)\n",
                "        physical = jnp.where(keep, physical, 0)\n",
            ),
        ),
        _GOLDEN + "test_each_case_alone_is_the_golden_record[recall-dflash2]",
        r"assert",
    ),
    Mutant(
        "walk without looking at the predecessor",
        (
            (
                "kernels/selector/xla.py",
                "edges[every_row, position, index]",
                "edges[every_row, position, 0 * index]",
            ),
        ),
        _GOLDEN + "test_each_case_alone_is_the_golden_record[recall-dflash2]",
        _BLOCKS,
    ),
    Mutant(
        "let a convolution's taps look ahead",
        (
            (
                "models/draft.py",
                "jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, : x.shape[1]]",
                "jnp.pad(x, ((0, 0), (0, tap), (0, 0)))[:, tap:]",
            ),
        ),
        _MODELS + "test_draft_hidden_states_are_the_references[recall-dflash2]",
        r"Not equal to tolerance",
    ),
    Mutant(
        "leave out the softcap",
        (
            (
                "kernels/lm_head/logits.py",
                "return logits if softcap is None else softcap * jnp.tanh(logits / softcap)",
                "return logits",
            ),
        ),
        _MODELS + "test_candidates_and_edge_scores_are_the_references[recall-dflash2-swa]",
        r"Not equal to tolerance",
    ),
    Mutant(
        "go on past a stop token in an accepted block",
        (("engine/steps.py", "jnp.where(stopped, jnp.argmax(stops, axis=1) + 1, count), stopped", "count, stopped"),),
        _SITUATIONS + "test_a_stop_token_inside_an_accepted_block_ends_the_request_there",
        r"assert",
    ),
    Mutant(
        "produce more than max_tokens when a block is accepted",
        (("engine/steps.py", "    count = jnp.minimum(count, slots.tokens_left[slot])\n", ""),),
        _SITUATIONS + "test_max_tokens_inside_an_accepted_block_ends_the_request_there[2]",
        r"assert|violated",
    ),
    Mutant(
        "sample the anchor of a resumed request anew",
        (
            (
                "engine/plan.py",
                "known_next=sequence.output[-1] if sequence.output else None,",
                "known_next=None,",
            ),
        ),
        _SITUATIONS + "test_preemption_alone_and_at_every_round_changes_nothing[True]",
        r"assert|violated",
    ),
    Mutant(
        "resume a draft without the features of what it heard before",
        (
            (
                "engine/steps.py",
                "    state = _commit(models, state, extension, rows, drafting & live, committed, implementation)\n",
                "    heard = jnp.where((known_next >= 0)[:, None, None], 0, extension.features)\n"
                "    extension = dataclasses.replace(extension, features=heard.astype(extension.features.dtype))\n"
                "    state = _commit(models, state, extension, rows, drafting & live, committed, implementation)\n",
            ),
            ("engine/steps.py", "import chex\n", "import dataclasses\n\nimport chex\n"),
        ),
        _SITUATIONS + "test_preempted_requests_resume_with_the_drafts_they_would_have_made[recall-dflash2-7]",
        _BLOCKS,
    ),
    Mutant(
        "ignore the draft budget",
        (("engine/steps.py", " & (slots.position[slot] <= slots.draft_limit[slot])", ""),),
        _SITUATIONS + "test_a_request_past_its_draft_budget_goes_on_plainly_and_says_so",
        r"assert|TypeError",
    ),
    Mutant(
        "let what nobody may see reach the attention's products",
        (
            (
                "kernels/block_attention/xla.py",
                "        values = jnp.where(exists[..., None, None], values, 0).astype(jnp.float32)\n",
                "        values = values.astype(jnp.float32)\n",
            ),
        ),
        _KERNELS + "test_block_attention.py::test_nan_outside_the_context_never_reaches_the_output[xla]",
        r"assert",
    ),
    Mutant(
        "read the pages of the row instead of its slot's, in the attention's kernel on CPUs",
        (("kernels/native/attention.cc", "std::clamp<int64_t>(a.mapping[row], 0,", "std::clamp<int64_t>(row, 0,"),),
        _KERNELS + "test_block_attention.py::test_two_slots_share_pages[native]",
        r"Mismatched elements|nan location mismatch",
    ),
    Mutant(
        "let a token see those behind it, in the attention's kernel on CPUs",
        (("kernels/native/attention.cc", "if (a.scope.causal) high = position + 1;", ""),),
        _KERNELS + "test_block_attention.py::test_empty_row_in_the_middle[native]",
        r"Mismatched elements",
    ),
    Mutant(
        "leave out what does not fill a register, in the attention's kernel on CPUs",
        (("kernels/native/attention.cc", "if (const int64_t left = count - i)", "if (const int64_t left = 0)"),),
        _KERNELS + "test_block_attention.py::test_natively_no_size_must_be_a_round_one[37-5-3-bfloat16]",
        r"Mismatched elements|nan location mismatch",
    ),
    Mutant(
        "write 16-bit pages as XLA does on CPUs, through float32 of the whole pool",
        (
            (
                "kernels/pages/native.py",
                "return None if pool.dtype.itemsize == 2",
                "return None if pool.dtype.itemsize == 3",
            ),
        ),
        "tests/engine/test_cost.py::test_no_page_pool_is_copied[one round-bfloat16]",
        r"assert",
    ),
    Mutant(
        "begin the softmax's steps where a token's window does, in the attention's kernel on CPUs",
        (
            (
                "kernels/native/attention.cc",
                "int64_t chunk = task.from / kChunk * kChunk;",
                "int64_t chunk = task.from;",
            ),
        ),
        _KERNELS + "test_block_attention.py::test_natively_a_token_is_the_same_bits_alone_and_in_a_block[100-70]",
        r"Arrays are not equal",
    ),
    Mutant(
        "leave out what does not fill a register, in the matmul's kernel on CPUs",
        (
            (
                "kernels/native/matmul.cc",
                "if (const int64_t left = p.inputs - units * Format::kInputs)",
                "if (const int64_t left = 0)",
            ),
        ),
        _KERNELS + "test_matmul.py::test_it_is_the_product",
        r"Not equal to tolerance",
    ),
    Mutant(
        "take every group of rows for the first, in the matmul's kernel on CPUs",
        (("kernels/native/matmul.cc", "const float* x = p.x + row * p.inputs;", "const float* x = p.x;"),),
        _KERNELS + "test_matmul.py::test_a_rows_result_is_the_same_bits_alone_and_in_a_block[576-193-float32]",
        r"Arrays are not equal",
    ),
    Mutant(
        "take the high halves of codes for the low ones, where compact weights are widened on CPUs",
        (
            ("kernels/native/weights.h", "  nibbles.Low(at, 0, take);\n", "  nibbles.High(at, 0, take);\n"),
            ("kernels/native/weights.h", "  nibbles.High(at, 1, take);\n", "  nibbles.Low(at, 1, take);\n"),
        ),
        _KERNELS + "test_compact.py::test_native_code_widens_to_the_same_bits[Q4_1]",
        r"Arrays are not equal",
    ),
    Mutant(
        "give every group of inputs the first one's scale, in the product with compact weights",
        (
            (
                "kernels/native/matmul.cc",
                "Format::Widen(at, Format::kScaled ? scales[i][group] : 0,",
                "Format::Widen(at, Format::kScaled ? scales[i][0] : 0,",
            ),
        ),
        _KERNELS + "test_compact.py::test_its_product_is_that_of_the_widened_matrix_to_the_bit[I8]",
        r"Arrays are not equal",
    ),
    Mutant(
        "forget the two upper bits of a sub-block's offset, where Q4_K is widened on CPUs",
        (("kernels/native/weights.h", "(c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)", "(c >> 4 & 0x0f0f0f0f)"),),
        _KERNELS + "test_compact.py::test_native_code_widens_to_the_same_bits[Q4_K]",
        r"Arrays are not equal",
    ),
    Mutant(
        "put each block of many rows where the first one goes, in the product with compact weights",
        (("kernels/native/matmul.cc", "Rows{p.x, p.y + n, p.count,", "Rows{p.x, p.y, p.count,"),),
        _KERNELS + "test_compact.py::test_a_rows_result_is_the_same_bits_alone_and_in_a_block[Q8_0]",
        r"Arrays are not equal",
    ),
    Mutant(
        "keep a file's rows in the order of the file, where the model has them in another",
        (("families/leaf.py", "lambda: whole().with_rows(rows),", "whole,"),),
        "tests/checkpoints/test_compact.py::test_a_gguf_file_is_held_as_it_is[Q4_1]",
        r"Arrays are not equal|q_proj",
    ),
    Mutant(
        "walk from the anchor at every position, in the selector's kernel",
        (("kernels/selector/mosaic_gpu.py", "        return token\n", "        return previous\n"),),
        _KERNELS + "test_selector.py::test_each_choice_follows_the_one_before[mosaic_gpu]",
        r"leaves the best path|Not equal to tolerance",
    ),
    Mutant(
        "prefer the last of equal logits, in the LM head's kernel",
        (
            (
                "kernels/lm_head/mosaic_gpu_kernel.py",
                "chosen = jnp.where(logits == _across(top, logits), token, _NO_TOKEN).min(axis=1)",
                "chosen = jnp.where(logits == _across(top, logits), token, -1).max(axis=1)",
            ),
        ),
        _KERNELS + "test_lm_head.py::test_of_equal_logits_the_lowest_ids_win[mosaic_gpu]",
        r"Arrays are not equal",
    ),
    Mutant(
        "list the tokens that the last tile reaches back over twice",
        (
            (
                "kernels/lm_head/mosaic_gpu_kernel.py",
                "jnp.where(fresh, _scaled(logits, plan), -jnp.inf)",
                "_scaled(logits, plan)",
            ),
        ),
        _KERNELS + "test_lm_head.py::test_of_equal_logits_the_lowest_ids_win[mosaic_gpu]",
        r"not close|Not equal to tolerance|listed twice",
    ),
    Mutant(
        "delete the check that a written page is one request's",
        (("engine/plan.py", "    check_pages_exclusive(\n        host.pool,\n", "    dict(\n"),),
        "tests/engine/test_invariants.py::test_a_page_of_two_writers_is_noticed_before_it_is_written",
        r"DID NOT RAISE|pages_conserved",
    ),
    Mutant(
        "let rows behind the batch take part in its step",
        (
            (
                "engine/run.py",
                "(self.models, _with_rows(device, plan.decodes), decode_inputs(plan)),",
                "(self.models, _with_rows(device, plan.decodes), decode_inputs(\n"
                "                dataclasses.replace(plan, decodes=tuple(\n"
                "                    decode or (Decode(plan.chunks[0].id, plan.chunks[0].slot) if plan.chunks else None)\n"
                "                    for decode in plan.decodes\n"
                "                ))\n"
                "            )),",
            ),
        ),
        _SITUATIONS + "test_a_prompt_that_ends_in_a_step_takes_no_part_in_its_round",
        r"violated|assert",
    ),
    Mutant(
        "read the state of the row instead of its slot's, in the gated delta rule's kernel on CPUs",
        (("kernels/native/gated_delta.cc", "const int64_t slot = work.mapping[row];", "const int64_t slot = row;"),),
        _KERNELS + "test_gated_delta.py::test_rows_find_their_slots_in_any_order[native]",
        r"Mismatched elements|nan location mismatch",
    ),
    Mutant(
        "leave out what does not fill a register, in the gated delta rule's kernel on CPUs",
        (
            (
                "kernels/native/gated_delta.cc",
                "if (const int64_t left = value_dim - column)",
                "if (const int64_t left = 0)",
            ),
        ),
        _KERNELS + "test_gated_delta.py::test_ragged_counts[native-3]",
        r"Mismatched elements|nan location mismatch",
    ),
    Mutant(
        "fold a block's rejected tokens in",
        (
            (
                "kernels/gated_delta/xla.py",
                "    state, _ = _run(start.state, block, count)\n",
                "    state, _ = _run(start.state, block, jnp.full_like(count, block.g.shape[1]))\n",
            ),
        ),
        _KERNELS + "test_gated_delta.py::test_rejected_tokens_are_exactly_the_identity[xla]",
        r"Mismatched elements",
    ),
    Mutant(
        "let a rejected token add zeros, which make 0 of -0",
        (
            (
                "kernels/gated_delta/xla.py",
                "    return jnp.where(live, kept + k[..., None] * difference[..., None, :], state)\n",
                "    return kept + jnp.where(live, k[..., None] * difference[..., None, :], 0)\n",
            ),
            (
                "kernels/gated_delta/xla.py",
                "    kept = jnp.where(decay != 1, decay * state, state)\n",
                "    kept = jnp.where(live, decay * state, state)\n",
            ),
        ),
        _KERNELS + "test_gated_delta.py::test_rejected_tokens_are_exactly_the_identity[xla]",
        r"Mismatched elements",
    ),
    Mutant(
        "keep the convolution's inputs of rejected tokens",
        (
            (
                "kernels/gated_delta/parts.py",
                "    at = count[:, None] + jnp.arange(conv_inputs.shape[-1])\n",
                "    at = jnp.full_like(count, qkv.shape[1])[:, None] + jnp.arange(conv_inputs.shape[-1])\n",
            ),
        ),
        _KERNELS + "test_gated_delta.py::test_ragged_counts[xla-2]",
        r"Mismatched elements|nan location mismatch",
    ),
    Mutant(
        "write the state of an empty row to the last slot",
        (
            (
                "kernels/gated_delta/parts.py",
                "    slots = jnp.where(idx_mapping >= 0, idx_mapping, states.shape[1])\n",
                "    slots = idx_mapping\n",
            ),
        ),
        _KERNELS + "test_gated_delta.py::test_empty_rows_change_nothing[xla]",
        r"Mismatched elements",
    ),
    Mutant(
        "fold all tokens in, in the gated delta rule's kernel",
        (
            (
                "kernels/gated_delta/mosaic_gpu.py",
                "        state = lax.fori_loop(0, count[row], step, _load(states, slot, head, columns, plan))\n",
                "        state = lax.fori_loop(0, k.shape[1], step, _load(states, slot, head, columns, plan))\n",
            ),
        ),
        _KERNELS + "test_gated_delta_gpu.py::test_rejected_tokens_are_exactly_the_identity",
        r"Mismatched elements",
    ),
    Mutant(
        "leave out the inputs that do not fill a step, in the experts' kernel on CPUs",
        (("kernels/native/experts.cc", "    for (; k < p.inputs; ++k)\n", "    for (; k < 0; ++k)\n"),),
        _KERNELS + "test_experts.py::test_each_token_gets_what_its_experts_make_of_it[float32-1e-05-sizes1-native]",
        r"Mismatched elements",
    ),
    Mutant(
        "let XLA compute the experts on CPUs",
        (("kernels/dispatch.py", '"native": "experts.native"', '"native": "experts.xla"'),),
        _KERNELS + "test_experts.py::test_a_tokens_experts_give_the_same_bits_alone_and_in_company[bfloat16]",
        r"Arrays are not equal",
    ),
)

_HYBRID = "tests/engine/test_hybrid.py::"
_COMMIT = (
    "        recurrent = commit(recurrent, extension.changes, idx_mapping, count, implementation=implementation)\n"
)

# What went wrong with recurrent states elsewhere; none of it may be possible here.
_OF_HYBRIDS = (
    Mutant(
        "leave a slot's recurrent state as its last owner had it",
        (
            (
                "engine/slots.py",
                '        return all_.at[:, slot].set(rows, mode="drop")\n',
                '        return jnp.where(jnp.any(loaded), all_.at[:, slot].set(rows, mode="drop"), all_)\n',
            ),
        ),
        _HYBRID + "test_a_stop_inside_a_block_ends_there_and_the_next_request_begins_clean",
        r"assert|finite_logits",
    ),
    Mutant(
        "fold a block's rejected tokens into the recurrent state",
        (
            (
                "engine/steps.py",
                _COMMIT,
                _COMMIT.replace(
                    "idx_mapping, count,", "idx_mapping, jnp.where(count > 0, extension.features.shape[1], 0),"
                ),
            ),
        ),
        _GOLDEN + "test_each_case_alone_is_the_golden_record[recall-hybrid-dflash2]",
        r"assert",
    ),
    Mutant(
        "write the recurrent state of the row instead of its slot's",
        (("engine/steps.py", _COMMIT, _COMMIT.replace("idx_mapping, count,", f"{_ROWS}, count,")),),
        _GOLDEN + "test_all_cases_at_once_are_as_alone[recall-hybrid-dflash2]",
        r"assert",
    ),
    Mutant(
        "verify a block as if it were a prompt's chunk",
        (
            (
                "engine/steps.py",
                "jnp.where(live, idx_mapping, -1), run, q_len, implementation, packing=packing",
                "jnp.where(live, idx_mapping, -1), run, q_len, implementation, packing=packing, prefill=True",
            ),
        ),
        _GOLDEN + "test_each_case_alone_is_the_golden_record[recall-hybrid-dflash2]",
        r"assert",
    ),
    Mutant(
        "begin with the checkpoint of another page",
        (
            (
                "engine/slots.py",
                "    loaded, index = loads >= 0, jnp.maximum(loads, 0)\n",
                "    loaded = loads >= 0\n"
                "    index = (jnp.maximum(loads, 0) + 1) % state.checkpoints.lengths.shape[0]\n",
            ),
            (
                "engine/slots.py",
                "jnp.where(loaded, state.checkpoints.lengths[index], 0)",
                "jnp.where(loaded, state.checkpoints.lengths[jnp.maximum(loads, 0)], 0)",
            ),
        ),
        _HYBRID + "test_the_same_prompt_again_begins_at_its_last_page[81]",
        r"assert",
    ),
    Mutant(
        "take a hit as deep as its pages go, whatever the checkpoints",
        (
            (
                "engine/admit.py",
                "_Resumption(pages, checkpoint.index)",
                "_Resumption(known, checkpoint.index)",
            ),
        ),
        _HYBRID + "test_a_prompt_that_departs_leaves_a_checkpoint_there_for_the_next",
        r"recurrent_continuity|assert",
    ),
    Mutant(
        "never keep a checkpoint where prompts depart",
        (
            (
                "engine/admit.py",
                "for pages in (known, full) if pages > shared",
                "for pages in (full,) if pages > shared",
            ),
        ),
        _HYBRID + "test_a_prompt_that_departs_leaves_a_checkpoint_there_for_the_next",
        r"assert",
    ),
    Mutant(
        "keep the state of another slot as the checkpoint",
        (
            (
                "engine/slots.py",
                '        return kept.at[:, index].set(slots[:, slot], mode="drop")\n',
                '        return kept.at[:, index].set(slots[:, (slot + 1) % slots.shape[1]], mode="drop")\n',
            ),
        ),
        _HYBRID + "test_the_same_prompt_again_begins_at_its_last_page[81]",
        r"assert",
    ),
    Mutant(
        "give away the checkpoint that a request is about to begin with",
        (("engine/plan.py", "take(host.checkpoints, pinned)", "take(host.checkpoints, ())"),),
        _HYBRID + "test_a_checkpoint_that_a_waiting_request_begins_with_is_not_given_to_another",
        r"assert|recurrent_continuity",
    ),
    Mutant(
        "resume a preempted request from zeros behind its pages",
        (("engine/admit.py", "            load=resumption.load,\n", "            load=None,\n"),),
        _HYBRID + "test_preemption_at_every_round_changes_nothing[True]",
        r"recurrent_continuity|assert",
    ),
    Mutant(
        "fold nothing in a round that drafts nothing",
        (
            (
                "engine/steps.py",
                _COMMIT,
                _COMMIT.replace(
                    "idx_mapping, count,", "idx_mapping, jnp.where(extension.features.shape[1] > 1, count, 0),"
                ),
            ),
        ),
        _HYBRID + "test_a_fork_without_a_draft_rebuilds_the_states",
        r"assert",
    ),
    Mutant(
        "delete the check that a state has taken in what its position says",
        (("engine/invariants.py", "        folded = slots.folded[slot] == slots.position[slot]\n", "        pass\n"),),
        _HYBRID + "test_a_state_that_took_in_another_number_of_tokens_is_noticed[True]",
        r"DID NOT RAISE|slot_entry|position_monotone",
    ),
)

_SAMPLED = "tests/engine/test_sampled.py::"

# The same gates on the pairs that this package trained: their drafters must notice too.
_OF_TRAINED_PAIRS = (
    ("skip the context write of the last accepted token", _GOLDEN + "test_each_case_alone_is_the_golden_record"),
    ("take the context of slot s + 1", _GOLDEN + "test_all_cases_at_once_are_as_alone"),
    (
        "key the draft's context by row instead of slot",
        _SITUATIONS + "test_survivor_of_condense_drafts_what_it_would_have_drafted_alone",
    ),
    ("key the draft's context by row instead of slot", _SITUATIONS + "test_swapping_live_rows_changes_no_draft"),
    (
        "resume a draft without the features of what it heard before",
        _SITUATIONS + "test_preempted_requests_resume_with_the_drafts_they_would_have_made",
    ),
    (
        "draw by row instead of by seed",
        "tests/engine/test_sampled.py::test_a_requests_tokens_and_drafts_do_not_depend_on_company_or_row",
    ),
)

_OF_JOBS = (
    Mutant(
        "name a summary without what is behind an output's last dot",
        (
            (
                "jobs/summary.py",
                'output.with_name(output.name + ".summary.json")',
                'output.with_suffix(".summary.json")',
            ),
        ),
        "tests/jobs/test_job_ends.py::test_no_two_outputs_of_a_folder_share_a_side_file",
        r"assert \d+ == \d+",
    ),
    Mutant(
        "take integers of any length for temperatures",
        (("engine/parameters.py", "    except OverflowError:", "    except ZeroDivisionError:"),),
        "tests/jobs/test_job_input.py::test_no_value_of_a_sampling_parameter_is_more_than_that_lines_error",
        "OverflowError",
    ),
    Mutant(
        "pass over sampling parameters beside the prompt",
        (("jobs/reader.py", "        if key in _SAMPLING_KEYS:", "        if False:"),),
        "tests/jobs/test_job_input.py::test_a_sampling_parameter_beside_the_prompt_is_told_its_place",
        "assert isinstance",
    ),
    Mutant(
        "let the clock run while something compiles",
        (("compiling.py", "return time.perf_counter() - self.seconds", "return time.perf_counter()"),),
        "tests/test_compiling.py::test_the_clock_stands_still_while_something_compiles_and_runs_otherwise",
        "assert compiling < wall",
    ),
    Mutant(
        "time what is traced within something else twice",
        (
            (
                "compiling.py",
                "        if not self._open:\n            self.seconds",
                "        if True:\n            self.seconds",
            ),
        ),
        "tests/test_compiling.py::test_what_compiles_within_something_else_counts_once",
        "watch.seconds",
    ),
    Mutant(
        "compare always plainly first",
        (("jobs/compare.py", "if len(pairs) % 2 == 0 else (True, False)", "if True else (True, False)"),),
        "tests/jobs/test_job_compare.py::test_each_prompt_runs_both_ways_at_once_after_the_other_and_the_order_alternates",
        "assert",
    ),
)


def _on_a_trained_pair(pair: str, name: str, test: str) -> Mutant:
    [mutant] = [mutant for mutant in _OF_GOLDEN_PAIRS if mutant.name == name]
    parameters = f"{pair}-7" if "preempted" in test else pair
    return dataclasses.replace(mutant, gate=f"{test}[{parameters}]")


_OF_TEXT = (
    Mutant(
        "let top_p keep nothing",
        (
            (
                "sampling/distribution.py",
                "    return order >= jnp.minimum(threshold[..., None], order.max(-1, keepdims=True))\n",
                "    return order >= threshold[..., None]\n",
            ),
        ),
        "tests/sampling/test_extremes.py::test_top_p_too_small_for_float32_keeps_the_best_token[1e-38]",
        r"nan",
    ),
    Mutant(
        "order by probabilities that a high temperature made equal",
        (("sampling/distribution.py", "kept = _keep_best(logits, probs,", "kept = _keep_best(probs, probs,"),),
        "tests/sampling/test_extremes.py::test_drafted_tokens_follow_the_plain_distribution_at_the_ends_of_every_parameter[{'temperature': 1e+39, 'top_p': 0.5}-0]",
        r"a token of probability 0 was drawn|p = ",
    ),
    Mutant(
        "hand temperatures to the device as they are",
        (("sampling/distribution.py", "if temperature > 0 else 0.0\n", "if temperature < 0 else temperature\n"),),
        "tests/engine/test_sampling_extremes.py::test_temperatures_past_float32_warn_of_nothing_and_draw_from_the_whole_vocabulary[1e+39]",
        r"overflow",
    ),
    Mutant(
        "show bytes of byte fallback that are part of no character as one mark",
        (("text/detokenizer.py", "_ByteRule(bytes_of, _EACH_BYTE, rest", "_ByteRule(bytes_of, 'replace', rest"),),
        "tests/text/test_detokenizer.py::test_a_byte_that_decodes_before_bytes_that_never_complete_and_then_text",
        r"assert",
    ),
    Mutant(
        "look for special tokens in the text that does not show them",
        (("engine/text.py", "        stop = self._stop_of.get(token)\n", "        stop = None\n"),),
        "tests/engine/test_text.py::test_a_stop_string_that_is_a_special_token_ends_the_text_at_its_id",
        r"assert",
    ),
    Mutant(
        "keep the second BOS",
        (("checkpoints/tokenizer.py", "            return ids[1:]\n", "            return ids\n"),),
        "tests/text/test_chat.py::test_a_text_that_begins_with_bos_gets_no_other_and_a_note_says_so",
        r"assert",
    ),
    Mutant(
        "catch only Jinja's own errors of a template",
        (
            (
                "text/template_worker.py",
                "    except Exception as error:\n        return json",
                "    except jinja2.TemplateError as error:\n        return json",
            ),
        ),
        "tests/text/test_template_bounds.py::test_whatever_a_template_raises_is_the_requests_error[{{ messages + 1 }}-TypeError]",
        r"ended with 1",
    ),
)

_HYBRIDS = "tests/models/test_hybrid_golden.py::"
_LOGITS = _HYBRIDS + "test_logits_of_hybrids_are_those_of_transformers[tiny-qwen3_5-prefill-chunks of 5]"

_OF_HYBRID_MODELS = (
    Mutant(
        "fold rejected tokens into the states too",
        (
            (
                "models/recurrent.py",
                "            idx_mapping,\n            count,\n",
                "            idx_mapping,\n            count + 1,\n",
            ),
        ),
        _HYBRIDS + "test_rejected_tokens_of_a_block_leave_the_states_as_one_by_one[tiny-qwen3_5]",
        r"0 accepted",
    ),
    Mutant(
        "leave the state of a prompt's chunk unwritten",
        (("models/recurrent.py", "jnp.where(count > 0, idx_mapping, -1)", "jnp.where(count < 0, idx_mapping, -1)"),),
        _LOGITS,
        r"Not equal to tolerance",
    ),
    Mutant(
        "leave attention's gate out",
        (("models/target.py", "mixed = mixed * jax.nn.sigmoid(gate)", "mixed = mixed + 0 * gate"),),
        _LOGITS,
        r"Not equal to tolerance",
    ),
    Mutant(
        "turn whole heads of hybrids",
        (("models/config.py", "return int(head_dim * self.partial)", "return head_dim"),),
        _LOGITS,
        r"Not equal to tolerance",
    ),
    Mutant(
        "page attention layers by their number among all layers",
        (("models/target.py", "                    len(keys),\n", "                    index,\n"),),
        _LOGITS,
        r"Not equal to tolerance|Error",
    ),
    Mutant(
        "give every token the shared expert ungated",
        (("models/layers.py", "jax.nn.sigmoid(tokens @ weights.shared.gate) * mlp", "mlp"),),
        _LOGITS.replace("tiny-qwen3_5-prefill", "tiny-qwen3-next-prefill"),
        r"Not equal to tolerance",
    ),
    Mutant(
        "leave value heads of a GGUF file in tiles",
        (
            (
                "families/qwen3_5.py",
                "return hybrid.untiled(config, hybrid.from_gguf(config, named))",
                "return hybrid.from_gguf(config, named)",
            ),
        ),
        "tests/checkpoints/test_gguf_hybrids.py::test_hybrids_in_gguf_come_back_as_converted[qwen3_5]",
        r"Not equal to tolerance",
    ),
    Mutant(
        "write Qwen3-Next's projections one after the other",
        (
            (
                "families/qwen3_next.py",
                "_packed(pieces, np.argsort(np.concatenate(orders)))",
                "_packed(pieces, np.arange(sum(map(len, orders))))",
            ),
        ),
        "tests/checkpoints/test_hybrids.py::test_packed_projections_lie_key_head_by_key_head",
        r"Arrays are not equal",
    ),
)

_REFUSED = "tests/engine/test_host_time.py::test_a_request_without_pages_is_"

_OF_THE_HOST = (
    Mutant(
        "look the pages of a refused request up at every step",
        (("engine/admit.py", " and not _is_refused(host):", ":"),),
        _REFUSED + "looked_up_again_only_when_pages_were_freed_or_cached",
        r"assert len\(looked\) == 1",
    ),
    Mutant(
        "refuse a request still when pages were freed",
        (("engine/admit.py", "        and refusal.releases == host.pool.releases\n", ""),),
        _REFUSED + "looked_up_again_only_when_pages_were_freed_or_cached",
        r"assert len\(looked\) == 2",
    ),
    Mutant(
        "refuse a request still when the next page of its prompt is known",
        (("engine/admit.py", "        and refusal.missing not in host.pool.page_of\n", ""),),
        _REFUSED + "admitted_as_soon_as_another_has_cached_enough_of_its_prompt",
        r"it waits for pages that it could share",
    ),
    Mutant(
        "identify the target again for another draft",
        (("engine/forks.py", "        target=run.identity.target,\n", ""),),
        "tests/engine/test_identity.py::test_a_fork_with_another_draft_reads_only_the_drafts_weights",
        r"assert",
    ),
    Mutant(
        "hash a request's pages again at every step",
        (
            (
                "engine/absorb.py",
                "dataclasses.replace(sequence, published=full)",
                "dataclasses.replace(sequence, published=full, hashes=type(sequence.hashes)())",
            ),
        ),
        "tests/engine/test_host_time.py::test_a_context_is_hashed_once",
        r"assert",
    ),
)

_WIDTH = "tests/engine/test_width.py::"

_OF_WIDTH = (
    Mutant(
        "verify the drafted tokens that were likely to be drawn",
        (
            (
                "engine/steps.py",
                "bins_of(jnp.zeros(block.tokens.shape) if block.margin is None else block.margin)",
                "bins_of(jnp.where(block.tokens == block.candidates[..., 0], 9.0, 0.0))",
            ),
        ),
        _WIDTH + "test_what_sampled_requests_say_is_distributed_as_without_a_budget",
        r"max\(map\(abs",
    ),
    Mutant(
        "keep up the draft's context in rounds with a draft only",
        (
            (
                "engine/steps.py",
                "        state = _commit(models, state, extension, rows, speculating, produced,",
                "        state = _commit(models, state, extension, rows, drafting, produced,",
            ),
            _UNCHECKED,
        ),
        _WIDTH + "test_rounds_without_a_draft_keep_up_the_context_of_the_next_draft[recall-dflash2]",
        r"assert",
    ),
    Mutant(
        "hand out a budget to later tokens of a block before earlier ones",
        (("engine/prospects.py", "return taken.sum(1)", "return jnp.where(taken.any(1), 1, 0)"),),
        _WIDTH + "test_a_budget_goes_to_whole_rows_and_parts_of_rows_and_changes_nothing[recall-dflash2]",
        r"all rows got the same",
    ),
    Mutant(
        "pack a row's tokens one place too far",
        (("kernels/packing.py", "start = jnp.cumsum(q_len) - q_len\n", "start = jnp.cumsum(q_len) - q_len + 1\n"),),
        _WIDTH + "test_a_budget_goes_to_whole_rows_and_parts_of_rows_and_changes_nothing[recall-dflash2]",
        r"assert",
    ),
    Mutant(
        "count drafted tokens as verified when they were not",
        (("engine/absorb.py", ".extend((row.num_verified,))", ".extend((row.num_drafts,))"),),
        _WIDTH + "test_metrics_count_what_was_verified",
        r"drafts_proposed",
    ),
    Mutant(
        "count what was never reached as not kept",
        (("engine/calibration.py", " & (offsets <= accepted[:, None])", ""),),
        _WIDTH + "test_a_sure_draft_counts_as_likelier_before_and_after_calibration",
        r"all that were reached",
    ),
    Mutant(
        "never run again what was slow once",
        (
            (
                "engine/width.py",
                "if width != best and costs.age(kind(width)) >= patience(width)",
                "if False",
            ),
        ),
        _WIDTH + "test_what_did_not_run_for_long_is_run_once_again",
        r"assert",
    ),
)

_PROGRAMS = "tests/test_programs.py::"

_OF_STARTS = (
    Mutant(
        "leave the static arguments out of what a kept program is filed under",
        (("program_files.py", "        repr(sorted(call.static.items())),\n", ""),),
        _PROGRAMS + "test_whatever_shapes_a_program_is_in_its_name[static argument]",
        r"assert",
    ),
    Mutant(
        "leave the static fields, such as a matrix's layout, out of what a kept program is filed under",
        (("program_files.py", "        repr(tree),\n", "        repr(tree.num_leaves),\n"),),
        _PROGRAMS + "test_whatever_shapes_a_program_is_in_its_name[static field]",
        r"assert",
    ),
    Mutant(
        "leave the package's sources out of what a kept program is filed under",
        (("program_files.py", "        source_digest(),\n", ""),),
        _PROGRAMS + "test_whatever_a_program_is_made_with_is_in_its_name[package]",
        r"assert",
    ),
    Mutant(
        "load a kept program whose trees are other ones",
        (("program_files.py", "if in_tree != jax.tree.structure((call.args, {})):", "if False:"),),
        _PROGRAMS + "test_a_program_of_other_arguments_under_its_name_is_made_anew",
        r"assert|mismatch|match",
    ),
    Mutant(
        "load a program that anybody may write",
        (("program_files.py", "        content = read_private(file)\n", "        content = file.read_bytes()\n"),),
        _PROGRAMS + "test_a_program_that_others_may_write_is_not_loaded",
        r"assert",
    ),
    Mutant(
        "keep programs of patched code",
        (("program_files.py", "    if foreign := altered():\n", "    if foreign := None:\n"),),
        _PROGRAMS + "test_patched_code_is_neither_kept_nor_answered_by_what_is_kept",
        r"assert",
    ),
    Mutant(
        "keep a program that was read from JAX's own cache",
        (("program_files.py", "lowered.compile(_ALSO_THE_DEFAULT)", "lowered.compile()"),),
        _PROGRAMS + "test_a_program_of_jax_own_cache_is_compiled_again_to_be_kept",
        r"NOT_FOUND|not found|assert",
    ),
    Mutant(
        "hand a step the rows of the step before it",
        (("engine/run.py", "    return device.replace(rows=Rows(none))\n", "    return device\n"),),
        "tests/engine/test_warmup.py::test_a_step_needs_no_program_of_its_own_for_the_rows_of_the_step_before",
        r"assert",
    ),
    Mutant(
        "count prompts in the speed of decoding",
        (("jobs/compare.py", "        if prefilling:\n            begin = clock()\n", ""),),
        "tests/jobs/test_job_compare.py::test_prompts_are_in_no_speed",
        r"assert",
    ),
    Mutant(
        "write rows again that a killed job had moved into a Parquet file",
        (
            (
                "jobs/formats/parquet_output.py",
                "        if all(map(self._is_closed, self._waiting.results())):",
                "        if False:",
            ),
        ),
        "tests/jobs/test_job_parquet.py::test_a_kill_between_a_files_end_and_the_forgetting_of_its_rows_doubles_nothing",
        r"assert",
    ),
    Mutant(
        "pass over what an OpenAI body asks for in vain",
        (
            ("jobs/formats/openai_input.py", "        if name not in _NEUTRAL:", "        if False:"),
            (
                "jobs/formats/openai_input.py",
                "        if not any(_same(value, neutral) for neutral in _NEUTRAL[name]):",
                "        if False:",
            ),
        ),
        "tests/jobs/test_job_openai.py::test_what_cannot_be_done_is_an_error_of_that_line_and_never_passed_over",
        r"assert",
    ),
    Mutant(
        "take a cut last round for one that the target ended",
        (("jobs/positions.py", "            accepted = produced\n", "            pass\n"),),
        "tests/jobs/test_job_report.py::test_a_cut_last_round_counts_as_far_as_it_is_known",
        r"assert",
    ),
    Mutant(
        "compare for longer than the job took",
        (("jobs/compare.py", "        if pairs and most_seconds is not None and", "        if False and"),),
        "tests/jobs/test_job_compare.py::test_a_comparison_ends_before_it_takes_longer_than_it_may",
        r"assert",
    ),
)

_LOGPROBS = "tests/engine/test_logprobs.py::"
_SAMPLES = "tests/engine/test_samples.py::"

_OF_OUTPUTS = (
    Mutant(
        "take a token's log-probability one place late in its block",
        (
            (
                "engine/logprobs.py",
                "logprobs_of(logits, pack(tokens, packing), top)",
                "logprobs_of(jnp.roll(logits, -1, axis=-2), pack(tokens, packing), top)",
            ),
        ),
        _LOGPROBS + "test_logprobs_are_those_of_a_full_float64_forward[recall-dflash2-greedy]",
        r"assert",
    ),
    Mutant(
        "tell log-probabilities after temperature and top-p",
        (
            (
                "sampling/logprobs.py",
                "logits.reshape(-1, vocab).astype(jnp.float32)",
                "logits.reshape(-1, vocab).astype(jnp.float32) / 3",
            ),
        ),
        _LOGPROBS + "test_logprobs_are_those_of_a_full_float64_forward[recall-dflash2-sampled]",
        r"assert",
    ),
    Mutant(
        "find log-probabilities in every step",
        (("engine/logprob_records.py", "if asked else None", "if asked else 0"),),
        _LOGPROBS + "test_nothing_is_computed_for_requests_that_do_not_ask",
        r"though nobody asked",
    ),
    Mutant(
        "keep records of tokens behind a stop string",
        (
            (
                "engine/absorb.py",
                "records(taken, row.logprobs, top, read.token_text)",
                "records(row.committed, row.logprobs, top, read.token_text)",
            ),
        ),
        _LOGPROBS + "test_each_output_token_has_one_logprob_however_the_output_ends[5]",
        r"assert",
    ),
    Mutant(
        "keep a prompt's log-probabilities again after a preemption",
        (("engine/absorb.py", "    fresh = len(known) - sequence.position\n", "    fresh = 0\n"),),
        _LOGPROBS + "test_a_request_preempted_within_its_prompt_goes_on_from_what_it_knows[1-recall-dflash2]",
        r"assert|mismatch",
    ),
    Mutant(
        "share cached pages with a prompt whose log-probabilities are wanted",
        (
            (
                "engine/admit.py",
                "        wanted = min(full, sequence.shareable // pool.page_size)\n",
                "        wanted = full\n",
            ),
        ),
        _LOGPROBS + "test_a_prompt_with_logprobs_is_run_whole_and_then_serves_others",
        r"assert",
    ),
    Mutant(
        "run a prompt for each of its samples",
        (
            (
                "engine/admit.py",
                "sequence, pool = _next(host), host.pool",
                "sequence, pool = host.waiting.first, host.pool",
            ),
        ),
        _SAMPLES + "test_the_prompt_is_run_once_and_the_others_share_its_pages[recall-dflash2]",
        r"assert",
    ),
    Mutant(
        "give all samples one seed",
        (("engine/request.py", "(sampling.seed + index) % 2**32", "sampling.seed"),),
        _SAMPLES + "test_each_sample_is_the_answer_of_a_request_of_its_own_with_the_derived_seed",
        r"assert",
    ),
    Mutant(
        "write a row before all of its samples are there",
        (("jobs/in_flight.py", "        if len(there) < item.sampling.n:\n", "        if not there:\n"),),
        "tests/jobs/test_job_samples.py::test_a_row_has_all_samples_and_the_summary_counts_them",
        r"KeyError",
    ),
)

_OF_ANALYSIS = (
    Mutant(
        "analysis: take the end of an output for a rejection",
        (
            (
                "analysis/rounds.py",
                "        end = np.where(self.cut, self.kept, np.minimum(self.kept + 1, self.verified))\n",
                "        end = np.minimum(self.kept + 1, self.verified)\n",
            ),
        ),
        "tests/analysis/test_acceptance.py::test_a_round_that_the_end_of_the_output_cut_counts_as_far_as_it_goes",
        r"observed",
    ),
    Mutant(
        "analysis: draw other prompts for each drafter",
        (
            (
                "analysis/comparing.py",
                "interval(samples - sampled[0], level)",
                "interval(samples - sampled[0][::-1], level)",
            ),
        ),
        "tests/analysis/test_acceptance.py::test_a_comparison_is_paired",
        r"assert",
    ),
    Mutant(
        "analysis: draw a peeked round by the next position's numbers",
        (("analysis/lattice.py", "block.probs, sampler, position)", "block.probs, sampler, position + 1)"),),
        "tests/analysis/test_lattice.py::test_peek_sees_what_the_next_step_does_and_changes_nothing[sampled-recall-dflash2]",
        r"committed",
    ),
    Mutant(
        "analysis: observe forks too",
        (("engine/engine.py", "        twin._observers = ()\n", ""),),
        "tests/analysis/test_replays.py::test_an_observer_is_of_one_engine_and_a_fork_is_not_observed",
        r"assert not",
    ),
)

_PROCESSED = "tests/engine/test_processed_distribution.py::"
_JOINT = _PROCESSED + "test_speculated_tokens_follow_the_processed_joint_distribution"
_PROCESSORS = "tests/engine/test_processors.py::"
_STRUCTURED = "tests/engine/test_structured_outputs.py::"
_DRAWN = r"a token of probability 0 was drawn|p = \d"

_OF_PROCESSORS = (
    Mutant(
        "leave the drafted tokens before a position out of its counts",
        (("engine/processors/penalties.py", "earlier & (drafts >= 0)", "earlier & (drafts >= vocab_size)"),),
        _JOINT + "[frequency-2]",
        _DRAWN,
    ),
    Mutant(
        "count a position's own drafted token among those before it",
        (("engine/processors/penalties.py", "< jnp.arange(positions)[:, None]", "<= jnp.arange(positions)[:, None]"),),
        _JOINT + "[presence-1]",
        _DRAWN,
    ),
    Mutant(
        "leave the prompt out of the repetition penalty",
        (
            (
                "engine/processors/penalties.py",
                "seen = _in_prompt(block, logits.shape[-1])[:, None] | (said > 0)",
                "seen = said > 0",
            ),
        ),
        _JOINT + "[repetition-0]",
        _DRAWN,
    ),
    Mutant(
        "count the prompt in the frequency penalty",
        (
            (
                "engine/processors/penalties.py",
                "output = (at >= block.prompt_len[:, None]) & (at < block.length[:, None])",
                "output = at < block.length[:, None]",
            ),
        ),
        _JOINT + "[frequency-0]",
        _DRAWN,
    ),
    Mutant(
        "look for bad words among committed tokens only",
        (("engine/processors/block.py", '.set(drafts.astype(history.dtype), mode="drop")', '.set(room, mode="drop")'),),
        _JOINT + "[bad word begun by a drafted token-2]",
        _DRAWN,
    ),
    Mutant(
        "count min_tokens from the block's beginning at every position",
        (
            (
                "engine/processors/block.py",
                "[:, None] + jnp.arange(positions)\n",
                "[:, None] + 0 * jnp.arange(positions)\n",
            ),
        ),
        _JOINT + "[min_tokens, from the second on-2]",
        _DRAWN,
    ),
    Mutant(
        "shift the tokens of logit_bias by one",
        (
            (
                "engine/processors/bias.py",
                "at = jnp.where(self.tokens >= 0, self.tokens, vocab_size)",
                "at = jnp.where(self.tokens >= 0, self.tokens + 1, vocab_size)",
            ),
        ),
        _JOINT + "[bias-1]",
        _DRAWN,
    ),
    Mutant(
        "allow what allowed_token_ids leaves out",
        (("engine/processors/allowed.py", "logits, -jnp.inf)", "logits, logits - 1)"),),
        _JOINT + "[allowed-1]",
        _DRAWN,
    ),
    Mutant(
        "read the logits processors of the row instead of its slot's",
        (("engine/processors/state.py", "leaf[slot], processors)", "leaf[jnp.arange(slot.shape[0])], processors)"),),
        _PROCESSORS + "test_requests_with_and_without_processors_do_not_touch_each_other[1]",
        r"At index \d+ diff|processor_history",
    ),
    Mutant(
        "let the logits processors of a slot's last owner act on the next",
        (
            (
                "engine/slots.py",
                'none.at[slot].set(jnp.asarray(processed), mode="drop")',
                'none.at[slot].set(True, mode="drop")',
            ),
        ),
        _PROCESSORS + "test_a_slots_next_owner_has_nothing_of_its_processors",
        _BLOCKS + r"|greedy_tokens",
    ),
    Mutant(
        "do not tell the logits processors what was committed",
        (("engine/steps.py", "        state = _record(state, rows, position + 1, kept, produced)\n", ""),),
        _PROCESSORS + "test_requests_with_and_without_processors_do_not_touch_each_other[1]",
        r"At index \d+ diff|processor_history",
    ),
    Mutant(
        "propose what is forbidden",
        (
            (
                "engine/steps.py",
                "    if process is None:\n        return models.shortlist\n",
                "    return models.shortlist\n",
            ),
        ),
        _PROCESSORS + "test_what_is_forbidden_is_neither_said_nor_drafted[recall-dflash2-greedy]",
        r"assert",
    ),
    Mutant(
        "let stop strings end an output before min_tokens",
        (("engine/text.py", " and self._left >= 0:", " and self._left > 1000:"),),
        _PROCESSORS + "test_stop_strings_before_min_tokens_are_text[stop string]",
        r"assert",
    ),
    Mutant(
        "replace a forbidden draft and leave q as it was",
        (("engine/grammars.py", "        probs[best] += probs[~allowed].sum()\n", ""),),
        _STRUCTURED + "test_a_draw_from_q_follows_the_changed_q",
        r"assert|p = \d",
    ),
    Mutant(
        "do not follow the drafted block in the grammar",
        (
            (
                "engine/grammars.py",
                "            advanced += 1\n",
                "            self._matcher.rollback(1)\n",
            ),
        ),
        _STRUCTURED + "test_every_answer_is_valid_json[greedy-recall-dflash2]",
        r"assert|Error",
    ),
)

MUTANTS = (
    *_OF_GOLDEN_PAIRS,
    *_OF_THE_HOST,
    *_OF_HYBRIDS,
    *_OF_HYBRID_MODELS,
    *_OF_JOBS,
    *_OF_OUTPUTS,
    *_OF_STARTS,
    *_OF_TEXT,
    *_OF_WIDTH,
    *_OF_ANALYSIS,
    *_OF_PROCESSORS,
    *(
        _on_a_trained_pair(pair, *gate)
        for pair in ("recall-trained", "recall-hybrid-trained")
        for gate in _OF_TRAINED_PAIRS
    ),
)
