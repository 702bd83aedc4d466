"""Train an agent with Strategy-Guided Exploration, or with plain GRPO.

    python train.py                          SGE on the house world with the tiny model
    python train.py --method grpo            the same without mixed temperature and reflection
    python train.py --method entropy         EntropyAdv; likewise rnd, rlad: the paper's other baselines (grpo.py)
    python train.py --resume runs/NAME       go on where a run stopped, to the last bit
    torchrun --nproc_per_node=4 train.py ... the same on four GPUs (parallel.py)

This is the paper's Algorithm 1.  One update:

    draw `tasks_per_update` tasks; for each, `group_size` episodes                        (N_traj / K groups)
    decide for each episode: plain, or reflecting on earlier strategies of its task        (SGE 3.2)
    roll them out, strategies hot, the rest cool                                           (sampler.py)
    remember every episode's strategies, failed or successful                              (reflection.py)
    group advantages, clipped token loss, a few optimiser steps                            (grpo.py)

Every curve that counts is *plain*: measured without reflection, and in evaluations with every token at the
token temperature.  A run folder holds config.json, metrics.jsonl (one object an update), episodes.jsonl.gz
(transcripts), checkpoint/ (written all or nothing) and, at the end, summary.json and curves.png.

How this differs from the paper, besides what the other files list:
  1. The tiny model is trained at lr 4e-4, not 1e-6 (it has 6,000 times fewer weights), up over the first tenth of
     the updates and down to 0 over the last half: at a constant rate it lost with one batch what it had learnt with
     another (`--lr-schedule constant` is the paper's).
  2. An update collects 40 tasks x 10 episodes (Table 2: 16 to 64 tasks x 6 to 16), and a minibatch has 256
     environment steps (code: 96), not 64 or 128: fewer, larger steps kept the tiny model steadier.
"""

import dataclasses
import gzip
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import envs
import eval as evaluation
import parallel
from grpo import (
    RND,
    UpdateSettings,
    advantage_key,
    groups_with_signal,
    head_chunks,
    optimizer_step,
    scorable,
    set_checkpointing,
    update,
)
from policy import DTYPES, Policy, demo_tokens, is_out_of_memory, load_policy, make_optimizer, token_logprobs
from reflection import BARE, FORMATS, PLAIN, Reflection, StrategyBuffers
from sampler import Episode, Job, Sampling, rollout, row_count, token_bytes

METHODS = ("sge", "grpo", "entropy", "rnd", "rlad")
SCHEDULES = ("trapezoid", "constant")

# ------------------------------------------------------------------------------------------------------
# presets
# ------------------------------------------------------------------------------------------------------

# SGE Table 2 by world: what a flag defaults to under --preset paper.  Its base models are of 3 to 8 billion weights.
_EVERYWHERE = dict(
    lr=1e-6, lr_schedule="constant", clip=0.2, epochs=2, minibatch_steps=128, group_size=16, token_temp=0.7,
    strategy_temp=1.2, buffer_size=32, p_fail=0.25, p_success=0.1,
)  # fmt: skip
TABLE_2 = {
    "house": _EVERYWHERE | dict(tasks_per_update=32, reply_tokens=520, epochs=1, token_temp=0.6, strategy_temp=1.0),  # LangR
    "phone": _EVERYWHERE | dict(tasks_per_update=32, reply_tokens=564, group_size=6, minibatch_steps=64),  # AndroidWorld
    "apps": _EVERYWHERE | dict(tasks_per_update=16, reply_tokens=768, group_size=8, lr=1e-5, p_success=0.5),  # AppWorld
    "code": _EVERYWHERE | dict(tasks_per_update=64, reply_tokens=2048),
}

# What the tiny model's optimiser was tuned to, by world, for all methods alike.  An episode has 2 steps in code and 6 in
# house: a minibatch of the same number of steps would leave code with too few optimiser steps.
TINY = {
    "house": dict(lr=4e-4, minibatch_steps=256),
    "phone": dict(lr=4e-4, minibatch_steps=256),
    "apps": dict(lr=4e-4, minibatch_steps=256, updates=20),  # SGE finds the rule early here, and GRPO by update 25
    # Rare successes of plain episodes start SGE on the hard tier here.  In a group of their own, and in small minibatches,
    # they are not drowned by what reflected and easy episodes have to say.  What is learnt with reflections carries over
    # to plain episodes more often with twice as many reflections on failures as in Table 2.
    "code": dict(lr=2.5e-4, minibatch_steps=32, updates=60, advantage_groups="split", p_fail=0.5),
}

# How to fit one GPU of so many GiB.  The numbers are worked out with `memory_needed` (below), not measured: they leave
# about a tenth free for Qwen3-4B on 80 GiB and more for Qwen3-0.6B on 24.  (16 bytes a weight in bfloat16 alone are
# 60 and 9 GiB, so 4B cannot be trained on 24.)  Smaller models may have more --rows and --cache-gb; conversations of
# much more than 1,024 tokens want fewer rows.
GPUS = {
    "24gb": (24, dict(dtype="bfloat16", gradient_checkpointing="on", rows=64, cache_gb=8.0, micro_tokens=8192)),
    "80gb": (80, dict(dtype="bfloat16", gradient_checkpointing="on", rows=56, cache_gb=8.0, micro_tokens=8192)),
}


def preset_values(names: str, env: str, method: str) -> dict:
    """The defaults that a --preset sets: paper, the name of a GPU, or both with a comma.  Raises ValueError.

    >>> preset_values("paper,24gb", "apps", "grpo")["lr"], "strategy_temp" in preset_values("paper", "apps", "grpo")
    (1e-05, False)
    """
    chosen = names.split(",") if names else []
    unknown = [name for name in chosen if name not in ("paper", *GPUS)]
    if unknown or len(chosen) > 2 or len(chosen) == 2 and chosen.count("paper") != 1:
        raise ValueError(f"--preset {names}: there is paper, {' or '.join(GPUS)}, or paper and one of these, as in paper,24gb")
    values: dict = {}
    for name in chosen:
        values |= TABLE_2[env] if name == "paper" else GPUS[name][1]
    if "paper" in chosen:
        values["strategy_tokens"] = values["reply_tokens"]  # Table 2 has one budget for all of a reply
        if method != "sge":  # hot strategies are SGE's
            del values["strategy_temp"]
    return values


# ------------------------------------------------------------------------------------------------------
# settings
# ------------------------------------------------------------------------------------------------------


def setting(default, help: str, choices: tuple = (), kind: type | None = None):
    """A field of Config: its default, one line of explanation, and what values it may take."""
    return dataclasses.field(default=default, metadata=dict(help=help, choices=choices, kind=kind or type(default)))


@dataclass
class Config:
    """Everything that shapes a run.  Each field is a flag of the same name, with - for _."""

    env: str = setting("house", "world to train in", envs.WORLDS)
    method: str = setting("sge", "sge: mixed temperature and reflection; grpo: neither; the others: grpo and a term", METHODS)
    model: str = setting("tiny", "tiny, a Hugging Face folder, a run folder, a .gguf file or a hub name")
    dtype: str = setting("float32", "precision of the weights; with bfloat16, AdamW keeps float32 masters", tuple(DTYPES))
    seed: int = setting(0, "seed of everything random in the run (the tiny base has its own)")
    updates: int = setting(None, "updates to train for (tiny on apps: 20, on code: 60, else 40)", kind=int)
    out: str = setting("", "run folder (default: runs/ENV-METHOD-MODEL-seedN)")
    device: str = setting("auto", "where to run", ("auto", "cpu", "cuda"))
    threads: int = setting(0, "CPU threads (0: torch's own choice)")
    preset: str = setting("", "other defaults: paper (Table 2), 24gb or 80gb (to fit a GPU), or both with a comma")

    # exploration (SGE 3.2, Table 2)
    strategy_temp: float = setting(None, "temperature of strategies (sge: 1.2, others: token-temp)", kind=float)
    token_temp: float = setting(0.7, "temperature of all other tokens, and of evaluation")
    reflect: str = setting(None, "kinds of reflection (sge: both, others: none)", ("both", "negative", "positive", "none"), str)
    p_fail: float = setting(None, "probability of reflecting on a failure of the task (tiny on code: 0.5, else 0.25)", kind=float)
    p_success: float = setting(0.1, "probability that an episode reflects on a success of its task")
    buffer_size: int = setting(32, "strategies kept per buffer")
    buffer_scope: str = setting("task", "what a buffer belongs to [open in the paper]", ("task", "family"))
    buffer_pick: str = setting("uniform", "which entry is drawn [open in the paper]", ("uniform", "newest"))
    buffer_store: str = setting("block", "what is stored of a strategy [open in the paper]", ("block", "last_paragraph"))
    strategy_format: str = setting("header", "how strategies are marked in a reply", tuple(FORMATS))
    strategy_prompt: str = setting("on", "off: no strategies, replies are actions (--strategy-format none)", ("on", "off"))
    strategy_tokens: int = setting(24, "tokens after which a strategy that does not end turns cool")
    reply_tokens: int = setting(64, "tokens of a whole reply (strategy, action and what is between)")

    # before the training, for models too small to follow the format of replies [not in the paper]
    warmup: int = setting(0, "steps of next-token loss on the scripted behaviour's replies (0: none)")
    warmup_lr: float = setting(1e-4, "their learning rate (for a pretrained model of 135 million weights)")
    warmup_batch: int = setting(4, "episodes a step")

    # collection and update (SGE Table 2, DAPO)
    tasks_per_update: int = setting(40, "tasks drawn per update (groups)")
    group_size: int = setting(10, "episodes per task (K)")
    lr: float = setting(None, "highest learning rate of AdamW (tiny: 4e-4, on code 2.5e-4; other models: Table 2)", kind=float)
    lr_schedule: str = setting("trapezoid", "up over the first tenth, down over the last half; constant: as the paper", SCHEDULES)
    clip: float = setting(0.2, "symmetric clip of the ratio")
    epochs: int = setting(2, "passes over the episodes of an update")
    minibatch_steps: int = setting(None, "environment steps per minibatch (by world; other models: Table 2)", kind=int)
    max_grad_norm: float = setting(1.0, "gradient norm is clipped to this [not in the paper]")
    advantage_groups: str = setting(
        None, "do plain and reflected episodes share a baseline (tiny on code: split, else joint)", ("joint", "split"), str
    )
    advantage_std: str = setting("unbiased", "advantages are divided by this std", ("unbiased", "biased", "none"))
    refill: int = setting(0, "rounds in which tasks may be drawn anew for groups without signal (DAPO: up to 10)")
    success_low: float = setting(0.0, "groups with a smaller share of successes are dropped")
    success_high: float = setting(1.0, "groups with a larger share of successes are dropped")
    clip_high: float = setting(None, "upper clip of the ratio (DAPO: 0.28; default: as --clip)", kind=float)
    loss_norm: str = setting("token", "mean over tokens, over episodes, or a constant divisor", ("token", "sequence", "constant"))
    loss_constant: int = setting(512, "that divisor, per episode (Dr. GRPO)")
    kl: float = setting(None, "weight of the KL term to the start policy (rlad: 0.001, others: 0)", kind=float)
    overlong_mask: str = setting("off", "leave episodes cut off by a length limit out of the loss", ("on", "off"))
    overlong_max: int = setting(0, "soft overlong punishment: sampled tokens of an episode at which it is -1 (0: none)")
    overlong_cache: int = setting(64, "... and over how many tokens before it grows (DAPO eq. 13)")

    # the baselines (SGE A.4)
    entropy_alpha: float = setting(0.4, "entropy: weight of the entropy in the advantage")
    entropy_kappa: float = setting(2.0, "entropy: the bonus is at most |advantage| / this")
    rnd_coef: float = setting(0.1, "rnd: weight of the bonus [open in the paper]")
    rnd_decay: int = setting(0, "rnd: updates in which the bonus is halved (i-MENTOR: 40; 0: never) [open]")
    rnd_norm: str = setting("std", "rnd: error / running std, or i-MENTOR's batch min-max", ("std", "minmax"))
    rnd_groups: str = setting("mixed", "rnd: are groups without a success dropped (mixed) or kept? [open]", ("mixed", "all"))
    rnd_hidden: int = setting(128, "rnd: width of its networks [open]")
    rnd_lr: float = setting(1e-3, "rnd: learning rate of the predictor [open]")
    skip_strategy: float = setting(None, "share of episodes that go without a strategy (rlad: 0.25, others: 0)", kind=float)
    skip_advantage: str = setting("group", "their advantage: the group's, or zero (RLAD eq. 3) [open]", ("group", "zero"))

    # fitting a machine
    rows: int = setting(256, "episodes decoded side by side")
    cache_gb: float = setting(4.0, "memory for keys and values while sampling")
    compile: str = setting("off", "torch.compile the decode step, for GPUs (the first steps then take minutes)", ("on", "off"))
    micro_tokens: int = setting(2048, "padded tokens per forward pass of the update")
    gradient_checkpointing: str = setting("off", "recompute layers in the backward pass: less memory, more time", ("on", "off"))

    # looking
    eval_every: int = setting(10, "updates between plain evaluations of one try per task (0: never)")
    final_tries: int = setting(4, "tries per task in the closing table")
    final_tasks: int = setting(0, "tasks per tier and split in the closing table and the evaluations before it (0: all)")
    base_tries: int = setting(256, "tries per task when measuring the base model")
    base_tasks: int = setting(8, "tasks per tier on which the base model is measured")
    save_every: int = setting(10, "updates between checkpoints")

    def resolve(self) -> "Config":
        """Fill in what depends on method, model and world, and check the rest.  Raises ValueError in one line."""
        explores, rlad = self.method == "sge", self.method == "rlad"
        if self.strategy_prompt == "off" or self.strategy_format == "none":  # two names of one thing
            self.strategy_prompt, self.strategy_format = "off", "none"
        if self.strategy_temp is None:
            self.strategy_temp = 1.2 if explores else self.token_temp
        if self.reflect is None:
            self.reflect = "both" if explores else "none"
        if self.kl is None:
            self.kl = 0.001 if rlad else 0.0
        if self.skip_strategy is None:
            self.skip_strategy = 0.25 if rlad else 0.0
        tuned = TINY[self.env] if self.model == "tiny" else TABLE_2[self.env]
        self.lr = tuned["lr"] if self.lr is None else self.lr
        self.minibatch_steps = tuned["minibatch_steps"] if self.minibatch_steps is None else self.minibatch_steps
        self.updates = tuned.get("updates", 40) if self.updates is None else self.updates
        if self.advantage_groups is None:
            self.advantage_groups = tuned.get("advantage_groups", "joint")
        self.p_fail = tuned.get("p_fail", 0.25) if self.p_fail is None else self.p_fail
        if not self.out:
            self.out = f"runs/{self.env}-{self.method}-{Path(self.model).name}-seed{self.seed}"
        for name in ("strategy_temp", "token_temp", "lr", "max_grad_norm", "cache_gb", "rnd_lr", "warmup_lr"):
            if not 0 < getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be above 0 and finite (at temperature 0 there is no gradient, for one)")
        if self.base_tries < 2:
            raise ValueError("--base-tries must be at least 2: the table shows pass@1 and pass@n")
        positive = ("updates", "tasks_per_update", "epochs", "minibatch_steps", "rows", "micro_tokens", "strategy_tokens")
        positive += ("loss_constant", "overlong_cache", "rnd_hidden", "warmup_batch")
        for name in (*positive, "reply_tokens", "buffer_size", "final_tries", "base_tasks", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        for name in ("threads", "eval_every", "seed", "refill", "overlong_max", "rnd_decay", "warmup", "final_tasks"):
            if not 0 <= getattr(self, name) < 2**31:
                raise ValueError(f"--{name.replace('_', '-')} must be between 0 and {2**31 - 1}")
        if self.group_size < 2:
            raise ValueError("--group-size must be at least 2: a group of one has no baseline")
        if not 0 < self.clip < 1:
            raise ValueError("--clip must be between 0 and 1")
        self._check_options()
        if not (self.p_fail >= 0 and self.p_success >= 0 and self.p_fail + self.p_success <= 1):
            raise ValueError("--p-fail and --p-success are probabilities with a sum of at most 1")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no CUDA GPU here; use --device cpu or auto")
        return self

    def _check_options(self) -> None:
        for name in ("clip_high", "kl", "entropy_alpha", "rnd_coef"):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 0 and finite")
        if not 1 < self.entropy_kappa < math.inf:
            raise ValueError("--entropy-kappa must be above 1, or the bonus would flip signs")
        if not 0 <= self.success_low <= self.success_high <= 1:
            raise ValueError("--success-low and --success-high are shares, the first not above the second")
        if not 0 <= self.skip_strategy < 1:
            raise ValueError("--skip-strategy is a share below 1")
        if self.overlong_max and self.overlong_cache > self.overlong_max:
            raise ValueError("--overlong-cache must not be larger than --overlong-max")
        if self.strategy_prompt == "off" and (self.reflect != "none" or self.strategy_temp != self.token_temp):
            raise ValueError("--strategy-prompt off leaves nothing to reflect on or to sample hot: use --method grpo")
        if self.warmup and self.strategy_format not in ("header", "tags"):
            raise ValueError("--warmup teaches the format of replies: it is for --strategy-format header or tags")
        if self.warmup and self.kl:
            raise ValueError(f"--warmup with --kl {self.kl:g}: the term is to the model before it; warm up in a run without, "
                             "then --model RUN")  # fmt: skip
        preset_values(self.preset, self.env, self.method)

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            self.strategy_temp, self.token_temp, self.strategy_tokens, self.reply_tokens, self.rows, self.cache_gb,
            self.compile == "on",
        )  # fmt: skip

    @property
    def plain_sampling(self) -> Sampling:
        """Evaluation: every token at the token temperature (README list no. 11)."""
        return dataclasses.replace(self.sampling, strategy_temp=self.token_temp)

    @property
    def update_settings(self) -> UpdateSettings:
        same = (
            "clip epochs minibatch_steps micro_tokens max_grad_norm advantage_groups success_low success_high clip_high "
            "loss_norm loss_constant kl overlong_max overlong_cache entropy_kappa rnd_coef rnd_decay rnd_norm skip_advantage"
        )
        return UpdateSettings(
            **{name: getattr(self, name) for name in same.split()},
            std=self.advantage_std,
            overlong_mask=self.overlong_mask == "on",
            entropy_alpha=self.entropy_alpha if self.method == "entropy" else 0.0,
            rnd_groups=self.rnd_groups if self.method == "rnd" else "mixed",
            checkpointing=self.gradient_checkpointing == "on",
        )

    def buffers(self) -> StrategyBuffers:
        p_fail = self.p_fail if self.reflect in ("both", "negative") else 0.0
        p_success = self.p_success if self.reflect in ("both", "positive") else 0.0
        return StrategyBuffers(self.buffer_size, p_fail, p_success, self.buffer_pick, self.buffer_store)


def parse_flags(argv: list[str]) -> tuple[Config, str]:
    """Flags -> (Config, folder to resume or "").  Wrong ones end the program with one line and code 2."""
    parser = evaluation.OneLineParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--resume", default="", metavar="RUN", help="continue this run; of other flags only --updates counts")
    for f in dataclasses.fields(Config):
        meta, flag = f.metadata, "--" + f.name.replace("_", "-")
        extra = {"choices": meta["choices"]} if meta["choices"] else {"metavar": meta["kind"].__name__.upper()}
        told = "" if f.default in (None, "") else f" (default: {f.default})"  # (of the others the help itself says what is taken)
        parser.add_argument(flag, type=meta["kind"], default=f.default, help=meta["help"] + told, **extra)
    args = vars(parser.parse_args(argv))
    resume = args.pop("resume")
    try:
        if not resume:
            preset = preset_values(args["preset"], args["env"], args["method"])
            parser.set_defaults(**preset)  # so that a flag that was given wins
            args = vars(parser.parse_args(argv))
            args.pop("resume")
            config = Config(**args).resolve()
            if preset:
                print(preset_line(config, preset))
            return config, ""
        given = {a.split("=")[0] for a in argv if a.startswith("--")} - {"--resume", "--updates"}
        if given:
            raise ValueError(f"--resume keeps the run's settings: leave out {' '.join(sorted(given))}")
        stored = Path(resume) / "config.json"
        if not stored.is_file():
            raise ValueError(f"nothing to resume: {stored} does not exist")
        try:
            config = Config(**json.loads(stored.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{stored} is not a configuration of this program: {error}") from error
        if any(a.startswith("--updates") for a in argv):
            config.updates = args["updates"]
        config.out = resume
        return config.resolve(), resume
    except ValueError as error:
        parser.error(str(error))


def preset_line(config: Config, preset: dict) -> str:
    """What a preset set, and what it did not since a flag was given."""
    told = {name.replace("_", "-"): value for name, value in preset.items()}
    kept = [f"{name} {value}" for name, value in told.items() if getattr(config, name.replace("-", "_")) == value]
    given = [name for name in told if getattr(config, name.replace("-", "_")) != told[name]]
    return f"preset {config.preset}: {', '.join(kept)}" + (f"; given otherwise: {', '.join(given)}" if given else "")


# ------------------------------------------------------------------------------------------------------
# the run
# ------------------------------------------------------------------------------------------------------


def schedule(kind: str, done: int, updates: int) -> float:
    """The share of the learning rate that update number `done` (from 0) of `updates` uses.

    >>> [schedule("trapezoid", i, 20) for i in (0, 1, 9, 10, 15, 19)]
    [0.5, 1.0, 1.0, 1.0, 0.5, 0.1]
    """
    if kind == "constant":
        return 1.0
    return min((done + 1) / (0.1 * updates), (updates - done) / (0.5 * updates), 1.0)


class Run:
    """The state of a training run: all of it is in the checkpoint, so a resumed run is the same run."""

    def __init__(self, config: Config, policy: Policy):
        self.config, self.policy = config, policy
        self.tasks = envs.tasks(config.env, "train", brief=policy.brief)
        self.optimizer = make_optimizer(policy.model, config.lr)
        self.buffers = config.buffers()
        # RLAD: episodes that skip the strategy; the same model, asked for an action only
        self.bare = Policy(policy.model, policy.tokenizer, FORMATS["none"], policy.brief) if config.skip_strategy else None
        self.rnd = self.reference = None
        if config.method == "rnd":
            width = policy.model.get_output_embeddings().weight.shape[1]
            self.rnd = RND(width, config.rnd_hidden, config.rnd_lr, config.seed, policy.device)
        if config.kl:  # the policy that the run began with, also when it is resumed
            start = load_policy(config.model, config.env, str(policy.device), config.strategy_format)
            self.reference = start.model.requires_grad_(False)
        self.rng = random.Random(config.seed)  # task order and reflection draws
        self.sampling_rng = torch.Generator(policy.device).manual_seed(parallel.stream(config.seed))  # each process its own
        self.shuffle_rng = torch.Generator().manual_seed(config.seed)  # minibatches
        self.queue: list[str] = []  # ids of tasks still to come in this pass over the task set
        self.done = 0  # updates
        self.totals = {"episodes": 0, "env_steps": 0, "tokens": 0, "seconds": 0.0}

    def next_tasks(self, n: int) -> list[envs.Task]:
        """The next n tasks of an endless shuffled pass over the training set."""
        by_id = {task.id: task for task in self.tasks}
        drawn = []
        while len(drawn) < n:
            if not self.queue:
                self.queue = sorted(by_id)
                self.rng.shuffle(self.queue)
            drawn.append(by_id[self.queue.pop()])
        return drawn

    def buffer_key(self, task: envs.Task) -> str:
        return task.id if self.config.buffer_scope == "task" else f"{task.tier}/{task.family}"

    def draw(self, task: envs.Task) -> Reflection:
        """What an episode is conditioned on."""
        if self.config.skip_strategy and self.rng.random() < self.config.skip_strategy:
            return BARE
        return self.buffers.draw(self.buffer_key(task), self.rng)

    def roll_out(self, tasks: list[envs.Task], first_group: int, tick) -> list[Episode]:
        """Play `group_size` episodes of each task, a group a task, and remember their strategies."""
        size = self.config.group_size
        jobs = [Job(task, self.draw(task), first_group + i) for i, task in enumerate(tasks) for _ in range(size)]
        episodes = self.play(jobs, tick)
        for e in episodes:  # after collection: no episode reflects on one of its own group
            if scorable(e):
                self.buffers.push(self.buffer_key(e.task), e.reward > 0, e.strategies, e.feedback)
        return episodes

    def play(self, jobs: list[Job], tick) -> list[Episode]:
        """Roll jobs out; the episodes come in their order.  Several processes: each plays its groups, all get everything."""
        config, played = self.config, {}
        mine = [i for i, job in enumerate(jobs) if job.group % parallel.world_size() == parallel.rank()]
        bare = [i for i in mine if jobs[i].reflection is BARE]
        asked = [i for i in mine if jobs[i].reflection is not BARE]
        for numbers, policy, sampling in ((asked, self.policy, config.sampling), (bare, self.bare, config.plain_sampling)):
            episodes = rollout(policy, config.env, [jobs[i] for i in numbers], sampling, self.sampling_rng, tick)
            played |= zip(numbers, episodes, strict=True)
        played = dict(parallel.gather(list(played.items())))
        for i, job in enumerate(jobs):  # (what comes from another process is a copy)
            played[i].task = job.task
        return [played[i] for i in range(len(jobs))]

    def collect(self, tick) -> tuple[list[Episode], int]:
        """The episodes of an update, and in how many rounds they were collected.

        With `refill`, tasks are drawn anew in the place of those whose group has no signal, for so many rounds
        at most: then the update is made with what there is (DAPO's dynamic sampling, but bounded).
        """
        how, episodes, missing, groups, rounds = self.config.update_settings, [], self.config.tasks_per_update, 0, 0
        while missing and rounds <= self.config.refill:
            episodes += self.roll_out(self.next_tasks(missing), groups, tick)
            groups, rounds = groups + missing, rounds + 1
            kept = groups_with_signal(episodes, how)
            useful = {e.group for e in episodes if advantage_key(e, how.advantage_groups) in kept}
            missing = self.config.tasks_per_update - len(useful)
        return episodes, rounds

    def one_update(self, tick) -> tuple[dict, list[Episode]]:
        """Collect, remember, learn: one round of Algorithm 1.  Returns (metrics, episodes)."""
        config, started = self.config, time.time()
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * schedule(config.lr_schedule, self.done, config.updates)
        episodes, rounds = self.collect(tick)
        sampled = time.time()
        self.policy.model.eval()  # no dropout in the update either: the ratio must start at 1
        how = config.update_settings
        learnt = update(self.policy, self.optimizer, episodes, how, self.shuffle_rng, self.rnd, self.reference)
        self.done += 1
        metrics = {"update": self.done, "rounds": rounds} | describe([e for e in episodes if scorable(e)]) | learnt
        metrics["rollout_seconds"], metrics["update_seconds"] = sampled - started, time.time() - sampled
        self.totals["episodes"] += len(episodes)
        self.totals["env_steps"] += metrics["env_steps"]
        self.totals["tokens"] += metrics["tokens"]
        self.totals["seconds"] += time.time() - started
        return metrics | {f"total_{k}": v for k, v in self.totals.items()}, episodes

    # -- warm-up ---------------------------------------------------------------------------------------

    def warm_up(self) -> float:
        """`warmup` steps of next-token loss on the replies of the world's scripted behaviour.  Returns the last loss.

        Its optimiser and its random stream are its own; the training begins with fresh moments.  Episodes go through
        the model one at a time: a batch is small, and no memory is needed that an update would not need.
        """
        config, model, rng = self.config, self.policy.model, random.Random(self.config.seed)
        self.optimizer = None  # (not both at a time)
        self.optimizer = make_optimizer(model, config.warmup_lr)
        set_checkpointing(model, config.gradient_checkpointing == "on")
        loss = math.nan
        with tqdm(range(config.warmup), desc="warm-up", unit="step", leave=False, disable=parallel.bar_off()) as bar:
            for step in bar:
                for group in self.optimizer.param_groups:
                    group["lr"] = config.warmup_lr * schedule("trapezoid", step, config.warmup)
                loss = self.imitate([demo_tokens(self.policy, config.env, rng) for _ in range(config.warmup_batch)])
                if optimizer_step(model, self.optimizer, config.max_grad_norm) is None:
                    raise FloatingPointError("the warm-up's gradient is not finite: lower --warmup-lr")
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                if bar.disable and parallel.first() and (step + 1) % -(-config.warmup // 10) == 0:  # into a file: ten lines
                    print(f"warm-up {step + 1}/{config.warmup} | loss {loss:.3f}", flush=True)
        self.optimizer = None
        self.optimizer = make_optimizer(model, config.lr)
        return loss

    def imitate(self, demos: list[tuple[list[int], list[bool]]]) -> float:
        """Add the gradients of the mean next-token loss over all masked tokens.  Returns that loss."""
        demos = [(ids[: self.policy.context], mask[: self.policy.context]) for ids, mask in demos]
        total, loss = max(1, sum(sum(mask) for _, mask in demos)), 0.0
        for ids, mask in demos[parallel.rank() :: parallel.world_size()]:
            row, where = (torch.tensor([values], device=self.policy.device) for values in (ids, mask))  # (1, L)
            logps, _ = token_logprobs(self.policy.model, row, where, torch.ones(row.shape, device=row.device))
            (-logps.sum() / total).backward()
            loss -= logps.detach().sum().item() / total
        parallel.sum_gradients(self.policy.model)
        return sum(parallel.gather([loss]))

    # -- checkpoints -----------------------------------------------------------------------------------

    def save(self) -> None:
        """Write checkpoint/ all or nothing: into a folder of its own, which then takes the old one's name."""
        streams = parallel.gather([self.sampling_rng.get_state().cpu()])
        if parallel.first():
            self._write(streams)

    def _write(self, streams: list[torch.Tensor]) -> None:
        out = Path(self.config.out)
        partial, final, old = out / "checkpoint.partial", out / "checkpoint", out / "checkpoint.old"
        shutil.rmtree(partial, ignore_errors=True)
        self.policy.model.save_pretrained(partial / "model")
        self.policy.tokenizer.save_pretrained(partial / "model")
        state = {
            "optimizer": self.optimizer.state_dict(),
            "sampling_rng": streams,  # of every process
            "shuffle_rng": self.shuffle_rng.get_state(),
        } | ({"rnd": self.rnd.state_dict()} if self.rnd else {})
        torch.save(state, partial / "state.pt")
        version, words, gauss = self.rng.getstate()
        plain = {
            "done": self.done, "queue": self.queue, "totals": self.totals,
            "rng": [version, list(words), gauss], "buffers": self.buffers.state_dict(),
        }  # fmt: skip
        (partial / "state.json").write_text(json.dumps(plain), encoding="utf-8")
        if final.exists():  # (if not, a kill left only checkpoint.old: keep it until the new one stands)
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)

    def load(self) -> None:
        """Take up the state that `save` wrote (the weights are loaded with the policy)."""
        folder = checkpoint_folder(self.config.out)
        state = torch.load(folder / "state.pt", map_location=self.policy.device, weights_only=True)
        streams = state["sampling_rng"]
        if len(streams) != parallel.world_size():
            raise ValueError(
                f"{self.config.out} was made by {len(streams)} process(es), and this is {parallel.world_size()}: "
                f"resume it with torchrun --nproc_per_node={len(streams)}"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        if self.rnd:
            self.rnd.load_state_dict(state["rnd"])
        self.sampling_rng.set_state(streams[parallel.rank()].cpu())  # random states live on the CPU, always
        self.shuffle_rng.set_state(state["shuffle_rng"].cpu())
        plain = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        self.done, self.queue, self.totals = plain["done"], plain["queue"], plain["totals"]
        version, words, gauss = plain["rng"]
        self.rng.setstate((version, tuple(words), gauss))
        self.buffers.load_state_dict(plain["buffers"])


def checkpoint_folder(run: str) -> Path:
    """The newest complete checkpoint of a run folder.  (A kill between two renames leaves checkpoint.old.)"""
    for name in ("checkpoint", "checkpoint.old"):
        if (Path(run) / name / "state.json").is_file():
            return Path(run) / name
    raise ValueError(f"nothing to resume: {run} has no checkpoint")


# ------------------------------------------------------------------------------------------------------
# looking at it
# ------------------------------------------------------------------------------------------------------


def describe(episodes: list[Episode]) -> dict:
    """What a batch of (scorable) episodes shows: success by tier, plain and reflected apart, lengths, outcomes."""
    success: dict[str, list] = defaultdict(list)
    outcomes: dict[int, set] = defaultdict(set)
    for e in episodes:
        plain = e.reflection.mode == "plain"
        success["plain" if plain else e.reflection.mode].append(e.reward)
        if plain:
            success[f"plain_{e.task.tier}"].append(e.reward)
        outcomes[e.group].add(e.outcome)
    replies = [turn.finish for e in episodes for turn in e.turns]
    return {
        **{f"success_{name}": sum(rewards) / len(rewards) for name, rewards in sorted(success.items())},
        "episodes": len(episodes),
        "env_steps": len(replies),
        "tokens": sum(sum(e.mask) for e in episodes),
        "cut_off_replies": replies.count("length") / max(1, len(replies)),
        "distinct_outcomes": sum(len(o) for o in outcomes.values()) / max(1, len(outcomes)),
        "tasks_solved": len({e.group for e in episodes if e.reward > 0}) / max(1, len(outcomes)),
        "reflected": sum(e.reflection not in (PLAIN, BARE) for e in episodes) / max(1, len(episodes)),
    }


def readable(m: dict, updates: int) -> str:
    """One update on one line."""

    def shown(name: str, form: str = "{:4.0%}") -> str:
        return form.format(m[name]) if name in m else "  - "

    return (
        f"update {m['update']:3d}/{updates} | plain {shown('success_plain')}: easy {shown('success_plain_easy')} medium "
        f"{shown('success_plain_medium')} hard {shown('success_plain_hard')} | after failure {shown('success_negative')} "
        f"after success {shown('success_positive')} | kept {shown('kept')} clipped {shown('clip_fraction', '{:5.1%}')} | "
        f"entropy {shown('strategy_entropy', '{:.2f}')}/{shown('action_entropy', '{:.2f}')} | "
        f"{m['rollout_seconds']:.1f}+{m['update_seconds']:.1f} s"
    )


def transcript(e: Episode, done: int) -> dict:
    """An episode as a line of episodes.jsonl.gz."""
    return {
        "update": done, "task": e.task.id, "instruction": e.task.instruction, "mode": e.reflection.mode,
        "reflects_on": list(e.reflection.strategies), "reward": e.reward if scorable(e) else None, "finish": e.finish,
        "turns": [dataclasses.asdict(turn) for turn in e.turns], "feedback": e.feedback,
    }  # fmt: skip


def log(config: Config, name: str, line: dict) -> None:
    with open(Path(config.out) / name, "a", encoding="utf-8") as f:
        f.write(json.dumps(line) + "\n")


def log_transcripts(config: Config, episodes: list[Episode], done: int) -> None:
    """Keep one episode a group, of every update: enough to read, small enough to keep."""
    seen: set = set()
    with gzip.open(Path(config.out) / "episodes.jsonl.gz", "at", encoding="utf-8") as f:
        for e in episodes:
            won = e.finish == "success"
            if e.group not in seen or (won and (e.group, "won") not in seen):
                seen.update({e.group} | ({(e.group, "won")} if won else set()))
                f.write(json.dumps(transcript(e, done)) + "\n")


def spread(env: str, split: str, tiers: tuple, policy: Policy, most: int) -> list[envs.Task]:
    """`most` tasks of each tier (0: all), spread evenly over its list, in which the families come one after the other."""
    chosen = []
    for tier in tiers:
        tasks = envs.tasks(env, split, tier, policy.brief)
        count = min(most, len(tasks)) if most else len(tasks)
        chosen += [tasks[i * len(tasks) // count] for i in range(count)]
    return chosen


def plain_success(run: Run, split: str, tries: int, seed: int) -> dict[str, float]:
    """pass@1 by tier without reflection, every token at the token temperature.  Draws from its own stream."""
    config = run.config
    tasks = spread(config.env, split, envs.TIERS, run.policy, config.final_tasks)
    counts = evaluation.count_successes(
        run.policy, config.env, tasks, tries, config.plain_sampling, seed, f"evaluating on {split}"
    )
    return {t: evaluation.mean_pass_at_k([c for c in counts if c["tier"] == t], 1) for t in envs.TIERS}


def closing_table(run: Run, base: dict, warm: dict) -> dict:
    """The summary by tier: base pass@1 and pass@n, trained pass@1 on training and on test tasks.

    warm: after a warm-up, pass@1 of the easy tier, measured as the base was; else {}."""
    train, test = (plain_success(run, split, run.config.final_tries, 10**6 + run.config.seed) for split in envs.SPLITS)
    most = f"pass@{run.config.base_tries}"
    table = {
        tier: {
            "base_pass@1": base[tier]["pass@1"], f"base_{most}": base[tier][most],
            "pass@1": train[tier], "test_pass@1": test[tier],
        }
        for tier in envs.TIERS
    }  # fmt: skip
    print(f"\n{'tier':8s}{'base pass@1':>13s}{'base ' + most:>15s}{'trained pass@1':>16s}{'on test tasks':>15s}")
    for tier, row in table.items():
        print(f"{tier:8s}" + "".join(f"{100 * v:{w}.1f}%" for v, w in zip(row.values(), (12, 14, 15, 14), strict=True)))
    for tier, figures in warm.items():
        print(f"pass@1 on {tier} tasks after the warm-up, before training: {100 * figures['pass@1']:.1f}%")
        table[tier]["warmup_pass@1"] = figures["pass@1"]
    return table


# ------------------------------------------------------------------------------------------------------
# memory
# ------------------------------------------------------------------------------------------------------


def memory_needed(config: Config, policy: Policy) -> dict[str, float]:
    """Estimate of the bytes a run needs, by part.  Sampling and update do not overlap, but the cache of one and
    the activations of the other are both counted: allocators are slow to give back."""
    model, shape = policy.model, policy.model.config
    size, width = model.dtype.itemsize, shape.hidden_size
    weights = sum(p.numel() for p in model.parameters())
    moments = 8 * weights + (4 * weights if size < 4 else 0)  # float32 both, and the masters if there are any
    rows = row_count(policy, config.sampling, config.tasks_per_update * config.group_size)
    # What a layer keeps for the backward pass, in numbers a token: about 12 vectors of the residual stream's width
    # and 4 of the feed-forward's.  With gradient checkpointing one layer at a time has them, the others their input.
    inner = getattr(shape, "intermediate_size", None) or 4 * width
    layer, layers = 12 * width + 4 * inner, shape.num_hidden_layers
    kept = layer + layers * width if getattr(model, "is_activation_checkpointing", False) else layers * layer
    # the logits of sampled tokens, in float32, a few copies at a time; about a third of a micro-batch is sampled, and the
    # head sees a bounded number of positions
    chunk = head_chunks(model, 1)[0].stop
    logits = 4 * 4 * policy.vocab * min(config.micro_tokens / 3, chunk)
    return {
        "weights": weights * size, "gradients": weights * size, "Adam": moments,
        f"keys and values of {rows} rows": token_bytes(model) * rows * min(policy.context, 1024),
        f"activations of {config.micro_tokens} tokens": config.micro_tokens * kept * size + logits,
    }  # fmt: skip


def memory_line(config: Config, policy: Policy) -> str:
    parts = memory_needed(config, policy)
    told = ", ".join(f"{name} {amount / 2**30:.2f}" for name, amount in parts.items())
    return f"memory, roughly {sum(parts.values()) / 2**30:.2f} GiB: {told}"


def check_preset_fits(config: Config, policy: Policy) -> None:
    """Refuse a model whose weights, gradients and moments alone do not fit the GPU that --preset names."""
    held = sum(memory_needed(config, policy)[part] for part in ("weights", "gradients", "Adam")) / 2**30
    for name in set(config.preset.split(",")) & GPUS.keys():
        if held > GPUS[name][0]:
            raise ValueError(f"--preset {name}: weights, gradients and Adam's moments alone need {held:.0f} GiB, whatever the "
                             "other settings; use a smaller model")  # fmt: skip


OUT_OF_MEMORY = (
    "out of memory: lower --rows (sampling) or --micro-tokens (update), or turn on --gradient-checkpointing or --dtype bfloat16"
)


# ------------------------------------------------------------------------------------------------------
# the program
# ------------------------------------------------------------------------------------------------------


def train(config: Config, resume: bool) -> int:
    """Run a whole training.  Returns the exit code."""
    out = Path(config.out)
    if not resume and any((out / name).exists() for name in ("checkpoint", "checkpoint.old")):
        raise ValueError(f"{out} holds a run already: --resume it, give another --out, or delete it")
    started = time.time()
    if config.threads:
        torch.set_num_threads(config.threads)
    device = parallel.device(config.device)
    source = str(checkpoint_folder(config.out) / "model") if resume else config.model
    policy = parallel.first_then_others(
        lambda: load_policy(source, config.env, device, config.strategy_format, config.dtype)
    )
    check_preset_fits(config, policy)
    run = Run(config, policy)
    if resume:
        run.load()
    if parallel.first():
        prepare_folder(run, resume)
    processes = f"{parallel.world_size()} processes, " if parallel.world_size() > 1 else ""
    how_often = f" ({config.p_fail:g}/{config.p_success:g})" if config.reflect != "none" else ""
    print(
        f"{config.method} on {config.env}: {len(run.tasks)} tasks, {config.updates} updates of {config.tasks_per_update} x "
        f"{config.group_size} episodes; temperatures {config.strategy_temp}/{config.token_temp}, "
        f"reflection {config.reflect}{how_often}; "
        f"lr {config.lr:g} ({config.lr_schedule}), minibatches of {config.minibatch_steps} steps, "
        f"{config.advantage_groups} baselines; {processes}{policy.device}, {torch.get_num_threads()} threads; "
        f"seed {config.seed} -> {config.out}",
        flush=True,
    )
    print(memory_line(config, policy), flush=True)
    base = measure_base(config, policy, resume)
    warm = start_warm(run, base, resume) if config.warmup else {}
    stopped = learn(run)
    run.save()
    if stopped:
        print(f"stopped after update {run.done}; all that was learnt is in {out}: go on with --resume {out}")
        return 130
    table = closing_table(run, base, warm)
    if parallel.first():
        totals = run.totals | {"updates": run.done, "wall_seconds": time.time() - started}
        (out / "summary.json").write_text(json.dumps(table | {"totals": totals}, indent=1), encoding="utf-8")
        evaluation.draw_curves([config.out], out / "curves.png")
    print(f"\n{run.totals['episodes']} episodes, {time.time() - started:.0f} s in all; curves in {out / 'curves.png'}")
    return 0


def prepare_folder(run: Run, resume: bool) -> None:
    """Make the run folder, with logs that reach as far as the run."""
    config, out = run.config, Path(run.config.out)
    out.mkdir(parents=True, exist_ok=True)
    if resume:
        forget_after(config, run.done)
    else:
        left = [path for path in (out / "metrics.jsonl", out / "episodes.jsonl.gz", out / "warmup.json") if path.exists()]
        if left:
            print(f"{out} holds logs of a run that ended before its first checkpoint: they are deleted, and the run begins anew")
        for path in left:
            path.unlink()
    evaluation.write_json(out / "config.json", dataclasses.asdict(config))


def start_warm(run: Run, base: dict, resume: bool) -> dict:
    """Warm the model up, unless the checkpoint has it done, and measure the easy tier: {"easy": {"pass@1": ...}}.

    A checkpoint is written at once, so that no resumed run does it again; a run that was stopped before has none.
    """
    kept = Path(run.config.out) / "warmup.json"
    if resume:
        known = parallel.gather([json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else None])[0]
        if known:
            return known
    else:
        loss = run.warm_up()
        print(f"warm-up: {run.config.warmup} steps of {run.config.warmup_batch} episodes, loss {loss:.3f} at the end", flush=True)
        run.save()
    warm = measure(run.config, run.policy, ("easy",), {1}, "measuring what the warm-up did")
    print(f"easy tasks, pass@1: base {100 * base['easy']['pass@1']:.1f}%, after the warm-up {100 * warm['easy']['pass@1']:.1f}%")
    if parallel.first():
        evaluation.write_json(kept, warm)
    return warm


def measure(config: Config, policy: Policy, tiers: tuple, ks: set, title: str) -> dict:
    """{tier: {"pass@k": ...}} on `base_tasks` tasks of each tier."""
    tasks = spread(config.env, "train", tiers, policy, config.base_tasks)
    counts = evaluation.count_successes(policy, config.env, tasks, config.base_tries, config.plain_sampling, 10**6, title)
    return {
        tier: {f"pass@{k}": evaluation.mean_pass_at_k([c for c in counts if c["tier"] == tier], k) for k in ks} for tier in tiers
    }


def measure_base(config: Config, policy: Policy, resume: bool) -> dict:
    """pass@1 and pass@n of the untrained model by tier, on `base_tasks` tasks of each.

    The tiny base is one fixed model, so its figures are kept beside it and measured only once.
    """
    kept = Path(config.out) / "base.json"
    shared = Path(policy.model.name_or_path) / (
        f"base-{config.base_tasks}x{config.base_tries}-{config.token_temp}-{config.strategy_tokens}-{config.reply_tokens}"
        f"-{config.strategy_format}.json"
    )
    known = kept if resume and kept.exists() else shared if config.model == "tiny" and shared.exists() else None
    figures = parallel.gather([json.loads(known.read_text(encoding="utf-8")) if known else None])[0]  # as the first finds it
    if not figures:
        figures = measure(config, policy, envs.TIERS, {1, config.base_tries}, "measuring the base")
        if config.model == "tiny" and parallel.first():
            evaluation.write_json(shared, figures)
    if parallel.first():
        evaluation.write_json(kept, figures)
    return figures


def learn(run: Run) -> bool:
    """The updates that are left.  Returns True if Ctrl-C ended them early."""
    config, asked_to_stop = run.config, []

    def on_interrupt(signum, frame):
        if asked_to_stop:  # the second time: at once (the last checkpoint stands)
            raise KeyboardInterrupt
        asked_to_stop.append(True)
        if parallel.first():
            tqdm.write("Ctrl-C: finishing this update, then saving; once more to stop at once")

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        per_update, processes = config.tasks_per_update * config.group_size, parallel.world_size()
        while run.done < config.updates and not any(parallel.gather([bool(asked_to_stop)])):
            title = f"update {run.done + 1}"
            with tqdm(total=per_update, desc=title, unit="episode", leave=False, disable=parallel.bar_off()) as bar:
                metrics, episodes = run.one_update(lambda bar=bar: bar.update(processes))  # the others are as fast
            if config.eval_every and run.done % config.eval_every == 0:
                rates = plain_success(run, "train", 1, 2 * 10**6 + run.done)
                metrics |= {f"eval_{tier}": rate for tier, rate in rates.items()}
            if parallel.first():
                log(config, "metrics.jsonl", metrics)
                log_transcripts(config, episodes, run.done)
            print(readable(metrics, config.updates), flush=True)
            if run.done % config.save_every == 0:
                run.save()
    finally:
        signal.signal(signal.SIGINT, previous)
    return run.done < config.updates


def forget_after(config: Config, done: int) -> None:
    """Drop log lines of updates that the checkpoint does not know: they will be made again.  A last line
    that a kill tore is of such an update, too."""
    for name, opener in (("metrics.jsonl", open), ("episodes.jsonl.gz", gzip.open)):
        path = Path(config.out) / name
        if path.exists():
            kept = whole_lines(path, opener, done)
            partial = path.with_name(name + ".partial")
            with opener(partial, "wt", encoding="utf-8") as f:
                f.writelines(kept)
            partial.replace(path)


def whole_lines(path: Path, opener, done: int) -> list[str]:
    """The lines of a log, up to a tear if it has one, that belong to updates up to `done`."""
    kept = []
    with opener(path, "rt", encoding="utf-8") as f:
        try:
            for line in f:
                if json.loads(line)["update"] <= done:
                    kept.append(line)
        except (EOFError, ValueError):
            print(f"{path.name} ends in a torn line, which is dropped")
    return kept


def main(argv: list[str] | None = None) -> int:
    config, resume = parse_flags(sys.argv[1:] if argv is None else argv)
    who = f"train.py (process {parallel.rank()})" if parallel.rank() else "train.py"
    try:
        return train(config, bool(resume))
    except (ValueError, FloatingPointError) as error:
        if parallel.first():  # the others found the same
            print(f"{who}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{who}: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"{who}: {OUT_OF_MEMORY}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if parallel.first():
            print(f"\nstopped; the last checkpoint, if any, is in {config.out}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parallel.join()
    code = main()
    if code == 0:  # (else the others may never come to say goodbye; torchrun ends them)
        parallel.leave()
    sys.exit(code)
