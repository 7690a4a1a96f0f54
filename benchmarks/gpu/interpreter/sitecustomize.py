"""For every Python of a dry run: Model Runner V2 on a CPU, before anything imports vLLM."""

from support.interpreter import use_model_runner_v2

use_model_runner_v2()
