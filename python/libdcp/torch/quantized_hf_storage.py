"""Quantized models, dequantized while they are read: `torch.distributed.checkpoint.quantized_hf_storage`.

Two schemes are known. X.weight with X.weight_scale_inv is scaled by one factor for each block of block_size x block_size elements.
X_blocks with X_scales has 4-bit floats, two in a byte, with one power of two for each group, the last dimension but one.
"""

import dataclasses

import torch
import torch.distributed.checkpoint.quantized_hf_storage as _original
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from .. import _core
from . import _describe, _pieces
from ._mirror import attributes
from .hf_storage import HuggingFaceStorageReader

__all__ = list(_original.__all__)

PIECE_ELEMS = 4 << 20  # dequantized at a time
# Of the 16 codes: 2 bits of exponent and 1 of mantissa, behind the sign.
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SCALE_BIAS = 127


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader, _original.QuantizedHuggingFaceStorageReader):
    """Reads tensors that have scales beside them as `target_dtype`; the index file tells which have. Others are read as they are."""

    __init__ = _original.QuantizedHuggingFaceStorageReader.__init__

    def read_metadata(self):
        metadata = HuggingFaceStorageReader.read_metadata(self)
        if self._checkpoint is None:
            raise _core.UnsupportedError(f"{self.path}: quantized models are read from the local file system")
        self._tensor_full_shapes = {}  # PyTorch's, since 2.13
        self._load_quantization_metadata()
        for name in self._weight_scale_mapping.keys() & metadata.state_dict_metadata.keys():
            entry = metadata.state_dict_metadata[name]
            if name.endswith("_blocks"):
                self._tensor_full_shapes[name + "_quantized"] = entry.size
                _unpack(name, entry, metadata.storage_data)
            entry.properties = dataclasses.replace(entry.properties, dtype=self.target_dtype)
        for name, entry in metadata.state_dict_metadata.items():
            self._tensor_full_shapes[name] = entry.size
        return metadata

    def _read_box(self, item, target):
        name = item.storage_index.fqn
        if not self._is_tensor_quantized(name):
            super()._read_box(item, target)
            return
        if tuple(target.shape) != tuple(item.lengths):
            raise AssertionError(f"req {item.storage_index} mismatch sizes {target.shape} vs {item.lengths}")
        origin = tuple(start + inner for start, inner in zip(item.storage_index.offset, item.storage_offsets))
        read = self._read_packed if name.endswith("_blocks") else self._read_scaled
        for offsets, sizes in _pieces.boxes(tuple(item.lengths), PIECE_ELEMS):
            starts = tuple(first + inner for first, inner in zip(origin, offsets))
            values = read(name, starts, sizes).to(self.target_dtype)
            _pieces.narrowed(target, (0,) * len(sizes), offsets, sizes).copy_(values)

    def _read_scaled(self, name, starts, sizes):
        """A box of a tensor with one factor for each block, in float32."""
        scale_name, scale_shape = self._scales_of(name)
        size = self._block_size_checked(name, scale_shape)
        first = [start // size for start in starts]
        count = [(start + extent - 1) // size - block + 1 for start, extent, block in zip(starts, sizes, first)]
        scales = self._read(scale_name, first, count).float()
        rows, columns = (
            torch.arange(start, start + extent) // size - block for start, extent, block in zip(starts, sizes, first)
        )
        return self._read(name, starts, sizes).float() * scales[rows][:, columns]

    def _block_size_checked(self, name, scale_shape):
        shape = self._tensor_full_shapes[name]
        if len(shape) != 2:
            raise ValueError(f"Unsupported quantization types: {name} has {len(shape)} dimensions, blocks have two")
        blocks = tuple(-(-extent // self.block_size) for extent in shape)
        if blocks != scale_shape:
            raise ValueError(
                f"{name} of shape {tuple(shape)} has {blocks} blocks of {self.block_size} x {self.block_size} elements, its scales"
                f" have the shape {scale_shape}"
            )
        return self.block_size

    def _read_packed(self, name, starts, sizes):
        """A box of a tensor of 4-bit floats, in float64, which holds each of them times its power of two exactly."""
        scale_name, scale_shape = self._scales_of(name)
        *outer, groups, width = self._tensor_full_shapes[name + "_quantized"]
        if scale_shape != (*outer, groups):
            raise ValueError(f"{name} has groups of shape {(*outer, groups)}, its scales have the shape {scale_shape}")
        values_of_group = 2 * width
        first = starts[-1] // values_of_group
        count = (starts[-1] + sizes[-1] - 1) // values_of_group - first + 1
        codes = self._read(name, (*starts[:-1], first, 0), (*sizes[:-1], count, width))
        scales = self._read(scale_name, (*starts[:-1], first), (*sizes[:-1], count)).view(torch.uint8)
        table = torch.tensor(FLOAT4, dtype=torch.float64)
        values = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(-2)
        values = torch.ldexp(values, scales.int().unsqueeze(-1) - SCALE_BIAS).flatten(-2)
        return values.narrow(-1, starts[-1] - first * values_of_group, sizes[-1])

    def _scales_of(self, name):
        """Name and shape of the scales of a tensor. They may be in any file."""
        scale_name = self._weight_scale_mapping[name]
        shape = self._tensor_full_shapes.get(scale_name)
        if shape is None:
            raise ValueError(f"Scale tensor {scale_name} of {name} is in the index, and in no file")
        return scale_name, tuple(shape)

    def _read(self, name, offsets, sizes):
        """A box as it is stored."""
        memory = torch.empty(tuple(sizes), dtype=_describe.dtype_of(self._checkpoint.item(name)[1]))
        self._checkpoint.read(name, tuple(offsets), tuple(sizes), _describe.whole(memory, memory))
        return memory


def _unpack(name, entry, places):
    """Gives the metadata of packed values [..., G, B] the shape that they have when dequantized, [..., G * B * 2]."""
    width = entry.size[-1]
    chunks = []
    for chunk in entry.chunks:
        if chunk.sizes[-1] != width:
            raise ValueError(f"{name} is cut within its groups")
        info = places.pop(MetadataIndex(name, chunk.offsets))
        chunks.append(ChunkStorageMetadata(_unpacked(chunk.offsets, width), _unpacked(chunk.sizes, width)))
        places[MetadataIndex(name, chunks[-1].offsets)] = info
    entry.size, entry.chunks = _unpacked(entry.size, width), chunks


def _unpacked(shape, width):
    return torch.Size([*shape[:-2], shape[-2] * width * 2])


__getattr__, __dir__ = attributes(__name__)
