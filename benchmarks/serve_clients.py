"""Clients that talk to a `vox serve` of SmolLM2: openai's SDK, `llm`, LangChain's `ChatOpenAI`.

    vox serve smollm2-135m --dtype fp32
    python -m benchmarks.serve_clients URL

It runs in an environment with `openai`, `llm` and `langchain-openai`, and prints what each client
read: whole, streamed and with a schema (which needs the server's extra `grammar`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel

MODEL = "smollm2-135m"
HELLO, RED = "Say hello in one word.", "Describe the colour red."


class Colour(BaseModel):
    """A colour."""

    name: str
    warm: bool


def by_openai(url: str) -> None:
    """The Responses API, streamed and not; schemas at both endpoints; a refusal."""
    import openai

    client: Any = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    asked = {"model": MODEL, "instructions": "Be brief.", "temperature": 0}
    whole = client.responses.create(input=HELLO, **asked)
    text, kinds = "", []
    with client.responses.stream(input=HELLO, **asked) as stream:
        for event in stream:
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
        last = stream.get_final_response()
    print("openai responses.create:", whole.status, repr(whole.output_text))
    print("openai responses.stream:", kinds[0], "...", kinds[-1])
    print("joined stream = answer:", text == last.output_text == whole.output_text)
    parsed = client.responses.parse(input=RED, text_format=Colour, **asked)
    print("openai responses.parse:", parsed.output_parsed)
    messages = [{"role": "user", "content": RED}]
    chat = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Colour, temperature=0
    )
    print("openai chat.completions.parse:", repr(chat.choices[0].message.parsed))
    try:
        client.responses.create(input="x", previous_response_id="resp_1", **asked)
    except openai.BadRequestError as error:
        print("openai previous_response_id:", type(error).__name__, error.body)


def by_langchain(url: str) -> None:
    """`ChatOpenAI`: whole, streamed, with a schema."""
    from langchain_openai import ChatOpenAI

    options: Any = {"base_url": url, "api_key": "none", "model": MODEL, "temperature": 0}
    chat = ChatOpenAI(**options, max_tokens=60)
    whole = chat.invoke(HELLO)
    print("ChatOpenAI.invoke:", repr(whole.content), whole.response_metadata["finish_reason"])
    joined = "".join(str(chunk.content) for chunk in chat.stream(HELLO))
    print("joined stream = answer:", joined == whole.content)
    found = chat.with_structured_output(Colour, method="json_schema").invoke(RED)
    print("ChatOpenAI.with_structured_output:", repr(found))


def by_llm(url: str) -> None:
    """`llm` with extra-openai-models.yaml."""
    with tempfile.TemporaryDirectory() as folder:
        models = (
            f"- model_id: vox\n  model_name: {MODEL}\n  api_base: {url}\n  supports_schema: true\n"
        )
        Path(folder, "extra-openai-models.yaml").write_text(models)
        own = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        for options in ((HELLO,), ("--no-stream", HELLO), ("--schema", "name, warm bool", RED)):
            command = [sys.executable, "-m", "llm", "-m", "vox", "-o", "temperature", "0", *options]
            done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
            print("llm", *options[:-1], "->", repr((done.stdout or done.stderr).strip()))


if __name__ == "__main__":
    for client in (by_openai, by_langchain, by_llm):
        client(sys.argv[1])
