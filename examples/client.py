"""Ask a server started with examples/serve.sh, stream its answer, then show its counters."""

import argparse
import re

import openai


def main() -> None:
    """Ask, print the answer as it arrives, and read /metrics."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    question = "Write a Python function that counts the vowels in a string."
    parser.add_argument("question", nargs="?", default=question)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    is_local = "//127.0.0.1" in arguments.url or "//localhost" in arguments.url
    http = openai.DefaultHttpxClient(trust_env=not is_local)  # a proxy does not know this machine
    client = openai.OpenAI(base_url=f"{arguments.url}/v1", api_key="none", http_client=http)
    try:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": arguments.question}],
            max_tokens=arguments.tokens,
            temperature=0.0,
            stream=True,
        )
    except openai.APIConnectionError as error:
        raise SystemExit(f"no server at {arguments.url}: start examples/serve.sh first") from error
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    metrics = http.get(f"{arguments.url}/metrics").text
    print("\n")
    for name, value in re.findall(r"^vllm:spec_decode_(num_\w+_total)\{.*?\} (\S+)", metrics, re.M):
        if "per_pos" not in name:
            print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
