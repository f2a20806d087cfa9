"""Checked bodies to what the engine takes: sampling parameters, prompts, and their limits."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from kvloom.core.errors import ContextLengthError, RequestError
from kvloom.core.request import Grammar, GrammarKind, SamplingParams
from kvloom.server.protocol import ChatBody, CompletionBody, SamplingBody

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for plain completions
MAX_PROMPTS = 256
MAX_CHOICES = 1024
MAX_STOP_CHARS = 1024
MAX_PRIORITY = 2**31
MAX_TOP_K = 2**31 - 1  # beyond any vocabulary, within any tensor's index

Prompt = str | tuple[int, ...]


def chat_params(body: ChatBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of a chat request; without a limit it runs to the end of the context."""
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise RequestError(
            f"max_tokens is {body.max_tokens} but max_completion_tokens is {body.max_completion_tokens}; send one",
            param="max_completion_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs true", param="top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _params(body, defaults, max_tokens, (body.top_logprobs or 0) if body.logprobs else None)


def completion_params(body: CompletionBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of a plain completion. ``echo`` with ``logprobs`` scores the prompt too."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(
            f"best_of is {body.best_of} but n is {body.n or 1}; ranking more answers than are returned is not "
            "supported, leave best_of out",
            param="best_of",
        )
    return _params(body, defaults, body.max_tokens, body.logprobs)


def wants_prompt_logprobs(body: CompletionBody) -> bool:
    return body.echo and body.logprobs is not None


def _params(
    body: SamplingBody, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    # The model's own recommendations stand in only where the client said nothing, as in vLLM.
    temperature = defaults.get("temperature", 1.0) if body.temperature is None else body.temperature
    top_p = defaults.get("top_p", 1.0) if body.top_p is None else body.top_p
    top_k = defaults.get("top_k", 0) if body.top_k is None else body.top_k
    if not -MAX_PRIORITY <= body.priority <= MAX_PRIORITY:
        raise RequestError(
            f"priority is {body.priority}; it must be between -{MAX_PRIORITY} and {MAX_PRIORITY}", param="priority"
        )
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(
            f"max_tokens is {max_tokens}; it must be at least 1 (to score a prompt, use echo, logprobs and "
            "max_tokens 1)",
            param="max_tokens",
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream true", param="stream_options")
    prompt_logprobs = body.prompt_logprobs
    if isinstance(body, CompletionBody) and wants_prompt_logprobs(body):
        prompt_logprobs = max(prompt_logprobs or 0, logprobs or 0)
    return SamplingParams(
        n=1 if body.n is None else body.n,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=0 if top_k == -1 else min(int(top_k), MAX_TOP_K),  # vLLM's clients write -1 for off
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias),
        seed=body.seed,
        stop=_stop(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=_grammar(body),
        skip_special_tokens=body.skip_special_tokens,
    )


def _stop(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"stop is {reprlib.repr(stop)}; it must be text or a list of texts", param="stop")
    longest = max(map(len, texts), default=0)
    if longest > MAX_STOP_CHARS:
        raise RequestError(
            f"stop holds a text of {longest} characters; at most {MAX_STOP_CHARS} are allowed", param="stop"
        )
    return tuple(texts)


def _logit_bias(bias: Any) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, dict):
        raise RequestError(f"logit_bias is {reprlib.repr(bias)}; it must map token ids to numbers", param="logit_bias")
    ready: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise RequestError(f"logit_bias names {reprlib.repr(key)}; it must be a token id", param="logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(
                f"logit_bias of token {key} is {reprlib.repr(value)}; it must be a number", param="logit_bias"
            )
        ready[int(key)] = value
    return ready


def _grammar(body: SamplingBody) -> Grammar | None:
    """The one output constraint that the request names, however it names it."""
    found: list[tuple[str, Grammar]] = []
    if body.response_format is not None:
        grammar = _response_format(body.response_format)
        if grammar is not None:
            found.append(("response_format", grammar))
    if body.structured_outputs is not None:
        found.append(("structured_outputs", _structured_outputs(body.structured_outputs)))
    for name, kind in _GUIDED.items():
        value = getattr(body, name)
        if value is not None:
            found.append((name, _constraint(kind, value, name)))
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise RequestError(f"{names} each constrain the output; send one of them", param=found[1][0])
    return found[0][1] if found else None


_GUIDED: Mapping[str, GrammarKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "lark",
}
_STRUCTURED: Mapping[str, GrammarKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
}


def _response_format(value: Any) -> Grammar | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(kind="json_object")
    if kind == "json_schema":
        holder = value.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if not isinstance(schema, dict):
            raise RequestError(
                "response_format.json_schema.schema is missing; it must be a JSON schema",
                param="response_format.json_schema.schema",
            )
        return Grammar(kind="json_schema", text=json.dumps(schema))
    raise RequestError(
        f"response_format is {reprlib.repr(value)}; its type must be text, json_object or json_schema",
        param="response_format",
    )


def _structured_outputs(value: Any) -> Grammar:
    given = {k: v for k, v in value.items() if v not in (None, False)} if isinstance(value, dict) else {}
    if len(given) != 1 or not set(given) <= {*_STRUCTURED, "json_object"}:
        raise RequestError(
            f"structured_outputs is {reprlib.repr(value)}; it must hold exactly one of "
            f"{', '.join(_STRUCTURED)} or json_object",
            param="structured_outputs",
        )
    name, constraint = next(iter(given.items()))
    if name == "json_object":
        return Grammar(kind="json_object")
    return _constraint(_STRUCTURED[name], constraint, f"structured_outputs.{name}")


def _constraint(kind: GrammarKind, value: Any, param: str) -> Grammar:
    if kind == "json_schema" and isinstance(value, dict):
        return Grammar(kind=kind, text=json.dumps(value))
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
            raise RequestError(f"{param} must be a list of non-empty texts", param=param)
        return Grammar(kind=kind, text=json.dumps(value))
    if not isinstance(value, str) or not value:
        raise RequestError(f"{param} is {reprlib.repr(value)}; it must be non-empty text", param=param)
    return Grammar(kind=kind, text=value)


def read_prompts(prompt: Any) -> list[Prompt]:
    """The prompts of a completion: one text, token ids, or a list of either.

    Raises:
        RequestError: empty, mixed, of another type, or too many.
    """
    if isinstance(prompt, str):
        return [_text(prompt, "prompt")]
    if not isinstance(prompt, list):
        raise RequestError(
            f"prompt is {reprlib.repr(prompt)}; it must be text, token ids, or a list of either", param="prompt"
        )
    if not prompt:
        raise RequestError("prompt is empty; send at least one token", param="prompt")
    if _is_ids(prompt):
        return [tuple(prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed in one request", param="prompt"
        )
    if all(isinstance(item, str) for item in prompt):
        return [_text(item, f"prompt.{index}") for index, item in enumerate(prompt)]
    ready: list[Prompt] = []
    for index, item in enumerate(prompt):
        if not isinstance(item, list) or not _is_ids(item):
            raise RequestError(
                f"prompt.{index} is {reprlib.repr(item)}; a list must hold texts only, or lists of token ids only",
                param=f"prompt.{index}",
            )
        if not item:
            raise RequestError(f"prompt.{index} is empty; send at least one token", param=f"prompt.{index}")
        ready.append(tuple(item))
    return ready


def _text(text: str, param: str) -> str:
    if not text:
        raise RequestError(
            f"{param} is empty; send some text, or the beginning-of-text token if the model has one", param=param
        )
    return text


def _is_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)  # bool is an int too, and no token id


def check_choices(num_prompts: int, n: int) -> None:
    """Raise RequestError if one request would ask for too many answers."""
    if num_prompts * n > MAX_CHOICES:
        raise RequestError(
            f"{num_prompts} prompts with n {n} ask for {num_prompts * n} answers; at most {MAX_CHOICES} are allowed in "
            "one request",
            param="n",
        )


def check_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise RequestError unless every id is one of the model's tokens."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestError(
            f"{param} holds token id {reprlib.repr(bad)}; this model's ids run from 0 to {vocab_size - 1}", param=param
        )


def fit_to_context(
    prompt_tokens: int, max_tokens: int | None, max_model_len: int, *, default: int | None, param: str
) -> int | None:
    """``max_tokens`` for a prompt: as asked, else ``default`` shortened to what the context leaves.

    Raises:
        ContextLengthError: the prompt leaves no room, or not for the tokens asked for.
    """
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"the {param} has {prompt_tokens} tokens but this model's context holds {max_model_len}, and the answer "
            f"needs one at least; shorten it by {1 - room} tokens",
            param=param,
        )
    if max_tokens is None:
        return None if default is None else min(default, room)
    if max_tokens > room:
        raise ContextLengthError(
            f"the {param} has {prompt_tokens} tokens and max_tokens is {reprlib.repr(max_tokens)}, together more than "
            f"the context's {max_model_len}; lower max_tokens to {room} or shorten the {param}",
            param=param,
        )
    return max_tokens
