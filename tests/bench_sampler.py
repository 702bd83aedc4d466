"""Benchmark of the sampler against `generate()` and against the bare matrix products ("the limit").

    python tests/bench_sampler.py                         the tiny model's architecture, random weights
    python tests/bench_sampler.py --model FOLDER          a real model

Two fixed workloads, the same number of sampled tokens on both sides (asserted):
  grouped     8 prompts x 16 samples, 200 prompt tokens, reply lengths on a fixed spread of 8..64
  multi-turn  64 episodes x 6 turns, 120 prompt tokens, replies of 8..40 tokens, observations of 24;
              the peer calls generate() on the whole conversation at every turn
and the decode steps alone (64 rows, 200 tokens of context) against the limit.

What is compared: `ours` is sampler.Rollout, unchanged but for the forced reply lengths.  `generate()` is
transformers' own, whole batch at once, temperature 1 and no top-k/top-p, each row ended at its forced
length by a stopping criterion.  `limit` runs only the matrix products (every Linear layer, the head
included) of the forward passes that `ours` made, shape by shape: no attention, no norms, no Python.
All are timed in turn, `--repeats` rounds; the medians and the spread of the ratios are printed.
"""

import argparse
import json
import random
import resource
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import envs  # noqa: E402
import policy as policy_module  # noqa: E402
from policy import Policy  # noqa: E402
from reflection import ReplyFormat  # noqa: E402
from sampler import Job, Rollout, Sampling, ragged  # noqa: E402


def spread(low: int, high: int, n: int) -> list[int]:
    """n lengths from low to high, evenly spread and then shuffled once and for all."""
    lengths = [low + round(i * (high - low) / (n - 1)) for i in range(n)]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1)).tolist()
    return [lengths[i] for i in order]


def clock(policy: Policy) -> float:
    """Seconds, once the device has done all it was given."""
    if policy.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Workload:
    """Prompts, forced reply lengths and observations, the same for both sides."""

    def __init__(self, vocab: int, prompts: int, samples: int, prompt_tokens: int, replies: tuple, turns: int, observation: int):
        g = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(10, vocab - 10, (prompts, prompt_tokens), generator=g)
        self.observations = torch.randint(10, vocab - 10, (turns, observation), generator=g).tolist()
        self.rows, self.samples, self.turns = prompts * samples, samples, turns
        lengths = spread(*replies, self.rows * turns)
        self.lengths = [lengths[i * turns : (i + 1) * turns] for i in range(self.rows)]  # [row][turn]
        self.tokens = sum(lengths)

    def prompt(self, row: int) -> list[int]:
        return self.prompts[row // self.samples].tolist()


class BenchWorld:
    """A world that only counts turns."""

    def __init__(self, turns: int):
        self.turns = turns

    def reset(self, task):
        self.left = self.turns
        return str(task.spec["row"]), {}

    def step(self, action):
        self.left -= 1
        return str(self.turns - self.left - 1), 0.0, False, self.left == 0, {"outcome": 0, "feedback": ""}


class ForcedRollout(Rollout):
    """The sampler with reply lengths from a table; it also notes the shape of every forward pass."""

    def reply_budget(self, row):
        return self.work.lengths[row.job][len(row.episode.turns)]

    def _forward(self, n, words, reading, body):
        self.shapes.append((n + len(words), n))  # (tokens through the body, rows through the head)
        return super()._forward(n, words, reading, body)


@torch.inference_mode()
def ours(policy: Policy, work: Workload) -> tuple[float, list, dict]:
    """Seconds, forward shapes, and seconds by part."""
    envs.make_env = lambda world: BenchWorld(work.turns)
    tasks = [envs.Task(str(i), "", "", "", "", {"row": i}) for i in range(work.rows)]
    policy.prompt_ids = lambda world, task, observation, reflection: work.prompt(task.spec["row"])
    policy.turn_ids = lambda observation, last: work.observations[int(observation)]
    how = Sampling(1.0, 1.0, strategy_tokens=10**6, reply_tokens=max(map(max, work.lengths)), rows=work.rows)
    began, generator = clock(policy), torch.Generator(policy.device).manual_seed(0)
    rollout = ForcedRollout(policy, "bench", [Job(t) for t in tasks], how, generator, lambda: None)
    rollout.work, rollout.shapes = work, [(work.prompts.numel(), 0)]
    with ragged(policy.model):
        episodes = rollout.run()
    seconds = clock(policy) - began
    assert sum(sum(e.mask) for e in episodes) == work.tokens
    return seconds, rollout.shapes, rollout.seconds


class ForcedLengths(StoppingCriteria):
    """Row i of generate() is done after lengths[i] new tokens."""

    def __init__(self, start: int, lengths: list[int], device):
        self.start, self.lengths = start, torch.tensor(lengths, device=device)

    def __call__(self, ids, scores, **kwargs):
        return (ids.shape[1] - self.start) >= self.lengths


@torch.inference_mode()
def generate(policy: Policy, work: Workload) -> float:
    """Seconds for the same workload with generate(), one call a turn for all rows, padded on the left."""
    began = clock(policy)
    conversations, sampled = [work.prompt(i) for i in range(work.rows)], 0
    for turn in range(work.turns):
        longest = max(map(len, conversations))
        ids = torch.zeros(work.rows, longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, c in enumerate(conversations):
            ids[i, longest - len(c) :] = torch.tensor(c)
            mask[i, longest - len(c) :] = 1
        lengths, ids, mask = [work.lengths[i][turn] for i in range(work.rows)], ids.to(policy.device), mask.to(policy.device)
        out = policy.model.generate(
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(lengths),
            eos_token_id=None, pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([ForcedLengths(longest, lengths, policy.device)]),
        )  # fmt: skip
        for i, n in enumerate(lengths):
            reply = out[i, longest : longest + n].tolist()
            sampled += len(reply)
            conversations[i] += reply + work.observations[turn]
    assert sampled == work.tokens
    return clock(policy) - began


@torch.inference_mode()
def limit(policy: Policy, shapes: list) -> float:
    """Seconds of the matrix products alone: every Linear layer of the body on all tokens, the head on the rows."""
    head = policy.model.get_output_embeddings().weight
    body = [m.weight for m in policy.model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    kind = dict(dtype=head.dtype, device=head.device)
    inputs = {(n, w.shape[1]): torch.randn(n, w.shape[1], **kind) for n, rows in shapes for w in body}
    heads = {rows: torch.randn(rows, head.shape[1], **kind) for _, rows in shapes}
    began = clock(policy)
    for n, rows in shapes:
        for w in body:
            torch.nn.functional.linear(inputs[n, w.shape[1]], w)
        if rows:
            torch.nn.functional.linear(heads[rows], head)
    return clock(policy) - began


@torch.inference_mode()
def decode(policy: Policy, rows: int = 64, context: int = 200, steps: int = 10) -> tuple[float, float]:
    """(seconds of `steps` decode steps with sampling, seconds of their matrix products) at a full context."""
    work = Workload(policy.vocab, 4, rows // 4, context, (steps + 2, steps + 2), 1, 1)
    envs.make_env = lambda world: BenchWorld(1)
    tasks = [envs.Task(str(i), "", "", "", "", {"row": i}) for i in range(rows)]
    policy.prompt_ids = lambda world, task, observation, reflection: work.prompt(task.spec["row"])
    how = Sampling(1.0, 1.0, strategy_tokens=10**6, reply_tokens=steps + 2, rows=rows)
    generator = torch.Generator(policy.device).manual_seed(0)
    rollout = ForcedRollout(policy, "bench", [Job(t) for t in tasks], how, generator, lambda: None)
    rollout.work, rollout.shapes = work, []
    with ragged(policy.model):
        rollout._prepare_prompts()
        rollout._start_episodes(range(rows))
        for _ in range(2):
            rollout._sample(rollout._feed())
        began = clock(policy)
        for _ in range(steps):
            rollout._sample(rollout._feed())
        seconds = clock(policy) - began
    return seconds, limit(policy, [(rows, rows)] * steps)


def load(folder: str) -> Policy:
    logging.set_verbosity_error()
    form = ReplyFormat("", "\0never\0", "", "")  # nothing switches, nothing stops: lengths are forced
    if folder:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        s = policy_module.TinySettings()
        texts = policy_module._demo_texts("house", random.Random(0), 50)
        tokenizer = policy_module.tiny_tokenizer(texts, s.vocab)
        model = Qwen3ForCausalLM(policy_module.tiny_config(s, tokenizer))
    policy = Policy(model.eval(), tokenizer, form)
    policy.stop_ids = []
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="", metavar="FOLDER", help="Hugging Face folder (default: tiny, random weights)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="figures once more as JSON on the last line: "
                        "grouped_ratio, multiturn_ratio (ours/generate), *_limit_fraction, decode_limit_fraction")  # fmt: skip
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    policy = load(args.model)
    weights = sum(p.numel() for p in policy.model.parameters())
    print(f"{args.model or 'tiny'}: {weights / 1e6:.2f}M weights, float32, {args.threads} threads, median of {args.repeats}")
    print(f"{'workload':12s}{'ours tok/s':>12s}{'generate()':>12s}{'limit':>10s}{'ours/peer (range)':>26s}{'ours/limit':>12s}")
    figures = {}
    works = {
        "grouped": Workload(policy.vocab, 8, 16, 200, (8, 64), 1, 1),
        "multiturn": Workload(policy.vocab, 64, 1, 120, (8, 40), 6, 24),
    }
    for name, work in works.items():
        rounds = []
        for _ in range(args.repeats):
            mine, shapes, parts = ours(policy, work)
            rounds.append((mine, generate(policy, work), limit(policy, shapes), parts["model"]))
        mine, peer, least, model = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = sorted(r[1] / r[0] for r in rounds)
        ratio = statistics.median(ratios)
        figures |= {f"{name}_ratio": ratio, f"{name}_limit_fraction": least / mine, f"{name}_tokens_per_s": work.tokens / mine}
        speeds = "".join(f"{work.tokens / s:>{w}.0f}" for s, w in ((mine, 12), (peer, 12), (least, 10)))
        print(f"{name:12s}{speeds}{f'{ratio:.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})':>26s}{least / mine:12.2f}"
              f"   forward passes {100 * model / mine:.0f}% of the time", flush=True)  # fmt: skip
    pairs = [decode(policy) for _ in range(args.repeats)]
    figures["decode_limit_fraction"] = statistics.median(b / a for a, b in pairs)
    step = statistics.median(a for a, _ in pairs) / 10
    share = figures["decode_limit_fraction"]
    print(f"decode step, 64 rows, 200 tokens of context: {1000 * step:.1f} ms, {share:.2f} of the limit")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GB")
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
