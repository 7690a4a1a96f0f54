"""How models write tool calls and reasoning, by the name of vLLM's parser; written by hand."""

# ruff: noqa: RUF001

from __future__ import annotations

from support.tool_formats import ToolFormat, as_json, as_pairs, as_python, as_tags, as_text

HERMES = ToolFormat(
    as_json("<tool_call>\n@\n</tool_call>"), special="<tool_call> </tool_call> <think> </think>"
)
QWEN_XML = as_tags(
    "<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>",
    "<parameter=KEY>\nVALUE\n</parameter>\n",
)
GLM = as_tags(
    "<tool_call>NAME\nPARAMETERS</tool_call>",
    "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
)
GLM_TOKENS = (
    "<tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <think> </think>"
)
DSML_CALL = as_tags(
    '<｜DSML｜invoke name="NAME">\nPARAMETERS</｜DSML｜invoke>',
    '<｜DSML｜parameter name="KEY" string="STRING">VALUE</｜DSML｜parameter>\n',
)
DSML = ToolFormat(
    DSML_CALL,
    "<｜DSML｜tool_calls>\n",
    end="\n</｜DSML｜tool_calls>",
    special="｜DSML｜ <think> </think>",
    reasoning="deepseek_v4",
)
PYTHON = ToolFormat(as_python, "[", ", ", "]", after_text=False)
THINK = "<tool_call> </tool_call> <think> </think>"
DEEPSEEK = (
    "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜>"
    " <｜tool▁sep｜> <think> </think>"
)
KIMI = (
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_end|>"
    " <|tool_call_argument_begin|> <think> </think>"
)
HY = "<tool_calls> </tool_calls> <tool_sep> " + GLM_TOKENS
LLAMA = ToolFormat(
    as_json("@", "parameters"), between="; ", special="<|python_tag|>", after_text=False
)
M3 = "]<]minimax[>["
IFM = "<ifm|NAME> </ifm|NAME>"


FORMATS: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen3_json": HERMES,
    "longcat": ToolFormat(
        as_json("<longcat_tool_call>\n@\n</longcat_tool_call>"),
        special="<longcat_tool_call> </longcat_tool_call>",
    ),
    "llama3_json": LLAMA,
    "llama4_json": LLAMA,
    "granite-20b-fc": ToolFormat(as_json("<function_call> @"), special="<function_call>"),
    "granite": ToolFormat(as_json("@"), "<|tool_call|> [", ", ", "]", special="<|tool_call|>"),
    "granite4": ToolFormat(as_json("<tool_call>\n@\n</tool_call>"), special=THINK),
    "ernie45": ToolFormat(
        as_json("<tool_call>\n@\n</tool_call>\n"),
        special=THINK + " <response> </response> <0x0A>",
        reasoning="ernie45",
    ),
    "jamba": ToolFormat(
        as_json("@"),
        "<tool_calls>[\n    ",
        ",\n    ",
        "\n]</tool_calls>",
        special="<tool_calls> </tool_calls>",
    ),
    "hunyuan_a13b": ToolFormat(as_json("@"), "<tool_calls>[", ", ", "]</tool_calls>"),
    "internlm": ToolFormat(
        as_json("<|action_start|><|plugin|>\n@<|action_end|>", "parameters"),
        special="<|action_start|> <|plugin|> <|action_end|>",
        several=False,
    ),
    "xlam": ToolFormat(as_json("@"), "[", ", ", "]", after_text=False),
    "phi4_mini_json": ToolFormat(as_json("@"), "functools[", ", ", "]", after_text=False),
    "apertus": ToolFormat(
        as_text('{"NAME": JSON}'),
        "<|tools_prefix|>[",
        ", ",
        "]<|tools_suffix|>",
        special="<|tools_prefix|> <|tools_suffix|>",
    ),
    "gigachat3": ToolFormat(
        as_json("<|function_call|>@"),
        special="<|function_call|> <|message_sep|> <|role_sep|>",
        several=False,
    ),
    "mistral": ToolFormat(as_json("@"), "[TOOL_CALLS][", ", ", "]", special="[TOOL_CALLS]"),
    "deepseek_v3": ToolFormat(
        as_text(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>"
        ),
        "<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        special=DEEPSEEK,
        reasoning="deepseek_r1",
    ),
    "deepseek_v31": ToolFormat(
        as_text("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
        special=DEEPSEEK,
        reasoning="deepseek_v3",
    ),
    "deepseek_v32": ToolFormat(
        DSML_CALL,
        "<｜DSML｜function_calls>\n",
        end="\n</｜DSML｜function_calls>",
        special="｜DSML｜ <think> </think>",
    ),
    "deepseek_v4": DSML,
    "deepseek_v41": ToolFormat(
        as_tags(
            '<｜DSML｜ invoke name="NAME">\nPARAMETERS</｜DSML｜ invoke>',
            '<｜DSML｜ parameter name="KEY" string="STRING">VALUE</｜DSML｜ parameter>\n',
        ),
        "<｜DSML｜ calls>\n",
        end="\n</｜DSML｜ calls>",
        special="｜DSML｜ <think> </think>",
        reasoning="deepseek_v41",
    ),
    "qwen3_coder": ToolFormat(QWEN_XML, special=THINK, reasoning="qwen3"),
    "qwen3_xml": ToolFormat(QWEN_XML, special=THINK, reasoning="qwen3"),
    "mimo": ToolFormat(QWEN_XML, special=THINK, reasoning="mimo"),
    "step3p5": ToolFormat(QWEN_XML, special=THINK, reasoning="step3p5"),
    "seed_oss": ToolFormat(
        as_tags(
            "<seed:tool_call>\n<function=NAME>\nPARAMETERS</function>\n</seed:tool_call>",
            "<parameter=KEY>VALUE</parameter>\n",
        ),
        special="<seed:tool_call> </seed:tool_call> <seed:think> </seed:think>",
        reasoning="seed_oss",
    ),
    "glm45": ToolFormat(GLM, special=GLM_TOKENS, reasoning="glm45"),
    "glm47": ToolFormat(
        as_tags(
            "<tool_call>NAMEPARAMETERS</tool_call>",
            "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
        ),
        special=GLM_TOKENS,
        reasoning="glm47",
    ),
    "ling3": ToolFormat(GLM, special=GLM_TOKENS, reasoning="ling3"),
    "poolside_v1": ToolFormat(GLM, special=GLM_TOKENS + " <assistant>", reasoning="poolside_v1"),
    "hy_v3": ToolFormat(
        as_tags(
            "<tool_call>NAME<tool_sep>\nPARAMETERS</tool_call>",
            "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        ),
        "<tool_calls>\n",
        end="\n</tool_calls>",
        special=HY,
        reasoning="hy_v3",
    ),
    "hy_v4": ToolFormat(
        as_tags(
            "<tool_call>NAMEPARAMETERS</tool_call>",
            "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
        ),
        "<tool_calls>",
        "",
        "</tool_calls>",
        special=HY,
        reasoning="hy_v4",
    ),
    "kimi_k2": ToolFormat(
        as_text(
            "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>JSON<|tool_call_end|>"
        ),
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
        special=KIMI,
        reasoning="kimi_k2",
    ),
    "kimi_k3": ToolFormat(
        as_tags(
            '<|open|>call tool="NAME" index="1"<|sep|>PARAMETERS<|close|>call<|sep|>',
            '<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>',
        ),
        "<|open|>tools<|sep|>",
        "",
        "<|close|>tools<|sep|>",
        special="<|open|> <|close|> <|sep|>",
        reasoning="kimi_k3",
    ),
    "k2_horizon": ToolFormat(
        as_tags(
            "<ifm|tool_call>NAMEPARAMETERS</ifm|tool_call>",
            "<ifm|arg_key>KEY</ifm|arg_key><ifm|arg_value>VALUE</ifm|arg_value>",
        ),
        "<ifm|tool_calls>",
        "",
        "</ifm|tool_calls>",
        special=" ".join(
            IFM.replace("NAME", name)
            for name in (
                "tool_calls",
                "tool_call",
                "arg_key",
                "arg_type",
                "arg_value",
                "think",
                "think_fast",
                "think_faster",
            )
        ),
        reasoning="k2_horizon",
    ),
    "minimax_m2": ToolFormat(
        as_tags(
            '<invoke name="NAME">\nPARAMETERS</invoke>',
            '<parameter name="KEY">VALUE</parameter>\n',
        ),
        "<minimax:tool_call>\n",
        end="\n</minimax:tool_call>",
        special="<minimax:tool_call> </minimax:tool_call> <think> </think>",
        reasoning="minimax_m2",
    ),
    "minimax_m3": ToolFormat(
        as_tags(
            f'{M3}<invoke name="NAME">PARAMETERS{M3}</invoke>\n',
            f"{M3}<KEY>VALUE{M3}</KEY>",
        ),
        f"{M3}<tool_call>\n",
        "",
        f"{M3}</tool_call>",
        special=f"{M3} <tool_call> </tool_call> <mm:think> </mm:think>",
        reasoning="minimax_m3",
    ),
    "pythonic": PYTHON,
    "llama4_pythonic": PYTHON,
    "lfm2": ToolFormat(
        as_python,
        "<|tool_call_start|>[",
        ", ",
        "]<|tool_call_end|>",
        special="<|tool_call_start|> <|tool_call_end|>",
    ),
    "olmo3": ToolFormat(as_python, "<function_calls>", "\n", "</function_calls>", after_text=False),
    "functiongemma": ToolFormat(
        as_pairs(
            "<start_function_call>call:NAME{PAIRS}<end_function_call>", "<escape>", "<escape>"
        ),
        special="<start_function_call> <end_function_call> <escape>",
    ),
    "gemma4": ToolFormat(
        as_pairs("<|tool_call>call:NAME{PAIRS}<tool_call|>", '<|"|>', ""),
        special='<|tool_call> <tool_call|> <|"|> <|channel> <channel|> <|tool_response>',
        reasoning="gemma4",
    ),
    "step3": ToolFormat(
        as_tags(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">PARAMETERS'
            "</steptml:invoke><｜tool_call_end｜>",
            '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
        ),
        "<｜tool_calls_begin｜>",
        end="<｜tool_calls_end｜>",
        special="<｜tool_calls_begin｜> <｜tool_calls_end｜> <｜tool_call_begin｜>"
        " <｜tool_call_end｜> <｜tool_sep｜> <think> </think>",
        reasoning="step3",
    ),
    "dots": ToolFormat(
        as_tags(
            '<invoke name="NAME">\nPARAMETERS</invoke>',
            '<parameter name="KEY">VALUE</parameter>\n',
        ),
        "<dots_function_call>\n",
        end="\n</dots_function_call>",
        special="<dots_function_call> </dots_function_call>",
    ),
    "minicpm5": ToolFormat(
        as_tags('<function name="NAME">PARAMETERS</function>', '<param name="KEY">VALUE</param>')
    ),
    "muse_glimmer": ToolFormat(
        as_tags(
            '<|start|>assistant to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">'
            "\nPARAMETERS</atem:invoke>\n</atem:function_calls><|eom|>",
            '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
        ),
        between="",
        special="<|start|> <|message|> <|eom|> <|eot|>",
        after_text=False,
        reasoning="muse_glimmer",
    ),
    "plamo3": ToolFormat(
        as_text(
            "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>NAME"
            "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>"
            "json<|plamo:msg|>JSON<|plamo:end_tool_arguments:plamo|>"
            "<|plamo:end_tool_request:plamo|>"
        ),
        "<|plamo:begin_tool_requests:plamo|>",
        "",
        "<|plamo:end_tool_requests:plamo|><|plamo:tag|>",
        special="<|plamo:begin_ <|plamo:end_ :plamo|> <|plamo:constrain|> <|plamo:msg|>"
        " <|plamo:tag|>",
        reasoning="plamo3",
    ),
    "inkling": ToolFormat(
        as_json("<|message_model|><|content_invoke_tool_json|>@<|end_message|>", "args"),
        between="",
        special="<|message_model|> <|content_invoke_tool_json|> <|end_message|> <|content_text|>"
        " <|content_thinking|> <|content_model_end_sampling|>",
        after_text=False,
        reasoning="inkling",
    ),
}
