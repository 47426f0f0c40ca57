"""A small byte-level BPE tokenizer, trained on the spot, under the chat templates of real families.

The templates keep what matters for masks in those of the model families they are named after:
default system prompts, thinking that is stripped from earlier turns, prompts that open a thought,
refused roles, turns closed by different tokens or not at all. The corpus makes merges across the
boundaries between header and content likely ("\\n\\n", ": ", " a").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = (
    "the answer is a number, and the question is a word. How are you? I am well, thank you.\n\n"
    "user: hello there\nassistant: hello, how may I help?\n\n\nnothing, thank you\n system model "
    "<think>\n\n</think>\n\n ends <|im_end and <|im_start assistant user\n\n  indented\n"
    "\ttabs äöü 日本"
)

CHATML = """\
{% for message in messages %}\
{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM<|im_end|>\\n' }}\
{% endif %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_THINKING = """\
{%- set ns = namespace(last=messages|length - 1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') -%}
{%- set thought = '' -%}
{%- if '</think>' in message.content -%}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
{{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' -}}
{{- content + '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'PROMPT' -}}{%- endif -%}"""

QWEN3 = _THINKING.replace("PROMPT", "<|im_start|>assistant\\n")
QWEN3_OPEN = _THINKING.replace("PROMPT", "<|im_start|>assistant\\n<think>\\n")

GEMMA = """\
{{ bos_token }}\
{%- if messages[0]['role'] == 'system' -%}
{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
{%- set loop_messages = messages[1:] -%}
{%- else -%}
{%- set first_user_prefix = '' -%}
{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else '') }}\
{{ message['content'] | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

GEMMA_WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + GEMMA
)

LLAMA3 = """\
{{- bos_token }}{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
{{- message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}\
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""

ZEPHYR = """\
{% for message in messages %}\
{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

MISTRAL = """\
{{- bos_token }}{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set rest = messages -%}{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for message in rest -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in rest -%}
{%- if message.role == 'user' and system is defined and loop.index0 == ns.last -%}
{{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' -}}
{%- elif message.role == 'user' -%}{{- '[INST] ' + message.content + '[/INST]' -}}
{%- else -%}{{- ' ' + message.content + eos_token -}}{%- endif -%}
{%- endfor -%}"""

GENERATION = """\
{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\\n' }}\
{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The stretch ends in a space, which a tokenizer that trims its offsets attributes to no token.
GENERATION_SPACE = GENERATION.replace(
    "{% endgeneration %}{{ '<|im_end|>\\n' }}", "{{ '<|im_end|> ' }}{% endgeneration %}"
)

# gpt-oss: the last turn is closed by another token than those before it, as is a thought within it.
HARMONY = """\
{% for tool in tools or [] %}{{ tool['function']['description'] }}{% endfor %}\
{% for message in messages %}\
{{ '<|start|>' + message['role'] }}\
{% if message['thinking'] %}\
{{ '<|message|>' + message['thinking'] + '<|end|><|start|>assistant' }}\
{% endif %}\
{% for call in message['tool_calls'] or [] %}\
{{ '<|message|>' + call['function']['name'] }}\
{{ call['function']['arguments'] | tojson + '<|return|>' }}\
{% else %}\
{{ '<|message|>' + message['content'] }}\
{{ '<|return|>' if loop.last and message['role'] == 'assistant' else '<|end|>' }}\
{% endfor %}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

HARMONY_MARKED = """\
{% for message in messages %}\
{{ '<|start|>' + message['role'] }}\
{% generation %}\
{% if message['thinking'] %}\
{{ '<|message|>' + message['thinking'] + '<|end|><|start|>assistant' }}\
{% endif %}\
{% if message['role'] == 'assistant' %}{{ '<|message|>' + message['content'] }}\
{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}\
{% endgeneration %}\
{% if message['role'] != 'assistant' %}\
{{ '<|message|>' + message['content'] + '<|end|>' }}\
{% endif %}\
{% endfor %}"""

# Only the last turn is closed; each header is a single special token.
LAST_CLOSED = """\
{% for message in messages %}\
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '\\n' }}\
{% if loop.last and message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

NEVER_CLOSED = LAST_CLOSED.replace("{{ eos_token }}", "")

PHI3 = """\
{% for message in messages %}\
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

DATED = "{{ strftime_now('%d %b %Y') + '\\n' }}" + CHATML


@dataclass(frozen=True)
class Family:
    """A template, and the special tokens that it needs; `swallow`: they take the whitespace after
    them into themselves, as Phi-3's do."""

    template: str | None
    specials: tuple[str, ...]
    eos: str
    bos: str | None = None
    trim_offsets: bool = False
    adds_bos: bool = False
    swallow: bool = False


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_HARMONY = ("<|start|>", "<|message|>", "<|end|>", "<|return|>")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "</s>")

FAMILIES: dict[str, Family] = {
    "chatml": Family(CHATML, _IM, "<|im_end|>"),
    "qwen3": Family(QWEN3, _IM, "<|im_end|>"),
    "qwen3_open": Family(QWEN3_OPEN, _IM, "<|im_end|>"),
    "gemma": Family(GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>"),
    "gemma_without_system": Family(
        GEMMA_WITHOUT_SYSTEM, ("<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>"
    ),
    "llama3": Family(
        LLAMA3,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|end_of_text|>",
        "<|begin_of_text|>",
        trim_offsets=True,
        adds_bos=True,
    ),
    "zephyr": Family(ZEPHYR, (), "</s>", "<s>"),
    "mistral": Family(MISTRAL, (), "</s>", "<s>"),
    "generation": Family(GENERATION, _IM, "<|endoftext|>"),
    "generation_trimmed": Family(GENERATION_SPACE, _IM, "<|endoftext|>", trim_offsets=True),
    "harmony": Family(HARMONY, _HARMONY, "<|return|>"),
    "harmony_marked": Family(HARMONY_MARKED, _HARMONY, "<|return|>"),
    "last_closed": Family(LAST_CLOSED, _ROLES, "</s>"),
    "never_closed": Family(NEVER_CLOSED, _ROLES, "</s>"),
    "phi3": Family(PHI3, (*_ROLES, "<|end|>"), "<|endoftext|>", swallow=True),
    "dated": Family(DATED, _IM, "<|im_end|>"),
    "base": Family(None, (), "<|endoftext|>"),
    "base_with_bos": Family(None, (), "</s>", "<s>", adds_bos=True, trim_offsets=True),
}


@cache
def tiny_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family; one object a process, so do not change it."""
    return make_tokenizer(FAMILIES[name])


def make_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    names = dict.fromkeys(filter(None, (family.bos, family.eos, *family.specials)))
    specials = {
        name: AddedToken(name, rstrip=family.swallow, normalized=False, special=True)
        for name in names
    }
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator([CORPUS] * 3, _trainer(list(specials.values())))
    core.post_processor = _post_processor(core, family)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=family.bos,
        eos_token=family.eos,
        additional_special_tokens=[specials[name] for name in family.specials],
        chat_template=family.template,
    )


def _trainer(specials: list[AddedToken]) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def _post_processor(core: Tokenizer, family: Family) -> processors.PostProcessor:
    trim = processors.ByteLevel(trim_offsets=family.trim_offsets)
    if not family.adds_bos:
        return trim
    bos = processors.TemplateProcessing(
        single=f"{family.bos} $A", special_tokens=[(family.bos, core.token_to_id(family.bos))]
    )
    return processors.Sequence([trim, bos])
