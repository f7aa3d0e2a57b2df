"""How states and completions are shown, in a terminal and in a notebook: sizes and a table, never arrays."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

if TYPE_CHECKING:
    from dflash_jax.engine.host import HostState
    from dflash_jax.engine.output import Completion
    from dflash_jax.engine.state import EngineState, Models

_MOST_ROWS = 16
"""Lines of a table; longer ones end in a count."""
_MOST_TEXT = 80

Table = tuple[Sequence[str], list[Sequence[object]]]


def engine_text(host: HostState, models: Models) -> str:
    """An engine: its models, and the requests in flight."""
    return "\n".join([f"Engine({models_text(models)})", f"{host_text(host)}", *_lines(_requests(host))])


def engine_html(host: HostState, models: Models) -> str:
    """An engine, for a notebook."""
    return _html(f"Engine: {models_text(models)}", host_text(host), _requests(host))


def host_text(host: HostState) -> str:
    """The host's half in one line."""
    return (
        f"HostState({len(host.running)} running, {len(host.waiting)} waiting, {len(host.undelivered)} updates "
        f"undelivered, {host.pool!r})"
    )


def host_html(host: HostState) -> str:
    """The host's half, for a notebook."""
    return _html("HostState", host_text(host), _requests(host))


def state_text(state: EngineState) -> str:
    """The device's half: bytes, and the slots in use. Reads the slots back from the device."""
    return "\n".join([_state_sizes(state), *_lines(_slots(state))])


def state_html(state: EngineState) -> str:
    """The device's half, for a notebook."""
    return _html("EngineState", _state_sizes(state), _slots(state))


def models_text(models: Models) -> str:
    """Target and draft in a few words."""
    target, draft = models.target_config, models.draft_config
    text = f"{target.family} target of {target.num_layers} layers"
    if draft is None:
        return text + ", no draft"
    return text + f", {draft.title} draft of {draft.num_layers} layers"


def completion_text(completion: Completion) -> str:
    """A completion in one line."""
    return f"Completion({', '.join(f'{name}={value}' for name, value in _completion(completion))})"


def completion_html(completion: Completion) -> str:
    """A completion, for a notebook."""
    return _html(f"Completion {completion.id!r}", "", (("", ""), [*_completion(completion)]))


def _completion(completion: Completion) -> list[tuple[str, object]]:
    metrics = completion.metrics
    fields: list[tuple[str, object]] = [
        ("id", repr(completion.id)),
        ("finish_reason", repr(completion.finish_reason)),
        ("prompt_tokens", completion.prompt_tokens),
        ("token_ids", _short(completion.token_ids)),
    ]
    if completion.text is not None:
        fields.append(("text", _cut(repr(completion.text))))
    if completion.others:
        fields.append(("samples", len(completion.samples)))
    for name in ("error", "fallback"):
        if getattr(completion, name) is not None:
            fields.append((name, repr(getattr(completion, name))))
    if metrics.mean_acceptance_length is not None:
        fields.append(("rounds", metrics.drafted_request_steps))
        fields.append(("mean_acceptance_length", f"{metrics.mean_acceptance_length:.2f}"))
    return fields


def _requests(host: HostState) -> Table:
    header = ("request", "slot", "prompt", "position", "output", "pages", "rounds", "")
    rows: list[Sequence[object]] = [
        (
            sequence.id,
            "-" if sequence.slot is None else sequence.slot,
            len(sequence.request.prompt),
            sequence.position,
            len(sequence.output),
            len(sequence.pages),
            len(sequence.produced_per_round),
            "waits" if sequence.slot is None else "decodes" if sequence.decoding else "prefills",
        )
        for sequence in host.in_flight
    ]
    return header, rows


def _slots(state: EngineState) -> Table:
    header = ("slot", "row", "position", "draft_len", "anchor", "tokens_left", "pages", "")
    if not isinstance(state.slots.position, jax.Array) or isinstance(state.slots.position, jax.core.Tracer):
        return header, []
    slots, mapping = jax.device_get((state.slots, state.rows.idx_mapping))
    rows: list[Sequence[object]] = []
    for slot in np.flatnonzero(np.any(slots.block_table >= 0, axis=1)):
        where = np.flatnonzero(mapping == slot)
        flags = [name for name in ("decoding", "speculating", "finished") if getattr(slots, name)[slot]]
        rows.append(
            (
                slot,
                "-" if not len(where) else where[0],
                slots.position[slot],
                slots.draft_len[slot],
                slots.anchor[slot],
                slots.tokens_left[slot],
                int(np.sum(slots.block_table[slot] >= 0)),
                ", ".join(flags) + (f" violation {slots.violation[slot]}" if slots.violation[slot] else ""),
            )
        )
    return header, rows


def _state_sizes(state: EngineState) -> str:
    # Looked up on the type: the stand-in for a donated array raises when it is asked for an attribute.
    if not hasattr(type(state.target_pages.k), "shape"):
        return f"EngineState({state.target_pages.k!r})"
    pages = state.target_pages.k.shape
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return (
        f"EngineState({state.slots.position.shape[0]} slots, {pages[1]} pages of {pages[2]} tokens, "
        f"{state.target_pages.k.dtype.name}, {size / 2**20:.1f} MiB)"
    )


def _lines(table: Table) -> list[str]:
    header, rows = table
    if not rows:
        return []
    shown = [[str(cell) for cell in row] for row in (header, *rows[:_MOST_ROWS])]
    widths = [max(len(row[column]) for row in shown) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    return lines + _rest(rows)


def _html(title: str, text: str, table: Table) -> str:
    header, rows = table
    parts = [f"<b>{html.escape(title)}</b>", f"<div>{html.escape(text)}</div>"]
    if rows:
        parts.append("<table>" + _tr("th", header) + "".join(_tr("td", row) for row in rows[:_MOST_ROWS]) + "</table>")
        parts += [html.escape(line) for line in _rest(rows)]
    return "".join(parts)


def _tr(tag: str, cells: Iterable[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"


def _rest(rows: list) -> list[str]:
    return [f"and {len(rows) - _MOST_ROWS} more"] if len(rows) > _MOST_ROWS else []


def _short(tokens: Sequence[int]) -> str:
    first = ", ".join(map(str, tokens[:8]))
    return f"({first})" if len(tokens) <= 8 else f"({first}, ... {len(tokens)} in all)"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "..."
