"""Benchmark of one update (grpo.py) against a plain one and against the bare matrix products ("the limit").

    python tests/bench_update.py                         the tiny model's architecture, random weights
    python tests/bench_update.py --model FOLDER          a real model

One fixed batch: 64 episodes of 200 prompt tokens and 6 turns of 24 observation + 30 reply tokens, in groups of
8 that share a prompt and, as in any rollout, the first observation; one pass, one optimiser step.

  ours        grpo.update, unchanged
  reference   what one writes first, below: 8 rows at a time (about as many tokens as in our pieces), logits and
              log-softmax at every position, prompts read by every row.  It computes no entropy and no metrics.
  limit       the matrix products alone, forward and backward, of every Linear layer: the body on the tokens that
              must be computed (each distinct prompt once), the head on the sampled ones

Each side runs in a process of its own, in turn, `--repeats` times: the model is loaded, a small update warms up,
then comes the one that is measured.  Memory is the process's peak (getrusage) less what it held before: so without
the interpreter, the libraries and the weights, with activations, gradients and the optimiser's state.  Both sides
must find the same gradient norm.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import bench_sampler  # noqa: E402
import grpo  # noqa: E402
from reflection import PLAIN  # noqa: E402
from sampler import ACTION, STRATEGY, Episode, Turn  # noqa: E402

GROUPS, SIZE, PROMPT, TURNS, OBSERVATION, REPLY = 8, 8, 200, 6, 24, 30
REFERENCE_ROWS = 8


def batch(policy, groups: int, size: int = SIZE) -> list[Episode]:
    """The episodes, with random tokens, half of each group successful, and the model's own log-probs."""
    g = torch.Generator().manual_seed(0)

    def tokens(n):
        return torch.randint(10, policy.vocab - 10, (n,), generator=g).tolist()

    made = []
    for group in range(groups):
        prompt = tokens(PROMPT + OBSERVATION)  # a group starts from the same observation
        for i in range(size):
            e = Episode(None, PLAIN, group, reward=float(i % 2))
            e.extend(prompt, False)
            for turn in range(TURNS):
                if turn:
                    e.extend(tokens(OBSERVATION), False)
                hot = REPLY // 2
                temps, segments = [1.2] * hot + [0.7] * hot, [STRATEGY] * hot + [ACTION] * hot
                e.extend(tokens(REPLY), True, [0.0] * REPLY, temps, segments)
                e.turns.append(Turn("", "", "", "stop"))
            row = grpo.Row(e, 0.0, policy.device)
            grpo.set_reference([row], policy.model, 4096)
            for at, logprob in zip(row.at.tolist(), row.reference.tolist(), strict=True):
                e.logprobs[at] = logprob
            made.append(e)
    return made


def ours(policy, episodes, optimizer) -> float:
    # Random tokens have log-probs down to -32 in SmolLM2, where rounding moved a ratio by 1.1e-4 (a run stops at 1e-4).
    how = grpo.UpdateSettings(epochs=1, minibatch_steps=10**6, ratio_tolerance=1e-3)
    return grpo.update(policy, optimizer, episodes, how, torch.Generator().manual_seed(0))["grad_norm"]


def reference(policy, episodes, optimizer) -> float:
    """The formula of grpo.py, as it stands there."""
    rewards, groups = [e.reward for e in episodes], [e.group for e in episodes]
    advantages = torch.tensor(grpo.group_advantages(rewards, groups), device=policy.device)
    longest, total = max(len(e.ids) for e in episodes), sum(sum(e.mask) for e in episodes)

    def padded(name, value):
        whole = [getattr(e, name) + [value] * (longest - len(e.ids)) for e in episodes]
        return torch.tensor(whole, device=policy.device)

    ids, mask, temps, old = padded("ids", 0), padded("mask", False), padded("temps", 1.0), padded("logprobs", 0.0)
    for i in range(0, len(episodes), REFERENCE_ROWS):
        rows = slice(i, i + REFERENCE_ROWS)
        logits = policy.model(input_ids=ids[rows], use_cache=False).logits[:, :-1].float() / temps[rows, 1:, None]
        logps = torch.log_softmax(logits, -1).gather(-1, ids[rows, 1:, None]).squeeze(-1)  # (B, L-1)
        ratio, a = (logps - old[rows, 1:]).exp(), advantages[rows, None]
        losses = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        ((losses * mask[rows, 1:]).sum() / total).backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()


@torch.no_grad()
def limit(policy, groups: int) -> float:
    """Seconds of y = x W', dx = dy W, dW = dy' x for every Linear layer."""
    body = [m.weight for m in policy.model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    head = policy.model.get_output_embeddings().weight
    tokens = groups * (PROMPT + OBSERVATION) + groups * SIZE * (TURNS * (OBSERVATION + REPLY) - OBSERVATION)
    sampled = groups * SIZE * TURNS * REPLY
    began = time.perf_counter()
    for weight, total, most in [(w, tokens, 4096) for w in body] + [(head, sampled, 1024)]:
        seconds_before = time.perf_counter()
        x, dy = torch.randn(most, weight.shape[1]), torch.randn(most, weight.shape[0])
        began += time.perf_counter() - seconds_before  # making numbers is no matrix product
        for start in range(0, total, most):
            n = min(most, total - start)
            x[:n] @ weight.t(), dy[:n] @ weight, dy[:n].t() @ x[:n]
    return time.perf_counter() - began


def held() -> int:
    """Bytes this process has used at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def child(side: str, model: str, threads: int, groups: int) -> dict:
    """One measurement, in a fresh process."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    policy = bench_sampler.load(model)
    if side == "limit":
        limit(policy, groups)  # warm-up
        return {"seconds": limit(policy, groups)}
    small, whole = batch(policy, 1, 2), batch(policy, groups)
    before = held()
    # at lr 0 the weights stay, so that the warm-up leaves nothing behind but the optimiser's state
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.0, weight_decay=0.0)
    run = {"ours": ours, "reference": reference}[side]
    run(policy, small, optimizer)
    began = time.perf_counter()
    norm = run(policy, whole, optimizer)
    return {"seconds": time.perf_counter() - began, "memory": held() - before, "norm": norm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="", metavar="FOLDER", help="Hugging Face folder (default: tiny, random weights)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--groups", type=int, default=GROUPS, help=f"less than {GROUPS}: a part of the batch, for big models")
    parser.add_argument("--json", action="store_true", help="figures once more as JSON on the last line: time_ratio and "
                        "memory_ratio (reference/ours, ours/reference), limit_fraction (limit/ours)")  # fmt: skip
    parser.add_argument("--side", choices=("ours", "reference", "limit"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(child(args.side, args.model, args.threads, args.groups)))
        return
    measured: dict[str, list] = {"ours": [], "reference": [], "limit": []}
    settings = ["--model", args.model, "--threads", str(args.threads), "--groups", str(args.groups)]
    command = [sys.executable, __file__, *settings, "--side"]
    for _ in range(args.repeats):
        for side, results in measured.items():
            out = subprocess.run([*command, side], check=True, stdout=subprocess.PIPE, text=True).stdout
            results.append(json.loads(out.splitlines()[-1]))
    norms = [r["norm"] for side in ("ours", "reference") for r in measured[side]]
    assert max(norms) - min(norms) < 1e-3 * max(norms), f"the two sides disagree: gradient norms {norms}"
    seconds = {side: statistics.median(r["seconds"] for r in results) for side, results in measured.items()}
    memory = {side: statistics.median(r["memory"] for r in measured[side]) / 2**20 for side in ("ours", "reference")}
    ratios = sorted(b["seconds"] / a["seconds"] for a, b in zip(measured["ours"], measured["reference"], strict=True))
    figures = {
        "time_ratio": statistics.median(ratios),
        "memory_ratio": memory["ours"] / memory["reference"],
        "limit_fraction": seconds["limit"] / seconds["ours"],
    }
    print(f"{args.model or 'tiny'}, {args.groups} groups, float32, {args.threads} threads, median of {args.repeats}")
    print(f"seconds    ours {seconds['ours']:.2f}   reference {seconds['reference']:.2f}   limit {seconds['limit']:.2f}")
    print(f"memory     ours {memory['ours']:.0f} MB   reference {memory['reference']:.0f} MB   (peak beyond the loaded model)")
    print(f"{figures['time_ratio']:.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f}) times as fast, {figures['memory_ratio']:.2f} of the "
          f"memory, {figures['limit_fraction']:.2f} of the limit")  # fmt: skip
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
