import shutil
import struct

import gguf
import numpy as np
import pytest

from dflash_jax.checkpoints import describe, load_target
from dflash_jax.checkpoints.gguf_io import open_gguf
from dflash_jax.errors import CheckpointError


def write(folder, name, tensors, *, per_file=2, hidden=4):
    """A model in parts, as the package's own writer splits it."""
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", "llama", split_max_tensors=per_file)
    writer.add_embedding_length(hidden)
    for tensor, value in tensors.items():
        writer.add_tensor(tensor, value)
    writer.write_header_to_file(folder / f"{name}.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob(f"{name}-*.gguf"))


TENSORS = {name: np.full((2, 3), index, np.float32) for index, name in enumerate("abcde")}


def test_any_part_of_a_split_model_stands_for_the_whole(tmp_path):
    parts = write(tmp_path, "m", TENSORS)
    assert [part.name for part in parts] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        metadata, tensors = open_gguf(part)
        assert metadata["llama.embedding_length"] == 4
        assert list(tensors) == list(TENSORS)
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor.read(), TENSORS[name])
        assert [tensor.file for tensor in tensors.values()] == [parts[0]] * 2 + [parts[1]] * 2 + [parts[2]]


def test_a_target_in_parts_loads_and_is_described_as_one(models, tmp_path):
    from tests.checkpoints.test_gguf import LLAMA, write_gguf

    params = models.params(LLAMA)
    whole = write_gguf(tmp_path / "whole.gguf", LLAMA, params)
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama", split_max_tensors=3)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file(tmp_path / "t.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("t-*.gguf"))
    assert len(parts) > 2
    models.assert_same(load_target(parts[1]).params, params)
    found = describe(parts[0])
    assert found.bytes_on_disk == sum(part.stat().st_size for part in parts)
    assert found.config == LLAMA


def test_an_incomplete_set_is_refused_by_the_missing_parts_name(tmp_path):
    parts = write(tmp_path, "m", TENSORS)
    for part in parts:
        others = [other for other in parts if other != part]
        part.rename(tmp_path / "away")
        for other in others:
            with pytest.raises(CheckpointError, match=rf"is one of 3 parts, of which {part.name} is missing from"):
                open_gguf(other)
        (tmp_path / "away").rename(part)


def test_parts_of_different_models_are_refused_by_name(tmp_path):
    parts = write(tmp_path, "m", TENSORS)
    for folder in ("same", "more", "swap"):
        (tmp_path / folder).mkdir()
        for part in parts:
            shutil.copy(part, tmp_path / folder)
    shutil.copy(parts[0], tmp_path / "same" / parts[1].name)
    with pytest.raises(CheckpointError, match=rf"split\.no in .*{parts[1].name} is 0, but by its name it must be 1"):
        open_gguf(tmp_path / "same" / parts[0].name)
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", "m", {f"x{name}": TENSORS["a"] for name in range(6)})
    shutil.copy(other[2], tmp_path / "more" / parts[2].name)
    with pytest.raises(CheckpointError, match=r"hold 6 tensors together, but split\.tensors\.count says 5"):
        open_gguf(tmp_path / "more" / parts[0].name)
    twice = write(tmp_path / "other", "n", {name: TENSORS["a"] for name in "cdefg"})
    shutil.copy(twice[1], tmp_path / "swap" / parts[1].name)
    with pytest.raises(CheckpointError, match=rf"tensor 'e' is both in .*{parts[1].name} and in .*{parts[2].name}"):
        open_gguf(tmp_path / "swap" / parts[2].name)


def test_names_that_do_not_fit_the_set_are_refused(tmp_path):
    parts = write(tmp_path, "m", TENSORS)
    renamed = shutil.copy(parts[0], tmp_path / "first.gguf")
    with pytest.raises(
        CheckpointError, match=r"first\.gguf is one of 3 parts by its metadata .*, and of 1 by its name"
    ):
        open_gguf(renamed)
    renamed = shutil.copy(parts[0], tmp_path / "m-00001-of-00004.gguf")
    with pytest.raises(CheckpointError, match=r"is one of 3 parts by its metadata .*, and of 4 by its name"):
        open_gguf(renamed)
    renamed = shutil.copy(parts[0], tmp_path / "m-00004-of-00003.gguf")
    with pytest.raises(CheckpointError, match="a part that its own name rules out"):
        open_gguf(renamed)
    whole = tmp_path / "m-00001-of-00001.gguf"
    whole.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    assert open_gguf(whole) == ({}, {})
