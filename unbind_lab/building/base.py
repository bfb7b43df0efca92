"""The base model of a recipe: one that is there, one of a hub, or one that is trained on the recipe's corpus as the demo's is."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from server.demo import corpus, pretrain
from unbind_core.errors import UnbindError
from unbind_lab.building.packages import source_files
from unbind_lab.building.recipe import ROOT, Base, Recipe

FETCHED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # no second copy of the weights in another format
MOST_OF_A_PACKAGE = 7_000_000  # characters, so that a few huge packages do not drown the rest


def build(recipe: Recipe, archives: Mapping[str, Path], work: Path) -> Path:
    """The folder of the checkpoint; training resumes where it stopped, and says how far it is. Raises UnbindError where a hub does
    not give it.
    """
    if recipe.base.folder:
        return ROOT / recipe.base.folder
    if recipe.base.hub:
        return _fetched(recipe)
    if not (work / "tokens.npy").exists():
        work.mkdir(parents=True, exist_ok=True)
        rng = random.Random(recipe.seed)
        corpus.pack(_files(recipe, archives, rng), work, rng)
    return pretrain.train(work, recipe.base.tokens, lambda vocabulary, end: architecture(recipe.base, vocabulary, end))


def architecture(base: Base, vocabulary: int, end: int) -> PreTrainedConfig:
    """A decoder of the family with tied embeddings and grouped-query attention."""
    return AutoConfig.for_model(
        base.family,
        vocab_size=vocabulary,
        hidden_size=base.hidden,
        intermediate_size=base.feed_forward,
        num_hidden_layers=base.layers,
        num_attention_heads=base.heads,
        num_key_value_heads=base.key_value_heads,
        max_position_embeddings=pretrain.LONG,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        use_cache=True,
    )


def _fetched(recipe: Recipe) -> Path:
    """Of the hub, or of what an earlier fetch left in its cache."""
    from huggingface_hub import snapshot_download

    base = recipe.base
    try:
        return Path(snapshot_download(base.hub, revision=base.revision or None, allow_patterns=FETCHED))
    except Exception as error:  # noqa: BLE001 - what a missing network, model or permission raises differs by version
        told = str(error).strip().splitlines()
        raise UnbindError(
            f"recipe: {base.hub} could not be fetched ({told[0] if told else type(error).__name__}); "
            f"where it lies already: unbind lab build {recipe.name} --base FOLDER"
        ) from None


def _files(recipe: Recipe, archives: Mapping[str, Path], rng: random.Random) -> list[str]:
    seen: set[bytes] = set()
    found: list[str] = []
    for package in recipe.of("corpus"):
        files = [text for _, text in source_files(package, archives[package.name])]
        rng.shuffle(files)
        taken = 0
        for text in files:
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen or taken > MOST_OF_A_PACKAGE:
                continue
            seen.add(digest)
            taken += len(text)
            found.append(text)
    return found
