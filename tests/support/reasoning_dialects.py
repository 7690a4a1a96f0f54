"""What stands around a model's reasoning, by the name of vLLM's parser."""

from __future__ import annotations

from support.tool_dialects import FORMATS

REASONING = {
    "hermes": (
        "deepseek_r1",
        "granite",
        "granite_thinking_parser",
        "holo2",
        "minicpmv",
        "minimax_m2_append_think",
        "nemotron_v3",
        "qwen3",
    ),
    "hunyuan_a13b": ("hunyuan_a13b",),
    "mistral": ("mistral",),
} | {name: (one.reasoning,) for name, one in FORMATS.items() if one.reasoning}
"""Reasoning parsers to try, by a tool parser."""

MARKS = {
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "granite": ("Here is my thought process:", " Here is my response:"),
    "hunyuan_a13b": ("<think>\n", "\n</think>\n<answer>\n"),
    "inkling": ("<|message_model|><|content_thinking|>", "<|end_message|>"),
    "k2_horizon": ("<ifm|think>", "</ifm|think>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("<think>", "</think>"),
    "muse_glimmer": ("to=self<|message|>", "<|eom|>"),
    "plamo3": ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
"""What stands around reasoning, by its parser; <think> and </think> by the others."""
