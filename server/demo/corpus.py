"""Training text for the demo model: pinned packages -> source files -> documents -> packed token stream.

First stage of ``unbind demo train``. ``sources.toml`` names every package with its version and licence; ``pip download``
fetches the wheels, and nothing of the text itself is committed. Half of the documents are put in fill-in-the-middle form.
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SOURCES = Path(__file__).with_name("sources.toml")
PACKAGE_CAP_BYTES = 7_000_000  # so that a few huge packages do not drown the rest
VOCABULARY = 4096
END = "<|endoftext|>"
FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
SPECIAL_TOKENS = [
    END,
    FIM_PREFIX,
    FIM_SUFFIX,
    FIM_MIDDLE,
    "<|fim_pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|repo_name|>",
    "<|file_sep|>",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SKIPPED_FOLDERS = re.compile(r"(^|/)(tests?|testing|migrations|_?vendor(ed)?|locale|node_modules)/")


def packages(section: str) -> dict[str, dict[str, str]]:
    """``{package: {"version", "licence"}}`` of ``section`` ("corpus" or "rows") in ``sources.toml``."""
    return tomllib.loads(SOURCES.read_text())[section]  # type: ignore[no-any-return]


def download(section: str, folder: Path) -> list[Path]:
    """Fetch the wheels of a section into ``folder`` (those already there are kept) and return their paths by package."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name, facts in packages(section).items():
        pattern = f"{re.sub(r'[-.]', '_', name)}-{facts['version']}-*.whl".lower()
        wheel = next((path for path in folder.iterdir() if Path(path.name.lower()).match(pattern)), None)
        if wheel is None:
            command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*command, "--dest", str(folder), f"{name}=={facts['version']}"], check=True)
            wheel = next(path for path in folder.iterdir() if Path(path.name.lower()).match(pattern))
        found.append(wheel)
    return found


def source_files(wheel: Path) -> Iterator[tuple[str, str]]:
    """``(path in the wheel, text)`` of the Python files worth learning from: parseable, hand-written, permissive."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if not entry.filename.endswith(".py") or _SKIPPED_FOLDERS.search(entry.filename):
                continue
            if not 400 <= entry.file_size <= 200_000:
                continue
            try:
                text = archive.read(entry).decode()
                ast.parse(text)
            except (UnicodeDecodeError, SyntaxError, ValueError):
                continue
            lines = text.splitlines()
            if re.search(r"General Public License|\bL?GPL", text) or max(map(len, lines)) > 400:
                continue
            if sum(c.isdigit() for c in text) > 0.15 * len(text):  # tables of numbers
                continue
            yield entry.filename, text.replace("\r\n", "\n")


def _files(folder: Path, rng: random.Random) -> Iterator[str]:
    seen: set[bytes] = set()
    for wheel in download("corpus", folder):
        files = list(source_files(wheel))
        rng.shuffle(files)
        taken = 0
        for _, text in files:
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen or taken > PACKAGE_CAP_BYTES:
                continue
            seen.add(digest)
            taken += len(text)
            yield text


def _documents(text: str, rng: random.Random) -> Iterator[str]:
    """Cut a file into documents of 400 to 6,000 characters (log-uniform), preferably where a top-level statement starts."""
    lines = text.splitlines(keepends=True)
    document: list[str] = []
    size, target = 0, 400 * 15 ** rng.random()
    for line in lines:
        if size >= target and (not line[:1].isspace() or size >= 2 * target):
            yield "".join(document)
            document, size, target = [], 0, 400 * 15 ** rng.random()
        document.append(line)
        size += len(line)
    if size > 100:
        yield "".join(document)


def _fill_in_the_middle(text: str, rng: random.Random) -> str:
    """Prefix-suffix-middle order, cut at two random places: characters in half of the cases, line starts in the other."""
    if rng.random() < 0.5:
        starts = [match.end() for match in re.finditer("\n", text)] or [0]
        first, second = sorted((rng.choice(starts), rng.choice(starts)))
    else:
        first, second = sorted((rng.randrange(len(text)), rng.randrange(len(text))))
    return f"{FIM_PREFIX}{text[:first]}{FIM_SUFFIX}{text[second:]}{FIM_MIDDLE}{text[first:second]}"


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with :data:`VOCABULARY` entries; ``<|endoftext|>`` is beginning and end, put in front by default."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A $B", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token="<|fim_pad|>",
        model_max_length=2048,
        additional_special_tokens=SPECIAL_TOKENS[1:],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def build(work: Path, seed: int = 0) -> Path:
    """Write ``work/tokenizer`` and ``work/tokens.npy`` (uint16, one packed stream); does nothing where they exist."""
    stream_path = work / "tokens.npy"
    if stream_path.exists():
        return stream_path
    rng = random.Random(seed)
    return pack(list(_files(work / "wheels", rng)), work, rng)


def pack(files: list[str], work: Path, rng: random.Random) -> Path:
    """The same from the texts of source files in any language."""
    rng.shuffle(files)
    print(f"corpus: {len(files)} files, {sum(map(len, files)) / 1e6:.1f} million characters", flush=True)
    tokenizer = train_tokenizer(files[: len(files) // 5])
    documents = [document for text in files for document in _documents(text, rng)]
    rng.shuffle(documents)
    documents = [_fill_in_the_middle(text, rng) if rng.random() < 0.5 else text for text in documents]
    ids = tokenizer.backend_tokenizer.encode_batch_fast(documents)  # the template puts <|endoftext|> in front of each
    stream = np.concatenate([np.asarray(encoding.ids, dtype=np.uint16) for encoding in ids])
    print(f"corpus: {len(documents)} documents, {len(stream) / 1e6:.1f} million tokens", flush=True)
    tokenizer.save_pretrained(work / "tokenizer")
    stream_path = work / "tokens.npy"
    partial = stream_path.with_suffix(".partial.npy")
    np.save(partial, stream)
    partial.rename(stream_path)
    return stream_path
