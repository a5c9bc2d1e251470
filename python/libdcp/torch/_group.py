"""Messages between the ranks of a torch.distributed group, without touching that group or any device.

Each process group gets a Gloo connection of its own, made at first use and kept as long as the group lives. It is not registered
with torch.distributed: it changes no group count, so that names of groups that the program makes later are what they would be without
us, and only the members of the group take part in making it.
"""

import functools
import operator
import threading
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT_S = 1800.0


class Channel:
    """All-to-all messages among the ranks of one group. One collective call at a time: hold `lock` from the first exchange of a
    save or load to the last."""

    def __init__(self, backend, rank, size, timeout_s, on_failure=lambda: None):
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.lock = threading.RLock()
        self.core_group = None  # the library's view of this channel, and the plan of its last save: see _native
        self.plan_cache = None
        self._backend = backend
        self._on_failure = on_failure
        self._in_flight = []  # after a failure: memory that the backend may still write to

    def alltoall(self, sends, recvs, timeout_s=None):
        """sends[r] goes to rank r, recvs[r] is filled with what rank r sent; None, or nothing in it: no message. Both sides know
        the sizes. Raises TimeoutError naming the ranks that did not arrive."""
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        if sends[self.rank] is not None and recvs[self.rank] is not None:
            recvs[self.rank][:] = sends[self.rank]
        arriving = []
        posted = []
        try:
            for peer, view in self._others(recvs):
                into = torch.empty(len(view), dtype=torch.uint8)
                posted.append((peer, self._backend.recv([into], peer, 0), into))
                arriving.append((view, into))
            for peer, view in self._others(sends):
                data = torch.frombuffer(bytearray(view), dtype=torch.uint8)
                posted.append((None, self._backend.send([data], peer, 0), data))
            self._wait(posted, deadline)
        except BaseException:
            self._in_flight = posted
            self._on_failure()
            raise
        for view, into in arriving:
            view[:] = memoryview(into.numpy())

    def _others(self, views):
        return [(peer, view) for peer, view in enumerate(views) if peer != self.rank and view is not None and len(view)]

    def _wait(self, posted, deadline):
        missing = []
        first = None
        for peer, work, _ in posted:
            # Once one is late the others get no more time, only the chance to have arrived.
            left = 0.001 if first is not None else max(deadline - time.monotonic(), 0.001)
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                first = first or error
                if peer is not None:
                    missing.append(peer)
        if first is None:
            return
        ranks = ", ".join(map(str, sorted(missing))) or "unknown"
        if "imed out" in str(first) or "imeout" in str(first):
            raise TimeoutError(f"no message from rank {ranks} before the deadline") from first
        raise ConnectionError(f"connection to rank {ranks} lost: {str(first).splitlines()[0]}") from first


class Single:
    """The channel of a process that works alone; without collectives it still has its rank in a group."""

    timeout_s = DEFAULT_TIMEOUT_S

    def __init__(self, rank=0, size=1):
        self.rank = rank
        self.size = size
        self.lock = threading.RLock()
        self.core_group = None
        self.plan_cache = None

    def alltoall(self, sends, recvs, timeout_s=None):
        if sends[0] is not None and recvs[0] is not None:
            recvs[0][:] = sends[0]


def exchange(channel, blobs, expected, timeout_s=None):
    """Sends blobs[r] to rank r (None: nothing) and returns what the ranks in `expected` sent here; sizes go first."""
    size = channel.size
    lengths = [None if blob is None else len(blob).to_bytes(8, "little") for blob in blobs]
    headers = [bytearray(8) if peer in expected else None for peer in range(size)]
    channel.alltoall([v and memoryview(v) for v in lengths], [v and memoryview(v) for v in headers], timeout_s)
    received = [None if header is None else bytearray(int.from_bytes(header, "little")) for header in headers]
    channel.alltoall(
        [None if blob is None else memoryview(blob) for blob in blobs],
        [None if blob is None else memoryview(blob) for blob in received],
        timeout_s,
    )
    return received


def gather(channel, root, blob, timeout_s=None):
    """Every rank's bytes as a list on rank `root`, None elsewhere."""
    is_root = channel.rank == root
    blobs = [blob if peer == root else None for peer in range(channel.size)]
    received = exchange(channel, blobs, range(channel.size) if is_root else (), timeout_s)
    return received if is_root else None


def scatter(channel, root, blobs, timeout_s=None):
    """On each rank its own of the bytes that `root` has a list of."""
    outgoing = blobs if channel.rank == root else [None] * channel.size
    return exchange(channel, outgoing, (root,), timeout_s)[root]


def all_gather(channel, blob, timeout_s=None):
    """Every rank's bytes, on every rank."""
    return exchange(channel, [blob] * channel.size, range(channel.size), timeout_s)


def union(channel, root, flags):
    """The bits that any rank has set in a byte, on every rank."""
    found = gather_bytes(channel, root, flags)
    return scatter_byte(channel, root, functools.reduce(operator.or_, found) if found else 0)


def gather_bytes(channel, root, number):
    """One byte of every rank on rank `root`, None elsewhere. Half of what `gather` takes, since nobody asks for lengths."""
    is_root = channel.rank == root
    received = [bytearray(1) if is_root else None for _ in range(channel.size)]
    sent = memoryview(bytes([number]))
    channel.alltoall([sent if peer == root else None for peer in range(channel.size)], [r and memoryview(r) for r in received])
    return [byte[0] for byte in received] if is_root else None


def scatter_byte(channel, root, number):
    """One byte of rank `root`, on every rank."""
    is_root = channel.rank == root
    received = bytearray(1)
    sent = memoryview(bytes([number])) if is_root else None
    channel.alltoall([sent] * channel.size, [memoryview(received) if peer == root else None for peer in range(channel.size)])
    return received[0]


_channels = weakref.WeakKeyDictionary()  # process group -> {kind: _Connection}
_channels_lock = threading.Lock()


class _Connection:
    """The current channel of one process group, for the main thread or for others: a save in the background and what the program
    does meanwhile come in any order. A channel that failed is given up by all of its ranks: whoever sees the failure notes it in the
    group's store, and the next save or load connects anew."""

    def __init__(self, store, kind):
        self.store = store and dist.PrefixStore(f"libdcp/{kind}", store)
        self.attempt = 0
        self.channel = None

    def given_up(self):
        return self.store.check([f"failed/{self.attempt}"])

    def give_up(self):
        try:
            self.store.set(f"failed/{self.attempt}", "1")
        except RuntimeError:
            pass  # the store is gone with its process, and so is the group


def of(process_group, kind=None):
    """The channel of a process group (None: the default one) for one kind of calls, which come in the same order on all ranks: unless
    it is given, those of the main thread are one kind and those of other threads another. Collective when it is made."""
    group = _member_of(process_group)
    with _channels_lock:
        connections = _channels.setdefault(group, {})
        if kind is None:
            kind = "main" if threading.current_thread() is threading.main_thread() else "background"
        if kind not in connections:
            connections[kind] = _Connection(_store(group), kind)
        connection = connections[kind]
    if connection.store is None:
        return _on_the_group_itself(group, connection)
    while connection.given_up():
        connection.attempt += 1
        connection.channel = None
    if connection.channel is None:
        connection.channel = _connect(group, connection)
    return connection.channel


def alone_in(process_group):
    """The channel of a process that uses no collectives: only its place in the group."""
    group = _member_of(process_group)
    return Single(group.rank(), group.size())


def _member_of(process_group):
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is no member of process_group")
    return group


def _connect(group, connection):
    rank, size, timeout_s = group.rank(), group.size(), _timeout_s(group)
    store = dist.PrefixStore(str(connection.attempt), connection.store)
    _await_all(store, rank, size, timeout_s)
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    return Channel(backend, rank, size, timeout_s, connection.give_up)


def _await_all(store, rank, size, timeout_s):
    """Connecting would wait as long, but not say for whom. And it would keep the store to itself: a store answers one question at a
    time, so that another thread of this process could not ask it for as long as this one waits."""
    store.set(f"here/{rank}", "1")
    keys = [f"here/{peer}" for peer in range(size)]
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [str(peer) for peer, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(f"rank {', '.join(missing)} of the group did not arrive within {timeout_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def _on_the_group_itself(group, connection):
    """MPI has no store to meet in, and its groups carry host memory: messages go over the group that the caller gave."""
    if connection.channel is None:
        connection.channel = Channel(group, group.rank(), group.size(), _timeout_s(group))
    return connection.channel


def _store(group):
    try:
        store = dist.distributed_c10d._get_process_group_store(group)
    except KeyError:
        raise ValueError("process_group is none that torch.distributed knows; has it been destroyed?") from None
    if store is not None and not dist.is_gloo_available():
        raise RuntimeError("libdcp.torch needs a PyTorch with Gloo to work with more than one process")
    return store


def _timeout_s(group):
    """The group's own deadline. Each of its backends has one; the longest counts."""
    found = []
    for device in getattr(group, "_device_types", ()):
        try:
            found.append(group._get_backend(device).options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            continue
    return max(found, default=DEFAULT_TIMEOUT_S)


