"""python -m libdcp.torch script.py [ARGUMENT...]: runs a program with libdcp behind torch.distributed.checkpoint.

    torchrun --nproc-per-node 8 -m libdcp.torch train.py --steps 1000
"""

import os
import runpy
import sys

from . import install


def main(arguments):
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        return 0 if arguments else 2
    install()
    sys.argv = arguments
    if arguments[0] == "-m":
        if len(arguments) < 2:
            print("-m: the name of a module is missing", file=sys.stderr)
            return 2
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        # As Python itself has them: programs go to other directories and come back by __file__.
        sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))
        runpy.run_path(os.path.join(os.getcwd(), arguments[0]), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
