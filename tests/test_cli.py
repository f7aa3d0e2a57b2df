from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dflash_jax import cli
from dflash_jax.jobs.console import JobConsole

GOLDEN = Path(__file__).parent / "golden"
CONFIGS = Path(__file__).parents[1] / "configs"
CASE = json.loads((GOLDEN / "recall-dflash2.json").read_text())["cases"][0]


@pytest.fixture
def call(monkeypatch, capsys):
    """Calls the command line; returns exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["dflash-jax", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def config(tmp_path):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text(json.dumps({"id": "a", "prompt_token_ids": CASE["prompt"]}) + "\nnot json\n")
    path = tmp_path / "job.yaml"
    values = {
        "target": {"path": str(GOLDEN / "recall-target")},
        "draft": {"path": str(GOLDEN / "recall-dflash2"), "width": 7},
        "engine": {"max_slots": 3, "max_model_len": 160, "strict": True},
        "sampling": {"max_tokens": 48},
        "input": {"path": str(prompts)},
        "output": {"path": str(tmp_path / "out.jsonl")},
    }
    path.write_text(yaml.safe_dump(values))
    return path


def refused(result, says):
    """Exit code 2 and one sentence on stderr, which is all that is said."""
    code, out, err = result
    assert code == 2, err
    assert re.search(says, err.splitlines()[-1]), err
    assert err.splitlines()[-1].startswith("dflash-jax: ")
    assert "Traceback" not in err and out == ""


def edited(directory, source, edit):
    """A copy of a golden checkpoint with its config.json changed."""
    copy = directory / source
    shutil.copytree(GOLDEN / source, copy)
    fields = json.loads((copy / "config.json").read_text())
    edit(fields)
    (copy / "config.json").write_text(json.dumps(fields))
    return copy


def test_generate_answers_and_says_what_came_of_it(call, config):
    code, out, err = call("generate", config, "--set", "output.trace=true", "--set", "sampling.max_tokens=20")
    assert code == 0, err
    rows = [json.loads(line) for line in (config.parent / "out.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["id"] == "a"]
    assert row["token_ids"] == CASE["greedy_tokens"][:20] and row["trace"]["drafted_blocks"]
    for word in (
        "finished",
        "output tokens",
        "accepted drafts",
        "throughput",
        "line 2: the line is not JSON",
        "out.jsonl",
    ):
        assert word in out
    summary = json.loads((config.parent / "out.jsonl.summary.json").read_text())
    assert summary["requests"]["total"] == 2 and summary["requests"]["error"] == 1


def test_an_interrupted_generate_says_so_and_how_to_go_on(call, config, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(JobConsole, "finished", lambda self, item, row: signal.raise_signal(signal.SIGINT))
    code, out, err = call("generate", config)
    assert code == 130
    assert err.endswith("dflash-jax: stopped by SIGINT; run the same command again for the rest\n")
    assert "stopped" in out and "Traceback" not in err
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("engine.max_slot=2", "unknown key 'engine.max_slot'; the nearest known one is 'engine.max_slots'"),
        ("sampling.temprature=1", "unknown sampling key 'temprature'; the nearest known one is 'temperature'"),
        ("target.path=absent", "there is no checkpoint 'absent'"),
        ("input.path=absent.jsonl", "there is no input file 'absent.jsonl'"),
        ("engine.max_slots", "is not an assignment"),
        ("draft.k=0", "'draft.k' is 0"),
        ("draft.mask_token_id=64", "mask_token_id 64 is outside"),
    ],
)
def test_generate_refuses_a_bad_setting_in_one_sentence(call, config, override, says):
    refused(call("generate", config, "--set", override), says)


def test_generate_refuses_a_missing_config(call, tmp_path):
    refused(call("generate", tmp_path / "absent.yaml"), "there is no config file")


def test_generate_refuses_an_unknown_architecture(call, config, tmp_path):
    odd = edited(tmp_path, "recall-target", lambda fields: fields.update(architectures=["OddForCausalLM"]))
    refused(call("generate", config, "--set", f"target.path={odd}"), "OddForCausalLM")


def test_generate_refuses_a_pair_that_does_not_fit(call, config):
    target = GOLDEN / "tiny-llama-rope3-tied"
    refused(
        call("generate", config, "--set", f"target.path={target}"), "(hidden_size|vocab_size) .* is not the target's"
    )


def test_generate_refuses_a_mask_token_outside_the_vocabulary(call, config, tmp_path):
    draft = edited(tmp_path, "recall-dflash2", lambda f: f["dflash_config"].update(mask_token_id=999))
    refused(call("generate", config, "--set", f"draft.path={draft}"), "mask_token_id 999 is outside")


def test_generate_refuses_a_checkpoint_without_its_weights(call, config, tmp_path):
    draft = edited(tmp_path, "recall-dflash2", lambda fields: None)
    (draft / "model.safetensors").unlink()
    refused(call("generate", config, "--set", f"draft.path={draft}"), "safetensors")


def test_inspect_tells_what_a_target_is(call):
    code, out, _ = call("inspect", GOLDEN / "recall-target", "--max-slots", "3", "--max-model-len", "160")
    assert code == 0
    for word in ("Qwen3ForCausalLM", "607,616", "4 full", "32.00 KiB for 16 tokens", "320.00 KiB in 10 pages"):
        assert word in out
    assert "drafts" not in out


def test_inspect_tells_a_drafts_options(call):
    code, out, _ = call("inspect", GOLDEN / "recall-dflash2-swa", "--k", "5")
    assert code == 0
    for word in ("3 window 24, not causal", "5 drafted", "rank 32, top 8", "1.5", "0.8", "20", "verifies 6 tokens"):
        assert word in out


def test_inspect_adds_up_a_pair(call):
    code, out, _ = call(
        "inspect", GOLDEN / "recall-target", "--draft", GOLDEN / "recall-dflash2-swa", "--dtype", "bfloat16"
    )
    assert code == 0
    # (4 + 3 layers) x 2 (K and V) x 16 tokens x 2 heads x 32 x 2 bytes.
    assert "28.00 KiB for 16 tokens" in out and "target and draft together" in out


def test_inspect_refuses_what_does_not_fit(call, tmp_path):
    refused(call("inspect", tmp_path / "absent"), "there is no checkpoint")
    target, draft = GOLDEN / "recall-target", GOLDEN / "recall-dflash2"
    refused(call("inspect", target, "--k", 3), "k is 3, but there is no draft")
    refused(call("inspect", draft, "--draft", target), "is a draft; give the target first")
    refused(call("inspect", target, "--draft", target), "is a target .*, not a draft")
    refused(call("inspect", GOLDEN / "tiny-llama-rope3-tied", "--draft", draft), "is not the target's")
    refused(call("inspect", target, "--page-size", 0), "'page_size' is 0")


def test_the_version_is_the_packages(call):
    code, out, _ = call("--version")
    assert (code, out) == (0, "dflash-jax 0.1.0\n")


def test_an_unknown_command_and_option_exit_with_2(call):
    assert call("generat")[0] == 2
    assert call("generate", "x.yaml", "--sett", "a=1")[0] == 2


def test_the_installed_command_refuses_like_the_function(tmp_path):
    command = [sys.executable, "-m", "dflash_jax", "generate", "absent.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert done.stderr == "dflash-jax: there is no config file 'absent.yaml'\n" and done.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        *(["generate"], ["train"], ["data", "generate"], ["data", "features"], ["bench", "ladder"]),
        ["generate", str(CONFIGS / "recall.yaml"), "--set", "engine.max_slot=1"],
        ["generate", str(CONFIGS / "recall.yaml"), "--set", "sampling.top_k=-1"],
        ["generate", str(CONFIGS / "train-recall.yaml")],
        ["generate", str(CONFIGS / "recall.yaml"), "--set", f"target.path={GOLDEN / 'recall-target'}"],
        *(
            ["generate", str(CONFIGS / "recall.yaml"), "--set", f"input.path={GOLDEN.parent / name}", *more]
            for name, more in {
                "golden/recall-dflash2.json": ["--set", "target.path=absent"],
                "golden": [],
                "conftest.py": ["--set", f"target.path={GOLDEN / 'recall-target'}", "--set", "draft.path=absent.gguf"],
                "golden/recall-target/config.json": ["--set", f"target.path={GOLDEN.parent}"],
            }.items()
        ),
        ["train", str(CONFIGS / "train-recall.yaml"), "--set", "draft.layers=1"],
        ["export", "absent.yaml", "somewhere"],
        ["inspect", str(GOLDEN / "recall-target"), "--page-size", "0"],
    ],
)
def test_a_bad_config_is_refused_before_jax_is_imported(arguments, tmp_path):
    arguments = arguments if len(arguments) > 2 or arguments[-1].endswith("yaml") else [*arguments, "absent.yaml"]
    program = f"""
import sys
from dflash_jax.cli import main
sys.argv = {["dflash-jax", *arguments]!r}
try:
    main()
except SystemExit as end:
    print(end.code, *sorted({{"jax", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "2\n", done.stderr


def test_a_file_that_cannot_be_written_is_one_sentence(call, tmp_path):
    values = {"target": str(GOLDEN / "recall-target"), "draft": {}, "data": {"path": "d"}, "optimiser": {"steps": 1}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**values, "output": "/dev/null/run"}))
    refused(call("train", tmp_path / "run.yaml"), r"/dev/null/run cannot be read or written \(Not a directory\)")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("arguments", [["--version"], ["inspect", str(GOLDEN / "recall-target")], ["generate"]])
def test_a_full_standard_output_is_named(config, arguments):
    arguments = [*arguments, str(config)] if arguments == ["generate"] else arguments
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "dflash_jax", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=CONFIGS.parent)
    said = "dflash-jax: the standard output cannot be read or written (No space left on device)\n"
    assert (done.returncode, done.stderr.splitlines(keepends=True)[-1]) == (2, said)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m dflash_jax inspect {GOLDEN / 'recall-target'} | true"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, cwd=CONFIGS.parent)
    assert done.stderr == ""


# Exit codes.


def test_a_job_of_which_no_line_was_answered_exits_with_3(call, config):
    (config.parent / "in.jsonl").write_text('not json\n{"id": "a"}\n')
    code, _, err = call("generate", config)
    assert code == 3 and err.endswith("dflash-jax: 2 of 2 lines could not be answered\n")
    # Nor is it all right the second time.
    assert call("generate", config)[0] == 3


def test_a_job_of_which_some_lines_were_answered_exits_with_3_if_it_is_asked_to(call, config):
    arguments = ("generate", config, "--set", "sampling.max_tokens=2")
    assert call(*arguments)[0] == 0
    code, _, err = call(*arguments, "--fail-on-error")
    assert code == 3 and err.endswith("dflash-jax: 1 of 2 lines could not be answered\n")
    (config.parent / "in.jsonl").write_text(json.dumps({"id": "a", "prompt_token_ids": CASE["prompt"]}))
    assert call(*arguments, "--fail-on-error")[0] == 0


def test_a_job_with_no_lines_exits_with_0(call, config):
    (config.parent / "in.jsonl").write_text("")
    assert call("generate", config, "--fail-on-error")[0] == 0


# What a command is for.

TRAINING = {"target": "t", "output": "o", "draft": {}, "data": {"path": "d"}, "optimiser": {"steps": 1}}
CORPUS = {"target": {"path": "t"}, "output": "o", "conversations": 3}


@pytest.mark.parametrize(
    ("values", "command", "says"),
    [
        (TRAINING, ["generate"], "is a training config .it has 'data'.; run it with `dflash-jax train`"),
        (TRAINING, ["bench", "ladder"], "is a training config .* `dflash-jax train`"),
        (TRAINING, ["data", "generate"], "is a training config .* `dflash-jax train`"),
        (CORPUS, ["generate"], "is a corpus config .* `dflash-jax data generate`"),
        (CORPUS, ["train"], "is a corpus config .* `dflash-jax data generate`"),
        (None, ["train"], "is a job config .* `dflash-jax generate`"),
        (None, ["data", "generate"], "is a job config .* `dflash-jax generate`"),
        (None, ["data", "features"], "is a job config .* `dflash-jax generate`"),
    ],
)
def test_a_config_given_to_another_command_is_told_its_own(call, config, tmp_path, values, command, says):
    path = config
    if values is not None:
        path = tmp_path / "other.yaml"
        path.write_text(yaml.safe_dump(values))
    refused(call(*command, path), says)


def test_a_slip_of_the_pen_does_not_make_a_config_another_commands(call, config, tmp_path):
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({**TRAINING, "inputt": 1}))
    refused(call("generate", tmp_path / "other.yaml"), "is a training config .it has 'data'.")
    refused(call("generate", config, "--set", "data=1"), "unknown key 'data'")
    refused(call("train", tmp_path / "other.yaml"), "unknown key 'inputt'")


# Looking without doing.


def test_a_dry_run_tells_what_would_be_run_and_writes_nothing(call, config):
    before = sorted(config.parent.iterdir())
    code, out, _ = call("generate", config, "--dry-run")
    assert code == 0
    for word in ("Qwen3ForCausalLM", "DFlash version", "1 lines to run, 0 answered already, 1 that cannot be run"):
        assert word in out
    assert "line 2: the line is not JSON" in out and "out.jsonl" in out
    assert sorted(config.parent.iterdir()) == before


def test_a_dry_run_knows_what_is_answered(call, config):
    row = {"id": "a", "finish_reason": "stop", "token_ids": [1]}
    (config.parent / "out.jsonl").write_text(json.dumps(row) + "\n")
    assert "0 lines to run, 1 answered already" in call("generate", config, "--dry-run")[1]
    assert "1 lines to run, 0 answered already" in call("generate", config, "--dry-run", "--overwrite")[1]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("input.path=absent", "there is no input file"),
        ("target.path=absent", "there is no checkpoint"),
        ("draft.k=0", "'draft.k' is 0"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(call, config, override, says):
    refused(call("generate", config, "--dry-run", "--set", override), says)


def test_a_dry_run_of_lines_that_are_all_bad_exits_with_3(call, config):
    (config.parent / "in.jsonl").write_text("not json\n")
    assert call("generate", config, "--dry-run")[0] == 3


# The package and the command.


def test_the_package_says_what_it_has():
    import dflash_jax

    assert {"Engine", "SamplingParams", "Completion", "ConfigError", "__version__"} <= set(dir(dflash_jax))
    assert all(hasattr(dflash_jax, name) for name in dir(dflash_jax))
    assert re.fullmatch(r"\d+\.\d+.*", dflash_jax.__version__)
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        dflash_jax.Engin  # noqa: B018


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "dflash_jax", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("dflash-jax 0.")


def test_a_shell_can_complete_commands():
    environment = {
        **os.environ,
        "_DFLASH_JAX_COMPLETE": "complete_bash",
        "COMP_WORDS": "dflash-jax gen",
        "COMP_CWORD": "1",
    }
    done = subprocess.run([sys.executable, "-m", "dflash_jax"], env=environment, capture_output=True, text=True)
    assert "generate" in done.stdout


def test_the_log_level_is_chosen(call, config, monkeypatch):
    levels = []
    monkeypatch.setattr("logging.basicConfig", lambda **options: levels.append(options["level"]))
    call("--log-level", "debug", "inspect", GOLDEN / "recall-target")
    call("inspect", GOLDEN / "recall-target")
    assert levels == ["DEBUG", "WARNING"]
    assert call("--log-level", "loud", "inspect", GOLDEN / "recall-target")[0] == 2


def test_an_option_that_is_not_given_leaves_the_default_to_what_it_is_for(call):
    from dflash_jax.engine import EngineConfig

    out = call("inspect", GOLDEN / "recall-target")[1]
    assert f"for {EngineConfig().max_model_len} tokens" in out


def test_an_answer_that_the_terminal_cannot_show_ends_no_job():
    """In another process: pytest's own standard output takes everything."""
    command = "from dflash_jax import cli; cli.app = lambda: print('\\xe9'); cli.main()"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\xe9\n", "")


def run_python(command, shell="", **environment):
    return subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" {shell}', sys.executable, command],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def test_closed_streams_are_no_files_of_the_job(tmp_path):
    """What a library prints would be in the output, or the end of the job a traceback."""
    work = f"open({str(tmp_path / 'out')!r}, 'w').write('x'), print('said'), [os.write(n, b'noise') for n in (1, 2)]"
    command = f"import os; from dflash_jax import cli; cli.app = lambda: ({work}); cli.main()"
    done = run_python(command, "<&- >&- 2>&-")
    assert done.returncode == 0 and (tmp_path / "out").read_text() == "x"


@pytest.mark.parametrize("arguments", [["generate", "-"], ["generate", "CONFIG", "--set", "input.path=-"]])
def test_a_closed_standard_input_cannot_be_read(config, arguments):
    arguments = ["dflash-jax", *(str(config) if word == "CONFIG" else word for word in arguments)]
    done = run_python(f"import sys; sys.argv = {arguments!r}; from dflash_jax import cli; cli.main()", "<&-")
    assert done.returncode == 2 and "cannot be read (the standard input is closed)" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("platform", ["nope", "cuda"])
def test_a_platform_that_jax_has_not_is_one_sentence(platform):
    command = "import jax; from dflash_jax import cli; cli.app = jax.default_backend; cli.main()"
    done = run_python(command, JAX_PLATFORMS=platform)
    if platform == "cuda" and done.returncode == 0:
        pytest.skip("this machine has one")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and last.startswith("dflash-jax: JAX has nothing to run on (")
    assert f"JAX_PLATFORMS is '{platform}', and must be empty or name what is there" in last
    assert "Traceback" not in done.stderr
