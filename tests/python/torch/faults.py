"""Writers and readers that store nothing and fail where a test says so."""

import torch.futures
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter


class Faulty:
    """faults: {name of a method: ranks on which it raises ValueError}; "write_future" and "read_future" for what it returns."""

    def __init__(self, rank, faults):
        self.rank = rank
        self.faults = faults

    def maybe_fail(self, where):
        if self.rank in self.faults.get(where, ()):
            raise ValueError(f"{where} fails")

    def future(self, where, value):
        future = torch.futures.Future()
        if self.rank in self.faults.get(where, ()):
            future.set_exception(ValueError(f"{where} fails"))
        else:
            future.set_result(value)
        return future

    # What writers and readers have alike:

    def reset(self, checkpoint_id=None):
        return

    def prepare_local_plan(self, plan):
        self.maybe_fail("prepare_local_plan")
        return plan

    def prepare_global_plan(self, plans):
        self.maybe_fail("prepare_global_plan")
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


class FaultyWriter(Faulty, StorageWriter):
    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        self.maybe_fail("set_up_storage_writer")

    def write_data(self, plan, planner):
        self.maybe_fail("write_data")
        return self.future("write_future", [])

    def finish(self, metadata, results):
        self.maybe_fail("finish")


class FaultyReader(Faulty, StorageReader):
    def __init__(self, metadata, rank, faults):
        super().__init__(rank, faults)
        self.metadata = metadata

    def read_metadata(self):
        self.maybe_fail("read_metadata")
        return self.metadata

    def set_up_storage_reader(self, metadata, is_coordinator):
        self.maybe_fail("set_up_storage_reader")

    def read_data(self, plan, planner):
        self.maybe_fail("read_data")
        return self.future("read_future", None)
