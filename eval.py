"""Evaluate and compare: pass@k of any model, and the curves and tables of finished runs.

    python eval.py passk   tiny --tier hard                   256 tries a task, unbiased pass@k
    python eval.py passk   runs/NAME --split test --n 16      world, reply format, caps and temperature as the run's
    python eval.py compare runs/A runs/B ...                  table, and curves in compare.png

Evaluation never reflects and never touches a training run's random streams.  With --json the figures
are printed once more as one JSON object on the last line.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import envs
import parallel
from policy import DTYPES, Policy, load_policy
from reflection import FORMATS
from sampler import Job, Sampling, rollout

# ------------------------------------------------------------------------------------------------------
# pass@k
# ------------------------------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased probability that one of k tries succeeds, from c successes in n tries (Chen et al. 2021, HE):

        1 - C(n-c, k) / C(n, k)  =  1 - prod_{i=n-c+1..n} (1 - k/i)

    Raises ValueError if k > n: that cannot be estimated.

    >>> round(pass_at_k(10, 3, 5), 7)
    0.9166667
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {c} successes in {n} tries")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def mean_pass_at_k(counts: list[dict], k: int) -> float:
    """Mean over tasks of each task's estimate.  counts: [{"tries": n, "successes": c}, ...]."""
    return float(np.mean([pass_at_k(c["tries"], c["successes"], k) for c in counts]))


def count_successes(
    policy: Policy, world: str, tasks: list[envs.Task], n: int, how: Sampling, seed: int, title: str = ""
) -> list[dict]:
    """Try every task n times, without reflection.  Returns one dict a task: id, tier, family, tries, successes.
    A try whose world failed is no success.

    Several processes share the tasks out; each returns the counts of all."""
    generator = torch.Generator(policy.device).manual_seed(parallel.stream(seed))
    mine = range(parallel.rank(), len(tasks), parallel.world_size())
    jobs = [Job(tasks[i], group=i) for i in mine for _ in range(n)]
    with tqdm(total=len(jobs), desc=title or "playing", unit="episode", leave=False, disable=parallel.bar_off()) as bar:
        episodes = rollout(policy, world, jobs, how, generator, bar.update)
    successes = Counter(parallel.gather([e.group for e in episodes if e.finish == "success"]))
    return [
        {"task": t.id, "tier": t.tier, "family": t.family, "tries": n, "successes": successes[i]} for i, t in enumerate(tasks)
    ]


# ------------------------------------------------------------------------------------------------------
# commands
# ------------------------------------------------------------------------------------------------------


def passk(args) -> dict:
    """pass@k for k = 1, 2, 4, ... up to n, by tier, and on how many tasks no try succeeded."""
    if args.threads:
        torch.set_num_threads(args.threads)
    policy = load_policy(args.model, args.env, parallel.device(args.device), args.strategy_format, args.dtype)
    strategy_temp = args.token_temp if args.strategy_temp is None else args.strategy_temp
    how = Sampling(strategy_temp, args.token_temp, args.strategy_tokens, args.reply_tokens, args.rows)
    tasks = envs.tasks(args.env, args.split, args.tier, policy.brief)
    counts = count_successes(policy, args.env, tasks, args.n, how, args.seed)
    ks = [k for k in (2**i for i in range(30)) if k <= args.n]
    print(f"{args.model} on {args.env}/{args.split}, {args.n} tries a task, temperatures {how.strategy_temp}/{how.token_temp}")
    print(f"{'tier':8s}{'tasks':>6s}{'never':>7s}" + "".join(f"{'@' + str(k):>8s}" for k in ks))
    figures = {}
    for tier in envs.TIERS:
        mine = [c for c in counts if c["tier"] == tier]
        if mine:
            never = sum(c["successes"] == 0 for c in mine)
            rates = {f"pass@{k}": mean_pass_at_k(mine, k) for k in ks}
            figures[tier] = rates | {"tasks": len(mine), "tasks_solved_0": never}
            print(f"{tier:8s}{len(mine):6d}{never:7d}" + "".join(f"{100 * r:7.1f}%" for r in rates.values()))
    if args.out:
        write_json(Path(args.out), counts)
    return figures


def read_run(folder: str) -> tuple[dict, list[dict], dict]:
    """(config, metrics, summary) of a run folder; the summary is {} while the run is not finished."""
    path = Path(folder)
    for name in ("config.json", "metrics.jsonl"):
        if not (path / name).is_file():
            raise ValueError(f"{folder} is no run folder: it has no {name}")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        summary = path / "summary.json"
        return config, metrics, json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    except ValueError as error:
        raise ValueError(f"{folder} has a broken file: {error}") from error


def compare(args) -> dict:
    """A table of finished runs, methods side by side (mean over seeds, lowest and highest), and their curves."""
    runs: dict[str, list] = defaultdict(list)
    for folder in args.runs:
        config, _, summary = read_run(folder)
        if not summary:
            raise ValueError(f"{folder} is not finished: it has no summary.json (go on with train.py --resume {folder})")
        runs[label(config)].append((folder, summary))
    figures: dict = {}
    print(f"{'':16s}{'tier':8s}{'base @1':>9s}{'trained pass@1 (range)':>26s}{'on test tasks (range)':>25s}   episodes   seconds")
    for name, members in runs.items():
        for tier in envs.TIERS:
            rows = [summary[tier] for _, summary in members]
            trained, test = ([100 * row[key] for row in rows] for key in ("pass@1", "test_pass@1"))
            totals = [summary["totals"] for _, summary in members]
            print(
                f"{name:16s}{tier:8s}{100 * rows[0]['base_pass@1']:8.1f}%{spread(trained):>26s}{spread(test):>25s}"
                f"{np.mean([t['episodes'] for t in totals]):11.0f}{np.mean([t['wall_seconds'] for t in totals]):10.0f}"
            )
            figures.setdefault(name, {})[tier] = {
                "pass@1": float(np.mean(trained)) / 100, "test_pass@1": float(np.mean(test)) / 100, "runs": len(rows)
            }  # fmt: skip
    draw_curves(args.runs, Path(args.out))
    print(f"curves in {args.out}")
    return figures


def label(config: dict) -> str:
    """What a run is, in a few words: runs with the same label differ in their seeds alone."""
    words = [config["env"], config["method"]]
    if config["method"] == "sge" and config["reflect"] != "both":
        words.append(f"reflect={config['reflect']}")
    if config["method"] == "sge" and config["strategy_temp"] != 1.2:
        words.append(f"T={config['strategy_temp']:g}/{config['token_temp']:g}")
    if config["model"] != "tiny":
        words.append(Path(config["model"]).name)
    return " ".join(words)


def spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.1f}%"
    return f"{np.mean(values):.1f}% ({min(values):.1f} - {max(values):.1f})"


def draw_curves(folders: list[str], out: Path) -> None:
    """Plain evaluated pass@1 over environment steps by tier, a line a method with a band over its seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves: dict[str, list] = defaultdict(list)
    bases = []
    for folder in folders:
        config, metrics, summary = read_run(folder)
        curves[label(config)].append([m for m in metrics if "eval_hard" in m])
        bases.append(summary)
    figure, axes = plt.subplots(1, len(envs.TIERS), figsize=(4 * len(envs.TIERS), 3.4), sharey=True)
    for axis, tier in zip(axes, envs.TIERS, strict=True):
        for name, seeds in curves.items():
            length = min(len(points) for points in seeds)
            if length:
                y = np.array([[100 * m[f"eval_{tier}"] for m in points[:length]] for points in seeds])
                x = np.mean([[m["total_env_steps"] / 1000 for m in points[:length]] for points in seeds], axis=0)
                (line,) = axis.plot(x, y.mean(0), marker=".", label=f"{name} ({len(seeds)} seed{'s'[: len(seeds) > 1]})")
                axis.fill_between(x, y.min(0), y.max(0), color=line.get_color(), alpha=0.2, lw=0)
        if bases[0]:
            row = bases[0][tier]
            most = next(key for key in row if key.startswith("base_pass@") and key != "base_pass@1")
            axis.axhline(100 * row["base_pass@1"], color="gray", lw=1, label="base pass@1")
            axis.axhline(100 * row[most], color="gray", lw=1, ls="--", label=most.replace("_", " "))
        axis.set(title=f"{tier} tasks", xlabel="environment steps (thousands)", ylim=(-3, 103))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("plain pass@1, training tasks (%)")
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="lower center", ncol=6, frameon=False)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def write_json(path: Path, value) -> None:
    """Write all or nothing."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1), encoding="utf-8")
    partial.replace(path)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("passk", help="success rate of 1, 2, 4, ... n tries")
    p.add_argument("model", metavar="RUN_OR_MODEL", help="tiny, a run folder, a Hugging Face folder, a .gguf file or a hub name")
    p.add_argument("--env", choices=envs.WORLDS, help="(the run's, or house)")
    p.add_argument("--split", default="train", choices=envs.SPLITS)
    p.add_argument("--tier", default="all", choices=(*envs.TIERS, "all"))
    p.add_argument("--n", type=int, default=256, help="tries per task (256)")
    p.add_argument("--token-temp", type=float, help="temperature of all tokens (the run's, or 0.7)")
    p.add_argument("--strategy-temp", type=float, help="... of strategies, if it shall differ")
    p.add_argument("--strategy-format", choices=tuple(FORMATS), help="(the run's, or header)")
    p.add_argument("--strategy-tokens", type=int, help="tokens after which a strategy turns cool (the run's, or 24)")
    p.add_argument("--reply-tokens", type=int, help="tokens of a whole reply (the run's, or 64)")
    p.add_argument("--dtype", default="float32", choices=tuple(DTYPES), help="precision of the weights")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--rows", type=int, default=256, help="episodes decoded side by side (256)")
    p.add_argument("--threads", type=int, default=0, help="CPU threads (torch's own choice)")
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    p.add_argument("--out", default="", metavar="FILE", help="write every task's count to this JSON file")
    p.set_defaults(run=passk)
    p = commands.add_parser("compare", help="table and curves of finished runs")
    p.add_argument("runs", nargs="+", metavar="RUN")
    p.add_argument("--out", default="compare.png", metavar="FILE", help="picture to write (compare.png)")
    p.set_defaults(run=compare)
    for p in commands.choices.values():
        p.add_argument("--json", action="store_true", help="print the figures as JSON on the last line, too")
    args = parser.parse_args(argv)
    try:
        if args.command == "passk":
            take_settings(args)
            check_passk(parser, args)
        figures = args.run(args)
    except (ValueError, OSError) as error:
        print(f"eval.py: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(figures))
    return 0


DEFAULTS = {"env": "house", "strategy_format": "header", "token_temp": 0.7, "strategy_tokens": 24, "reply_tokens": 64}


def take_settings(args) -> None:
    """Where flags were not given: how the run was trained, if the model is a run folder, else DEFAULTS.

    A run's strategy temperature is not taken: an evaluation has every token at the token temperature.
    """
    run, taken = Path(args.model), {}
    if (run / "config.json").is_file() and any((run / name).is_dir() for name in ("checkpoint", "checkpoint.old")):
        try:
            stored = json.loads((run / "config.json").read_text(encoding="utf-8"))
            taken = {name: stored[name] for name in DEFAULTS if getattr(args, name) is None}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{run / 'config.json'} is not the configuration of a run: {error}") from error
    if taken:
        print(f"as {args.model} was trained: " + ", ".join(f"{name.replace('_', '-')} {value}" for name, value in taken.items()))
    for name, value in (DEFAULTS | taken).items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def check_passk(parser, args) -> None:
    """Refuse values that cannot work, in one line, before anything is loaded."""
    for name in ("n", "rows", "strategy_tokens", "reply_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for temperature in (args.token_temp, args.strategy_temp):
        if temperature is not None and not 0 <= temperature < np.inf:
            parser.error("a temperature must be 0 (greedy) or above, and finite")
    if args.threads < 0 or not 0 <= args.seed < 2**31:
        parser.error(f"--threads must be at least 0, --seed between 0 and {2**31 - 1}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA GPU here; use --device cpu or auto")
    if args.out and not Path(args.out).absolute().parent.is_dir():
        parser.error(f"--out {args.out}: there is no such folder")


class OneLineParser(argparse.ArgumentParser):
    """argparse whose complaints are one line, without the usage of forty flags above it."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n" if parallel.first() else None)


if __name__ == "__main__":
    sys.exit(main())
