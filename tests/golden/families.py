# ruff: noqa: RUF001 (DeepSeek's special tokens have other bars)
"""The chat templates of the golden files, each with a tokenizer that has its special tokens.

The tokenizers are trained on the spot (SmolLM2's is the real one): what they make of ordinary text
does not matter here, only that special tokens are single ones and that others may merge across any
boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tests.core.tiny_tokenizer import Family, make_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = Path(__file__).parent
TEMPLATES = FOLDER / "templates"
RENDERED = FOLDER / "rendered"
REAL = "smollm2"


@dataclass(frozen=True)
class Golden:
    """A template's tokenizer, and what is to be known to read its golden files.

    Args:
        end: what closes an assistant's turn.
        around: what else the template writes into a turn, before the words or after them.
        text_arguments: it wants the arguments of calls as JSON text, and null as the content beside
            them, which `apply_chat_template` does not pass on.
    """

    specials: tuple[str, ...]
    eos: str
    bos: str | None
    end: str
    around: tuple[str, ...] = ()
    swallow: bool = False
    text_arguments: bool = False


_QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_DEEPSEEK = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)
_DEEPSEEK_AROUND = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
_THOUGHT = "<think>\n\n</think>\n\n"
_PHI4 = ("<|im_start|>", "<|im_sep|>", "<|im_end|>")

FAMILIES: dict[str, Golden] = {
    "smollm2": Golden(_QWEN, "<|im_end|>", None, "<|im_end|>"),
    "qwen2.5": Golden(_QWEN, "<|im_end|>", None, "<|im_end|>"),
    "qwen3": Golden(_QWEN, "<|im_end|>", None, "<|im_end|>", (_THOUGHT,)),
    "qwen3.5": Golden(_QWEN, "<|im_end|>", None, "<|im_end|>", ("\n</think>\n\n",)),
    "llama3.2": Golden(
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        "<|eot_id|>",
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "gemma3": Golden(("<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>", "<end_of_turn>"),
    "mistral-nemo": Golden(
        (
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        "</s>",
        "<s>",
        "</s>",
    ),
    "phi3": Golden(
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|endoftext|>",
        "<s>",
        "<|end|>",
        swallow=True,
    ),
    "phi4": Golden(_PHI4, "<|im_end|>", "<|endoftext|>", "<|im_end|>"),
    "deepseek-r1": Golden(
        _DEEPSEEK,
        _DEEPSEEK_AROUND[1],
        _DEEPSEEK_AROUND[0],
        _DEEPSEEK_AROUND[1],
        text_arguments=True,
    ),
    "deepseek-v3.1": Golden(
        _DEEPSEEK, _DEEPSEEK_AROUND[1], _DEEPSEEK_AROUND[0], _DEEPSEEK_AROUND[1]
    ),
    "chatml": Golden(_QWEN, "<|im_end|>", None, "<|im_end|>"),
    "zephyr": Golden((), "</s>", "<s>", "</s>"),
    "granite3.3": Golden(_GRANITE, "<|end_of_text|>", "<|end_of_text|>", "<|end_of_text|>"),
    "granite4": Golden(_GRANITE, "<|end_of_text|>", "<|end_of_text|>", "<|end_of_text|>"),
}


@cache
def tokenizer(name: str) -> PreTrainedTokenizerBase:
    """One object a process, so do not change it."""
    if name == REAL:
        from vox_core.data.tokenizer import load_tokenizer
        from vox_core.models import resolve

        return load_tokenizer(resolve("smollm2-135m").path)
    golden = FAMILIES[name]
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return make_tokenizer(
        Family(template, golden.specials, golden.eos, golden.bos, swallow=golden.swallow)
    )
