"""Lists a checkpoint, reads two rows of one of its tensors, and only them, and saves them as a checkpoint of their own.

    python first.py CHECKPOINT FQN FIRST_ROW NEW_CHECKPOINT
"""
import sys

import libdcp

checkpoint, fqn, first_row, new = sys.argv[1:]
with libdcp.open(checkpoint) as ckpt:
    for name, item in ckpt.items():
        print(name, item)
    rows = ckpt[fqn][int(first_row):int(first_row) + 2]

libdcp.save(new, {"rows": rows, "from": {"name": fqn, "row": int(first_row)}})
print(libdcp.load(new))
