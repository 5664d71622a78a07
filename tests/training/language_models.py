"""Small language models and corpora that the tests of language models make themselves."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import oelm
from oelm.data.tokenizer import train_tokenizer
from tests.data.made import parquet, sentence

FAMILIES = ("oelm-gpt", "gpt2", "llama")
WINDOW = 64


def corpus(root: Path, documents: int = 300, text: Callable[[random.Random], str] = sentence) -> Path:
    """Documents under tinystories' name. Its held-out validation part is 1 % of train, its test a file."""
    rng = random.Random(0)
    for split, count in (("train", documents), ("validation", 80)):
        parquet(root / "tinystories" / f"{split}.parquet", text=[text(rng) for _ in range(count)])
    return root


def tokenizer() -> Any:
    rng = random.Random(1)
    return train_tokenizer((sentence(rng) for _ in range(200)), 320)


def random_model(family: str, folder: Path) -> Path:
    """A language model with random weights and the tokenizer above, as anyone's folder."""
    words = tokenizer()
    ids = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "vocab_size": len(words)}
    torch.manual_seed(3)
    model: Any
    if family == "oelm-gpt":
        sizes = {"d_model": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": WINDOW}
        model = oelm.OelmGPTForCausalLM(oelm.OelmGPTConfig(**sizes, **ids))
    elif family == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=WINDOW, **ids)
        model = transformers.GPT2LMHeadModel(config)
    else:
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        config = transformers.LlamaConfig(**size, max_position_embeddings=WINDOW, **ids)
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # of a size at which what was read matters for what comes next
        for parameter in model.parameters():
            parameter.mul_(6)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
