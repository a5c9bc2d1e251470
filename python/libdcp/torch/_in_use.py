"""Which memory of a stager an upload is still reading."""

import concurrent.futures
import os


OF_THIS_PROCESS = ("_upload", "_background", "_claim", "state_dict_cache")


class Reused:
    """A stager that uses its memory again. `async_save` tells it of the upload that reads the memory; the next state waits for its
    end, however it ends."""

    _upload = None

    def __getstate__(self):
        """Without what belongs to this process; writers go to others."""
        return {name: value for name, value in vars(self).items() if name not in OF_THIS_PROCESS}

    def __setstate__(self, state):
        vars(self).update(state, state_dict_cache=None)

    def _upload_started(self, future):
        self._upload = _Upload(future)

    def _take_upload(self):
        """The upload to wait for before the memory is written. Taken in the thread that calls `stage`: by the time that a worker
        gets to it, the upload of its own state may have been noted."""
        upload, self._upload = self._upload, None
        return upload


class _Upload:
    def __init__(self, future):
        self._future = future
        self._process = os.getpid()

    def wait(self):
        if self._process == os.getpid():  # a fork's stager has other memory, and no thread that would end the upload
            concurrent.futures.wait([self._future])
