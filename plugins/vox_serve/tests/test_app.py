"""The endpoints over a tiny model: answers, streams, log-probabilities, batches, refusals."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from threading import current_thread

import numpy as np
import pytest

from vox_core.config import GenerateSettings, validate
from vox_core.contract import Batch
from vox_core.data.tokenizer import load_tokenizer
from vox_core.run.load import OpenModel

HI = [{"role": "user", "content": "Hi"}]
QUESTIONS = ["Hi", "How do I merge a run into its base?", "x", "Grüße", "Stop?", "1 + 1", "Why?"]


def chunks(response) -> list[dict]:
    """The events of a stream, which must end with [DONE]."""
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(each.removeprefix("data: ")) for each in events]


def content(found: list[dict], index: int = 0) -> str:
    """The joined text of one choice of a streamed chat."""
    choices = [choice for chunk in found for choice in chunk["choices"]]
    return "".join(c["delta"].get("content", "") for c in choices if c["index"] == index)


def test_models_are_the_adapters_and_their_base(client) -> None:
    found = client.get("/v1/models").json()
    assert [(each["id"], each["parent"]) for each in found["data"]] == [
        ("one", "base"),
        ("two", "base"),
        ("base", None),
    ]
    assert client.get("/v1/models/two").json() == found["data"][1]
    assert client.get("/v1/models/three").status_code == 404
    assert client.get("/health").json() == {"status": "ok"}


def test_a_chat_is_answered_in_openais_form(chat) -> None:
    body = chat("Hi").json()
    (choice,) = body["choices"]
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "one"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    prompt = len(rendered) - len("<|im_start|>") * 2 - len("<|im_end|>") + 3
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 12,
        "total_tokens": prompt + 12,
    }


def test_each_model_answers_as_its_adapter_does(chat, opened) -> None:
    """Greedy text from the definition: a token from the logits of all tokens before it."""
    for name, served in opened.models.items():
        tokens = served.render([{"role": "user", "content": "Hi"}])
        text = served.text(())
        for _ in range(12):
            logits_TV = opened.base.model.logits(np.array(tokens), served.adapter)
            tokens.append(int(logits_TV[-1].argmax()))
            text.add(tokens[-1])
        said = chat("Hi", name).json()["choices"][0]["message"]["content"]
        assert said == text.take(everything=True), name


def test_answers_are_the_same_alone_together_and_in_any_order(chat) -> None:
    asked = [(text, model) for text in QUESTIONS for model in ("one", "two", "base")]

    def said(pair) -> str:
        return chat(*pair).json()["choices"][0]["message"]["content"]

    alone = [said(pair) for pair in asked]
    assert len(set(alone)) > len(QUESTIONS), "the adapters answer differently"
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(said, asked)) == alone
        assert list(pool.map(said, asked[::-1])) == alone[::-1]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1, "seed": 3, "n": 3},
        {"stop": ["e", "\n"], "temperature": 1.5, "seed": 1, "max_tokens": 60},
        {"logprobs": True, "top_logprobs": 2},
    ],
    ids=str,
)
def test_a_stream_joined_is_the_answer_that_is_not_streamed(chat, fields) -> None:
    whole = chat("Why?", **fields).json()
    found = chunks(chat("Why?", stream=True, stream_options={"include_usage": True}, **fields))
    assert found[-1]["usage"] == whole["usage"]
    assert found[-1]["choices"] == []
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        assert content(found, choice["index"]) == choice["message"]["content"]
        own = [c for chunk in found for c in chunk["choices"] if c["index"] == choice["index"]]
        assert own[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        if choice["logprobs"]:
            parts = [c["logprobs"]["content"] for c in own if c["logprobs"]]
            assert [*chain(*parts)] == choice["logprobs"]["content"]


def test_a_stop_text_ends_the_answer_before_it(chat) -> None:
    fields = {"temperature": 1.5, "seed": 5, "max_tokens": 60}
    whole = chat("Hi", **fields).json()["choices"][0]["message"]["content"]
    stop = whole[20:22]
    (choice,) = chat("Hi", stop=stop, **fields).json()["choices"]
    assert choice["message"]["content"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_seed_and_choice_decide_what_is_sampled(chat) -> None:
    def said(**fields) -> list[str]:
        choices = chat("Hi", temperature=1, n=2, **fields).json()["choices"]
        return [choice["message"]["content"] for choice in choices]

    assert said(seed=1) == said(seed=1)
    assert len({*said(seed=1), *said(seed=-1), *said()}) == 6


def test_a_sampled_answer_is_that_of_vox_generate(chat, opened, folders) -> None:
    """`OpenModel` is what `vox generate` answers with."""
    settings = {"temperature": 0.9, "top_p": 0.8, "seed": 4, "max_tokens": 30}
    tokenizer = load_tokenizer(folders / "base")
    generating = OpenModel(
        "two",
        opened.base.generator,
        tokenizer,
        validate(GenerateSettings, settings),
        adapter="two",
    )
    said = chat("Why?", "two", **settings).json()["choices"][0]["message"]["content"]
    assert said == "".join(generating.reply([{"role": "user", "content": "Why?"}]))


def test_log_probs_are_those_of_the_model(chat, opened) -> None:
    """Of a sampled answer, and with penalties, which do not change them."""
    served = opened.models["one"]
    ascii_only = {served.decode(token): token for token in range(256)}
    del ascii_only["\ufffd"]
    others = {str(token): -100 for token in range(260) if token not in ascii_only.values()}
    fields = {"temperature": 1, "seed": 2, "frequency_penalty": 1, "logit_bias": others}
    body = chat("Hi", logprobs=True, top_logprobs=3, max_tokens=20, **fields).json()
    entries = body["choices"][0]["logprobs"]["content"]
    prompt = served.render([{"role": "user", "content": "Hi"}])
    answer = [ascii_only[entry["token"]] for entry in entries]
    tokens_T = np.array([*prompt, *answer])
    scored_T = np.arange(len(tokens_T)) < len(tokens_T) - 1
    batch = Batch(
        tokens_T,
        np.roll(tokens_T, -1),
        np.zeros(len(tokens_T), np.float32),
        np.zeros(1, np.int64),
        scored_T,
    )
    exact_T = opened.base.model.log_probs(batch, "one")[len(prompt) - 1 : -1]
    assert len(answer) == 20
    assert [e["logprob"] for e in entries] == pytest.approx(exact_T.tolist(), abs=1e-4)
    for entry in entries:
        found = [each["logprob"] for each in entry["top_logprobs"]]
        assert len(found) == 3
        assert found == sorted(found, reverse=True)
        assert entry["logprob"] <= found[0]


def test_penalties_bias_and_filters_reach_sampling(chat) -> None:
    body = chat("Hi", logit_bias={"65": 100}).json()
    assert body["choices"][0]["message"]["content"] == "a" * 12 or "A" * 12
    plain = chat("Hi", max_tokens=40).json()["choices"][0]["message"]["content"]
    for fields in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 1.5}):
        other = chat("Hi", max_tokens=40, **fields).json()["choices"][0]["message"]["content"]
        assert other != plain, fields
    for fields in ({"top_k": 1}, {"min_p": 1}, {"top_p": 1e-9}):
        same = chat("Hi", max_tokens=40, temperature=2, seed=1, **fields).json()
        assert same["choices"][0]["message"]["content"] == plain, fields


def test_completions_take_texts_and_tokens(client, opened) -> None:
    def said(**fields):
        body = {"model": "two", "temperature": 0, "max_tokens": 8, **fields}
        return client.post("/v1/completions", json=body).json()

    one, other = said(prompt="def f"), said(prompt="x")
    together = said(prompt=["def f", "x"])
    assert [c["text"] for c in together["choices"]] == [
        one["choices"][0]["text"],
        other["choices"][0]["text"],
    ]
    assert together["usage"]["prompt_tokens"] == 6
    tokens = opened.models["two"].encode("def f")
    assert said(prompt=tokens)["choices"][0]["text"] == one["choices"][0]["text"]
    assert said(prompt=[tokens])["choices"][0]["text"] == one["choices"][0]["text"]
    logprobs = said(prompt="def f", logprobs=2)["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 8
    chosen = zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    assert all(token in top for token, top in chosen)
    assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:n])) for n in range(8)]
    body = {"model": "two", "temperature": 0, "max_tokens": 8, "prompt": "def f", "stream": True}
    found = chunks(client.post("/v1/completions", json=body))
    assert "".join(c["choices"][0]["text"] for c in found) == one["choices"][0]["text"]


def test_texts_and_conversations_as_tokens(client, opened) -> None:
    """As vLLM's `/tokenize` takes and returns them, and llama.cpp's `/apply-template`."""

    def posted(path: str, **fields):
        return client.post(path, json=fields).json()

    served = opened.models["one"]
    found = posted("/tokenize", model="two", prompt="def f", return_token_strs=True)
    assert found == {
        "count": 5,
        "max_model_len": 512,
        "tokens": served.encode("def f"),
        "token_strs": ["d", "e", "f", " ", "f"],
    }
    assert posted("/tokenize", prompt="")["tokens"] == []
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert posted("/apply-template", messages=HI) == {
        "prompt": rendered,
        "tokens": served.render(HI),
    }
    assert posted("/tokenize", messages=HI)["tokens"] == served.render(HI)
    shorter = posted("/apply-template", messages=HI, add_generation_prompt=False)["prompt"]
    assert shorter == rendered.removesuffix("<|im_start|>assistant\n")


def test_texts_of_tokens_are_not_decoded_on_the_event_loop(client, opened, monkeypatch) -> None:
    names, own = [], opened.models["one"].decode

    def decode(token: int) -> str:
        names.append(current_thread().name)
        return own(token)

    monkeypatch.setattr(opened.models["one"], "decode", decode)
    body = {"model": "one", "prompt": "def", "return_token_strs": True}
    assert client.post("/tokenize", json=body).json()["token_strs"] == ["d", "e", "f"]
    assert all(name.startswith("AnyIO worker") for name in names)


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/tokenize", {}, "send either prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "send either prompt or messages"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "for a prompt"),
        ("/tokenize", {"content": "x"}, "content is not supported"),
        ("/apply-template", {"prompt": "x"}, "messages: Field required"),
        ("/apply-template", {"messages": HI, "tools": [{"name": "f"}]}, "does not write the tools"),
        ("/apply-template", {"messages": HI, "tools": [{"name": 1}]}, "as tools[0].name"),
    ],
)
def test_what_cannot_be_rendered_is_refused(client, path, fields, says) -> None:
    response = client.post(path, json=fields)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


def test_max_tokens_is_bounded_by_the_server_and_the_context(chat, opened) -> None:
    (choice,) = chat("Hi", max_tokens=None, max_completion_tokens=5).json()["choices"]
    assert choice["finish_reason"] == "length"
    default = chat("Hi", max_tokens=None).json()
    assert default["usage"]["completion_tokens"] == 64
    with opened.client(positions=40) as small:
        messages = [{"role": "user", "content": "Hi"}]
        body = {"model": "one", "messages": messages, "temperature": 0, "max_tokens": 64}
        counts = small.post("/v1/chat/completions", json=body).json()["usage"]
        assert counts["total_tokens"] == 40


# --- refusals -------------------------------------------------------------------------------------

IMAGE = [{"type": "image_url", "image_url": {"url": "data:,"}}]
REFUSED = [
    ({"model": "three"}, 404, "model", "one, two, base"),
    ({"model": None}, 400, "model", "required"),
    ({"messages": []}, 400, "messages", "at least 1"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role", "robot"),
    ({"messages": [{"role": "user", "content": IMAGE}]}, 400, "messages.0.content", "image_url"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, None, "surrogate"),
    ({"messages": [{**HI[0], "tool_call_id": "1"}]}, 400, "messages.0.tool_call_id", "of the user"),
    ({"messages": [{**HI[0], "tool_calls": [{}]}]}, 400, "messages.0.tool_calls", "found null"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "messages", "reads 512"),
    ({"functions": [{"name": "f"}]}, 400, "functions", "functions is not supported; leave it out"),
    ({"temprature": 1}, 400, "temprature", "did you mean temperature?"),
    ({"temperature": -1}, 400, "temperature", "greater than or equal to 0"),
    ({"temperature": "1"}, 400, "temperature", "valid number"),
    ({"max_tokens": 0}, 400, "max_tokens", "greater than 0"),
    ({"max_tokens": 10**30}, 400, "max_tokens", "max_tokens"),
    ({"max_tokens": 65}, 400, "max_tokens", "allows 64"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, None, "send one"),
    ({"n": 5}, 400, "n", "4 at once"),
    ({"stop": [""]}, 400, "stop.0", "at least 1"),
    ({"top_logprobs": 3}, 400, None, "needs logprobs"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias.x", "pattern"),
    ({"logit_bias": {"9999": 1}}, 400, "logit_bias", "vocabulary of 260"),
    ({"seed": 2**70}, 400, "seed", "less than"),
    ({"stream": "yes"}, 400, "stream", "valid boolean"),
    ({"stream_options": {"x": 1}}, 400, "stream_options.x", "not permitted"),
]


@pytest.mark.parametrize(("fields", "status", "param", "says"), REFUSED, ids=lambda x: str(x)[:60])
def test_what_cannot_be_done_is_refused_by_name(client, fields, status, param, says) -> None:
    body = {"model": "one", "messages": HI, **fields}
    data = json.dumps(body).encode()
    response = client.post(
        "/v1/chat/completions", content=data, headers={"content-type": "application/json"}
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("data", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b'{"model": "one", "model": "two"}', "application/json", 400),
        (b"[]", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "application/json", 400),
        (b"{}", "text/plain", 415),
        (b" " * ((4 << 20) + 1), "application/json; charset=utf-8", 413),
    ],
    ids=["cut", "twice", "list", "bytes", "deep", "nested", "type", "large"],
)
def test_a_body_that_cannot_be_read_is_refused(client, data, kind, status) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = client.post(path, content=data, headers={"content-type": kind})
        assert response.status_code == status, response.text
        message = response.json()["error"]["message"]
        assert ("nested too deeply" in message) == (data[:5] in (b'{"a":', b"[[[[["))


@pytest.mark.parametrize(
    "prompt", [5, [], [[]], ["x", 1], [[1], "x"], [-1], [9999], "", {}], ids=str
)
def test_a_prompt_of_another_form_is_refused(client, prompt) -> None:
    response = client.post("/v1/completions", json={"model": "base", "prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


def test_neutral_values_of_unsupported_fields_are_accepted(chat) -> None:
    fields = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    assert chat("Hi", user="me", store=False, function_call=None, **fields).status_code == 200
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    said = chat("", messages=[{"role": "user", "content": parts, "name": None}]).json()
    assert said["choices"] == chat("Hi").json()["choices"]


def test_unknown_routes_and_methods_have_openais_error(client) -> None:
    for response, status in (
        (client.get("/v1/embeddings"), 404),
        (client.get("/v1/completions"), 405),
    ):
        assert response.status_code == status
        assert "/v1/chat/completions" in response.json()["error"]["message"]


def test_a_key_is_required_where_there_is_one(opened) -> None:
    key = "correct horse battery"
    with opened.client(key=key) as guarded:
        for given in (None, "Bearer", "Bearer wrong", f"Basic {key}", "Bearer é".encode("latin-1")):
            headers = {"authorization": given} if given else {}
            response = guarded.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert key not in response.text
        headers = {"authorization": f"Bearer {key}", "host": "far.example"}
        assert guarded.get("/v1/models", headers=headers).status_code == 200
        assert guarded.get("/health").status_code == 200
        assert guarded.get("/metrics").status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil", ""])
def test_without_a_key_only_loopback_names_are_answered(client, host) -> None:
    assert client.get("/health", headers={"host": host}).status_code == 403
    for good in ("localhost:8000", "127.0.0.1", "[::1]:8000", "[::1]", "LOCALHOST"):
        assert client.get("/health", headers={"host": good}).status_code == 200


def test_no_answer_has_a_path_of_the_machine(client, chat, folders) -> None:
    answers = [client.get("/v1/models"), client.get("/metrics"), chat("Hi"), chat("Hi", "x")]
    assert not [each for each in answers if str(folders) in each.text]


def test_metrics_count_requests_and_tokens(opened) -> None:
    with opened.client() as counted:
        body = {"model": "base", "prompt": "abc", "max_tokens": 4, "temperature": 0}
        assert counted.post("/v1/completions", json=body).status_code == 200
        assert counted.post("/v1/completions", json={}).status_code == 400
        lines = counted.get("/metrics").text.splitlines()
    for line in (
        "vox_answers_running 0",
        "vox_answers_waiting 0",
        "# TYPE vox_requests_total counter",
        'vox_requests_total{status="200"} 1',
        'vox_requests_total{status="400"} 1',
        "vox_prompt_tokens_total 3",
        "vox_completion_tokens_total 4",
    ):
        assert line in lines


def test_mlx_answers_as_the_cpu_does(chat, opened_on) -> None:
    """Greedy, in float32, over both adapters and the base."""
    pytest.importorskip("mlx.core")
    mlx = opened_on("mlx").client()
    for model in ("one", "two", "base"):
        body = {"model": model, "messages": HI, "temperature": 0, "max_tokens": 12}
        said = mlx.post("/v1/chat/completions", json=body).json()
        assert said["choices"] == chat("Hi", model).json()["choices"]
