"""The modules of torch.distributed.checkpoint under our own name.

`libdcp.torch.planner` has every name of `torch.distributed.checkpoint.planner`, and so on for each module that the installed
PyTorch has. Where we have a module of our own (a file beside this one), its names come first. The rest are PyTorch's very objects,
looked up when they are asked for: what one release lacks is absent here too, with no list to keep.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

OURS = __package__
THEIRS = "torch.distributed.checkpoint"
# Not in that package, but used together with it by those who save and load.
ELSEWHERE = {"_state_dict_utils": "torch.distributed._state_dict_utils"}


def original_name(name):
    """PyTorch's name of our module `name`: libdcp.torch.planner -> torch.distributed.checkpoint.planner."""
    inner = name[len(OURS) + 1 :]
    return ELSEWHERE.get(inner, f"{THEIRS}.{inner}" if inner else THEIRS)


def attributes(name):
    """`__getattr__` and `__dir__` for our module `name`, which answer with what PyTorch's module has."""
    original = importlib.import_module(original_name(name))

    def get(attribute):
        try:
            found = getattr(original, attribute)
        except AttributeError:
            raise AttributeError(f"neither {name} nor {original.__name__} has {attribute!r}") from None
        inner = f"{name}.{attribute}"
        if isinstance(found, types.ModuleType) and found.__name__ == original_name(inner) and _has_file(name, inner):
            return importlib.import_module(inner)  # PyTorch has imported its module; ours may still be to come
        return found

    def names():
        return sorted(set(vars(sys.modules[name])) | set(dir(original)))

    return get, names


def _has_file(package, name):
    """Whether we have a module of our own of that name."""
    places = getattr(sys.modules[package], "__path__", None)
    return places is not None and importlib.machinery.PathFinder.find_spec(name, places) is not None


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that only PyTorch has. Last of all finders, so that our files win."""

    def find_spec(self, name, path=None, target=None):
        if not name.startswith(OURS + "."):
            return None
        try:
            found = importlib.util.find_spec(original_name(name))
        except ModuleNotFoundError:
            return None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(name, self, origin=found.origin, is_package=is_package)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        original = importlib.import_module(original_name(module.__name__))
        module.__getattr__, module.__dir__ = attributes(module.__name__)
        module.__doc__ = original.__doc__
        if hasattr(original, "__all__"):
            module.__all__ = list(original.__all__)


def register():
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
