"""Reads a safetensors file in one pass: the bytes that are hashed become the tensors."""

# The library's own readers take a path, and would read the file again after its digest was checked,
# or they take bytes and copy them twice. Their tensors also lie in memory that torch cannot resize,
# so that a trial resumed from disk could not be suspended to host memory later.

from __future__ import annotations

import ctypes
import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
"""The dtypes that every version of safetensors knows: its names and torch's."""

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """The content of a file, to be trusted only once its digest has been compared.

    Args:
        sha256: hex digest of the file.
        header: description of each tensor; empty if it is no safetensors file.
        data: the bytes of each tensor.
    """

    sha256: str
    header: Mapping[str, Any]
    data: Mapping[str, torch.Tensor]

    @classmethod
    def read(cls, file: io.FileIO, size: int) -> Content:
        """Read a file that has ``size`` bytes.

        Raises:
            OSError: it cannot be read, or is shorter.
        """
        source = _Source(file)
        header, lengths = _header(source, size)
        data = {name: source.take(length) for name, length in lengths.items()}
        return cls(sha256=source.digest(), header=header, data=data)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name; raises any error if the file breaks the format."""
        import torch

        found = {}
        for name, data in self.data.items():
            part = self.header[name]
            view = data.view(getattr(torch, DTYPES[part["dtype"]])).reshape(part["shape"])
            # Torch detaches no view in place, as some optimizers do with gradients.
            own = torch.empty(0, dtype=view.dtype, device="cpu")
            found[name] = own.set_(view.untyped_storage(), 0, view.shape, view.stride())
        return found


def digest(file: io.FileIO) -> str:
    """The SHA-256 of a file, in hex."""
    return _Source(file).digest()


class _Source:
    """A file that is read from front to back, and the running digest of its bytes."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def take(self, count: int) -> torch.Tensor:
        """The next ``count`` bytes."""
        import torch

        data = torch.empty(count, dtype=torch.uint8, device="cpu")
        # Not data.numpy(): torch cannot resize a storage that was shared with an array.
        rest = memoryview((ctypes.c_char * count).from_address(data.data_ptr())).cast("B")
        while rest:
            got = self._file.readinto(rest[:_CHUNK_BYTES])
            if not got:
                raise OSError("it ended while it was read")
            self._hash.update(rest[:got])
            rest = rest[got:]
        return data

    def digest(self) -> str:
        """Read on to the end; return the SHA-256 of the whole file, in hex."""
        chunk = memoryview(bytearray(_CHUNK_BYTES))
        while count := self._file.readinto(chunk):
            self._hash.update(chunk[:count])
        return self._hash.hexdigest()


def _header(source: _Source, size: int) -> tuple[dict[str, Any], dict[str, int]]:
    """The header, and the length in bytes of each tensor in the order of the file.

    Both are empty if these bytes are no header of a file of this size.
    """
    length = int.from_bytes(source.take(min(8, size)).numpy().tobytes(), "little")
    # Bounded by the file's size: a damaged length may be any number.
    text = source.take(max(0, min(length, size - 8))).numpy().tobytes()
    try:
        header = json.loads(text)
        return header, dict(_lengths(header, size - 8 - length))
    except Exception:  # any bytes may be here; the comparison of digests reports the damage
        return {}, {}


def _lengths(header: Mapping[str, Any], room: int) -> Iterator[tuple[str, int]]:
    parts = [(header[name]["data_offsets"], name) for name in header if name != "__metadata__"]
    end = 0
    for (begin, stop), name in sorted(parts):
        if begin != end:
            raise ValueError(f"{name!r} must begin at byte {end}, not at {begin}.")
        end = stop
        yield name, len(range(begin, stop))
    if end != room:
        raise ValueError(f"The tensors must take {room} bytes, not {end}.")
