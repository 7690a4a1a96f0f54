"""`vllm-dflash demo`: what it refuses, runs and shows; its servers answer at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind

from support import DEMO
from support.instant_server import InstantServer
from vllm_dflash.checkpoint.refusal import missing_model_reason
from vllm_dflash.tools import cli
from vllm_dflash.tools.bench import bench_pair, sides
from vllm_dflash.tools.bench.sides import Side, make_sides
from vllm_dflash.tools.demo import demonstration
from vllm_dflash.tools.demo.demo_server import StepCollector
from vllm_dflash.tools.demo.demonstration import (
    PROMPT_SHOWN,
    Demonstration,
    Step,
    Written,
    demonstrate,
    write_by_step,
)
from vllm_dflash.tools.demo_files import INSTALLED
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.prompts import QUESTIONS, default_prompts, read_prompts
from vllm_dflash.tools.server import Server

PAIR = ["--target", str(DEMO / "target"), "--drafter", str(DEMO / "drafter")]
SIDES = make_sides("drafter", [])


def found(dtype: str = "float32", *, differs: bool = False) -> Demonstration:
    """Return speeds: with one text, 1.5 and 2 times plain decoding's; with 8, the same."""
    one = {
        "plain": Written([[1, 2], [3]], 20.0, None),
        "ours": Written([[1, 2], [4 if differs else 3]], 40.0, 3.0),
    }
    eight = {name: Written([[1]], 100.0, None) for name in one}
    return Demonstration(dtype, {1: one, 8: eight})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the demonstrations that are asked for, and how they start plain decoding."""
    calls: list[dict[str, Any]] = []

    def answer(start: Any, sides: Any, prompts: Any, *others: Any) -> Demonstration:
        calls.append({"prompts": prompts, "questions": others[-1]})
        start(sides[0])
        return found()

    def started(log: Path, model: str, flags: list[str], **named: Any) -> None:
        calls[-1] |= {"model": model, "flags": flags}

    monkeypatch.setattr(demonstration, "demonstrate", answer)
    monkeypatch.setattr(sides, "Server", started)
    return calls


def demo(tmp_path: Path, *arguments: str) -> int:
    return cli.main(["demo", "--out", str(tmp_path / "out"), *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "only"], "belong together"),
        (["--target", "./nowhere", "--drafter", PAIR[3]], "./nowhere"),
        ([*PAIR[:2], "--drafter", "./nowhere"], "./nowhere"),
    ],
)
def test_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert demo(tmp_path, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_outside_a_clone_the_installed_pair_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]]
) -> None:
    widened: list[Path] = []
    pair = bench_pair.Pair(PAIR[1], PAIR[3], "demo pair")
    monkeypatch.setattr(bench_pair, "widened_demo", lambda demo, _: widened.append(demo) or pair)
    monkeypatch.chdir(tmp_path)
    assert demo(tmp_path) == 0
    assert widened == [INSTALLED]
    assert asked[0]["model"] == PAIR[1]
    assert asked[0]["flags"][-3:] == ["--enforce-eager", "--dtype", "float32"]
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
    flags = " ".join(call["flags"]).removesuffix(" --dtype float32")  # test_default_dtype.py
    assert flags.endswith("--max-num-seqs=4")  # after ours, so it holds
    assert "--enforce-eager" not in call["flags"]
    assert call["prompts"] == default_prompts(str(target))
    assert len(call["prompts"]) == 16
    assert call["questions"] == read_prompts(QUESTIONS)
    assert demo(tmp_path / "beside", *PAIR) == 0
    assert demo(tmp_path / "given", *PAIR, "--prompts", str(DEMO / "held_out.jsonl")) == 0
    # Text beside a target, or text that was asked for, is continued.
    assert [call["questions"] for call in asked[1:]] == [None, None]


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


def writing(*script: bytes, **facts: Any) -> InstantServer:
    known = {"dtype": "float32", "has_chat_template": False, "stop_tokens": [ord("h")]}
    return InstantServer(*script, **known | facts)


def demonstrated(
    prompts: list[str], questions: list[str], **facts: Any
) -> tuple[Demonstration, dict[str, InstantServer], list[Any]]:
    """Return the result, the servers by the names of their sides, and what was shown."""
    started: dict[str, InstantServer] = {}
    told: list[Any] = []

    def start(side: Side) -> Server:
        started[side.name] = writing(**facts)
        return started[side.name]

    def show(prompt: str, text: Iterator[Step]) -> None:
        told.append((prompt, [*text]))

    return demonstrate(start, SIDES, prompts, 6, Progress(), show, questions), started, told


def test_every_side_writes_the_same_texts_and_ours_starts_first() -> None:
    prompts = [chr(ord("a") + number) for number in range(30)]
    one, started, told = demonstrated(prompts, ["a question"])
    numbers = [(name, len(server.asked)) for name, server in started.items()]
    assert numbers == [("ours", 2 + 1 + 4 + 8 + 24), ("plain", 1 + 4 + 8 + 24)]
    assert {asked["max_tokens"] for asked in started["plain"].asked} == {6}
    assert one.dtype == "float32"
    assert one.all_identical
    assert list(one.levels) == [1, 8]
    lengths = {name: written.acceptance_length for name, written in one.levels[8].items()}
    assert lengths == dict.fromkeys(("ours", "plain"), 2.0)
    assert [prompt for prompt, _ in told] == ["a", "b"]


def test_few_prompts_repeat_until_eight_run_at_a_time() -> None:
    one, started, _ = demonstrated(["a"], [])
    assert len(started["plain"].asked) == 1 + 4 + 8 + 24
    assert len(one.levels[8]["ours"].texts) == 24


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        # Steps are whole, even beyond the last token that is asked for.
        (
            [b"b", b"cde", b"fgij", b"k"],
            [Step("", "b", 1), Step("cd", "e", 3), Step("fgi", "j", 4)],
        ),
        # A token that ends the text has no text.
        ([b"e", b"fgh", b""], [Step("", "e", 1), Step("fg", "", 3)]),
        # The last token of a character has its text.
        ([b"a\xc3", b"\xa4bc"], [Step("a", "", 2), Step("äb", "c", 3)]),
        ([b"\xc3\xa4"], [Step("", "ä", 2)]),
    ],
)
def test_steps_are_shown_as_they_come(script: list[bytes], shown: list[Step]) -> None:
    assert [*write_by_step(writing(*script), [ord("a")], 6)] == shown


def test_a_text_is_not_asked_beyond_the_context() -> None:
    server = writing(b"b", max_model_len=6)
    assert [*write_by_step(server, [ord("a")], 9)] == [Step("", "b", 1)]
    assert server.asked[0]["max_tokens"] == 5


def test_a_target_that_chats_is_asked_questions() -> None:
    questions = [f"question {number}?" for number in range(24)]
    one, started, told = demonstrated(["p"], questions, has_chat_template=True)
    assert told[0][0] == "question 0?\n\n"
    assert {name: len(level["ours"].texts) for name, level in one.levels.items()} == {1: 4, 8: 24}
    for each in started.values():
        prompts = {"".join(map(chr, asked["prompt"])) for asked in each.asked}
        assert prompts == {f"<{question}>" for question in questions}


def test_a_stream_has_one_message_for_each_step() -> None:
    """vLLM joins those that wait; an error overtakes them."""

    def step(number: int) -> Any:
        return SimpleNamespace(token_ids=[number])

    async def read() -> list[Any]:
        collector = StepCollector(RequestOutputKind.DELTA, "request")
        assert collector.get_nowait() is None
        for number in range(3):
            collector.put(step(number))
        outputs: list[Any] = [collector.get_nowait(), await collector.get(), await collector.get()]
        assert collector.get_nowait() is None
        collector.put(step(3))
        collector.put(ValueError("an error"))
        with pytest.raises(ValueError, match="an error"):
            await collector.get()
        return [token for output in outputs for token in output.token_ids]

    assert asyncio.run(read()) == [0, 1, 2]
