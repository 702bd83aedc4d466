"""Benchmark of the worlds: what a step costs, and its share of a rollout's time.

    python tests/bench_envs.py                 the tiny model's architecture, random weights
    python tests/bench_envs.py --built         ... and the tiny bases, of worlds where train.py has built one

Two measurements a world, both of what its scripted behaviour does on training tasks:
  step     milliseconds of env.step, median and 99th percentile, nothing else running
  share    seconds in env.step / seconds of a rollout.  The rollout is sampler.Rollout with random weights, but each reply is
           as long as the script's and is replaced by it before the world sees it: the work is that of a trained model
With --built also the share of an ordinary rollout of the warm-started base, which acts by itself.

`code` is measured three times.  Programs in the world's own words are run in this process ("own words").  All others go to the
sandbox, which a comment after each sees to: the same one ("code"), so that of equal programs one is run and the others are
answered from memory; or always another one ("all new"), the worst case.  Target: at most 2% of a rollout, code 15%.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import envs  # noqa: E402
import policy as policy_module  # noqa: E402
import sandbox  # noqa: E402
from policy import Policy, load_policy  # noqa: E402
from sampler import Job, Rollout, Sampling, ragged  # noqa: E402

# name -> (world, what is put after each action)
ROWS = {world: (world, "") for world in envs.WORLDS}
ROWS |= {"code, own words": ("code", ""), "code": ("code", "  #"), "code, all new": ("code", "  # {}")}
number = itertools.count()


def reply(script, observation: str, extra: str) -> tuple[str, str]:
    strategy, action = script.reply(observation)
    return strategy, action + extra.format(next(number))


def step_times(world: str, extra: str) -> list[float]:
    """Milliseconds of every step of one scripted episode a training task, sorted."""
    rng, times = random.Random(0), []
    envs._code_verdicts.clear()
    for task in envs.tasks(world, "train", brief=True):
        env, script, over = envs.make_env(world), envs.make_script(world, task, rng), False
        observation, _ = env.reset(task)
        while not over:
            _, action = reply(script, observation, extra)
            began = time.perf_counter()
            observation, _, terminated, truncated, _ = env.step(action)
            times.append(1e3 * (time.perf_counter() - began))
            over = terminated or truncated
    return sorted(times)


class ScriptedRollout(Rollout):
    """The sampler with the script's replies: as many tokens are sampled as they have, and thrown away."""

    extra = ""

    def reply_budget(self, row):
        began = time.perf_counter()
        if not hasattr(row, "script"):
            row.script = envs.make_script(self.world, row.episode.task, random.Random(row.job))
        strategy, action = reply(row.script, row.observation, self.extra)
        row.text = f"{strategy}\n{self.policy.form.closing}\n{action}"
        budget = len(self.policy.encode_text(row.text)) + 1  # and the end of the turn
        self.seconds["script"] = self.seconds.get("script", 0.0) + time.perf_counter() - began
        return min(budget, self.how.reply_tokens)

    def _finish(self, row, ids, text):
        return "length" if len(ids) >= row.budget else ""

    def _end_reply(self, row, ids, text, *rest):
        super()._end_reply(row, ids, row.text, *rest)


def jobs_of(world: str, episodes: int) -> list[Job]:
    """Groups of eight on tasks from all tiers."""
    tasks = envs.tasks(world, "train", brief=True)
    chosen = random.Random(0).sample(tasks, min(len(tasks), max(1, episodes // 8)))
    return [Job(task, group=i) for i, task in enumerate(chosen) for _ in range(8)]


def random_policy(world: str) -> Policy:
    """The tiny model before its warm start."""
    settings = policy_module.TinySettings()
    tokenizer = policy_module.tiny_tokenizer(policy_module._demo_texts(world, random.Random(0), 50), settings.vocab)
    return Policy(Qwen3ForCausalLM(policy_module.tiny_config(settings, tokenizer)).eval(), tokenizer, brief=True)


@torch.inference_mode()
def share(policy: Policy, world: str, kind: type, episodes: int, extra: str = "") -> tuple[float, float]:
    """(share of a rollout's time that is spent in env.step, steps a second of the whole rollout)."""
    jobs, how, generator = jobs_of(world, episodes), Sampling(), torch.Generator().manual_seed(0)
    envs._code_verdicts.clear()
    began = time.perf_counter()
    machine = kind(policy, world, jobs, how, generator, lambda: None)
    machine.extra = extra
    with ragged(policy.model):
        played = machine.run()
    seconds = time.perf_counter() - began - machine.seconds.get("script", 0.0)
    return machine.seconds["worlds"] / seconds, sum(len(e.turns) for e in played) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--built", action="store_true", help="also the built tiny bases, acting by themselves")
    parser.add_argument("--episodes", type=int, default=256, help="episodes of a rollout (256)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="figures once more as JSON on the last line, by world: "
                        "step_ms, step_ms_99, share, steps_per_s, built_share")  # fmt: skip
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{args.threads} threads, rollouts of {args.episodes} episodes")
    print(f"{'world':17s}{'step ms':>9s}{'99%':>8s}{'share':>9s}{'steps/s':>9s}" + f"{'built':>9s}" * args.built)
    figures = {}
    sandbox.check("def f(): return 0", "f", [((), 0)])  # starts its helper, once
    for name, (world, extra) in ROWS.items():
        times = step_times(world, extra)
        part, speed = share(random_policy(world), world, ScriptedRollout, args.episodes, extra)
        middle, most = statistics.median(times), times[99 * len(times) // 100]
        row = {"step_ms": middle, "step_ms_99": most, "share": part, "steps_per_s": speed}
        line = f"{name:17s}{middle:9.3f}{most:8.3f}{100 * part:8.2f}%{speed:9.0f}"
        if args.built and policy_module.tiny_folder(world).exists():
            row["built_share"], _ = share(load_policy("tiny", world), world, Rollout, args.episodes)
            line += f"{100 * row['built_share']:8.2f}%"
        elif args.built:
            line += f"{'none':>9s}"
        figures[name] = row
        print(line, flush=True)
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
