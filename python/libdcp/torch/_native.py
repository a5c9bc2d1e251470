"""Whole saves and loads in C, for planners, writers and readers with nothing overridden."""

import os
import pathlib

import torch.distributed.checkpoint.default_planner as _original

from .. import _core
from . import _describe, _errors, _group, _metadata, _objects
from ._hooks import is_untouched
from ._steps import Steps
from .default_planner import DefaultLoadPlanner, DefaultSavePlanner
from .filesystem import (
    FileSystemReader,
    FileSystemWriter,
    has_known_transforms,
    is_local,
    metadata_path,
    warn_of_existing,
)


def can_save(writer, planner):
    return (
        is_untouched(planner, DefaultSavePlanner, _original.DefaultSavePlanner)
        and planner.flatten_state_dict
        and planner.flatten_sharded_tensors
        and is_untouched(writer, FileSystemWriter)
        and writer._writes_in_c()
    )


def can_load(reader, planner):
    return (
        is_untouched(planner, DefaultLoadPlanner, _original.DefaultLoadPlanner)
        and planner.flatten_state_dict
        and planner.flatten_sharded_tensors
        and is_untouched(reader, FileSystemReader)
        and is_local(reader)
        and has_known_transforms(reader)
    )


def save(state_dict, writer, planner, channel, coordinator, use_collectives, options):
    together = channel if use_collectives else _group.Single()
    sources = _describe.Sources()
    state_dict, describe = _prepared(
        state_dict, sources.describe, lambda: _prepare_save(writer, channel, coordinator, use_collectives)
    )
    try:
        report = _core.save(
            writer.path,
            state_dict,
            describe=describe,
            pickle=_objects.dump,
            tensor_types=_describe.ATTRIBUTES_SUFFICE,
            group=_core_group(together) if use_collectives else None,
            coordinator=coordinator if use_collectives else 0,
            overwrite=writer.overwrite and use_collectives,
            sync=writer.sync_files,
            files=writer.thread_count,
            file_per_item=not writer.single_file_per_rank,
            serialization=writer.serialization_name(),
            transform=writer.transform_name(),
            # Without collectives nobody has agreed on an id; different ones would say that the ranks' files are of different saves.
            save_id=writer.save_id if use_collectives else None,
            checkpoint_id=os.fspath(writer.path),
            dedup_to_lowest=planner.dedup_save_to_lowest_rank,
            cache=_plan_cache(planner, together),
            stream=sources.devices.stream,
            copy_ahead_bytes=writer.copy_ahead_bytes(),
            rank_local=None if use_collectives else (channel.rank, channel.size),
            **options,
        )
    except BaseException as error:
        if not use_collectives:
            raise
        _errors.raise_together("write", error, together, place=os.fspath(writer.path))
    rank = None if use_collectives else channel.rank
    path, save_id = pathlib.Path(writer.path).absolute(), report["save_id"]  # the coordinator's
    return _metadata.LazyMetadata(lambda: _metadata.metadata_of_save(path, save_id, rank))


def _prepare_save(writer, channel, coordinator, use_collectives):
    writer.set_up_storage_writer(channel.rank == coordinator, rank=channel.rank, use_collectives=use_collectives)
    if use_collectives and writer.overwrite and os.path.exists(metadata_path(writer)):
        warn_of_existing(writer.path)


def _prepared(state_dict, describe, prepare):
    """The state, or what it gives if it is a function, and how to describe it, after `prepare()`. If one of them fails, a state that
    cannot be described: a rank that cannot go on takes part all the same, and so tells the others."""
    try:
        prepare()
        return state_dict() if callable(state_dict) else state_dict, describe
    except Exception as error:
        failure = error

    def fail(node):
        raise failure

    return {"": object()}, fail


def load(state_dict, reader, planner, channel, coordinator, is_saved_alone, options):
    """is_saved_alone: ranks were saved each by itself, and each loads its own."""
    targets = _describe.Targets()
    options = dict(options)
    differences = _errors.Differences(
        options.pop("on_difference", None), planner.allow_partial_load, options.get("exact", False)
    )
    tree, describe = _prepared(state_dict, targets.describe, lambda: _describe.materialise(state_dict))
    arguments = dict(
        describe=describe,
        tensor_types=_describe.ATTRIBUTES_SUFFICE,
        load_object=_objects.load,
        convert=targets.convert,
        filling=targets.check_fillable,
        partial=planner.allow_partial_load,
        difference=differences,
        objects_for_tensors=True,
        make_tensor=_describe.from_memory,
        stream=targets.devices.stream,
        **options,
    )
    if is_saved_alone:
        _, objects, filled = Steps(channel, coordinator).all_gather(
            "read", lambda: _core.load(reader.path, tree, rank=channel.rank, **arguments)
        )[channel.rank]
    else:
        try:
            _, objects, filled = _core.load(reader.path, tree, group=_core_group(channel), **arguments)
        except BaseException as error:
            _errors.raise_together("read", error, channel, differences)
    try:
        targets.finish(filled)
    except Exception as error:  # of the device: what a copy refuses has been found out before
        _errors.raise_alone("read", error, channel.rank)
    for path, _, value in objects:
        put(state_dict, path, value)


def put(tree, path, value):
    """Puts a loaded object where the state had one."""
    for part in path[:-1]:
        tree = tree[part]
    tree[path[-1]] = value


def _core_group(channel):
    """The channel as the library's communicator; it keeps its state from one save to the next."""
    if channel.core_group is None:
        channel.core_group = _core.Group(
            channel.rank, channel.size, alltoall=channel.alltoall, any_thread=channel.size == 1, timeout_s=channel.timeout_s
        )
    return channel.core_group


def _plan_cache(planner, channel):
    """Kept with the channel, for planners that ask for it: the structure of the state is compared, so any of them may use it."""
    if not planner._enable_plan_caching:
        return None
    if channel.plan_cache is None:
        channel.plan_cache = _core.PlanCache()
    return channel.plan_cache
