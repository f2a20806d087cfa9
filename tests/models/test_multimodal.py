"""Multimodal Gemma 4 checkpoints are served as text models; their towers are not loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from kvloom.core.config import EngineConfig
from kvloom.models.loader import load_model
from tests.models import configs
from tests.models.harness import PagedRunner, difference, eager_logits, random_ids
from tests.models.tiny import build_tokenizer

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def test_the_text_part_of_a_multimodal_gemma4_is_served(tmp_path: Path) -> None:
    text = configs.tiny_config("gemma4_text", tie_word_embeddings=True).to_dict()
    config = Gemma4Config(text_config=text, vision_config=VISION, audio_config=None)
    torch.manual_seed(0)
    whole = Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    whole.save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    loaded = load_model(EngineConfig(model=str(tmp_path / "model"), cache_dir=str(tmp_path), dtype="float32"))
    assert loaded.model_type == "gemma4" and loaded.hf_config.model_type == "gemma4_text"
    assert not any("vision" in name for name, _ in loaded.model.named_parameters())
    assert loaded.layout.shared == {3, 4}  # of five layers, three store
    assert {plane.dim for group in loaded.layout.groups for plane in group.planes} == {16, 32}
    ids = random_ids(50, 256, 0)
    got = PagedRunner(loaded.model, loaded.layout).step({"a": ids})["a"]
    assert difference(got, eager_logits(whole, ids)) < 1e-5
