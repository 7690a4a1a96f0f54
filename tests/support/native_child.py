"""Run vLLM's own DFlash on Model Runner V2 in its own process: tokens of every step, as JSON.

python -m support.native_child TARGET DRAFTER PROMPTS_JSON
"""

import json
import os
import sys

from support.interpreter import use_model_runner_v2

NEW_TOKENS = 32


def main() -> None:
    os.environ["VLLM_PLUGINS"] = ""
    use_model_runner_v2()
    from support.engines import engine, greedy
    from support.stepped_requests import tokens_by_step

    target, drafter, prompts = sys.argv[1:]
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": 7}
    with engine(model=target, speculative_config=speculative, max_num_seqs=8) as llm:
        params = greedy(NEW_TOKENS, ignore_eos=True)
        print(json.dumps(tokens_by_step(llm, json.loads(prompts), params)))


if __name__ == "__main__":
    main()
