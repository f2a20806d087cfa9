"""Keys: everything but /health is closed, each key is a tenant, and the salt is the server's."""

from __future__ import annotations

import hashlib

import pytest

from kvloom.core.errors import AuthenticationError, ConfigError
from kvloom.server.auth import ApiKeys
from kvloom.server.config import ServerConfig
from tests.server.conftest import client_for
from tests.server.fake import FakeEngine

pytestmark = pytest.mark.anyio

ROUTES = [
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake/model"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/nothing"),
    ("GET", "/health/"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("OPTIONS", "/v1/models"),
]


async def test_everything_but_health_is_closed(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(api_keys=("one", "two"))) as client:
        assert (await client.get("/health")).status_code == 200
        for method, route in ROUTES:
            for header in (
                None,
                "",
                "one",
                "Basic one",
                "Bearer",
                "Bearer ",
                "Bearer on",
                "Bearer onee",
                "Bearer \xff",
            ):
                headers = {} if header is None else {"Authorization": header.encode("latin-1")}
                answer = await client.request(method, route, headers=headers)
                assert answer.status_code == 401, (route, header)
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        for key in ("one", "two"):
            for scheme in ("Bearer", "bearer"):
                answer = await client.get("/v1/models", headers={"Authorization": f"{scheme} {key}"})
                assert answer.status_code == 200


async def test_each_key_has_its_own_salt(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(api_keys=("one", "two"))) as client:
        for key in ("one", "two"):
            await client.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": f"Bearer {key}"})
    assert [request.salt for request in engine.requests] == [hashlib.sha256(k).digest() for k in (b"one", b"two")]


async def test_without_keys_there_is_no_salt(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        await client.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": "Bearer anything"})
    assert engine.requests[0].salt == b""


def test_digests_not_keys_are_kept() -> None:
    keys = ApiKeys(["secret"])
    assert "secret" not in repr(vars(keys))
    with pytest.raises(AuthenticationError) as error:
        keys.tenant_salt("Bearer secre")
    assert "secre'" not in str(error.value)


@pytest.mark.parametrize("key", ["", " a", "a\n", "ü"])
def test_keys_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(api_keys=(key,))


async def test_cors_is_off_unless_asked_for(engine: FakeEngine) -> None:
    asks = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    async with client_for(engine) as client:
        answer = await client.get("/v1/models", headers={"Origin": "http://page"})
        assert "access-control-allow-origin" not in answer.headers
    async with client_for(engine, ServerConfig(cors_origins=("http://page",), api_keys=("k",))) as client:
        preflight = await client.options("/v1/completions", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://page"
        refused = await client.get("/v1/models", headers={"Origin": "http://page"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "http://page"
        other = await client.get("/v1/models", headers={"Origin": "http://elsewhere"})
        assert "access-control-allow-origin" not in other.headers
