"""The loss and its gradients against a plain implementation, one block and one position at a time."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.kernels.context import Context, KeyValues
from dflash_jax.models.draft import context_entries
from dflash_jax.models.drafters import drafter_of
from dflash_jax.models.layers import linear, mlp, project_kv, project_q, rms_norm
from dflash_jax.sampling import Sampler
from dflash_jax.training.data.batch import Batch
from dflash_jax.training.data.features import run_sequences
from dflash_jax.training.objective import head
from dflash_jax.training.objective.anchors import Anchors
from dflash_jax.training.objective.head import head_loss
from dflash_jax.training.objective.losses import draft_loss, position_weights
from dflash_jax.training.objective.metrics import metric_means
from dflash_jax.training.objective.sampled_softmax import VocabularySubset, whole_vocabulary
from dflash_jax.training.objective.shared_weights import SharedWeights, shared_weights
from dflash_jax.training.precision import in_precision
from tests.pairs import PAIRS, models
from tests.training.recall import sequences

GAMMA, SELECTOR_WEIGHT = 3.0, 0.7
LENGTHS = (40, 30)
ANCHORS = Anchors(
    jnp.array([[11, 20, 35], [12, 21, 28]], jnp.int32), jnp.array([[True, True, True], [True, False, True]])
)


def the_batch(pair: str) -> Batch:
    of = models(pair)
    tokens = jnp.asarray(np.stack([sequence.tokens for sequence in sequences(2, 40, seed=4)]))
    width = of.draft_config.hidden_size * len(of.draft_config.target_layer_ids)
    features = jax.random.normal(jax.random.key(1), (2, 40, width))
    final = jax.random.normal(jax.random.key(2), (2, 40, of.draft_config.hidden_size))
    return Batch(tokens, jnp.array([11, 11], jnp.int32), jnp.array(LENGTHS, jnp.int32), features, final)


def plain_block(params, config, embedding, features, anchor, token):
    """Hidden states of one block, with every key and value laid out and masked by hand."""
    block = config.block_size
    x = embedding[jnp.array([config.mask_token_id] * block).at[0].set(token)] * config.input_embedding_scale
    context = rms_norm(features @ params.fc, params.hidden_norm, config.rms_norm_eps)
    own, past = anchor + jnp.arange(block), jnp.arange(features.shape[0])
    positions = jnp.concatenate([past, own])
    exists = jnp.concatenate([past < anchor, jnp.ones(block, bool)])

    def convolved(sublayer, normed, weights):
        if weights is None:
            return sublayer(normed)
        taps, group = config.conv.taps, config.conv.group_size
        deltas = (normed @ weights.kernel_projection).reshape(block, 2, taps, -1)

        def convolve(x, side):
            rows = []
            for i in range(block):
                row = 0
                for tap in range(min(taps, i + 1)):
                    kernel = weights.base_kernel[side, tap] + jnp.repeat(deltas[i, side, tap], group)
                    row = row + kernel * x[i - tap]
                rows.append(row)
            return jnp.stack(rows)

        return convolve(sublayer(convolve(normed, 0)), 1)

    for weights, layer in zip(params.layers, config.layers, strict=True):

        def attend(normed, weights=weights, layer=layer):
            q = project_q(normed[None], own[None], weights.attention, config)[0]
            pairs = [
                project_kv(y[None], p[None], weights.attention, config) for y, p in ((context, past), (normed, own))
            ]
            k, v = (jnp.concatenate([pairs[0][i][0], pairs[1][i][0]]) for i in (0, 1))
            distance = own[:, None] - positions[None, :]
            seen = (distance >= 0) if layer.causal else jnp.ones(distance.shape, bool)
            if layer.window is not None:
                seen = seen & (abs(distance) < layer.window)
            heads = []
            for number in range(config.num_heads):
                cached = number * config.num_kv_heads // config.num_heads
                scores = q[:, number] @ k[:, cached].T / math.sqrt(config.head_dim)
                heads.append(jax.nn.softmax(jnp.where(seen & exists, scores, -jnp.inf), -1) @ v[:, cached])
            return linear(jnp.concatenate(heads, -1), weights.attention.o_proj)

        x = x + convolved(attend, rms_norm(x, weights.input_norm, config.rms_norm_eps), weights.attention_conv)
        normed = rms_norm(x, weights.post_attention_norm, config.rms_norm_eps)
        x = x + convolved(lambda h, weights=weights: mlp(h, weights.mlp), normed, weights.mlp_conv)
    return rms_norm(x, params.norm, config.rms_norm_eps)


def plain_block_loss(params, config, shared, tokens, length, features, final, anchor, soft):
    """The objective of one anchor as the papers word it, with part of each label spread as the target would."""
    hidden = plain_block(params, config, shared.embedding, features, anchor, tokens[anchor])
    total = 0.0
    for i in range(1, config.block_size):
        logits = shared.head @ hidden[i] * config.output_multiplier
        if config.final_logit_softcap is not None:
            logits = config.final_logit_softcap * jnp.tanh(logits / config.final_logit_softcap)
        # The sequences' padding is never a label: `length` stops it.
        label, previous = tokens[anchor + i], tokens[anchor + i - 1]
        teacher = shared.head @ final[anchor + i - 1]
        wanted = (1 - soft) * jax.nn.one_hot(label, len(logits)) + soft * jax.nn.softmax(teacher)
        loss = -jnp.sum(wanted * jax.nn.log_softmax(logits))
        if (selector := params.selector) is not None:
            is_candidate = logits >= jnp.sort(logits)[-config.selector.top_k]
            gate = hidden[i] @ selector.hidden_projection
            edges = selector.successor_codebook @ (selector.predecessor_codebook[previous] * gate)
            scores = jnp.where(is_candidate, logits + edges, -jnp.inf)
            surprise = jnp.where(is_candidate, -jax.nn.log_softmax(scores), 0.0)
            spread = jax.nn.softmax(jnp.where(is_candidate, teacher, -jnp.inf))
            loss += SELECTOR_WEIGHT * ((1 - soft) * surprise[label] + soft * jnp.sum(spread * surprise))
        total += jnp.where(anchor + i < length, math.exp(-(i - 1) / GAMMA) * loss, 0.0)
    return total


def plain_loss(config, shared, batch, anchors, soft):
    """Its value and gradient over all anchors, one after the other."""
    one = jax.jit(jax.value_and_grad(plain_block_loss), static_argnums=1)

    def at(params):
        results = [
            one(
                params,
                config,
                shared,
                *(x[row] for x in (batch.tokens, batch.seq_lens, batch.features, batch.final)),
                anchor,
                soft,
            )
            for row in range(batch.tokens.shape[0])
            for anchor, valid in zip(anchors.positions[row], anchors.valid[row], strict=True)
            if valid
        ]
        return jax.tree.map(lambda *parts: sum(parts), *results)

    return at


def fast_loss(params, config, shared, batch, anchors, subset=None, soft=0.0):
    subset = whole_vocabulary(config.vocab_size) if subset is None else subset
    weights = {"gamma": GAMMA, "selector_weight": SELECTOR_WEIGHT, "soft": soft}
    return draft_loss(params, config, shared, batch, anchors, subset, **weights)


@pytest.mark.parametrize("soft", [0.0, 0.7])
@pytest.mark.parametrize("pair", PAIRS)
def test_loss_and_gradients_are_those_of_the_plain_implementation(pair, soft, monkeypatch):
    # Several chunks, the last one padded.
    monkeypatch.setattr(head, "_CHUNK_LOGITS", 64 * 16)
    of, batch = models(pair), the_batch(pair)
    shared = shared_weights(of.target, "float32")

    def fast(params):
        # The factor is for the hand-written backward passes, which must pass one on.
        return 3.0 * fast_loss(params, of.draft_config, shared, batch, ANCHORS, soft=soft)[0]

    plain = plain_loss(of.draft_config, shared, batch, ANCHORS, soft)(of.draft)
    expected, expected_gradient = jax.tree.map(lambda x: 3.0 * x, plain)
    found, found_gradient = jax.jit(jax.value_and_grad(fast))(of.draft)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    for path, expected_leaf in jax.tree_util.tree_leaves_with_path(expected_gradient):
        found_leaf = dict(jax.tree_util.tree_leaves_with_path(found_gradient))[path]
        scale = float(jnp.abs(expected_leaf).max())
        np.testing.assert_allclose(
            found_leaf, expected_leaf, atol=1e-4 * scale + 1e-7, err_msg=jax.tree_util.keystr(path)
        )


def test_mixed_precision_gradients_point_the_same_way():
    pair = "recall-dflash2"
    of, batch = models(pair), the_batch(pair)
    matrix = shared_weights(of.target, "float32").head

    def loss(params, dtype):
        shared = SharedWeights(of.target.embedding, matrix.astype(dtype))
        return fast_loss(in_precision(params, dtype), of.draft_config, shared, batch, ANCHORS)[0]

    exact, mixed = (jax.jit(jax.grad(loss), static_argnums=1)(of.draft, dtype) for dtype in ("float32", "bfloat16"))
    for path, leaf in jax.tree_util.tree_leaves_with_path(exact):
        other = dict(jax.tree_util.tree_leaves_with_path(mixed))[path]
        assert other.dtype == jnp.float32
        cosine = jnp.vdot(leaf, other) / (jnp.linalg.norm(leaf) * jnp.linalg.norm(other))
        assert cosine > 0.99, jax.tree_util.keystr(path)
        assert not np.array_equal(leaf, other), "bfloat16 products cannot be exactly those of float32"


def head_case():
    config = models("recall-dflash2").draft_config
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (5, config.hidden_size))
    matrix = jax.random.normal(keys[1], (64, config.hidden_size)) * 0.2
    return config, hidden, matrix, jnp.array([3, 9, 40, 63, 3]), jnp.array([1.0, 0.5, 2.0, 0.0, 1.0])


def test_a_label_outside_the_subset_takes_part_in_its_own_softmax():
    config, hidden, matrix, labels, weights = head_case()
    tokens = jnp.arange(10, dtype=jnp.int32)
    loss, output = head_loss(config, 4, hidden, matrix, VocabularySubset(tokens, jnp.zeros(10)), labels, weights)
    logits = hidden @ matrix.T
    for i, label in enumerate(labels.tolist()):
        members = sorted({*range(10), label})
        expected = jax.nn.logsumexp(logits[i, jnp.array(members)]) - logits[i, label]
        np.testing.assert_allclose(output.nll[i], expected, rtol=1e-5)
        assert set(output.candidates[i].tolist()) <= set(range(10))
    np.testing.assert_allclose(loss, jnp.sum(output.nll * weights), rtol=1e-6)


def test_a_drawn_token_counts_for_those_it_stands_for_but_a_label_for_itself():
    config, hidden, matrix, _, weights = head_case()
    subset = VocabularySubset(jnp.array([1, 7], jnp.int32), jnp.array([0.0, math.log(5.0)]))
    labels = jnp.array([7, 1, 1, 1, 2])
    _, output = head_loss(config, 1, hidden, matrix, subset, labels, weights)
    e = np.exp(np.asarray(hidden @ matrix.T, np.float64))
    np.testing.assert_allclose(output.nll[0], -np.log(e[0, 7] / (e[0, 1] + e[0, 7])), rtol=1e-5)
    np.testing.assert_allclose(output.nll[1], -np.log(e[1, 1] / (e[1, 1] + 5 * e[1, 7])), rtol=1e-5)
    np.testing.assert_allclose(output.nll[4], -np.log(e[4, 2] / (e[4, 1] + 5 * e[4, 7] + e[4, 2])), rtol=1e-5)


def test_a_soft_label_is_the_targets_distribution_over_the_same_subset():
    config, hidden, matrix, labels, weights = head_case()
    teacher = jax.random.normal(jax.random.key(9), hidden.shape)
    subset = VocabularySubset(jnp.array([1, 7, 9], jnp.int32), jnp.array([0.0, 0.0, math.log(5.0)]))
    loss, _ = head_loss(config, 1, hidden, matrix, subset, labels, weights, teacher, 1.0)
    expected = 0.0
    for i, label in enumerate(labels.tolist()):
        # What a drawn row stands for is spread evenly over as many tokens; a label stands for itself.
        copies = {1: 1.0, 7: 1.0, 9: 5.0, label: 1.0}
        e, wanted = (np.exp(np.asarray(x[i] @ matrix.T, np.float64)) for x in (hidden, teacher))
        total, wanted_total = (sum(count * x[token] for token, count in copies.items()) for x in (e, wanted))
        shares = {token: count * wanted[token] / wanted_total for token, count in copies.items()}
        expected -= float(weights[i]) * sum(share * np.log(e[token] / total) for token, share in shares.items())
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_weights_fall_along_the_block():
    np.testing.assert_allclose(position_weights(3, 2.0), [1.0, math.exp(-0.5), math.exp(-1.0)], rtol=1e-6)


def test_accepted_tokens_are_those_that_drafting_from_each_anchor_gets_right():
    of = models("recall-dflash2")
    tokens = jnp.asarray(np.stack([sequence.tokens for sequence in sequences(1, 64, seed=9)]))
    run = jax.jit(run_sequences, static_argnums=(1, 3))
    features = run(of.target, of.target_config, tokens, of.feature_layers).features
    # The last blocks reach past the end, and are not counted.
    positions = jnp.arange(12, 62, 2, dtype=jnp.int32)
    count = len(positions)
    batch = Batch(tokens, jnp.array([11], jnp.int32), jnp.array([64], jnp.int32), features)
    anchors = Anchors(positions[None], jnp.ones((1, count), bool))
    shared = shared_weights(of.target, "float32")
    _, metrics = jax.jit(lambda b: fast_loss(of.draft, of.draft_config, shared, b, anchors))(batch)

    entries = context_entries(of.draft, of.draft_config, features, jnp.arange(64)[None])
    pages = KeyValues(*(x.reshape(x.shape[0], 4, 16, *x.shape[3:]) for x in (entries.k, entries.v)))
    table = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (count, 4))
    context = Context(pages, table, jnp.arange(count, dtype=jnp.int32), positions)
    drafts = of.draft_config.block_size - 1
    zeros = jnp.zeros(count)
    greedy = Sampler(zeros, zeros.astype(jnp.int32), zeros + 1, zeros, zeros.astype(jnp.uint32))
    drafter = drafter_of(of.draft_config)
    drafted = drafter.propose(
        of.draft, of.draft_config, of.target, context, tokens[0, positions], drafts, greedy
    ).tokens
    whole = int(jnp.sum(positions + drafts < 64))
    right = drafted[:whole] == tokens[0, positions[:whole, None] + 1 + jnp.arange(drafts)]
    accepted = int(jnp.cumprod(right, axis=1).sum())
    assert whole < count
    assert 0 < accepted < whole * drafts
    assert int(metrics.accepted) == accepted
    assert int(metrics.blocks) == whole
    assert metric_means(metrics)["acceptance"] == pytest.approx(1 + accepted / whole)
