"""Tensors of safetensors files, read and written in parts: whole tensors of a model, or the pieces that ranks wrote."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, DTYPE_MAP, SAVED_OFFSETS_KEY

from rlhf_trainer.errors import NumericsError
from rlhf_trainer.tensor_slice import TensorSlice

DTYPE_NAMES = {dtype: name for name, dtype in DTYPE_MAP.items()}
CHUNK_BYTES = 64 * 2**20
"""Maximum bytes of a tensor that are read or written at once; one row may be larger."""
FLOAT32 = "e_score_correction_bias"
"""Last part of the names of tensors that files have in float32: biases by which DeepSeek-V3's routers are balanced."""
SUMS = "rlhf.crc32"
"""Key in a safetensors file's header. Its value is JSON: tensor name -> CRC-32 of the tensor's bytes (hexadecimal)."""


class TensorSource(Protocol):
    """Source of a tensor, in memory or in files, from which a rank reads the part that it needs."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor of this source."""

    def parts(self, wanted: TensorSlice) -> Iterator[tuple[TensorSlice, Tensor]]:
        """Yield parts of the whole tensor, on the CPU, that together cover `wanted`."""


class LocalFile:
    """A safetensors file on this machine's disk. Its methods raise OSError or SafetensorError where it is damaged.

    `find` returns the file's path, and is called at the first read.
    """

    def __init__(self, find: Callable[[], str]) -> None:
        self._find = find

    @cached_property
    def _open(self) -> Any:
        path = self._find()
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise SafetensorError(f"{path}: {error}") from error

    def names(self) -> list[str]:
        return list(self._open.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return DTYPE_MAP[self._open.get_slice(name).get_dtype()]

    def metadata(self) -> dict[str, str]:
        """Return the texts in the file's header, by key."""
        return self._open.metadata() or {}

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor of the file, to the CPU; an empty index: the whole tensor."""
        part: Tensor = self._open.get_slice(name)[index] if index else self._open.get_tensor(name)
        return part


class RemoteFile:
    """A safetensors file in an object store, with the methods of `LocalFile`; only ranges of bytes are read."""

    def __init__(self, files: AbstractFileSystem, path: str) -> None:
        self._files, self._path = files, path

    @cached_property
    def _header(self) -> tuple[int, dict[str, Any]]:
        """(byte at which the file's tensors begin, parsed header of the file)."""
        size = int.from_bytes(self._bytes(0, 8), "little")
        return 8 + size, json.loads(self._bytes(8, 8 + size))

    def _bytes(self, start: int, stop: int) -> bytes:
        try:
            data: bytes = self._files.cat_file(self._path, start=start, end=stop) if start < stop else b""
        except Exception as error:  # each kind of storage raises errors of its own
            raise OSError(f"{self._path}: {type(error).__name__}: {error}") from error
        if len(data) != stop - start:
            raise SafetensorError(f"{self._path}: the file is cut off")
        return data

    def names(self) -> list[str]:
        return [name for name in self._header[1] if name != "__metadata__"]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header[1][name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return DTYPE_MAP[self._header[1][name]["dtype"]]

    def metadata(self) -> dict[str, str]:
        texts: dict[str, str] = self._header[1].get("__metadata__", {})
        return texts

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        begin, header = self._header
        start, stop = (begin + offset for offset in header[name]["data_offsets"])
        shape, dtype = self.shape(name), self.dtype(name)
        if index:
            row = prod(shape[1:]) * dtype.itemsize
            start, stop = start + index[0].start * row, start + index[0].stop * row
            shape = (index[0].stop - index[0].start, *shape[1:])
        values = torch.frombuffer(bytearray(self._bytes(start, stop)), dtype=dtype).view(shape)
        return values[(slice(None), *index[1:])] if index else values


TensorFile = LocalFile | RemoteFile


@dataclass(frozen=True)
class HeldTensor:
    """Tensor source that is a tensor in memory, on any device."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def parts(self, wanted: TensorSlice) -> Iterator[tuple[TensorSlice, Tensor]]:
        yield wanted, self.tensor[wanted.within(TensorSlice.whole(self.shape))].cpu()


@dataclass(frozen=True)
class Layer:
    """A matrix of a stack [layers, rows, columns], or some rows of that matrix, seen as a separate tensor."""

    stack: TensorSource
    place: TensorSlice
    """Slice of the stack that this tensor is: one index of the first dim, and some rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape[1:]

    def parts(self, wanted: TensorSlice) -> Iterator[tuple[TensorSlice, Tensor]]:
        number, *first = self.place.starts
        for part, values in self.stack.parts(wanted.moved(first).on_layer(number)):
            yield part.off_layer().moved([-start for start in first]), values[0]


@dataclass(frozen=True)
class Piece:
    """A tensor of a file that is a part of a larger tensor, such as a layer of a stack."""

    file: TensorFile
    name: str
    place: TensorSlice | None = None
    """Slice of the larger tensor that the file holds under this name; None: the larger tensor as a whole."""

    @property
    def held(self) -> TensorSlice:
        return self.place or TensorSlice.whole(self.file.shape(self.name))

    def parts(self, wanted: TensorSlice) -> Iterator[tuple[TensorSlice, Tensor]]:
        """Yield the piece's elements in `wanted`. NumericsError if the whole piece was read with a wrong checksum."""
        held, found = self.held, 0
        met = wanted.intersection(held)
        outer = len(held.starts) - len(self.file.shape(self.name)) if self.place else 0
        sums = json.loads(self.file.metadata().get(SUMS, "{}")) if met == held else {}
        for part in chunks(met, self.file.dtype(self.name).itemsize) if met else ():
            values = self.file.read(self.name, part.within(held)[outer:])
            found = crc32(bytes_of(values), found) if self.name in sums else 0
            yield part, values.view(part.shape) if outer else values
        if self.name in sums and f"{found:08x}" != sums[self.name]:
            raise NumericsError(f"{self.name} is not what was written (checksum)")


@dataclass(frozen=True)
class StoredTensor:
    """Tensor source in one or several files, each of which holds a piece of the tensor."""

    pieces: Sequence[Piece]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(max(stops) for stops in zip(*(piece.held.stops for piece in self.pieces), strict=True))

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].file.dtype(self.pieces[0].name)

    def parts(self, wanted: TensorSlice) -> Iterator[tuple[TensorSlice, Tensor]]:
        for piece in self.pieces:
            yield from piece.parts(wanted)


def bytes_of(values: Tensor) -> memoryview:
    """Return the memory of a CPU tensor as bytes; the tensor is copied only if it is not contiguous."""
    return values.contiguous().flatten().view(torch.uint8).numpy().data


def chunks(part: TensorSlice, itemsize: int) -> Iterator[TensorSlice]:
    """Split a part of a tensor into blocks of rows of at most CHUNK_BYTES."""
    if not part.starts:
        yield part
        return
    rows = max(1, CHUNK_BYTES // (prod(part.shape[1:]) * itemsize))
    for start in range(part.starts[0], part.stops[0], rows):
        yield part.cut(0, start, start + rows)


def saved_by_ranks(files: Iterable[TensorFile]) -> dict[str, StoredTensor]:
    """Return the tensors whose pieces the ranks wrote into these files, by name."""
    found: dict[str, dict[TensorSlice, Piece]] = {}
    for file in files:
        for name, place in places_in(file).items():
            found.setdefault(name, {})[place] = Piece(file, name, place)
    return {name: StoredTensor(list(pieces.values())) for name, pieces in found.items()}


def places_in(file: TensorFile) -> dict[str, TensorSlice]:
    """Return the slices of tensors that a rank wrote into a file, by the tensors' names."""
    offsets = json.loads(file.metadata()[CUSTOM_METADATA_KEY])
    starts = {name: tuple(offsets[name][SAVED_OFFSETS_KEY]) for name in file.names()}
    return {name: TensorSlice.whole(file.shape(name)).moved(start) for name, start in starts.items()}


def read_into(target: Tensor, held: TensorSlice, source: TensorSource) -> None:
    """Fill `target` with the elements `held` of the source. Raises ValueError if the source lacks some of them."""
    read = 0
    for part, values in source.parts(held) if held.numel else ():
        target[part.within(held)].copy_(values)
        read += part.numel
    if read != held.numel:
        raise ValueError(f"{held.numel - read:,} elements are in none of the files")


def tensor_files(files: AbstractFileSystem, folder: str) -> list[TensorFile]:
    """Return the safetensors files of a folder, sorted by name; opening a file reads only the file's header."""
    paths = sorted(path for path in files.ls(folder, detail=False) if path.endswith(".safetensors"))
    if isinstance(files, LocalFileSystem):
        return [LocalFile(partial(str, path)) for path in paths]
    return [RemoteFile(files, path) for path in paths]


def written_type(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which the tensor of this name is written if its model is written in `dtype`."""
    return torch.float32 if name.endswith(FLOAT32) else dtype


def write_tensors(
    path: Path, sources: Mapping[str, TensorSource], dtype: torch.dtype, metadata: Mapping[str, str]
) -> str:
    """Write a safetensors file in parts of at most CHUNK_BYTES; one row may be larger. `FLOAT32` keeps its type.

    Returns the CRC-32 of the file's `SUMS`, as hexadecimal text.
    """
    dtypes = {name: written_type(name, dtype) for name in sources}
    header: dict[str, Any] = {}
    end = 0
    for name, source in sources.items():
        start, end = end, end + prod(source.shape) * dtypes[name].itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtypes[name]], "shape": source.shape, "data_offsets": [start, end]}
    sums = dict.fromkeys(sources, 0)

    def head() -> bytes:
        texts = {**metadata, SUMS: json.dumps({name: f"{found:08x}" for name, found in sums.items()})}
        text = json.dumps({"__metadata__": texts, **header}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    with path.open("wb") as file:
        file.write(head())
        for name, source in sources.items():
            for part in chunks(TensorSlice.whole(source.shape), dtypes[name].itemsize):
                values = torch.empty(part.shape, dtype=dtypes[name])
                read_into(values, part, source)
                file.write(data := bytes_of(values))
                sums[name] = crc32(data, sums[name])
        file.seek(0)
        file.write(head())  # with the checksums; the length stays the same
    return f"{crc32(json.dumps(sums, sort_keys=True).encode()):08x}"


def write_piece(path: Path, pieces: Mapping[str, tuple[Tensor, TensorSlice]], dtype: torch.dtype) -> str:
    """Write this rank's pieces of tensors for `saved_by_ranks`, and return their checksum as `write_tensors` does.

    pieces: name -> (elements, slice of the tensor).
    """
    offsets = {name: {SAVED_OFFSETS_KEY: place.starts} for name, (_, place) in pieces.items()}
    sources = {name: HeldTensor(tensor) for name, (tensor, _) in pieces.items()}
    return write_tensors(path, sources, dtype, {CUSTOM_METADATA_KEY: json.dumps(offsets)})
