"""JSON as the server writes and reads it: one place that no text can turn into a failure."""

from __future__ import annotations

import json
import re
from typing import Any

from kvloom.core.errors import RequestError

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def dump_json(data: Any) -> bytes:
    """``data`` as UTF-8 JSON. A lone surrogate, which UTF-8 cannot hold, becomes ``?``."""
    return _ENCODER.encode(data).encode("utf-8", "replace")


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``.

    Raises:
        RequestError: not UTF-8, not JSON, nested too deeply, not an object, or holding a lone
            surrogate, which is no Unicode text and which no tokenizer accepts.
    """
    try:
        data = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8 (byte 0x{body[error.start]:02x} at offset {error.start}); encode it as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the body's JSON is nested too deeply") from error
    except ValueError as error:  # an integer with more digits than Python reads
        raise RequestError(f"the body is not usable JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError(f"the body is a JSON {_json_kind(data)}; it must be an object")
    if _SURROGATE_ESCAPE.search(body):  # a pair of escapes is fine, so look closer only now
        _refuse_surrogates(data, "")
    return data


def _refuse_surrogates(value: Any, where: str) -> None:
    stack: list[tuple[Any, str]] = [(value, where)]
    while stack:
        item, path = stack.pop()
        if isinstance(item, str):
            if not _is_text(item):
                raise RequestError(
                    f"{path} holds a lone surrogate, which is not valid Unicode; remove it or send the whole pair",
                    param=path,
                )
        elif isinstance(item, dict):
            for key, inner in item.items():
                if not _is_text(key):
                    raise RequestError(f"a key in {path or 'the body'} holds a lone surrogate; remove it")
                stack.append((inner, f"{path}.{key}" if path else key))
        elif isinstance(item, list):
            stack.extend((inner, f"{path}.{index}") for index, inner in enumerate(item))


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "number"
