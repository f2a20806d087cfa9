"""What clients may send: OpenAI's request bodies with the extras of other engines, checked field by field.

Pydantic is used here only. Fields of several shapes (``prompt``, ``stop``, ``messages`` …) are
declared ``Any`` and read in ``convert`` and ``chat``, whose messages say what is wrong; a union
would answer with one complaint per alternative.

An unknown field is refused by name: a misspelt ``temprature`` must not be ignored. Fields that
cannot change an answer (``HARMLESS``) are accepted and ignored; known fields that this server does
not serve (``UNSUPPORTED``) are refused with the reason.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError

from kvloom.core.errors import RequestError

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",  # prefixes are found by content; the key would only route to a replica
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",  # speeds up, never changes
        "parallel_tool_calls",
    }
)

UNSUPPORTED: Mapping[str, str] = {
    "functions": "functions are replaced by tools; send tools",
    "function_call": "function_call is replaced by tool_choice; send tool_choice",
    "modalities": "this server writes text only; leave modalities out",
    "audio": "this server writes text only; leave audio out",
    "web_search_options": "this server does not search the web; leave web_search_options out",
    "reasoning_effort": "no served model has a reasoning setting; pass template switches in chat_template_kwargs",
    "verbosity": "verbosity is not supported; ask for it in the prompt",
    "suffix": "suffix (text after the completion) is not supported; leave it out",
    "use_beam_search": "beam search is not supported; use n with sampling",
    "length_penalty": "length_penalty belongs to beam search, which is not supported",
    "cache_salt": "the cache salt comes from the API key; one that clients choose would isolate nobody",
    "chat_template": "the chat template comes with the model; pass variables in chat_template_kwargs",
}

# Stop at the first bad element: describing each of a million would hold the event loop for seconds.
TokenIds = Annotated[list[int], FailFast()]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """``stream_options``: a last chunk with usage, or usage so far in every chunk."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # OpenAI pads chunks against eavesdroppers; accepted, no padding


class SamplingBody(_Body):
    """What chat and plain completions share."""

    n: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Any = None
    seed: int | None = None
    stop: Any = None
    response_format: Any = None

    # Extras beyond OpenAI's, as vLLM names them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    priority: int = 0
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Any = None
    guided_grammar: str | None = None


class ChatBody(SamplingBody):
    """``POST /v1/chat/completions``."""

    messages: Any
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(SamplingBody):
    """``POST /v1/completions``."""

    prompt: Any
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool = True


class TokenizeBody(_Body):
    """``POST /tokenize``: ``prompt``, or ``messages`` as chat would render them."""

    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(_Body):
    """``POST /detokenize``."""

    tokens: TokenIds
    skip_special_tokens: bool = False


Body = TypeVar("Body", bound=_Body)


def parse_body(model: type[Body], data: Mapping[str, Any]) -> Body:
    """``data`` as ``model``. A field that is null counts as left out, as OpenAI does.

    Raises:
        RequestError: an unknown or unsupported field, or a value of the wrong type; ``param`` names it.
    """
    given = {key: value for key, value in data.items() if value is not None and key not in HARMLESS}
    known = model.model_fields
    for key in given:
        if key in known:
            continue
        if key in UNSUPPORTED:
            raise RequestError(UNSUPPORTED[key], param=key, code="unsupported_parameter")
        key = key[:64]
        near = difflib.get_close_matches(key, list(known), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(sorted(known))}"
        raise RequestError(f"unknown field {key!r}; {hint}", param=key, code="unknown_parameter")
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _request_error(error) from error


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "body"
    if first["type"] == "missing":
        return RequestError(f"{where} is missing", param=where, code="missing_parameter")
    if first["type"] == "extra_forbidden":
        return RequestError(f"unknown field {where!r}", param=where, code="unknown_parameter")
    reason = first["msg"].removeprefix("Input ")
    return RequestError(f"{where} is {reprlib.repr(first['input'])}; it {reason}", param=where, code="invalid_type")
