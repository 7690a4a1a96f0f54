"""`vllm-dflash demo`: what it refuses, runs and shows; its engines answer at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import DEMO
from support.instant_engines import Question, of, recording_processes
from vllm_dflash.checkpoint.refusal import missing_model_reason
from vllm_dflash.tools import cli
from vllm_dflash.tools.bench import bench_pair, sides
from vllm_dflash.tools.bench.sides import make_sides
from vllm_dflash.tools.demo import demonstration
from vllm_dflash.tools.demo.demonstration import PROMPT_SHOWN, Demonstration, Written, demonstrate
from vllm_dflash.tools.demo_files import INSTALLED
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.prompts import QUESTIONS, default_prompts, read_prompts

PAIR = ["--target", str(DEMO / "target"), "--drafter", str(DEMO / "drafter")]
SIDES = make_sides("drafter", [3])


def found(dtype: str = "float32", *, differs: bool = False) -> Demonstration:
    """Return speeds: with one text, 1.5 and 2 times plain decoding's; with 8, the same."""
    one = {
        "plain": Written([[1, 2], [3]], 20.0, None),
        "native K=3": Written([[1, 2], [3]], 30.0, 2.5),
        "ours": Written([[1, 2], [4 if differs else 3]], 40.0, 3.0),
    }
    eight = {name: Written([[1]], 100.0, None) for name in one}
    return Demonstration(SIDES, dtype, {1: one, 8: eight})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the demonstrations that are asked for."""
    calls: list[dict[str, Any]] = []

    def answer(engine: Any, sides: Any, prompts: Any, *others: Any) -> Demonstration:
        calls.append({**engine, "sides": sides, "prompts": prompts, "questions": others[-1]})
        engine["logs"].mkdir(parents=True)
        return found()

    monkeypatch.setattr(demonstration, "demonstrate", answer)
    return calls


def demo(tmp_path: Path, *arguments: str) -> int:
    return cli.main(["demo", "--out", str(tmp_path / "out"), *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "only"], "belong together"),
        (["--target", "./nowhere", "--drafter", PAIR[3]], "./nowhere"),
        ([*PAIR[:2], "--drafter", "./nowhere"], "./nowhere"),
        ([*PAIR, "--prompts", "nothing.txt"], "nothing.txt"),
    ],
)
def test_refused_in_one_line(
    tmp_path: Path,
    asked: list[Any],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert demo(tmp_path, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not asked


def test_outside_a_clone_the_installed_pair_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]]
) -> None:
    widened: list[Path] = []
    pair = bench_pair.Pair(PAIR[1], PAIR[3], "demo pair")
    monkeypatch.setattr(bench_pair, "widened_demo", lambda demo, _: widened.append(demo) or pair)
    monkeypatch.chdir(tmp_path)
    assert demo(tmp_path) == 0
    assert widened == [INSTALLED]
    assert (asked[0]["model"], asked[0]["dtype"]) == (PAIR[1], "float32")
    assert "--enforce-eager" in asked[0]["flags"]  # it starts sooner
    prompts, held_out = asked[0]["prompts"], default_prompts(str(DEMO / "target"))[0]
    assert len(held_out) > PROMPT_SHOWN
    assert prompts[0] == held_out[-PROMPT_SHOWN:]
    assert max(map(len, prompts)) == PROMPT_SHOWN
    long = tmp_path / "prompts.txt"
    long.write_text("p" * 300)
    assert demo(tmp_path / "other", "--prompts", str(long)) == 0
    assert asked[1]["prompts"] == ["p" * 300]


def test_the_pair_is_unpacked_to_where_the_documentation_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told = missing_model_reason("models/demo/target")
    assert told is not None
    assert "`vllm-dflash demo --unpack`" in told
    assert demo(tmp_path, "--unpack") == 0
    assert missing_model_reason("models/demo/target") is None
    weights = "drafter/model.safetensors"
    assert (Path("models/demo") / weights).read_bytes() == (DEMO / weights).read_bytes()
    assert "inspect models/demo/drafter --target models/demo/target" in capsys.readouterr().out
    assert demo(tmp_path, "--unpack") == 0  # and overwrites nothing
    assert "Nothing was copied" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_users_pair_brings_its_own_dtype_and_needs_no_prompts(
    tmp_path: Path, asked: list[Any]
) -> None:
    target = tmp_path / "target"
    target.symlink_to(DEMO / "target")
    assert demo(tmp_path, "--target", str(target), *PAIR[2:], "--", "--max-num-seqs=4") == 0
    (call,) = asked
    assert call["model"] == str(target)
    assert call.get("dtype") in (None, "float32")  # by the CPU: test_default_dtype.py
    assert call["flags"][-1] == "--max-num-seqs=4"  # after ours, so it holds
    assert "--enforce-eager" not in call["flags"]
    assert call["prompts"] == default_prompts(str(target))
    assert len(call["prompts"]) == 16
    assert call["questions"] == read_prompts(QUESTIONS)
    assert demo(tmp_path / "beside", *PAIR) == 0
    assert demo(tmp_path / "given", *PAIR, "--prompts", str(DEMO / "held_out.jsonl")) == 0
    # Text beside a target, or text that was asked for, is continued.
    assert [call["questions"] for call in asked[1:]] == [None, None]
    assert [side.name for side in call["sides"]] == ["plain", "ours"]


@pytest.mark.parametrize(
    ("dtype", "differs", "code"),
    [("float32", False, 0), ("float32", True, 1), ("bfloat16", True, 0)],
)
def test_only_float32_texts_must_be_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, differs: bool, code: int
) -> None:
    written = found(dtype, differs=differs)
    monkeypatch.setattr(demonstration, "demonstrate", lambda *arguments: written)
    assert demo(tmp_path, *PAIR) == code


def writing(template: dict[str, Any] | None) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Return answers of an engine that writes each text at once: its prompt's length, repeated.

    `template`: what all texts must be asked with; None: the target has no chat template.
    """
    steps: Iterator[list[str]] = iter(())

    def generate(asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["template"] == template
        counts = {"drafts": 5.0, "draft_tokens": 35.0, "accepted_tokens": 5.0}
        texts = [[len(prompt)] * asked["tokens"] for prompt in asked["prompts"]]
        return {"token_ids": texts, "tokens_per_second": 7.0, "counts": counts}

    def begin_text(asked: dict[str, Any]) -> None:
        nonlocal steps
        steps = iter([[asked["prompt"], str(asked["tokens"])], [str(asked["template"])]])

    return {
        "facts": lambda _: {"dtype": "float32", "has_chat_template": template is not None},
        "generate": generate,
        "begin_text": begin_text,
        "next_step": lambda _: next(steps, None),
    }


def demonstrated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[str],
    questions: list[str],
    template: dict[str, Any] | None,
) -> tuple[Demonstration, list[Question], list[Any]]:
    """Return the result, what engines were asked, and what was shown."""
    asked: list[Question] = []
    monkeypatch.setattr(sides, "EngineProcess", recording_processes(asked, writing(template)))
    told: list[Any] = []
    show = lambda prompt, steps: told.append((prompt, [*steps]))  # noqa: E731
    engine = {"model": "target", "logs": tmp_path}
    return demonstrate(engine, SIDES, prompts, 10, Progress(), show, questions), asked, told


def test_every_side_writes_the_same_texts_and_ours_starts_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["p" * length for length in range(1, 31)]
    one, asked, told = demonstrated(tmp_path, monkeypatch, prompts, ["a question"], None)
    started = {side: given for side, _, given in of(asked, "start")}
    names = [*started]
    assert names == ["ours", "plain", "native K=3"]
    assert [given["plugins"] for given in started.values()] == ["dflash", "", ""]
    configs = [given["arguments"]["speculative_config"] for given in started.values()]
    drafted = [config and config.get("num_speculative_tokens") for config in configs]
    assert drafted == [None, None, 3]
    passes = [
        (side, len(each["prompts"]), each["concurrency"]) for side, _, each in of(asked, "generate")
    ]
    sizes = [(1, 1), (4, 1), (8, 8), (24, 8)]
    assert passes == [(name, *size) for name in names for size in sizes]
    assert one.dtype == "float32"
    assert one.all_identical
    assert list(one.levels) == [1, 8]
    lengths = {name: written.acceptance_length for name, written in one.levels[8].items()}
    assert lengths == dict.fromkeys(names, 2.0)
    assert told == [("p", [["p", "10"], ["None"]]), ("pp", [["pp", "10"], ["None"]])]


def test_a_target_that_chats_is_asked_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [f"question {number}?" for number in range(24)]
    one, _, told = demonstrated(tmp_path, monkeypatch, ["p"], questions, {})
    assert told[0] == ("question 0?\n\n", [["question 0?", "10"], ["{}"]])
    assert {name: len(level["ours"].texts) for name, level in one.levels.items()} == {1: 4, 8: 24}
