"""convert(): one form of a checkpoint from another."""
from __future__ import annotations

import os

from . import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


def convert(source: str | os.PathLike, target: str | os.PathLike, *, to: str, include: Sequence[str] = (),
            exclude: Sequence[str] = (), edits: Sequence[str] = (), cast: Mapping[str, str] | None = None,
            dequantize: str | None = None, dequantize_block: int = 0, allow_overflow: bool = False,
            split: Mapping[str, str] | None = None, alias: str = "copy", objects: str = "error", max_file_bytes: int = 0,
            mapping: str | os.PathLike | None = None, ranks: int = 0, files: int = 0, file_per_item: bool = False,
            align_payloads: bool = False, transform: str | None = None, target_release: int = 0, overwrite: bool = False,
            resume: bool = False, sync: bool = True, check: bool = True, allow_shard_gaps: bool = False,
            group: _core.Group | None = None, threads: int = 0, memory_bytes: int = 0,
            progress: Callable[[int, int], Any] | None = None) -> dict[str, Any]:
    """Makes a checkpoint of one form out of one of any form, in bounded memory, and returns a report.

    Every byte of a tensor is read once. Free space is looked at first; what is written is read back and compared before it gets its
    name. After an error what was there before is whole. `dcptool convert` does the same.

    source: whatever open() opens. to: "dcp", a directory of torch.distributed.checkpoint; "torch", one file of torch.save;
    "safetensors", one file; "hf", a Hugging Face directory, whose shards are put together.
    include, exclude: glob patterns of names; one that fits nothing is NotFoundError.
    edits: changes of names, one after the other: "s/regex/text/", "add:model.", "strip:model.".
    cast: {glob pattern: dtype}, the first that fits counts. Numbers that do not fit are MismatchError, with how many; with
    allow_overflow they are counted in the report. dequantize: the dtype of tensors that are stored with scales (blocks of
    dequantize_block rows and columns, 0: 128).
    split: {name: glob pattern}: several outputs, target/<name> each; every name must go to one.
    alias: "copy", "drop" or "error": names that share elements, where the form knows no sharing.
    objects: "error", "drop" or "beside": what is no tensor, where the form has tensors alone; beside: a torch.save file.
    max_file_bytes: hf: of the tensors of one file. mapping: hf: an index file that says which tensor goes to which file.
    ranks: dcp: as if so many ranks had saved it. files, file_per_item, align_payloads, transform, target_release: dcp: as in save().
    overwrite: replace what is there; otherwise ExistsError. resume: hf: keep finished files of an earlier try.
    sync: make it durable. check: read it back. allow_shard_gaps: accept shards whose numbers are not complete.
    group: hf: the ranks that convert together. threads, memory_bytes, progress: as in save().
    """
    cast, split = cast or {}, split or {}
    return _core.convert(source, target, form=to, include=include, exclude=exclude, edits=edits, cast_names=list(cast),
                         cast_dtypes=list(cast.values()), part_names=list(split), part_patterns=list(split.values()), alias=alias,
                         objects=objects, max_file_bytes=max_file_bytes, mapping=None if mapping is None else os.fspath(mapping),
                         ranks=ranks, files=files, file_per_item=file_per_item, align_payloads=align_payloads, transform=transform,
                         target_release=target_release, overwrite=overwrite, resume=resume, sync=sync, check=check,
                         dequantize=dequantize, dequantize_block=dequantize_block, allow_overflow=allow_overflow,
                         allow_shard_gaps=allow_shard_gaps, group=group, threads=threads, memory_bytes=memory_bytes,
                         progress=progress)
