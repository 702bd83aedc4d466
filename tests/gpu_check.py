"""Does it work on a GPU, and how fast?  Run by hand on a machine with one (CI and pytest do not).

    python tests/gpu_check.py                       the tiny model, random weights: one to two minutes
    python tests/gpu_check.py --model FOLDER        and a real model in bfloat16 (figures only)
    python tests/gpu_check.py --device cpu          a dry run of this script with small sizes

  same ids     greedy episodes in float32, GPU against CPU.  Where they part, the CPU's own logits must be a tie.
  training     ten updates from a barely warmed model, in float32 and bfloat16: everything finite; in float32 the
               first ratio must be within 1e-4 of 1, or the run stops
  sampler      bench_sampler's two workloads in bfloat16: ours, `generate()`, and the bare matrix products
  update       bench_update's batch in bfloat16: ours, and what one writes first; on the tiny model in float32 first,
               where the two must find the same gradient norm
  memory       the peak of each part on the device; for --model, too, what train.memory_needed would have said

One table at the end; exit code 0 if all checks passed, 1 if one failed, 2 if there is no GPU.  No part begins after
four minutes.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_sampler  # noqa: E402
import bench_update  # noqa: E402
import conftest  # noqa: E402
import envs  # noqa: E402
import policy as policy_module  # noqa: E402
import train  # noqa: E402
from sampler import Job, Sampling, rollout  # noqa: E402

LAST_START = 240  # seconds
TIE = 1e-3  # logits so close may change places between devices


def micro_base(folder: Path) -> str:
    """The folder of a tiny model with next to no warm start, made on the CPU in seconds."""
    keep, policy_module.tiny_folder = policy_module.tiny_folder, lambda world, settings=None: folder / "base"
    try:
        return str(policy_module.build_tiny("house", policy_module.TinySettings(**conftest.MICRO)))
    finally:
        policy_module.tiny_folder = keep


def same_ids(base: str, device: str, n: int) -> tuple[bool, str]:
    """Play n tasks greedily on both devices."""
    jobs = [Job(task, group=i) for i, task in enumerate(envs.tasks("house", "train")[:n])]
    played = []
    for where in ("cpu", device):
        policy = policy_module.load_policy(base, "house", where)
        how, generator = Sampling(0.0, 0.0, reply_tokens=24), torch.Generator(policy.device).manual_seed(0)
        played.append(rollout(policy, "house", jobs, how, generator))
    model, equal, ties = policy_module.load_policy(base, "house").model, 0, 0
    for a, b in zip(*played, strict=True):
        parts = next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y), None)
        if parts is None:
            equal += len(a.ids) == len(b.ids)
        else:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([a.ids[:parts]])).logits[0, -1]
            ties += bool(a.mask[parts] and (logits[a.ids[parts]] - logits[b.ids[parts]]).abs() < TIE)
    return equal + ties == n, f"{equal} of {n} greedy episodes equal, {ties} part at a tie"


def training(base: str, device: str, dtype: str, updates: int, folder: Path) -> tuple[bool, str]:
    """Updates in the world of coins, through train.main, with a checkpoint and a resume of two more."""
    out = folder / f"run-{dtype}"
    flags = conftest.smallest_run(base, out, device=device, dtype=dtype, updates=updates, tasks_per_update=3, group_size=8)
    real, said = (envs.make_env, envs.tasks), io.StringIO()
    conftest.play_coins()
    began = time.perf_counter()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            codes = [train.main([str(word) for word in flags])]
            codes.append(train.main(["--resume", str(out), "--updates", str(updates + 2)]))
    finally:
        envs.make_env, envs.tasks = real
    if codes != [0, 0]:
        return False, f"exit codes {codes}: {said.getvalue().strip().splitlines()[-1]}"
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    off = max(m.get(f"first_ratio_off_{name}", 0.0) for m in metrics for name in ("strategy", "action"))
    steps, skipped = (sum(m[name] for m in metrics) for name in ("optimizer_steps", "skipped_steps"))
    good = len(metrics) == updates + 2 and steps > 0 and skipped == 0
    seconds = time.perf_counter() - began
    return good, f"{len(metrics)} updates, {steps} steps, {skipped} skipped, first ratio off by {off:.1e}, {seconds:.0f} s"


def load(model: str, device: str, dtype: torch.dtype = torch.bfloat16):
    """A policy for the benchmarks.  They put things of their own into it: one for each."""
    policy = bench_sampler.load(model)
    policy.model.to(device, dtype)
    return policy


def sampler_speed(model: str, device: str, small: bool) -> tuple[bool, str]:
    told, real = [], envs.make_env
    for name, sizes in (("grouped", (8, 16, 200, (8, 64), 1, 1)), ("multi-turn", (64, 1, 120, (8, 40), 6, 24))):
        policy = load(model, device)
        work = bench_sampler.Workload(policy.vocab, *((2, 2, 20, (2, 6), 2, 3) if small else sizes))
        try:
            for _ in range(1 if small else 2):  # the first round warms up
                ours, shapes, _ = bench_sampler.ours(policy, work)
                seconds = [ours, bench_sampler.generate(policy, work), bench_sampler.limit(policy, shapes)]
        finally:
            envs.make_env = real  # the benchmark has put a world of its own in its place
        speeds = [f"{work.tokens / s:.0f}" for s in seconds]
        told.append(f"{name} {speeds[0]} tokens/s, generate() {speeds[1]}, limit {speeds[2]}")
    return True, "; ".join(told)


def update_speed(model: str, device: str, small: bool) -> tuple[bool, str]:
    seconds, norms = {}, {}
    for dtype in (torch.bfloat16,) if model else (torch.float32, torch.bfloat16):
        for name, side in (("ours", bench_update.ours), ("reference", bench_update.reference)):
            torch.manual_seed(0)  # the tiny model's weights are random
            policy = load(model, device, dtype)
            episodes = bench_update.batch(policy, *((1, 2) if small else ()))
            optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.0, weight_decay=0.0)
            side(policy, episodes[:2], optimizer)  # warm-up: two of one group, of unequal reward
            began = bench_sampler.clock(policy)
            norms[name, dtype] = side(policy, episodes, optimizer)
            seconds[name] = bench_sampler.clock(policy) - began
    told = ", ".join(f"{name} {s:.2f} s" for name, s in seconds.items())
    if model:
        return True, told
    off = abs(norms["ours", torch.float32] / norms["reference", torch.float32] - 1)
    return off < 1e-3, f"{told}; in float32 the gradient norms differ by {off:.1e} of themselves"


def update_memory(model: str, device: str) -> tuple[bool, str]:
    """One update with AdamW's masters as a run has it, against the estimate less the cache of sampling."""
    policy = load(model, device)
    episodes = bench_update.batch(policy)
    config = train.Config(model=model, dtype="bfloat16").resolve()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    how = dataclasses.replace(config.update_settings, epochs=1)
    optimizer = train.make_optimizer(policy.model, 1e-6)
    metrics = train.update(policy, optimizer, episodes, how, torch.Generator().manual_seed(0))
    parts = train.memory_needed(config, policy)
    told = sum(amount for name, amount in parts.items() if not name.startswith("keys")) / 2**30
    return metrics["skipped_steps"] == 0, f"estimate without the cache {told:.2f} GiB (the peak is in the next column)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="", metavar="FOLDER", help="Hugging Face folder to measure besides the tiny model")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a dry run of this script")
    args = parser.parse_args()
    gpu, small = args.device == "cuda", args.device == "cpu"
    if gpu and not torch.cuda.is_available():
        print("gpu_check.py: torch finds no CUDA GPU here (--device cpu makes a dry run)")
        return 2
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder, updates = Path(name), 2 if small else 10
        base = micro_base(folder)
        parts = [
            ("same ids", lambda: same_ids(base, args.device, 4 if small else 32)),
            ("training float32", lambda: training(base, args.device, "float32", updates, folder)),
            ("training bfloat16", lambda: training(base, args.device, "bfloat16", updates, folder)),
            ("sampler, tiny", lambda: sampler_speed("", args.device, small)),
            ("update, tiny", lambda: update_speed("", args.device, small)),
        ]
        if args.model:
            parts += [
                ("sampler, model", lambda: sampler_speed(args.model, args.device, small)),
                ("update, model", lambda: update_speed(args.model, args.device, small)),
                ("update memory, model", lambda: update_memory(args.model, args.device)),
            ]
        lines = [check(title, part, gpu) for title, part in parts]
    device = torch.cuda.get_device_name() if gpu else "CPU, small sizes: a dry run, no figures to keep"
    print(f"\n{device}; torch {torch.__version__}; {time.perf_counter() - BEGAN:.0f} s in all")
    print(f"{'check':22s}{'':8s}{'peak GiB':>9s}  what was seen")
    for title, verdict, peak, told in lines:
        print(f"{title:22s}{verdict:8s}{peak:9.2f}  {told}")
    return int(any(verdict == "FAILED" for _, verdict, _, _ in lines))


BEGAN = time.perf_counter()


def check(title: str, part, gpu: bool) -> tuple[str, str, float, str]:
    """(title, verdict, peak memory on the device in GiB, what was seen) of one part.  An error is a failed check."""
    if time.perf_counter() - BEGAN > LAST_START:
        return title, "left out", 0.0, "no time left"
    print(f"{title} ...", flush=True)
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        good, told = part()
    except Exception as error:  # the other parts are worth seeing
        good, told = False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    return title, "ok" if good else "FAILED", peak, told


if __name__ == "__main__":
    sys.exit(main())
