"""Tokenizers: GPT-2 through tiktoken, raw bytes, or any JSON file of the `tokenizers` library.

A special token that is spelled out in a document is encoded as ordinary text. Only `prepare` adds end-of-text tokens, so none is
lost or doubled.
"""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from xsa_jax.errors import UserError

_EOT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot|>", "<|im_end|>", "[EOS]")


class Tokenizer(Protocol):
    """A map between text and token ids.

    Attributes:
      name: name of the tokenizer.
      vocab_size: number of token ids, which run from 0 to vocab_size - 1.
      eot_id: token id of the end of text.
      fingerprint: identifier of the content; tokenizers with the same fingerprint encode alike.
    """

    name: str
    vocab_size: int
    eot_id: int
    fingerprint: str

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without end-of-text tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; end-of-text tokens are spelled out."""
        ...


def load(name: str) -> Tokenizer:
    """Loads a tokenizer.

    Args:
      name: "gpt2", "bytes", or the path of a `tokenizers` JSON file.

    Raises:
      UserError: there is no such tokenizer, or its files are unavailable or invalid. The message says what to do.
    """
    if name == "gpt2":
        return GPT2()
    if name == "bytes":
        return Bytes()
    path = Path(name)
    if path.is_file():
        return JsonFile(path)
    raise UserError(f"tokenizer {name!r}: expected 'gpt2', 'bytes' or the path of a tokenizers JSON file; there is no such file")


class Bytes:
    """UTF-8 bytes as ids 0 to 255, and id 256 for the end of text."""

    name = "bytes"
    vocab_size = 257
    eot_id = 256
    fingerprint = "utf8-bytes-eot256"

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """See `Tokenizer`."""
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        pieces = [b"<|endoftext|>" if i == self.eot_id else bytes([i]) for i in ids]
        return b"".join(pieces).decode(errors="replace")


class GPT2:
    """The GPT-2 tokenizer of tiktoken.

    Raises:
      UserError: the files of the tokenizer are not in tiktoken's cache and cannot be fetched.
    """

    name = "gpt2"

    def __init__(self) -> None:
        import tiktoken

        try:
            self._encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:
            raise UserError(_gpt2_help(error)) from None
        self.vocab_size = self._encoding.n_vocab
        self.eot_id = self._encoding.eot_token
        ranks = b"".join(len(token).to_bytes(4, "little") + token for token in self._encoding.token_byte_values())
        self.fingerprint = _digest(ranks + self._encoding._pat_str.encode())

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """See `Tokenizer`."""
        return [self._encoding.encode_ordinary(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._encoding.decode(list(ids))


class JsonFile:
    """A tokenizer from a JSON file of the `tokenizers` library.

    Attributes:
      json: content of the file.

    Raises:
      UserError: the file is not of the library, or has no known end-of-text token.
    """

    def __init__(self, path: Path):
        # The worker processes already use every core.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        self.name = path.name
        self.json = path.read_bytes()
        self.fingerprint = _digest(self.json)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(self.json.decode())
        except Exception as error:
            raise UserError(f"tokenizer {path}: not a JSON file of the tokenizers library ({error})") from error
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        eot = next((token for token in _EOT_NAMES if token in vocabulary), None)
        if eot is None:
            raise UserError(f"tokenizer {path}: found no end-of-text token; expected one of {', '.join(_EOT_NAMES)}")
        self.eot_id = vocabulary[eot]
        # A saved file may truncate or pad to the context length of its model.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """See `Tokenizer`."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def _gpt2_help(error: Exception) -> str:
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    where = cache or os.path.join(tempfile.gettempdir(), "data-gym-cache")
    return (
        f"tokenizer 'gpt2': its files are not in tiktoken's cache ({where}) and could not be fetched "
        f"({type(error).__name__}). On a machine with a network run\n"
        "  TIKTOKEN_CACHE_DIR=gpt2_files python -c \"import tiktoken; tiktoken.get_encoding('gpt2')\"\n"
        "copy the folder gpt2_files here and set TIKTOKEN_CACHE_DIR to it; or use --tokenizer bytes, which needs no files"
    )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
