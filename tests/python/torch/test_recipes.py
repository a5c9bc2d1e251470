"""The recipes of docs/switching.md that need nothing but PyTorch."""

import unittest

import torch
import torch.distributed.checkpoint as torch_dcp

import libdcp.torch as dcp
import pool
from support import TestCase

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before 2.6
    fully_shard = None


def model_and_optimizer(ranks, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 5))
    mesh = ranks.line()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def train_save_resume(ranks, path, save_with_torch, load_with_torch):
    """FSDP2: saves, and loads into another model; all parameters and optimizer states are equal then."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = model_and_optimizer(ranks, 1)
    model_state, optim_state = get_state_dict(model, optimizer)
    group = {"process_group": ranks.group, "checkpoint_id": path}
    (torch_dcp if save_with_torch else dcp).save({"model": model_state, "optim": optim_state}, **group)
    other, other_optimizer = model_and_optimizer(ranks, 2)
    other_state, other_optim_state = get_state_dict(other, other_optimizer)
    differed = any(not torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), other.parameters()))
    state = {"model": other_state, "optim": other_optim_state}
    (torch_dcp if load_with_torch else dcp).load(state, **group)
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    same = all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), other.parameters()))
    for a, b in zip(model.parameters(), other.parameters()):
        for name in ("exp_avg", "exp_avg_sq"):
            mine, theirs = optimizer.state[a][name], other_optimizer.state[b][name]
            same = same and torch.equal(mine.to_local(), theirs.to_local())
    return differed, same


@unittest.skipIf(fully_shard is None, "fully_shard came with PyTorch 2.6")
class Recipes(TestCase):
    def test_fsdp2_switch_and_switch_back(self):
        for number, (save_with_torch, load_with_torch) in enumerate(((False, False), (True, False), (False, True))):
            found = pool.run(train_save_resume, str(self.root / str(number)), save_with_torch, load_with_torch, world=2)
            self.assertEqual(found, [(True, True)] * 2)


if __name__ == "__main__":
    unittest.main()
