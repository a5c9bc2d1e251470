"""The functions of the package."""
from __future__ import annotations

from . import _core
from ._arrays import Describer, Opaque, make_array, tensor_types
from ._checkpoint import Checkpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


def open(path: str | os.PathLike[str], *, rank: int | None = None, check_crc: bool = False,
         allow_outside: bool = False) -> Checkpoint:
    """Opens a checkpoint and reads its metadata, no elements.

    path: a directory or file of any layout that PyTorch writes. rank: of a checkpoint that was saved without communication, that
    rank's part alone; None joins all. check_crc: compare the CRC-32 of every record that is read whole (ChecksumError).
    allow_outside: follow names in the metadata that lead out of the directory, as PyTorch does.

    Raises NotFoundError (a FileNotFoundError), FormatError or ChecksumError (ValueErrors, with offset), StorageError (an OSError).
    """
    return Checkpoint(path, rank=rank, check_crc=check_crc, allow_outside=allow_outside)


def save(path: str | os.PathLike[str], tree: Mapping[Any, Any], *, overwrite: bool = False, sync: bool = True, files: int = 1,
         file_per_item: bool = False, align_payloads: bool = False, serialization: str = "torch_save", transform: str | None = None,
         target_release: int = 0, save_id: str | None = None, checkpoint_id: str | None = None, group: _core.Group | None = None,
         coordinator: int = 0, dedup_to_lowest: bool = False, check_content: bool = False, per_rank: Sequence[str] = (),
         cache: _core.PlanCache | None = None, rank_local: tuple[int, int] | None = None, threads: int = 0, memory_bytes: int = 0,
         on_failure: str = "return", progress: Callable[[int, int], Any] | None = None) -> dict[str, Any]:
    """Saves a dict as a checkpoint of PyTorch's form, and returns a report of seconds and bytes.

    At every moment the directory holds the old checkpoint or the new one, whatever crashes; after an error the old one holds and
    nothing of the new one is left.

    tree: nested dicts and lists; tensors are NumPy arrays and what has the buffer protocol or DLPack, of any strides, and View; other
    leaves None, bool, int, float, complex, str, bytes, bytearray and tuples, lists, sets and dicts of these. TypeError for other
    objects, ValueError for a tree that contains itself; the message names the place.
    overwrite: replace a checkpoint that is there; otherwise ExistsError (a RuntimeError).
    sync: make the files durable before publishing.
    files: data files of this rank, 1 to 1000. file_per_item: one for each tensor or object instead.
    align_payloads: start elements of tensors of 1 MiB and more at multiples of 4096 bytes.
    serialization: "torch_save", or "safetensors" for a form that only libdcp reads. transform: "stream.zstd/1" compresses records.
    target_release: oldest PyTorch to serve, major * 100 + minor (204 is 2.4); 0: the oldest that knows all dtypes.
    save_id: a UUID; None: a new one. checkpoint_id: noted in the metadata; None: path.
    group, coordinator, dedup_to_lowest, check_content, per_rank: several ranks save together, each its part; see Group. per_rank:
    glob patterns of names that every rank has for itself. A failure of any rank raises PeerError on all.
    cache: keeps the plan from save to save. rank_local: (rank, world) of a save without communication.
    threads: workers; 0: as many as the process may use, at most 8. memory_bytes: for buffers; 0: 192 MiB.
    on_failure: "warn" logs a warning (logger "libdcp") and returns a report with another status than "OK" instead of raising.
    progress(done_bytes, total_bytes): called now and then on this thread; a False result cancels (CanceledError).
    """
    return _core.save(path, tree, describe=Describer(False), tensor_types=tensor_types(), overwrite=overwrite, sync=sync, files=files,
                      file_per_item=file_per_item, align_payloads=align_payloads, serialization=serialization, transform=transform,
                      target_release=target_release, save_id=save_id, checkpoint_id=checkpoint_id, group=group,
                      coordinator=coordinator, dedup_to_lowest=dedup_to_lowest, check_content=check_content, per_rank=per_rank,
                      cache=cache, rank_local=rank_local, threads=threads, memory_bytes=memory_bytes, on_failure=on_failure,
                      progress=progress)


def load(path: str | os.PathLike[str], into: dict[Any, Any] | None = None, *, partial: bool = False, exact: bool = False,
         include: Sequence[str] = (), exclude: Sequence[str] = (), prefix: str = "",
         rename: Callable[[str], str | None] | None = None, group: _core.Group | None = None, per_rank: Sequence[str] = (),
         check_crc: bool = False, difference: Callable[[str, str, str], Any] | None = None, threads: int = 0,
         memory_bytes: int = 0, rank: int | None = None, progress: Callable[[int, int], Any] | None = None) -> dict[Any, Any]:
    """Loads a checkpoint, and returns it as a dict.

    into: None for all of it, in new arrays; or a dict of the form that was saved, which is returned: its arrays are filled where they
    are (any strides, views), other leaves are replaced by the saved values, and None becomes whatever was saved. All differences are
    found before anything is changed: MissingKeyError (a RuntimeError) for names that the checkpoint lacks, MismatchError (a
    ValueError) for other shapes, dtypes or kinds. The other options need `into`:
    partial: leave names that the checkpoint lacks as they are. exact: names that `into` lacks are an error.
    include, exclude: glob patterns of names of `into` to load, and to leave alone.
    prefix: put before each name to get the checkpoint's. rename(name): after that; None leaves the name out.
    group, per_rank: several ranks load together, as in save().
    difference(kind, name, text): called for each difference; kind is "missing", "unexpected", "shape", "dtype" or "kind".
    check_crc, rank: as in open(). threads, memory_bytes, progress: as in save().
    """
    if into is None:
        with Checkpoint(path, rank=rank, check_crc=check_crc) as checkpoint:
            return checkpoint.tree()
    describe = Describer(True)
    _, objects, filled = _core.load(path, into, describe=describe, tensor_types=tensor_types(), partial=partial, exact=exact, include=include,
                            exclude=exclude, prefix=prefix, rename=rename, group=group, per_rank=per_rank, check_crc=check_crc,
                            difference=difference, threads=threads, memory_bytes=memory_bytes, rank=-1 if rank is None else rank,
                            progress=progress, make_tensor=make_array, make_opaque=Opaque, filling=describe.check_fillable)
    describe.finish(filled)
    for keys, _, value in objects:
        _put(into, keys, value)
    return into


def _put(tree: Any, keys: tuple[Any, ...], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree[key]
    tree[keys[-1]] = value


def verify(path: str | os.PathLike[str], *, quick: bool = False, defect: Callable[[dict[str, Any]], Any] | None = None,
           progress: Callable[[int, int], Any] | None = None) -> dict[str, Any]:
    """Checks everything in a checkpoint that can be checked, and returns a report: n_defects, defects (dicts of code, file, fqn,
    offset, message), n_records, n_files, n_unchecked (records without any checksum), bytes (read), has_digests.

    quick: structure, bounds, coverage, presence and length of files; no elements. defect(d): called for each as it is found.
    progress(done_bytes, total_bytes): called now and then; a False result cancels (CanceledError). A checkpoint that cannot be
    opened raises as open() does.
    """
    with Checkpoint(path) as checkpoint:
        return checkpoint.verify(quick=quick, defect=defect, progress=progress)


def hash(path: str | os.PathLike[str], fqn: str) -> str:
    """SHA-256 of the row-major little-endian bytes of a tensor, in hexadecimal: the same whatever the chunks it is stored in.
    KeyError if there is no such name."""
    with Checkpoint(path) as checkpoint:
        return checkpoint.hash(fqn)


def latest(path: str | os.PathLike[str]) -> str:
    """Path of the newest complete checkpoint directly below a directory (or the directory itself): by the largest number at the end of
    the name where names have one, else by time. NotFoundError (a FileNotFoundError) if there is none."""
    return _core.latest(path)
