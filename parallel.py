"""Several processes, one for each GPU, that together make one training run (torch.distributed).

    torchrun --nproc_per_node=4 train.py --model FOLDER ...

Every process holds the whole model, its optimiser and the whole state of the run; what they share out is the work:

    rollouts      a group is played by one process; then every process gets all episodes     (train.py: Run.play)
    evaluation    likewise, by tasks                                                        (eval.py: count_successes)
    update        each takes a part of the rows of EVERY minibatch; gradients are summed    (grpo.py: share)

What follows from the episodes (buffers, advantages, minibatches, metrics) is worked out by all of them alike, from
equal random streams.  Only sampling draws from a stream of its own in each.  The first process writes and prints.

With one process all of this is nothing: `gather` gives back what it got, and there is no gradient to be summed.
Not here: several machines were never tried; the weights and Adam's moments are not cut up (no FSDP), so that a model
that does not fit one GPU does not fit several; the novelty of RND and the reference of a KL term are worked out
by each process for all rows.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def join() -> None:
    """Become one of the processes that torchrun started, if it did.  All but the first fall silent.

    Tensors on GPUs travel by NCCL, everything else by gloo.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) == 1:
        return
    backend = "gloo"
    if torch.cuda.is_available() and int(os.environ["LOCAL_RANK"]) < torch.cuda.device_count():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    # replies differ in length: a process may have to wait long for the others
    dist.init_process_group(backend, timeout=timedelta(hours=2))
    if rank():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")


def leave() -> None:
    if world_size() > 1:
        dist.destroy_process_group()


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def first() -> bool:
    """Is this the process that writes and prints?"""
    return rank() == 0


def bar_off() -> bool | None:
    """tqdm's `disable`: no bar where there is no terminal (None), and only that of the first process."""
    return None if first() else True


def device(name: str) -> str:
    """auto, cpu or cuda -> the device of this process.  Raises ValueError if there are too few GPUs."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    if name == "cpu" or world_size() == 1:
        return name
    # the same answer in every process, so that all of them end
    most, gpus = max(gather([int(os.environ["LOCAL_RANK"])])), min(gather([torch.cuda.device_count()]))
    if most >= gpus:
        raise ValueError(f"{most + 1} processes here, but {gpus} GPUs: lower --nproc_per_node, or give --device cpu")
    return f"cuda:{os.environ['LOCAL_RANK']}"


def stream(seed: int) -> int:
    """The seed of this process's own random stream: `seed` itself in the first."""
    return (seed + 1_000_000_007 * rank()) % 2**32


def gather(values: list) -> list:
    """The lists of all processes, one after the other.  (Copies, but for a single process.)"""
    if world_size() == 1:
        return values
    lists: list = [None] * world_size()
    dist.all_gather_object(lists, values)
    return [value for part in lists for value in part]


def first_then_others(make):
    """make() in the first process and then in the others, who find on disk what it built.  A ValueError is everybody's."""
    made = error = None
    if first():
        try:
            made = make()
        except ValueError as wrong:
            error = wrong
    error = gather([error])[0]
    if error:
        raise error
    return made if first() else make()


def sum_gradients(model) -> None:
    """Let each process have the sum of all gradients.  One that had no rows has None, which counts as 0."""
    if world_size() == 1:
        return
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)


def same_weights(model) -> None:
    """Raise RuntimeError if the processes' weights are not equal: then they no longer train one model."""
    if world_size() > 1:
        sums = gather([sum(p.detach().double().sum().item() for p in model.parameters())])
        if len(set(sums)) > 1:
            raise RuntimeError(f"the processes' weights have drifted apart (their sums: {sums})")
