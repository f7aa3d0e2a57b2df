"""Each way of quantising is written here number by number, as its authors' packages pack it, and read back."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoints import describe, load_draft, load_target, save_draft, save_target
from dflash_jax.checkpoints.table import param_at, table
from dflash_jax.errors import CheckpointError, DflashError

RNG = np.random.default_rng(7)


def is_linear(name):
    return "_proj.weight" in name


def quantise(directory, settings, change):
    """Rewrites a saved model: `change` makes the tensors that stand for a linear weight, and the weight they mean."""
    file = directory / "model.safetensors"
    expected, stored = {}, {}
    for name, weight in load_file(file).items():
        parts = {name: weight}
        if is_linear(name):
            parts, expected[name] = change(name.removesuffix(".weight"), weight)
        stored.update(parts)
    write(file, stored)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return expected


def write(file, tensors):
    """`save_file` for dtypes that safetensors has and numpy has not."""
    names = {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "float16": "F16", "float32": "F32"}
    names |= {"int32": "I32", "int8": "I8", "bfloat16": "BF16", "int64": "I64", "float64": "F64"}
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": names[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def assert_loaded(loaded, expected):
    checked = 0
    for leaf in table(loaded.config):
        for expert, name in enumerate(leaf.names):
            if name in expected:
                found = np.asarray(param_at(loaded.params, leaf.path))
                found = found[expert] if leaf.experts else found
                np.testing.assert_array_equal(found.T, expected[name], err_msg=name)
                checked += 1
    assert checked == len(expected) > 5


def saved(models, directory, name="qwen3"):
    if name in models.drafts:
        save_draft(directory, models.drafts[name], models.params(models.drafts[name]))
    else:
        save_target(directory, models.targets[name], models.params(models.targets[name]))
    return directory


def fp8_blocks(rows, columns, scale_dtype=np.float32):
    def change(base, weight):
        scales = np.ones((-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)))
        values, meant = np.zeros_like(weight), np.zeros_like(weight)
        for i in range(weight.shape[0]):
            for j in range(weight.shape[1]):
                scales[i // rows, j // columns] = 2.0 ** ((i // rows - j // columns) % 3)
        scales = scales.astype(scale_dtype).astype(np.float32)
        for i in range(weight.shape[0]):
            for j in range(weight.shape[1]):
                scale = scales[i // rows, j // columns]
                values[i, j] = np.float32(ml_dtypes.float8_e4m3fn(weight[i, j] / scale))
                meant[i, j] = values[i, j] * scale
        return {
            f"{base}.weight": values.astype(ml_dtypes.float8_e4m3fn),
            f"{base}.weight_scale_inv": scales.astype(scale_dtype),
        }, meant

    return change


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "dflash2"])
def test_fp8_in_blocks_is_read(models, tmp_path, name, scale_dtype):
    directory = saved(models, tmp_path / "m", name)
    # Neither 5 nor 6 divides the sizes, so that the last blocks are cut as published ones are.
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [5, 6]}
    expected = quantise(directory, settings, fp8_blocks(5, 6, scale_dtype))
    load = load_draft if name in models.drafts else load_target
    assert_loaded(load(directory), expected)
    assert describe(directory).dtypes["F8_E4M3"] == len(expected)


def fp8_scaled(shape, name="weight_scale", extra=()):
    def change(base, weight):
        sizes = {"tensor": (), "one": (1,), "row": (weight.shape[0], 1)}
        scales = RNG.uniform(0.5, 2, sizes[shape]).astype(np.float32)
        values = (weight / scales).astype(ml_dtypes.float8_e4m3fn)
        others = {f"{base}.{part}": np.ones(1, np.float32) for part in extra}
        scales = np.asarray(scales)
        return {f"{base}.weight": values, f"{base}.{name}": scales, **others}, values.astype(np.float32) * scales

    return change


def compressed(strategy, block=None, bits=8, kind="float", format="float-quantized", **more):
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "block_structure": block}
    group = {"weights": weights | more, "targets": ["Linear"], "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"quant_method": "fp8"}, fp8_scaled("tensor", "weight_scale_inv")),
        ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_scaled("one", extra=["input_scale", "k_scale"])),
        (compressed("tensor"), fp8_scaled("one")),
        (compressed("channel"), fp8_scaled("row", extra=["input_scale"])),
    ],
    ids=["fp8-tensor", "fp8-static", "compressed-tensor", "compressed-channel"],
)
def test_fp8_with_a_scale_per_tensor_or_row_is_read(models, tmp_path, settings, change):
    directory = saved(models, tmp_path / "m")
    expected = quantise(directory, settings, change)
    assert_loaded(load_target(directory), expected)


def test_compressed_tensors_in_blocks_are_read(models, tmp_path):
    def renamed(base, weight):
        parts, meant = fp8_blocks(4, 8)(base, weight)
        return {name.replace("_scale_inv", "_scale"): array for name, array in parts.items()}, meant

    directory = saved(models, tmp_path / "m")
    expected = quantise(directory, compressed("block", [4, 8]), renamed)
    assert_loaded(load_target(directory), expected)


def test_compressed_int8_is_read(models, tmp_path):
    def change(base, weight):
        scales = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
        values = np.round(weight / scales).astype(np.int8)
        return {f"{base}.weight": values, f"{base}.weight_scale": scales}, values.astype(np.float32) * scales

    directory = saved(models, tmp_path / "m")
    settings = compressed("channel", kind="int", format="int-quantized")
    expected = quantise(directory, settings, change)
    assert_loaded(load_target(directory), expected)


def test_fused_experts_in_fp8_are_read(models, tmp_path):
    directory = saved(models, tmp_path / "m", "qwen3_moe")
    expected = quantise(directory, {"quant_method": "fp8", "weight_block_size": [2, 4]}, fp8_blocks(2, 4))
    file = directory / "model.safetensors"
    from dflash_jax.checkpoints.safetensors_io import open_file

    tensors = {name: tensor.read() for name, tensor in open_file(file).items()}
    prefix = "model.layers.0.mlp.experts"

    def take(part, end):
        return np.stack([tensors.pop(f"{prefix}.{expert}.{part}.weight{end}") for expert in range(3)])

    for end in ("", "_scale_inv"):
        gate_up = np.concatenate([take("gate_proj", end), take("up_proj", end)], axis=1)
        tensors[f"{prefix}.gate_up_proj{end}"] = gate_up
        tensors[f"{prefix}.down_proj{end}"] = take("down_proj", end)
    write(file, tensors)
    assert_loaded(load_target(directory), expected)


def pack(numbers):
    """Eight 4-bit, or four 8-bit, numbers in a signed 32-bit integer, the first one lowest."""
    bits = 32 // len(numbers)
    word = 0
    for place, number in enumerate(numbers):
        word |= int(number) << (bits * place)
    return np.uint32(word).astype(np.int32)


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(group_size):
    def change(base, weight):
        outputs, inputs = weight.shape
        size = inputs if group_size == -1 else group_size
        groups = inputs // size
        values = RNG.integers(0, 16, (inputs, outputs))
        zeros = RNG.integers(0, 16, (groups, outputs))
        scales = RNG.uniform(0.01, 0.1, (groups, outputs)).astype(np.float16)

        def packed(rows):
            return np.array(
                [
                    [pack([row[8 * word + AWQ_ORDER[i]] for i in range(8)]) for word in range(outputs // 8)]
                    for row in rows
                ]
            )

        meant = np.zeros_like(weight)
        for i in range(inputs):
            for o in range(outputs):
                meant[o, i] = (values[i, o] - zeros[i // size, o]) * np.float32(scales[i // size, o])
        return {f"{base}.qweight": packed(values), f"{base}.qzeros": packed(zeros), f"{base}.scales": scales}, meant

    return change


def even_sizes(models):
    """The smallest target's sizes in multiples of 8, as packing needs them."""
    import dataclasses

    return dataclasses.replace(models.targets["qwen3"], intermediate_size=24)


def saved_even(models, directory):
    config = even_sizes(models)
    save_target(directory, config, models.params(config))
    return directory


@pytest.mark.parametrize("group_size", [8, -1])
def test_awq_is_read(models, tmp_path, group_size):
    directory = saved_even(models, tmp_path / "m")
    settings = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "GEMM", "zero_point": True}
    expected = quantise(directory, settings, awq(group_size))
    assert_loaded(load_target(directory), expected)
    assert describe(directory).dtypes["AWQ-4"] == len(expected)


def gptq(group_size, bits=4, *, less_one=True, shuffled=False, with_order=True, symmetric=False):
    per, most = 32 // bits, (1 << bits) - 1

    def change(base, weight):
        outputs, inputs = weight.shape
        size = inputs if group_size == -1 else group_size
        groups = -(-inputs // size)
        order = np.arange(inputs) // size
        if shuffled:
            order = RNG.permutation(order)
        values = RNG.integers(0, most + 1, (inputs, outputs))
        # Zero included, which less one is the largest number.
        zeros = RNG.integers(0, most + 1, (groups, outputs))
        if symmetric:
            zeros[:] = (most + 1) // 2
        scales = RNG.uniform(0.01, 0.1, (groups, outputs)).astype(np.float16)
        kept = (zeros - 1) & most if less_one else zeros
        qweight = np.array(
            [
                [pack([values[per * word + k, o] for k in range(per)]) for o in range(outputs)]
                for word in range(inputs // per)
            ]
        )
        qzeros = np.array(
            [[pack(row[per * word : per * word + per]) for word in range(outputs // per)] for row in kept]
        )
        meant = np.zeros_like(weight)
        for i in range(inputs):
            for o in range(outputs):
                meant[o, i] = (values[i, o] - zeros[order[i], o]) * np.float32(scales[order[i], o])
        parts = {f"{base}.qweight": qweight, f"{base}.qzeros": qzeros, f"{base}.scales": scales}
        return parts | ({f"{base}.g_idx": order.astype(np.int32)} if with_order else {}), meant

    return change


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"group_size": 8, "sym": False}, gptq(8)),
        ({"group_size": 8, "sym": False, "desc_act": True}, gptq(8, shuffled=True)),
        ({"group_size": -1, "sym": False}, gptq(-1, with_order=False)),
        ({"group_size": 10, "sym": False}, gptq(10, with_order=False)),
        ({"group_size": 8, "sym": False, "checkpoint_format": "gptq_v2"}, gptq(8, less_one=False)),
        ({"group_size": 8, "bits": 8, "sym": False}, gptq(8, bits=8)),
        ({"group_size": 8, "sym": True}, gptq(8, symmetric=True)),
        # Some writers call format 2 "gptq"; a symmetric zero can only mean one thing.
        ({"group_size": 8, "sym": True, "checkpoint_format": "gptq"}, gptq(8, symmetric=True, less_one=False)),
    ],
    ids=["groups", "shuffled", "one-group", "last-group-short", "format-2", "8-bits", "symmetric", "symmetric-as-is"],
)
def test_gptq_is_read(models, tmp_path, settings, change):
    directory = saved_even(models, tmp_path / "m")
    expected = quantise(directory, {"quant_method": "gptq", "bits": 4} | settings, change)
    assert_loaded(load_target(directory), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes', but weights must be plain floats or"),
        ({"quant_method": ["awq"]}, r"\['awq'\]"),
        ({"bits": 4}, "None"),
        ("awq", "awq"),
        ({"quant_method": "awq", "version": "gemv"}, r"quantization_config\.version .* is 'gemv', but only 'gemm'"),
        ({"quant_method": "awq", "bits": 3}, r"bits .* is 3, but only 4 can be read"),
        ({"quant_method": "awq", "bits": True}, r"bits .* is True"),
        ({"quant_method": "awq", "zero_point": False}, r"zero_point .* is False"),
        ({"quant_method": "awq", "group_size": 0}, r"group_size .* is 0"),
        ({"quant_method": "awq", "group_size": "128"}, r"group_size .* is '128'"),
        ({"quant_method": "gptq", "bits": 3}, r"bits .* is 3, but only 4 or 8"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, r"checkpoint_format .* is 'marlin'"),
        ({"quant_method": "gptq", "dynamic": {"-:.*": {}}}, r"dynamic .* the same bits and groups for all layers"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size .* is \[0, 128\]"),
        ({"quant_method": "fp8", "weight_block_size": 10**400}, "weight_block_size"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
        (compressed("group", format="pack-quantized", bits=4), r"format .* is 'pack-quantized'"),
        (compressed("channel", bits=4), "but only symmetric 8 bits can be read"),
        (compressed("channel", symmetric=False), "but only symmetric 8 bits can be read"),
        (compressed("channel", kind="e4m3"), r"weights\.type .* is 'e4m3', but only 'int' or 'float' can be read"),
        ({"quant_method": "gptq", "desc_act": "yes"}, r"desc_act .* is 'yes'"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "config_groups"),
    ],
)
def test_other_quantisations_are_refused_in_one_sentence(models, tmp_path, settings, message):
    directory = saved(models, tmp_path / "m")
    quantise(directory, settings, lambda base, weight: ({f"{base}.weight": weight}, weight))
    with pytest.raises(DflashError, match=message) as raised:
        load_target(directory)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600
    with pytest.raises(DflashError, match=message):
        describe(directory)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("method", "part", "array", "message"),
    [
        ("awq", "qzeros", None, r"q_proj\.qweight' in .* has no qzeros beside it"),
        ("awq", "scales", np.ones((2, 5), np.float16), r"scales' in .* has shape \[2, 5\], but scales must be of"),
        ("awq", "qweight", np.ones((16, 4), np.float32), r"qweight' in .* is of dtype F32"),
        ("awq", "qzeros", np.ones((16,), np.int32), r"qzeros must be I32 of 2 axes"),
        ("gptq", "g_idx", np.full(16, 2, np.int32), r"g_idx' in .* names groups 2 to 2 of 2"),
        ("gptq", "g_idx", np.full(16, -1, np.int32), r"names groups -1 to -1"),
        ("gptq", "g_idx", np.zeros(15, np.int32), r"g_idx' in .* has shape \[15\]"),
        ("gptq", "scales", np.ones((2, 32), np.int32), r"scales' in .* is of dtype I32"),
        ("gptq", "scales", np.full((2, 32), np.nan, np.float16), r"q_proj\.qweight' in .* has nan at \[0, 0\]"),
        ("fp8", "weight_scale_inv", np.ones((3, 3), np.float32), r"no scale for a weight of \[32, 16\] in blocks of"),
        ("fp8", "weight_scale_inv", np.full((8, 2), np.inf, np.float32), r"q_proj\.weight' in .* which is not finite"),
        ("gptq", "g_idx", None, r"q_proj\.qweight' in .* has no g_idx beside it"),
        ("fp8", "weight", np.zeros((32, 0), ml_dtypes.float8_e4m3fn), r"q_proj\.weight' in .* shape \[32, 0\] but has"),
        ("fp8", "weight", np.ones((32, 16), np.int8), r"is of dtype I8 .* so that it must be F8_E4M3"),
        ("fp8", "weight_scale_inv", np.ones((8, 2), np.int64), r"is of dtype I64, but scales must be one of F64, F32"),
        ("fp8", "weight_scale_inv", np.ones((), np.float32), r"no scale for a weight of \[32, 16\] in blocks of"),
        ("fp8", "weight_scale_inv", np.ones((1, 1), np.float32), r"no scale for a weight of \[32, 16\] in blocks of"),
        ("fp8", "weight_scale_inv", None, r"q_proj\.weight' in .* is of dtype F8_E4M3, but weights must be"),
    ],
)
def test_misfit_parts_are_named(models, tmp_path, method, part, array, message):
    directory = saved_even(models, tmp_path / "m")
    change = {"awq": awq(8), "gptq": gptq(8), "fp8": fp8_blocks(4, 8)}[method]
    settings = {"quant_method": method, "bits": 4, "group_size": 8, "weight_block_size": [4, 8], "desc_act": True}

    def damaged(base, weight):
        parts, meant = change(base, weight)
        if base == Q:
            parts.pop(f"{base}.{part}")
            if array is not None:
                parts[f"{base}.{part}"] = array
        return parts, meant

    quantise(directory, settings, damaged)
    with pytest.raises(CheckpointError, match=message):
        load_target(directory)


@pytest.mark.parametrize("held", [None, "file"])
@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"quant_method": "fp8", "weight_block_size": [1 << 40, 1 << 40]}, fp8_blocks(1 << 40, 1 << 40)),
        ({"quant_method": "gptq", "sym": False, "group_size": 10**30}, gptq(-1, with_order=False)),
    ],
    ids=["fp8", "gptq"],
)
def test_a_block_larger_than_memory_is_one_block(models, tmp_path, settings, change, held):
    directory = saved_even(models, tmp_path / "m")
    expected = quantise(directory, settings, change)
    params = load_target(directory, weights=held).params
    found = params.layers[0].attention.q_proj.weight
    np.testing.assert_array_equal(found.out_in, expected[f"{Q}.weight"])


def test_scales_too_large_are_refused_and_nothing_else_is_said(models, tmp_path, recwarn):
    directory = saved_even(models, tmp_path / "m")

    def change(base, weight):
        values = np.full(weight.shape, 448, ml_dtypes.float8_e4m3fn)
        return {f"{base}.weight": values, f"{base}.weight_scale": np.full((), 1e300)}, weight

    quantise(directory, {"quant_method": "fp8"}, change)
    with pytest.raises(CheckpointError, match="which is not finite"):
        load_target(directory)
    assert not recwarn.list


def test_quantised_weights_load_as_bfloat16_too(models, tmp_path):
    directory = saved_even(models, tmp_path / "m")
    expected = quantise(directory, {"quant_method": "awq", "group_size": 8}, awq(8))
    found = load_target(directory, "bfloat16").params.layers[0].attention.q_proj.weight
    np.testing.assert_array_equal(np.asarray(found.out_in), expected[f"{Q}.weight"].astype(ml_dtypes.bfloat16))


def test_plain_files_are_written_by_the_library_itself(tmp_path):
    """That `write` above writes what safetensors writes."""
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.int32)}
    write(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs")
    for name, array in load_file(tmp_path / "ours").items():
        np.testing.assert_array_equal(array, load_file(tmp_path / "theirs")[name])
