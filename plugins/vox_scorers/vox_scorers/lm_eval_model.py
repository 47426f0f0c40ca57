"""A model of vox's as lm-eval takes one, with its answers in a file that continues it.

lm-eval requests all log-likelihoods of its tasks, then all generated texts. They are computed in
blocks of `BLOCK` requests, and a block is a line of the file, so that a continued evaluation has
the batches, and with them the roundoff, of an uninterrupted one.

Tokens are those of lm-eval's own model `hf`: context and continuation encoded together, with the
special tokens that the tokenizer adds, and contexts cut from the left.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from vox_core.api.commands import kept_if_stopped
from vox_core.api.files import append
from vox_core.api.generating import OpenModel, Question, Sampling
from vox_core.api.models import Observe
from vox_core.api.runs import continued
from vox_core.contract import Notice
from vox_core.errors import DataError
from vox_eval.evaluation import Document, log_probs

BLOCK = 256
"""Requests of a line."""
READS = 2048
"""Tokens of a model without a limit of its own."""
NEW_TOKENS = 256
"""Of a generated text, if its task does not say."""

Asked = TypeVar("Asked")
Pair = tuple[tuple[str, str], list[int], list[int]]


class VoxModel(TemplateLM):  # type: ignore[misc] # of a package without types
    """An `OpenModel` for lm-eval.

    Args:
        path: file of the answers.
        greedy: names of the tasks that need to know whether a continuation is the model's own.
    """

    def __init__(
        self, model: OpenModel, path: Path, greedy: frozenset[str], observe: Observe
    ) -> None:
        super().__init__()
        self._model, self._path, self._greedy, self._observe = model, path, greedy, observe
        self.tokenizer = model.tokenizer
        self._kept = continued(path, _parsed)

    @property
    def max_length(self) -> int:
        """Tokens that the model reads."""
        return self._model.positions or READS

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Encode a text; by default with the special tokens that the tokenizer adds."""
        special = add_special_tokens
        if special is None:
            special = not string.startswith(str(self.tokenizer.decode([self.prefix_token_id])))
        return list(self.tokenizer(string, add_special_tokens=special)["input_ids"])

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Return log p(continuation | context), and whether it is the greedy one."""
        pairs = [self._pair(*request.args) for request in requests]
        greedy = [request.task_name in self._greedy for request in requests]
        return self._loglikelihood_tokens(pairs, greedy)

    def _pair(self, context: str, continuation: str) -> Pair:
        """Encode as `TemplateLM.loglikelihood` does, which cannot pass on whose request it is."""
        if context:
            return (context, continuation), *self._encode_pair(context, continuation)
        tokens = self.tok_encode(continuation, add_special_tokens=False)
        if tokens[0] != self.prefix_token_id:
            tokens = [self.prefix_token_id, *tokens]
        return (context, continuation), tokens[:1], tokens[1:]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = True
    ) -> list[float]:
        """Return log p(text), in windows that overlap by a token."""
        windows, owners = list[Pair](), list[int]()
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                context, continuation = make_disjoint_window(window)
                windows.append(((text, ""), list(context), list(continuation)))
                owners.append(number)
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens(windows)
        for owner, (total, _) in zip(owners, found, strict=True):
            totals[owner] += total
        return totals

    def _loglikelihood_tokens(
        self, requests: list[Pair], greedy: Sequence[bool] = (), **_: Any
    ) -> list[tuple[float, bool]]:
        """Return log-likelihoods; `greedy`: of which to compare with the greedy continuation."""
        return self._blocks("log-probabilities", requests, partial(self._sums, greedy))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Return texts generated after contexts, up to their stop texts."""
        return self._blocks("texts", [request.args for request in requests], self._texts)

    # --- blocks -----------------------------------------------------------------------------------

    def _blocks(
        self,
        what: str,
        asked: Sequence[Asked],
        compute: Callable[[Sequence[Asked], int], list[Any]],
    ) -> list[Any]:
        """Return an answer to each request, from the file where it has them."""
        found = list[Any]()
        for start in range(0, len(asked), BLOCK):
            block = asked[start : start + BLOCK]
            content = json.dumps([what, start, block], sort_keys=True, default=str)
            name = hashlib.sha256(content.encode()).hexdigest()[:16]
            if name not in self._kept:
                with kept_if_stopped(f"{start}/{len(asked)} {what} are kept in {self._path}"):
                    answers = compute(block, start)
                line = json.dumps({"block": name, "answers": answers}, ensure_ascii=False)
                append(self._path, f"{line}\n".encode())
                self._kept[name] = answers
                self._observe(Notice(f"{len(found) + len(block)}/{len(asked)} {what}"))
            found += self._kept[name]
        return found

    def _sums(
        self, greedy: Sequence[bool], block: Sequence[Pair], start: int
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is greedy where that is
        wanted, which takes all logits of its positions."""
        most, found = self.max_length + 1, dict[int, tuple[float, bool]]()
        for (_, asked), _, continuation in block:
            self._require_room(asked, len(continuation))
        wanted = [at for at, want in enumerate(greedy[start : start + len(block)]) if want]
        pairs = [(block[at][1][-(most - len(block[at][2])) :], block[at][2]) for at in wanted]
        for at, (log_probs_, is_greedy) in zip(wanted, self._model.given(pairs), strict=True):
            found[at] = math.fsum(log_probs_), is_greedy
        others = [at for at in range(len(block)) if at not in found]
        documents = [
            Document(tokens := [*context, *continuation][-most:], len(tokens) - len(continuation))
            for _, context, continuation in (block[at] for at in others)
        ]
        for at, part in zip(others, log_probs(self._model, documents), strict=True):
            found[at] = float(part.sum(dtype="float64")), False
        return [found[at] for at in range(len(block))]

    def _require_room(self, asked: str, tokens: int) -> None:
        """Refuse a continuation without room for a token before it, as lm-eval's `hf` does."""
        if tokens > self.max_length:
            raise DataError(
                "D007",
                "a continuation of lm-eval is longer than the model can read",
                found=f"{tokens} tokens: {asked[:60]!r} …",
                expected=f"at most {self.max_length}",
                remedy="leave the task out, or choose a model with a longer context",
            )

    def _texts(self, block: Sequence[tuple[str, dict[str, Any]]], start: int) -> list[str]:
        questions = [self._question(*each, start + at) for at, each in enumerate(block)]
        texts = [""] * len(block)
        for at, reply in self._model.replies(questions):
            # As lm-eval decodes: whole, with what is no UTF-8 at the end.
            text = str(self.tokenizer.decode(list(reply.tokens), skip_special_tokens=True))
            ends = [found for stop in questions[at].stop if (found := text.find(stop)) >= 0]
            texts[at] = text[: min(ends, default=len(text))]
        return texts

    def _question(self, context: str, given: dict[str, Any], row: int) -> Question:
        until = given.get("until") or ()
        stop = [until] if isinstance(until, str) else list(until)
        new = int(given.get("max_gen_toks", given.get("max_new_tokens", NEW_TOKENS)))
        sampled = given.get("do_sample", float(given.get("temperature") or 0) > 0)
        sampling = Sampling(
            max_tokens=new,
            temperature=float(given.get("temperature", 1)) if sampled else 0.0,
            top_p=float(given.get("top_p", 1)),
            top_k=int(given.get("top_k", 0)),
            row=row,
        )
        tokens = self.tok_encode(context)[-max(1, self.max_length - new) :]
        return Question(tokens, sampling, [each for each in stop if each])


def _parsed(lines: Sequence[bytes]) -> dict[str, list[Any]]:
    found = map(json.loads, lines)
    return {line["block"]: line["answers"] for line in found}
