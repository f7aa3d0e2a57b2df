"""Other names and packings that published checkpoints use for the tensors of the table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dflash_jax.checkpoints.tensors import HostArray, StoredTensor

_CODEBOOK = re.compile(r"(candidate_selector\.(?:predecessor|successor)_codebook)\.weight")
_FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)")


def draft_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """A draft's tensors under the table's names: no `model.` prefix, codebooks without `.weight`."""
    return {_CODEBOOK.sub(r"\1", name.removeprefix("model.")): tensor for name, tensor in tensors.items()}


def target_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """A target's tensors with fused experts taken apart.

    transformers 5 (`Qwen3MoeExperts`) holds `gate_up_proj` [experts, 2 * inner, hidden], gate first,
    and `down_proj` [experts, hidden, inner]; GGUF stacks each projection alone. The table has a
    tensor per expert and projection.
    """
    separate: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = _FUSED_EXPERTS.fullmatch(name)
        if match and len(tensor.shape) == 3:
            separate.update(_split_experts(match[1], match[2], tensor))
        else:
            separate[name] = tensor
    return separate


def _split_experts(prefix: str, part: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    experts, rows, columns = tensor.shape
    names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    height = rows // len(names)
    for expert in range(experts):
        for index, name in enumerate(names):

            def load(slices: tuple[slice, ...], expert=expert, start=index * height) -> HostArray:
                return tensor.read(slice(expert, expert + 1), slice(start, start + height))[0][slices]

            yield (
                f"{prefix}.{expert}.{name}.weight",
                StoredTensor(
                    name=tensor.name, file=tensor.file, shape=(height, columns), dtype=tensor.dtype, load=load
                ),
            )
