"""Every exception that kvloom raises on purpose.

::

    KvloomError
    ├── ConfigError              a flag, variable or file asks for something impossible   exit 2
    │   └── CodecError               a codec does not fit the plane, or lacks its calibration
    ├── ModelError               a model cannot be served                                 exit 2
    │   ├── UnsupportedModelError    known to be wrong, or not verified
    │   └── CorruptModelError        files missing, truncated or contradictory
    ├── CapacityError            does not fit into memory                                 exit 1
    ├── RequestError             one request is refused; the server lives on              HTTP 400
    │   ├── ContextLengthError       prompt (plus asked-for tokens) beyond the limit      HTTP 400
    │   ├── AuthenticationError      missing or wrong key                                 HTTP 401
    │   ├── NotFoundError            unknown model or route                               HTTP 404
    │   ├── BodyTooLargeError        body beyond the server's limit                       HTTP 413
    │   └── QueueFullError           too many requests wait                               HTTP 429
    └── EngineError              the engine failed; the request ends with this error      HTTP 500
        └── EngineStoppedError       the engine is draining or gone                       HTTP 503

A message names the value, the limit and the remedy.
"""

from __future__ import annotations


class KvloomError(Exception):
    """Root of all errors that kvloom raises on purpose."""

    exit_status = 1


class ConfigError(KvloomError):
    """A flag, environment variable or file asks for something impossible."""

    exit_status = 2


class CodecError(ConfigError):
    """A codec does not fit the plane or block it is asked for, or lacks its calibration."""


class ModelError(KvloomError):
    """A model cannot be served."""

    exit_status = 2


class UnsupportedModelError(ModelError):
    """The architecture is known to be wrong through our seam, or was never verified."""


class CorruptModelError(ModelError):
    """Model files are missing, truncated or contradict each other."""


class CapacityError(KvloomError):
    """Something does not fit into the memory given."""


class RequestError(KvloomError):
    """One request is refused. ``param`` names the field, ``code`` is machine-readable."""

    http_status = 400
    error_type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt, or the prompt plus ``max_tokens``, is beyond ``max_model_len``."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    http_status = 401
    error_type = "authentication_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


class NotFoundError(RequestError):
    """The named model or route does not exist here."""

    http_status = 404
    error_type = "not_found_error"


class BodyTooLargeError(RequestError):
    """The request body is larger than the server accepts."""

    http_status = 413


class QueueFullError(RequestError):
    """The waiting queue is full; try again after ``retry_after_s`` seconds."""

    http_status = 429
    error_type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message, code="queue_full")
        self.retry_after_s = retry_after_s


class EngineError(KvloomError):
    """The engine failed while it worked on a request."""

    http_status = 500


class EngineStoppedError(EngineError):
    """The engine is draining, stopped or was never started."""

    http_status = 503
