"""Record greedy tokens of the default model with an independent implementation (torch and transformers).

Needs its own environment, outside the product's: `pip install torch transformers gguf accelerate sentencepiece`. Run

    python tools/record_greedy_tokens.py MODEL.gguf tests/data/smollm2_greedy.json

The file holds prompts, token ids in and out, and the versions; tests compare the reference engine against it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a Python function that returns the n-th Fibonacci number."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "My name is Ada. Remember it."},
        {"role": "assistant", "content": "Hello Ada! I will remember your name."},
        {"role": "user", "content": "What is my name?"},
    ],
    [{"role": "user", "content": "Explain 🚂 and 🛤️ to a child, please! 😀👩‍👩‍👧‍👦"}],
    [{"role": "user", "content": "Erkläre mir in zwei Sätzen, was ein Rangierbahnhof ist."}],
    [{"role": "user", "content": "请用一句话介绍北京。"}],
]
RAW: list[str] = [
    "Once upon a time, in a small village by the sea,",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot = items[0]\n",
    "La ville de Paris est connue pour",
    "Москва — это",
    "0123456789 3.14159 1,000,000 =",
    "  two  spaces\tand a tab\n\n\nthree newlines, then: ",
    '{"name": "switchyard", "nodes": [1, 2, 3], "ok": true, "next":',
    "A",
    "The quick brown fox jumps over the lazy dog. " * 12 + "The quick",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokens", type=int, default=28)
    arguments = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(arguments.model.parent), arguments.model.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model.eval()
    prompts: list[dict[str, Any]] = [
        {
            "chat": chat,
            "text": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
        }
        for chat in CHATS
    ]
    prompts += [{"chat": None, "text": text} for text in RAW]
    for prompt in prompts:
        ids = tokenizer(prompt["text"], add_special_tokens=False)["input_ids"]
        prompt["token_ids"] = ids
        prompt.update(_greedy(torch, model, ids, arguments.tokens))
        print(prompt["text"][-60:].replace("\n", " "), "->", tokenizer.decode(prompt["output_ids"]).replace("\n", " "))
    document = {
        "model_file": name,
        "model_sha256": hashlib.sha256(arguments.model.read_bytes()).hexdigest(),
        "dtype": "float32",
        "versions": {package: version(package) for package in ("torch", "transformers", "gguf", "tokenizers")},
        "prompts": prompts,
    }
    arguments.output.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")


def _greedy(torch: Any, model: Any, ids: list[int], tokens: int) -> dict[str, Any]:
    """Greedy ids, the end token included where it comes, and the smallest gap between the best two logits."""
    output: list[int] = []
    smallest_gap = float("inf")
    cache = None
    current = torch.tensor([ids])
    with torch.no_grad():
        while len(output) < tokens:
            answer = model(input_ids=current, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            best = torch.topk(answer.logits[0, -1], 2)
            smallest_gap = min(smallest_gap, float(best.values[0] - best.values[1]))
            output.append(int(best.indices[0]))
            if output[-1] == model.config.eos_token_id:
                break
            current = torch.tensor([[output[-1]]])
    return {"output_ids": output, "smallest_logit_gap": round(smallest_gap, 6)}


if __name__ == "__main__":
    main()
