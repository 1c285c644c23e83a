"""Processes that torchrun would start, made by fork: a new interpreter takes seconds for torch."""

import os
import socket
import sys
import time
import traceback
import warnings


def started(world, work, folder):
    """The ids of processes that know their place, as torchrun tells it, and call work(rank)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(world):
        with warnings.catch_warnings():  # of threads, by newer interpreters
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
            os.environ |= {key: str(value) for key, value in place.items()}
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            out = os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            code = 99
            try:
                work(rank)
                code = 0
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children.append(pid)
    return children


def ended(children, folder, longest=60):
    """The exit code and the words of each process; all are ended when one takes too long."""
    codes, end = {}, time.monotonic() + longest
    while len(codes) < len(children):
        for rank, pid in enumerate(children):
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end:
                    os.kill(pid, 9)
        time.sleep(0.01)
    return [(codes[rank], (folder / f"{rank}.txt").read_text()) for rank in range(len(children))]
