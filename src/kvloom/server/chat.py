"""Chat messages to the text that the model's own template makes of them."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateError, meta

from kvloom.core.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
# Replies of servers carry these; clients send them back with the history.
ECHOED_FIELDS = frozenset({"refusal", "annotations", "audio", "function_call", "reasoning"})


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Checked messages as templates expect them: text content, ``developer`` as ``system``.

    Raises:
        RequestError: no messages, an unknown role or field, or a part that is not text.
    """
    if not isinstance(messages, list):
        raise RequestError(f"messages is {reprlib.repr(messages)}; it must be a list", param="messages")
    if not messages:
        raise RequestError("messages is empty; send at least one message", param="messages")
    return [_read_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def _read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(
            f"{where} is {reprlib.repr(message)}; it must be an object with role and content", param=where
        )
    given = {key: value for key, value in message.items() if value is not None and key not in ECHOED_FIELDS}
    role = given.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{where}.role is {reprlib.repr(role)}; it must be one of {', '.join(ROLES)}", param=f"{where}.role"
        )
    unknown = sorted(set(given) - MESSAGE_FIELDS)
    if unknown:
        raise RequestError(
            f"unknown field {unknown[0][:64]!r} in {where}; known: {', '.join(sorted(MESSAGE_FIELDS))}",
            param=f"{where}.{unknown[0][:64]}",
            code="unknown_parameter",
        )
    calls = given.get("tool_calls")
    if calls is not None and (role != "assistant" or not _is_list_of_dicts(calls)):
        raise RequestError(
            f"{where}.tool_calls must be a list of calls in an assistant message", param=f"{where}.tool_calls"
        )
    if "content" not in given and not calls:
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    given["content"] = _read_content(given.get("content", ""), f"{where}.content")
    if role == "developer":
        given["role"] = "system"  # templates know no developer; OpenAI gives it the system prompt's place
    return given


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} is {reprlib.repr(content)}; it must be text or a list of parts", param=where)
    return "\n".join(_read_part(part, f"{where}.{index}") for index, part in enumerate(content))


def _read_part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"{where} is {reprlib.repr(part)}; it must be an object with type and text", param=where)
    kind = part.get("type")
    if kind != "text":
        raise RequestError(f"{where} is a part of type {reprlib.repr(kind)}; this model takes text only", param=where)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text is {reprlib.repr(text)}; it must be text", param=f"{where}.text")
    return text


def read_tools(tools: Any, tool_choice: Any) -> list[dict[str, Any]] | None:
    """The tools to show to the model: None without any, or with ``tool_choice`` "none".

    Raises:
        RequestError: malformed tools, or a choice that would have to be enforced.
    """
    if tool_choice not in (None, "none", "auto"):
        raise RequestError(
            f"tool_choice is {reprlib.repr(tool_choice)}; this server shows tools to the model but cannot force a "
            "call: use 'auto' or 'none', or constrain the answer with response_format",
            param="tool_choice",
        )
    if tools is None:
        return None
    if not _is_list_of_dicts(tools):
        raise RequestError("tools must be a list of objects", param="tools")
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise RequestError(
                f'tools.{index} must look like {{"type": "function", "function": {{"name": …}}}}',
                param=f"tools.{index}",
            )
    return tools if tools and tool_choice != "none" else None


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of ``messages`` by the tokenizer's chat template.

    Raises:
        RequestError: the model has no template, or its template does not take these messages.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise RequestError(
            "this model has no chat template, so it cannot chat; use /v1/completions with a prompt",
            param="messages",
            code="no_chat_template",
        )
    # Variables for the template, not switches of the function that renders it.
    reserved = sorted(
        {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} & set(template_kwargs or ())
    )
    if reserved:
        raise RequestError(
            f"chat_template_kwargs may not set {reserved[0]!r}", param=f"chat_template_kwargs.{reserved[0]}"
        )
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message needs add_generation_prompt false: the last message is continued or answered",
            param="continue_final_message",
        )
    if isinstance(template, str) and not knows_tools(template):
        _refuse_tools(messages, tools)
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **(template_kwargs or {}),
        )
    except TemplateError as error:
        raise RequestError(f"the model's chat template refuses these messages: {error}", param="messages") from error
    except Exception as error:
        # The template is the model author's program; whatever it trips over, it is over these messages.
        raise RequestError(
            f"the model's chat template fails on these messages: {type(error).__name__}: {error}", param="messages"
        ) from error
    return str(text)


def _refuse_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> None:
    if tools:
        raise RequestError(
            "this model's chat template has no place for tools; leave tools out or describe them in the prompt",
            param="tools",
            code="tools_not_supported",
        )
    for index, message in enumerate(messages):
        if message["role"] == "tool" or message.get("tool_calls"):
            raise RequestError(
                f"messages.{index} belongs to a tool call but this model's chat template knows no tools; "
                "send the result as a user message",
                param=f"messages.{index}",
                code="tools_not_supported",
            )


@functools.lru_cache(maxsize=16)
def knows_tools(template: str) -> bool:
    """Whether a chat template reads ``tools`` or speaks of the tool role."""
    if "'tool'" in template or '"tool"' in template:
        return True
    try:
        return "tools" in meta.find_undeclared_variables(Environment().parse(template))
    except TemplateError:  # extensions that transformers adds, such as {% generation %}
        return "tools" in template


def _is_list_of_dicts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
