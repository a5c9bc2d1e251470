"""Whether anything about a planner, writer or reader is the program's own.

Where nothing is, a whole save or load runs in C. Where a hook is overridden, by a subclass or on the instance, it is called exactly
where DCP calls it, and all phases go through the Python hooks.
"""

import functools


def is_untouched(obj, *classes):
    """Whether `obj` behaves as one of `classes` does. A subclass that adds methods or options of its own does, too."""
    return any(isinstance(obj, cls) and _overrides_nothing(type(obj), cls) and not _hooks(cls) & vars(obj).keys() for cls in classes)


@functools.lru_cache(maxsize=256)
def _overrides_nothing(subclass, cls):
    return all(_attribute(subclass, name) is _attribute(cls, name) for name in _hooks(cls))


@functools.lru_cache(maxsize=32)
def _hooks(cls):
    """Names of the methods and properties of a class and its bases, but for the special ones."""
    names = set()
    for base in cls.__mro__[:-1]:
        names.update(name for name, value in vars(base).items() if _is_hook(name, value))
    return frozenset(names)


def _is_hook(name, value):
    return not name.startswith("__") and (callable(value) or isinstance(value, (classmethod, staticmethod, property)))


def _attribute(cls, name):
    """As written in the class body, unbound."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
