"""The loss and its gradients against a plain implementation, one block and one position at a time."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models.layers import linear, mlp, project_kv, project_q, rms_norm
from dflash_jax.training import head
from dflash_jax.training.anchors import Anchors
from dflash_jax.training.batch import Batch, Vocabulary
from dflash_jax.training.head import HeadRows, all_rows, head_loss
from dflash_jax.training.losses import draft_loss, position_weights, report
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
    return Batch(tokens, jnp.array([11, 11], jnp.int32), jnp.array(LENGTHS, jnp.int32), features)


def plain_block(params, config, embedding, features, anchor: int, token):
    """Hidden states of one block, with every key and value laid out and masked by hand."""
    block = config.block_size
    x = embedding[jnp.array([token] + [config.mask_token_id] * (block - 1))] * config.input_embedding_scale
    context = rms_norm(features[:anchor] @ params.fc, params.hidden_norm, config.rms_norm_eps)
    own, past = jnp.arange(anchor, anchor + block), jnp.arange(anchor)
    positions = jnp.concatenate([past, own])

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
                heads.append(jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1) @ v[:, cached])
            return linear(jnp.concatenate(heads, -1), weights.attention.o_proj)

        x = x + convolved(attend, rms_norm(x, weights.input_norm, config.rms_norm_eps), weights.attention_conv)
        normed = rms_norm(x, weights.post_attention_norm, config.rms_norm_eps)
        x = x + convolved(lambda h, weights=weights: mlp(h, weights.mlp), normed, weights.mlp_conv)
    return rms_norm(x, params.norm, config.rms_norm_eps)


def plain_loss(params, config, vocabulary, batch, anchors) -> jax.Array:
    """The objective as the papers word it."""
    total = 0.0
    for row in range(batch.tokens.shape[0]):
        for anchor, valid in zip(anchors.positions[row].tolist(), anchors.valid[row].tolist(), strict=True):
            if not valid:
                continue
            token = int(batch.tokens[row, anchor])
            hidden = plain_block(params, config, vocabulary.embedding, batch.features[row], anchor, token)
            for i in range(1, config.block_size):
                if anchor + i >= int(batch.lengths[row]):
                    break
                logits = vocabulary.head @ hidden[i] * config.output_multiplier
                if config.final_logit_softcap is not None:
                    logits = config.final_logit_softcap * jnp.tanh(logits / config.final_logit_softcap)
                label, previous = int(batch.tokens[row, anchor + i]), int(batch.tokens[row, anchor + i - 1])
                weight = math.exp(-(i - 1) / GAMMA)
                total += weight * -jax.nn.log_softmax(logits)[label]
                if params.selector is None:
                    continue
                candidates = np.argsort(-np.asarray(logits))[: config.selector.top_k].tolist()
                if label in candidates:
                    selector = params.selector
                    gate = hidden[i] @ selector.hidden_projection
                    scores = jnp.stack(
                        [
                            logits[b]
                            + jnp.sum(selector.predecessor_codebook[previous] * gate * selector.successor_codebook[b])
                            for b in candidates
                        ]
                    )
                    own = candidates.index(label)
                    total += SELECTOR_WEIGHT * weight * -jax.nn.log_softmax(scores)[own]
    return total


def fast_loss(params, config, vocabulary, batch, anchors, rows=None):
    rows = all_rows(config.vocab_size) if rows is None else rows
    return draft_loss(
        params, config, vocabulary, batch, anchors, rows, gamma=GAMMA, selector_weight=SELECTOR_WEIGHT
    )


@pytest.mark.parametrize("pair", PAIRS)
def test_loss_and_gradients_are_those_of_the_plain_implementation(pair, monkeypatch):
    # Several chunks, the last one padded.
    monkeypatch.setattr(head, "_CHUNK_LOGITS", 64 * 16)
    of, batch = models(pair), the_batch(pair)
    vocabulary = Vocabulary(of.target.embedding, head.head_matrix(of.target))

    def plain(params):
        return plain_loss(params, of.draft_config, vocabulary, batch, ANCHORS)

    def fast(params):
        return fast_loss(params, of.draft_config, vocabulary, batch, ANCHORS)[0]

    with jax.disable_jit(False):
        expected, expected_gradient = jax.value_and_grad(plain)(of.draft)
        found, found_gradient = jax.value_and_grad(fast)(of.draft)
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
    matrix = head.head_matrix(of.target)

    def loss(params, dtype):
        vocabulary = Vocabulary(of.target.embedding, matrix.astype(dtype))
        return fast_loss(in_precision(params, dtype), of.draft_config, vocabulary, batch, ANCHORS)[0]

    exact, mixed = (jax.grad(loss)(of.draft, dtype) for dtype in ("float32", "bfloat16"))
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


def test_a_label_outside_the_rows_takes_part_in_its_own_softmax():
    config, hidden, matrix, labels, weights = head_case()
    tokens = jnp.arange(10, dtype=jnp.int32)
    loss, output = head_loss(config, 4, hidden, matrix, HeadRows(tokens, jnp.zeros(10)), labels, weights)
    logits = hidden @ matrix.T
    for i, label in enumerate(labels.tolist()):
        members = sorted({*range(10), label})
        expected = jax.nn.logsumexp(logits[i, jnp.array(members)]) - logits[i, label]
        np.testing.assert_allclose(output.nll[i], expected, rtol=1e-5)
        assert set(output.candidates[i].tolist()) <= set(range(10))
    np.testing.assert_allclose(loss, jnp.sum(output.nll * weights), rtol=1e-6)


def test_a_drawn_row_counts_for_those_it_stands_for_but_a_label_for_itself():
    config, hidden, matrix, _, weights = head_case()
    rows = HeadRows(jnp.array([1, 7], jnp.int32), jnp.array([0.0, math.log(5.0)]))
    labels = jnp.array([7, 1, 1, 1, 2])
    _, output = head_loss(config, 1, hidden, matrix, rows, labels, weights)
    e = np.exp(np.asarray(hidden @ matrix.T, np.float64))
    np.testing.assert_allclose(output.nll[0], -np.log(e[0, 7] / (e[0, 1] + e[0, 7])), rtol=1e-5)
    np.testing.assert_allclose(output.nll[1], -np.log(e[1, 1] / (e[1, 1] + 5 * e[1, 7])), rtol=1e-5)
    np.testing.assert_allclose(output.nll[4], -np.log(e[4, 2] / (e[4, 1] + 5 * e[4, 7] + e[4, 2])), rtol=1e-5)


def test_weights_fall_along_the_block():
    np.testing.assert_allclose(position_weights(3, 2.0), [1.0, math.exp(-0.5), math.exp(-1.0)], rtol=1e-6)


def test_teacher_forced_acceptance_of_a_trained_draft_is_what_its_decoding_reaches():
    """The recall drafts accept nearly everything, and the tally must say so on the target's own text."""
    from dflash_jax.training.features import run_sequences

    of = models("recall-dflash2")
    tokens = jnp.asarray(np.stack([sequence.tokens for sequence in sequences(2, 64, seed=9)]))
    features = run_sequences(of.target, of.target_config, tokens, of.feature_layers).features
    batch = Batch(tokens, jnp.array([11, 11], jnp.int32), jnp.array([64, 64], jnp.int32), features)
    positions = jnp.broadcast_to(jnp.arange(20, 52, 4, dtype=jnp.int32), (2, 8))
    anchors = Anchors(positions, jnp.ones((2, 8), bool))
    vocabulary = Vocabulary(of.target.embedding, head.head_matrix(of.target))
    _, tally = fast_loss(of.draft, of.draft_config, vocabulary, batch, anchors)
    figures = report(tally)
    assert figures["acceptance"] > 6.5
    assert min(figures["recall"]) > 0.99
    assert float(tally.blocks) == 16
    # The walk reads past the first mistake no more: wrong labels in front leave nothing accepted.
    wrong = Batch(tokens.at[:, :].set((tokens + 1) % 50), batch.prompt_lens, batch.lengths, features)
    _, tally = fast_loss(of.draft, of.draft_config, vocabulary, wrong, anchors)
    assert report(tally)["acceptance"] < 1.5
