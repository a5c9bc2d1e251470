"""Snapshots of a state for saves in the background: `torch.distributed.checkpoint.staging`, with stagers of our own."""

import torch
import torch.distributed.checkpoint.staging as _original

from ._in_use import Reused
from ._mirror import attributes
from ._state_dict_utils import _copy_state_dict, _create_cpu_state_dict, bytes_of, check_copyable

__all__ = list(_original.__all__)

if hasattr(_original, "DefaultStager"):  # since 2.9
    from ._default_stager import DefaultStager


class BlockingAsyncStager(Reused, _original.BlockingAsyncStager):
    """Copies a state to host memory before `stage` returns.

    cache_staged_state_dict: the memory, pinned where there is an accelerator, is used again for the next state. That must have the
    same structure, shapes and dtypes, and waits for the upload of the state before. type_check: values that are neither tensors,
    numbers, text, bytes nor containers are refused.
    """

    staged_bytes = 0  # of tensors in the last snapshot

    def stage(self, state_dict):
        staged = self._stage_cached(state_dict) if self.cache_staged_state_dict else self._stage_anew(state_dict)
        self.staged_bytes = bytes_of(staged)
        return staged

    def _stage_anew(self, state_dict):
        staged = _create_cpu_state_dict(state_dict)
        return _copy_state_dict(state_dict, staged, type_check=self.type_check)

    def _stage_cached(self, state_dict):
        upload = self._take_upload()
        if upload is not None:
            upload.wait()
        if self.state_dict_cache is None:
            self.state_dict_cache = _create_cpu_state_dict(state_dict, pin_memory=_has_accelerator())
        check_copyable(state_dict, self.state_dict_cache, type_check=self.type_check, same_dtype=True)
        return _copy_state_dict(state_dict, self.state_dict_cache, type_check=self.type_check)

    def synchronize_staging(self):
        """Does nothing: `stage` has copied all."""

    def close(self):
        """Frees the memory that is kept."""
        self.state_dict_cache = None


def _has_accelerator():
    if hasattr(torch, "accelerator"):
        return torch.accelerator.is_available()
    return torch.cuda.is_available()


__getattr__, __dir__ = attributes(__name__)
