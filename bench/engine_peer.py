"""Run by `bench/engine.py` in the peer's Python: prefill and decode of a GGUF model with llama-cpp-python, else transformers.

`python engine_peer.py MODEL.gguf PREFILL_TOKENS CONTEXT_TOKENS DECODED_TOKENS` prints one JSON object with tokens a CPU second on
one thread. Imports nothing of the product, so that it runs anywhere.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any


def prompt(tokens: int) -> list[int]:
    return random.Random(tokens).choices(range(100, 49000), k=tokens)


def with_llama(model: str, prefill: int, context: int, decoded: int) -> dict[str, Any]:
    import llama_cpp

    llm = llama_cpp.Llama(model_path=model, n_ctx=2048, n_batch=128, n_threads=1, n_threads_batch=1, verbose=False)
    llm.eval(prompt(32))
    llm.reset()
    began = time.process_time()
    llm.eval(prompt(prefill))
    prefill_s = time.process_time() - began
    llm.reset()
    llm.eval(prompt(context))
    began = time.process_time()
    for token in prompt(decoded):
        llm.eval([token])
    decode_s = time.process_time() - began
    name = f"llama-cpp-python {llama_cpp.__version__}"
    return {"name": name, "prefill 1": prefill / prefill_s, "decode 1": decoded / decode_s}


def with_transformers(model: str, prefill: int, context: int, decoded: int) -> dict[str, Any]:
    import torch
    import transformers

    torch.set_num_threads(1)
    path = Path(model)
    llm = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    llm.eval()
    found: dict[str, Any] = {"name": f"transformers {transformers.__version__}, torch {torch.__version__}"}
    with torch.no_grad():
        llm(input_ids=torch.tensor([prompt(32)]))
        for batch in (1, 8):
            tokens = prefill if batch == 1 else prefill // 4
            began = time.process_time()
            llm(input_ids=torch.tensor([prompt(tokens)] * batch), use_cache=True, logits_to_keep=1)
            found[f"prefill {batch}"] = batch * tokens / (time.process_time() - began)
            cache = llm(input_ids=torch.tensor([prompt(context)] * batch), use_cache=True).past_key_values
            began = time.process_time()
            for token in prompt(decoded):
                answer = llm(input_ids=torch.tensor([[token]] * batch), past_key_values=cache, use_cache=True)
                cache = answer.past_key_values
                answer.logits.argmax(-1)
            found[f"decode {batch}"] = batch * decoded / (time.process_time() - began)
    return found


def main() -> None:
    model, *sizes = sys.argv[1:]
    numbers = [int(size) for size in sizes]
    try:
        found = with_llama(model, *numbers)
    except ImportError:
        found = with_transformers(model, *numbers)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
