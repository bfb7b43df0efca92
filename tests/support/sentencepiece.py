"""Tokenizers as the files of Llama 2 and CodeLlama say them, trained here and now."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.core.conftest import BOS, CORPUS

FIM = ("▁<PRE>", "▁<SUF>", "▁<MID>")


def sentencepiece(way: str) -> PreTrainedTokenizerFast:
    """A blank before whatever it is given, by a normalizer or a pre-tokenizer; bytes for what it does not know."""
    trained: Any = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if way == "normalizer":
        trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[no-untyped-call]
    else:
        trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    special = ["<unk>", BOS, "</s>", *FIM]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special + pieces, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    state = json.loads(trained.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special]
    whole: Any = Tokenizer.from_str(json.dumps(state))
    whole.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])  # type: ignore[no-untyped-call]
    return PreTrainedTokenizerFast(
        tokenizer_object=whole, unk_token="<unk>", bos_token=BOS, eos_token="</s>", add_bos_token=True
    )
