"""What states hold, to be compared: digests in the form of `dcptool hash --json` and of the golden files' expectations."""

import hashlib

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def tensor_bytes(tensor):
    """Row-major little-endian bytes, whatever the dtype."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # PyTorch 2.9 cannot copy float4_e2m1fn_x2
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def digest(tensor):
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "sha256": hashlib.sha256(tensor_bytes(tensor)).hexdigest(),
        "shape": list(tensor.shape),
    }


class Shown:
    """A tensor inside an object, as dcptool prints it: PyTorch's own text would depend on its print options."""

    def __init__(self, tensor):
        self.text = f"<tensor {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}>"

    def __repr__(self):
        return self.text


def shown(value):
    if isinstance(value, torch.Tensor):
        return Shown(value)
    return type(value)(map(shown, value)) if type(value) in (list, tuple) else value


def digests(flat):
    """Of a dict of names and leaves."""
    tensors = {name: digest(value) for name, value in flat.items() if isinstance(value, torch.Tensor)}
    objects = {name: repr(shown(value)) for name, value in flat.items() if not isinstance(value, torch.Tensor)}
    return {"tensors": tensors, "objects": objects}


def zeros(size, dtype):
    tensor = torch.empty(size, dtype=dtype)
    if tensor.numel():
        tensor.reshape(-1).view(torch.uint8).zero_()
    return tensor


def targets_for(metadata):
    """By name: tensors of zeros and None."""
    return {
        name: zeros(item.size, item.properties.dtype) if isinstance(item, TensorStorageMetadata) else None
        for name, item in metadata.state_dict_metadata.items()
    }
