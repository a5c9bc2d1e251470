"""The steps in which the ranks of a group do something together and agree on how it went.

As in DCP: what one rank or several fail at is raised on all of them, as one CheckpointException that has the step's name and the
exception of each rank that failed. A failing rank takes part to the end, and every wait has a deadline, so nobody is left behind.
"""

import pickle

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _is_wrapped_exception, _wrap_exception

from . import _group


def channel_of(process_group, step="plan", kind=None):
    """The channel of a process group; that ranks do not arrive to make it counts as a failure of the first step."""
    try:
        return _group.of(process_group, kind)
    except (OSError, RuntimeError) as error:
        rank = process_group.rank() if process_group is not None else dist.get_rank()
        raise CheckpointException(step, {rank: _wrap_exception(error)}) from error


class Steps:
    """`channel`: who takes part; `coordinator`: the rank of the group that decides for all."""

    def __init__(self, channel, coordinator=0):
        if not 0 <= coordinator < channel.size:
            raise ValueError(f"coordinator rank {coordinator} is not in a group of {channel.size}")
        self.channel = channel
        self.rank = channel.rank
        self.size = channel.size
        self.coordinator = coordinator
        self.is_coordinator = channel.rank == coordinator

    def reduce_scatter(self, step, each, central):
        """`each()` on every rank; `central(values)` on the coordinator gives a list with one result for each rank."""

        def spread(values):
            results = central(values)
            if len(results) != self.size:
                raise ValueError(f"{len(results)} plans for {self.size} ranks")
            return results

        if self.size == 1:
            return self._alone(step, lambda: spread([each()])[0])
        return self._reduce(step, each, spread)

    def all_reduce(self, step, each, central):
        """`each()` on every rank; `central(values)` on the coordinator gives the result of all."""
        if self.size == 1:
            return self._alone(step, lambda: central([each()]))
        return self._reduce(step, each, lambda values: _ForAll(central(values)))

    def all_gather(self, step, each):
        """`each()` on every rank; all of the values on every rank."""
        if self.size == 1:
            return self._alone(step, lambda: [each()])
        mine = attempt(each)
        blobs = self._communicate(step, lambda: _group.all_gather(self.channel, packed(mine)))
        values = self._unpacked(blobs, mine)
        return self._agreed(step, mine, failures_in(values), values)

    def union(self, step, flags):
        """The bits that any rank has set in a byte, on every rank: for what all have to do alike."""
        if self.size == 1:
            return flags
        return self._communicate(step, lambda: _group.union(self.channel, self.coordinator, flags))

    def _alone(self, step, function):
        result = attempt(function)
        return self._agreed(step, result, failures_in([result]), result)

    def _reduce(self, step, each, central):
        mine = attempt(each)
        blobs = self._communicate(step, lambda: _group.gather(self.channel, self.coordinator, packed(mine)))
        own = None
        outcome = None
        if self.is_coordinator:
            values = self._unpacked(blobs, mine)
            failures = failures_in(values)
            if not failures:
                own = attempt(lambda: central(values))
                failures = failures_in({self.rank: own})
            outcome = self._outcomes(failures, own)
        blob = self._communicate(step, lambda: _group.scatter(self.channel, self.coordinator, outcome))
        result = pickle.loads(blob)
        failures = result.failures if isinstance(result, _Failed) else {}
        if self.is_coordinator and not failures:
            result = own.value if isinstance(own, _ForAll) else own[self.rank]
        return self._agreed(step, own if _is_wrapped_exception(own) else mine, failures, result)

    def _outcomes(self, failures, results):
        """What the coordinator sends: one pickle for each rank."""
        if not failures:
            try:
                if isinstance(results, _ForAll):
                    return [pickle.dumps(results.value)] * self.size
                return [pickle.dumps(result) for result in results]
            except Exception as error:  # pickling runs code of the values' classes, which may raise anything
                failures = {self.rank: _wrap_exception(error)}
        return [pickle.dumps(_Failed({rank: portable(cause) for rank, cause in failures.items()}))] * self.size

    def _unpacked(self, blobs, mine):
        """What the ranks sent; this one's own value is the very object. What cannot be unpickled counts as its rank's failure."""
        return [mine if rank == self.rank else attempt(lambda b=blob: pickle.loads(b)) for rank, blob in enumerate(blobs)]

    def _agreed(self, step, mine, failures, result):
        if not failures:
            return result
        if _is_wrapped_exception(mine) and self.rank in failures:
            failures[self.rank] = mine  # the very object, not its copy
        raise CheckpointException(step, dict(sorted(failures.items())))

    def _communicate(self, step, exchange):
        try:
            return exchange()
        except (OSError, RuntimeError) as error:  # deadlines and lost connections; of no use to tell the others
            raise CheckpointException(step, {self.rank: _wrap_exception(error)}) from error


class _ForAll:
    """One result for every rank."""

    def __init__(self, value):
        self.value = value


class _Failed:
    """Takes the place of a result where there is none."""

    def __init__(self, failures):
        self.failures = failures


def attempt(function):
    """The result of `function()`, or what it raised in DCP's form: (exception, summary of the traceback)."""
    try:
        return function()
    except BaseException as error:  # an interrupted rank, too, owes the others an answer
        return _wrap_exception(error)


def failures_in(values):
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    return {rank: value for rank, value in pairs if _is_wrapped_exception(value)}


def packed(value):
    """The pickle of a step's value, or of the failure to make one."""
    if not _is_wrapped_exception(value):
        try:
            return pickle.dumps(value)
        except Exception as error:  # pickling runs code of the values' classes, which may raise anything
            value = _wrap_exception(error)
    return pickle.dumps(portable(value))


def portable(wrapped):
    """A wrapped exception that other ranks can unpickle; in place of one that they cannot, its class name and text."""
    try:
        pickle.loads(pickle.dumps(wrapped))
        return wrapped
    except Exception:  # see above
        cause, trace = wrapped
        return RuntimeError(f"{type(cause).__name__}: {cause}"), trace
