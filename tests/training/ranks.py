"""Several ranks on this machine for tests: processes connected as torchrun would connect them, over gloo."""

import multiprocessing as mp
import os
import socket
import traceback

import torch


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(rank, size, port):
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    return {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}


def _child(rank, function, size, port, args, pipe):
    os.environ |= environment(rank, size, port)
    torch.set_num_threads(1)
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def spread(function, size, *args):
    """What a function, which finds its rank in the environment, returns on each of `size` ranks."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["angpt.training.launch", "torch.distributed.fsdp", "tests.training.ranks"])
    port = free_port()
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(rank, function, size, port, args, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    answers = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    for good, answer in answers:
        assert good, answer
    return [answer for _, answer in answers]
