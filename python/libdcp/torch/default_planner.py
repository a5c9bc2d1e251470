"""PyTorch's default planners, under names that tell that they are ours: `torch.distributed.checkpoint.default_planner`.

They plan as PyTorch's do, with its code, where a program overrides something; otherwise all planning is done in C. What differs is
the loading of objects, which executes nothing.
"""

import collections
import dataclasses

import torch
import torch.distributed.checkpoint.default_planner as _original
from torch.distributed.checkpoint._traverse import set_element, traverse_state_dict_v_2_3
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .. import _core
from . import _describe, _objects
from ._mirror import attributes

__all__ = list(_original.__all__)


class DefaultSavePlanner(_original.DefaultSavePlanner):
    """Plans the saving of nested states, sharded or not."""


class DefaultLoadPlanner(_original.DefaultLoadPlanner):
    """Plans the loading into nested states, sharded or not. Objects are loaded as libdcp.torch.allow_pickle describes."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        _describe.materialise(state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self):
        if self.metadata is None:
            raise AssertionError("set_up_planner was not given metadata")
        if self.flatten_state_dict:
            self._flatten_as_saved()
        plan = _original.create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)
        self._refuse_gaps(plan)
        return plan

    def _refuse_gaps(self, plan):
        """What no chunk of the checkpoint covers would stay as it is, and nobody would know."""
        found = collections.Counter()
        for item in plan.items:
            found[item.dest_index.fqn] += item.lengths.numel()
        for name, value in self.state_dict.items():
            entry = self.metadata.state_dict_metadata.get(name)
            if isinstance(value, torch.Tensor) and isinstance(entry, TensorStorageMetadata):
                wanted = _describe.held_elems(value)
                if found[name] < wanted:
                    raise _core.MismatchError(f"{name}: of {wanted} elements that are wanted here the checkpoint has {found[name]}")

    def _flatten_as_saved(self):
        """Releases up to 2.3 did not enter containers without tensors. If names of the checkpoint are missing from the state and
        that rule explains one of them, the state is flattened by it."""
        missing = self.metadata.state_dict_metadata.keys() - self.state_dict.keys()
        if not missing:
            return
        flat, paths = {}, {}

        def note(path, value):
            name = ".".join(map(str, path))
            flat[name], paths[name] = value, path

        traverse_state_dict_v_2_3(self.original_state_dict, note)
        if flat.keys() & missing:
            self.state_dict, self.mappings = flat, paths

    def load_bytes(self, read_item, value):
        name = read_item.dest_index.fqn
        loaded = _objects.load(name, value)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


class _EmptyStateDictLoadPlanner(_original._EmptyStateDictLoadPlanner, DefaultLoadPlanner):
    """Fills an empty state dict with what the checkpoint has, or with the selected keys and what lies below them."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        if metadata is not None and metadata.planner_data is None:  # which releases up to 2.9 take for a dict
            metadata = dataclasses.replace(metadata, planner_data={})
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def _should_include_key(self, key, metadata):
        if self.keys is None or key in self.keys:
            return True
        path = (metadata.planner_data or {}).get(key, (key,))
        prefixes = (".".join(map(str, path[: n + 1])) for n in range(len(path)))
        return any(prefix in self.keys for prefix in prefixes)


__getattr__, __dir__ = attributes(__name__)
