"""Signals during long saves and loads: they come out promptly, nothing is published, and no thread is left."""
import logging
import os
import signal
import tempfile
import threading
import time
import unittest

import numpy as np

import libdcp
from libdcp import _core

logging.getLogger("libdcp").addHandler(logging.NullHandler())
PROMPT_SECONDS = 2  # on a busy machine; without looking at signals these calls take many times that


class Alarm(KeyboardInterrupt):
    pass


def n_threads():
    return len(os.listdir("/proc/self/task"))


def big():
    """16 GiB that take no memory, and are never written to their end."""
    return {"w": np.broadcast_to(np.float32(1), (1 << 32,))}


class Interrupts(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.dir = os.path.join(place.name, "ck")
        old = signal.signal(signal.SIGALRM, self.alarm)
        self.addCleanup(signal.signal, signal.SIGALRM, old)

    def alarm(self, *unused):
        self.at = time.monotonic()
        raise Alarm

    def interrupted(self, call):
        """Runs a call that a signal ends; fails if it takes its time."""
        before = n_threads()
        signal.setitimer(signal.ITIMER_REAL, 0.15)
        with self.assertRaises(Alarm):
            call()
        self.assertLess(time.monotonic() - self.at, PROMPT_SECONDS)
        self.assertEqual(n_threads(), before)

    def test_save(self):
        self.interrupted(lambda: libdcp.save(self.dir, big()))
        self.assertFalse(os.path.exists(self.dir) and os.listdir(self.dir), "something was left behind")

    def test_save_over_a_checkpoint(self):
        libdcp.save(self.dir, {"n": 1})
        before = sorted(os.listdir(self.dir))
        self.interrupted(lambda: libdcp.save(self.dir, big(), overwrite=True))
        self.assertEqual(sorted(os.listdir(self.dir)), before)
        self.assertEqual(libdcp.load(self.dir), {"n": 1})

    def test_save_with_one_thread_and_with_many(self):
        for threads in (1, 4):
            tree = {str(i): big()["w"] for i in range(3)}
            self.interrupted(lambda: libdcp.save(self.dir, tree, threads=threads, files=2))

    def test_keyboard_interrupt(self):
        timer = threading.Timer(0.15, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with self.assertRaises(KeyboardInterrupt):
            libdcp.save(self.dir, big())
        timer.join()

    def test_load_and_reads(self):
        w = np.ones(1 << 23, np.float32)
        libdcp.save(self.dir, {"w": w}, sync=False)
        into = {str(i): w for i in range(2000)}  # 64 GiB of reads
        self.interrupted(lambda: libdcp.load(self.dir, into=into, rename=lambda name: "w"))
        with libdcp.open(self.dir) as ckpt:
            request = ("w", None, None, ("b", w))
            self.interrupted(lambda: ckpt._core.read_many([request] * 2000))
            np.testing.assert_array_equal(ckpt["w"][:10], np.ones(10))  # still of use

    def test_in_a_group_the_work_stays_on_this_thread(self):
        threads = set()

        def alltoall(sends, recvs, timeout_s):
            threads.add(threading.get_ident())
            if recvs[0] is not None:
                recvs[0][:] = sends[0]

        group = _core.Group(0, 1, alltoall=alltoall)
        self.interrupted(lambda: libdcp.save(self.dir, big(), group=group))
        self.assertEqual(threads, {threading.get_ident()})
        self.assertFalse(os.path.exists(os.path.join(self.dir, ".metadata")))

    def test_a_handler_that_raises_nothing_does_not_end_the_save(self):
        seen = []
        signal.signal(signal.SIGALRM, lambda *unused: seen.append(time.monotonic()))
        tree = {"w": np.broadcast_to(np.float32(1), (1 << 26,))}
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        try:
            libdcp.save(self.dir, tree, sync=False)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.assertTrue(seen)
        with libdcp.open(self.dir) as ckpt:
            self.assertEqual(ckpt["w"][-1], 1)

    def test_other_threads_save_without_looking_at_signals(self):
        libdcp.save(self.dir, {"n": 1}, sync=False)
        result = []
        other = threading.Thread(target=lambda: result.append(libdcp.load(self.dir)))
        other.start()
        other.join()
        self.assertEqual(result, [{"n": 1}])


if __name__ == "__main__":
    unittest.main()
