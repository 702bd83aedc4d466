"""Fixtures that several test files share: a babbling base model, and a world in which babbling sometimes pays."""

import os
import sys
import zlib
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # no test talks to a hub; a wrong model name fails at once
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest  # noqa: E402

import envs  # noqa: E402

MICRO = dict(vocab=400, width=32, layers=1, steps=40, batch=8, lr=1e-2)  # 3 s; about half of its replies hold an action


class CoinHouse(envs.House):
    """A house where a toss decides after two steps, the coin being the words of its actions.

    The micro base cannot solve a task, so that in the real world every group would be dropped and nothing
    would ever be learnt; here about half of the episodes succeed, by a rule that is deterministic.
    """

    on_step = staticmethod(lambda: None)  # a test may hang something in here

    def reset(self, task):
        self.said = task.id
        return super().reset(task)

    def step(self, action):
        self.on_step()
        observation, _, _, _, info = super().step(action)
        self.said += action
        over = self.steps == 2
        won = over and zlib.crc32(self.said.encode()) % 2 == 1
        self.over = over
        return observation, float(won), won, over and not won, info


def few_tasks(per_tier=1, real=envs.tasks):
    """A stand-in for envs.tasks: the first tasks of each tier, so that a run soon meets a task again."""
    return lambda world, split, tier="all", brief=False: [
        task for t in envs.TIERS if tier in (t, "all") for task in real(world, split, t, brief)[:per_tier]
    ]


def play_coins(patch=setattr):
    """Put the coin world and its few tasks in place (`patch`: monkeypatch.setattr, or setattr in a fresh process)."""
    patch(envs, "make_env", lambda world: CoinHouse())
    patch(envs, "tasks", few_tasks())


@pytest.fixture
def coins(monkeypatch):
    play_coins(monkeypatch.setattr)
    return CoinHouse


@pytest.fixture(scope="session")
def micro_base(tmp_path_factory):
    """The folder of a tiny model with next to no warm start."""
    import policy

    folder = tmp_path_factory.mktemp("micro") / "base"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "tiny_folder", lambda world, settings=None: folder)
        return str(policy.build_tiny("house", policy.TinySettings(**MICRO)))


def smallest_run(model, out, **settings):
    """The command line of a run of the smallest size."""
    small = dict(
        model=model, out=out, device="cpu", updates=4, tasks_per_update=2, group_size=4, lr=1e-3, minibatch_steps=8,
        reply_tokens=20, strategy_tokens=14, p_fail=0.4, p_success=0.4, eval_every=0, base_tries=2, base_tasks=1,
        final_tries=1, save_every=100, threads=1,  # sums depend on the number of threads, in the last bit
    )  # fmt: skip
    return [word for k, v in (small | settings).items() for word in ("--" + k.replace("_", "-"), str(v))]


@pytest.fixture
def train_flags(micro_base, tmp_path):
    """flags(name, **settings): a smallest run into tmp_path/name."""
    return lambda name, **settings: smallest_run(micro_base, **{"out": tmp_path / name} | settings)
