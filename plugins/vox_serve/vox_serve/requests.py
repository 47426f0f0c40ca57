"""The bodies of requests, checked: pydantic models of OpenAI's fields.

A field that vox does not support is refused by its name unless its value changes nothing, such as
`"tools": []`. A field that is null is absent. Values are of the JSON type that OpenAI documents.
Beyond OpenAI's fields there are vLLM's `top_k`, `min_p` and `repetition_penalty`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from vox_core.api.files import JsonFault, is_deep, parse_json
from vox_core.api.generating import tool_calls, tool_schemas
from vox_core.api.rows import RowError, faulty
from vox_core.api.settings import did_you_mean
from vox_serve.grammar import Constraint, choice_grammar

MAX_BODY = 4 << 20
"""Bytes of a request's body."""
MAX_STOPS, MAX_STOP = 16, 256
MAX_PROMPTS = 128
MAX_TOOLS = 128
_SHOWN = 80

UNUSED = {
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "store", "user",
}  # fmt: skip
"""Fields that change no answer: they are about accounts and storage."""

_NEUTRAL: dict[str, Sequence[object]] = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
}
"""Fields that are not supported, with the values that change nothing."""

_SPOKEN_BY = {"tool_calls": "assistant", "tool_call_id": "tool", "name": "tool"}
"""Fields of messages, by the role that has them."""


class ApiError(Exception):
    """An answer with OpenAI's error body.

    Args:
        status: of HTTP.
        message: what is wrong, what was found, and how to correct it.
        param: the field at fault.
        code: as OpenAI has it, where it has one.
        retry_after: seconds until another attempt is worthwhile.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code, self.retry_after = param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        found = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": found}


def _fault(message: str) -> PydanticCustomError:
    """Return a fault whose message says what was found."""
    return PydanticCustomError("said", "{message}", {"message": message})


def _unsupported(name: str, how: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "is not supported{how}", {"name": name, "how": how})


def _text_of(content: object) -> object:
    """Join the parts of a message's content, all of which must be text."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise _fault(f"parts of type {_short(kind)} are not supported; send text")
        texts.append(text)
    return "".join(texts)


def _checked(read: Callable[[object], Any]) -> BeforeValidator:
    """Validate with one of the core's readers, whose values are lists of plain objects."""

    def validate(value: object) -> Any:
        try:
            return list(read(value))
        except RowError as error:
            raise _fault(str(error.faults[0])) from None

    return BeforeValidator(validate)


def _functions(value: object) -> list[dict[str, Any]]:
    for tool in value if isinstance(value, list) else ():
        kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
        if kind != "function":
            raise faulty("unsupported", ("tools",), f"the type {_short(kind)}", "function")
    tools = [dict(tool) for tool in tool_schemas(value)]
    for index, tool in enumerate(tools):
        if not isinstance(tool["function"].get("parameters") or {}, dict):
            place = ("tools", index, "parameters")
            raise faulty("wrong type", place, "another type", "a JSON schema")
    for name, count in Counter(tool["function"]["name"] for tool in tools).items():
        if count > 1 or not re.fullmatch(_NAME, name):
            raise faulty("wrong value", ("tools",), f"the name {_short(name)}", _NAMES)
    return tools


_NAME = r"[A-Za-z0-9_.:/-]{1,128}"
_NAMES = "a name once, of up to 128 letters, digits and _ . : / -"
_FunctionName: TypeAlias = Annotated[str, Field(pattern=f"^{_NAME}$")]
Tools: TypeAlias = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)]
ToolSchemas: TypeAlias = Annotated[Tools, _checked(_functions)]
_Calls: TypeAlias = Annotated[Tools, _checked(partial(tool_calls, place=()))]


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Strict(BaseModel):
    """A part of a body: values of the JSON type that is documented, and no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Lenient(Strict):
    """A part of a body that may also have fields which change nothing; a null field is absent.

    Attributes:
        neutral: fields that are not supported, with the values that change nothing.
        unused: fields that change nothing whatever their value.
    """

    neutral: ClassVar[Mapping[str, Sequence[object]]] = {}
    unused: ClassVar[Set[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        """Leave out fields that are null or change nothing; refuse others that are not known."""
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if value is None or name in cls.unused:
                continue
            if name in cls.model_fields:
                kept[name] = value
            elif value not in cls.neutral.get(name, ()):
                near = did_you_mean(name[:_SHOWN], cls.model_fields)
                what = near if near and name not in cls.neutral else "leave it out"
                raise _unsupported(_short(name), f"; {what}")
        return kept


class Message(Lenient):
    """A message of a conversation; the role `developer` is `system`, as templates name it."""

    neutral = {"annotations": ([],)}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_text_of)] = None
    tool_calls: _Calls = []
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _spoken_by_its_role(self) -> Message:
        for name, role in _SPOKEN_BY.items():
            if getattr(self, name) and self.role != role:
                raise _unsupported(name, f" in a message of the {self.role}")
        if self.content is None and self.role != "assistant":
            raise _fault(f"a message of the {self.role} needs content, which may be empty")
        return self

    @property
    def rendered(self) -> dict[str, Any]:
        """Arguments of the chat template."""
        role = "system" if self.role == "developer" else self.role
        beside = {name: value for name in _SPOKEN_BY if (value := getattr(self, name))}
        return {"role": role, "content": self.content or "", **beside}


class _Named(Strict):
    name: _FunctionName


class NamedChoice(Strict):
    """A function that the answer must call."""

    type: Literal["function"]
    function: _Named


class JsonSchema(Strict):
    """OpenAI's wrapper of a schema; answers always follow it, `strict` or not."""

    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    """`text`, `json_object` or `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise _fault("json_schema belongs to the type json_schema")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """Return the constraint of the answers."""
        if self.json_schema:
            return Constraint("response_format", "json", self.json_schema.schema_)
        json = Constraint("response_format", "json", {"type": "object"})
        return json if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """vLLM's field: one of these constraints."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> StructuredOutputs:
        given = self.model_dump(exclude_none=True)
        if len(given) != 1:
            raise _fault("send one of json, regex, choice and json_object")
        return self

    @property
    def constraint(self) -> Constraint:
        """Return the constraint of the answers."""
        if self.regex is not None:
            return Constraint("structured_outputs", "regex", self.regex)
        if self.choice is not None:
            return Constraint("structured_outputs", "lark", choice_grammar(self.choice))
        schema = {"type": "object"} if self.json_ is None else self.json_
        return Constraint("structured_outputs", "json", schema)


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Request(Lenient):
    """Fields of both endpoints."""

    neutral, unused = _NEUTRAL, UNUSED
    model: str
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[
        Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]
    ] = Field({}, max_length=1024)
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP)]],
        Field(max_length=MAX_STOPS),
        BeforeValidator(_one_or_many),
    ] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    structured_outputs: StructuredOutputs | None = None

    @property
    def constraint(self) -> Constraint | None:
        """Constraint of the answers; None if there is none."""
        return self.structured_outputs.constraint if self.structured_outputs else None

    @property
    def most(self) -> int | None:
        """The maximum of new tokens; None: that of the server."""
        return self.max_tokens


class ChatRequest(_Request):
    """The body of `/v1/chat/completions`."""

    prompted: ClassVar[str] = "messages"
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(gt=0)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tools: ToolSchemas = []
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat(type="text")

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.tool_choice not in ("none", "auto") and self.forced not in (None, *self.functions):
            raise _fault("tool_choice names none of the tools")
        if self.tool_choice == "required" and not self.tools:
            raise _fault('tool_choice "required" needs tools')
        if self.response_format.constraint and self.structured_outputs:
            raise _fault("send response_format or structured_outputs")
        if self.constraint and self.functions:
            raise _fault('a format of the answer beside tools is supported with tool_choice "none"')
        if self.top_logprobs and not self.logprobs:
            raise _fault("top_logprobs needs logprobs = true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise _fault("max_tokens and max_completion_tokens are the same; send one")
        return self

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def constraint(self) -> Constraint | None:
        return self.response_format.constraint or super().constraint

    @property
    def functions(self) -> dict[str, dict[str, Any]]:
        """The functions that may be called, by name."""
        tools = [] if self.tool_choice == "none" else self.tools
        return {tool["function"]["name"]: tool["function"] for tool in tools}

    @property
    def forced(self) -> str | None:
        """The name of the function that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None

    @property
    def top(self) -> int | None:
        """Number of alternatives with log-probabilities; None for no log-probabilities."""
        return self.top_logprobs if self.logprobs else None


_Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]


class CompletionRequest(_Request):
    """The body of `/v1/completions`."""

    prompted: ClassVar[str] = "prompt"
    prompt: (
        str
        | _Tokens
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[_Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)

    @property
    def top(self) -> int | None:
        return self.logprobs


class TokenizeRequest(Lenient):
    """The body of `/tokenize`, as vLLM has it, and of `/apply-template`.

    Args:
        model: None: the first one.
        add_special_tokens: of a prompt, those that the tokenizer sets around it.
    """

    neutral = {"continue_final_message": (False,)}
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: ToolSchemas = []
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise _fault("send either prompt or messages")
        if self.messages and self.add_special_tokens:
            raise _fault("add_special_tokens is for a prompt; a chat template writes its own")
        return self


R = TypeVar("R", bound=BaseModel)


def parse(kind: type[R], body: bytes) -> R:
    """Check a request's body.

    Raises:
        ApiError: 400, with the field at fault.
    """
    try:
        document = parse_json(body, unique=True)
    except JsonFault as fault:
        raise ApiError(400, f"the body is not JSON that can be read: {fault}") from None
    if is_deep(document):
        raise ApiError(400, "the body is nested too deeply")
    if not isinstance(document, dict):
        raise ApiError(400, "the body is not a JSON object")
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "a text of the body has half of a surrogate pair") from None
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise as_api_error(error) from None


def as_api_error(error: ValidationError) -> ApiError:
    """Describe the first fault."""
    fault = error.errors(include_url=False)[0]
    place = [part for part in fault["loc"] if isinstance(part, int) or part.isidentifier()]
    what, code = f": {fault['msg'].removeprefix('Input ')}", None
    if fault["type"] == "unsupported":
        place.append(fault["ctx"]["name"])
        what, code = f" {fault['msg']}", "unsupported_parameter"
    elif fault["type"] not in ("missing", "said"):
        what += f" (found {_short(fault['input'])})"
    if what_forms := _FORMS.get(str(place[0]) if place else ""):  # each form has a fault of its own
        place, what = place[:1], f": {what_forms} (found {_short(fault['input'])})"
    param = ".".join(map(_short, place)) or None
    return ApiError(400, f"{param or 'the request'}{what}", param=param, code=code)


_FORMS = {
    "input": "should be a text or a list of items",
    "prompt": "should be a text, token ids, or a list of texts or of token ids",
    "tool_choice": 'should be "none", "auto", "required" or a function by its name',
}


def _short(value: object) -> str:
    """Show a value in at most `_SHOWN` characters."""
    text = value if isinstance(value, str) and value.isidentifier() else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
