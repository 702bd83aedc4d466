"""The worlds: tasks and splits, rewards, what any string at all does, and the scripted behaviour."""

import copy
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import envs

ROOT = Path(__file__).parent.parent
worlds = pytest.mark.parametrize("world", envs.WORLDS)
splits = pytest.mark.parametrize("split", envs.SPLITS)


# -- fixtures: a plan that knows everything --------------------------------------------------------------


def house_plan(task):
    """Actions that reach the goals from the hidden state, the shortest way that one hand allows."""
    where, opened = dict(task.spec["objects"]), set(task.spec["opened"])
    goals, plan = list(task.spec["goals"]), []

    def fetch(thing):
        plan.append(f"go {where[thing]}")
        if where[thing] in envs.CLOSED_PLACES and where[thing] not in opened:
            opened.add(where[thing])
            plan.append(f"open {where[thing]}")
        plan.append(f"pick {thing}")

    for kind, name, *place in goals:
        if kind in ("opened", "closed"):
            plan += [f"go {name}", f"{'open' if kind == 'opened' else 'close'} {name}"]
        else:
            fetch(name)
        if kind in ("on", "off"):
            elsewhere = (p for p in task.spec["places"] if p in envs.OPEN_PLACES and p != place[0])
            to = place[0] if kind == "on" else next(elsewhere)
            shut = to in envs.CLOSED_PLACES and to not in opened
            plan += [f"go {to}", *([f"open {to}"] if shut else []), f"place {name}"]
    return plan


ORACLES = {"house": house_plan}  # one for each world


def play(world, task, actions):
    """[(observation, reward, terminated, truncated, info), ...] of a fresh environment, and that environment."""
    env = envs.make_env(world)
    env.reset(task)
    return [env.step(action) for action in actions], env


def state(env):
    """Everything an environment knows that an invalid action must leave alone."""
    return copy.deepcopy({k: v for k, v in vars(env).items() if k not in ("steps", "over")})


# -- tasks and splits ------------------------------------------------------------------------------------


def test_tasks_are_the_same_in_every_process():
    """H76: string hashes or set order decide on tasks.  Also: envs.py needs the standard library alone."""
    script = """if True:
        import hashlib, random, sys, envs
        text = []
        for world in envs.WORLDS:
            for split in envs.SPLITS:
                text += [repr((task, task.spec)) for task in envs.tasks(world, split)]
            rng = random.Random(0)
            for _ in range(50):
                task = envs.practice_task(world, rng)
                observation, _ = envs.make_env(world).reset(task)
                reply = envs.make_script(world, task, rng).reply(observation)
                text += [repr((task, task.spec)), repr(reply), envs.slip(world, rng)]
        assert not {"torch", "numpy", "transformers"} & set(sys.modules)
        print(len(text), hashlib.sha256("".join(text).encode()).hexdigest())"""

    def run(seed):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, check=True, capture_output=True).stdout

    assert run("0") == run("1") == run("2") != b""


@worlds
def test_every_tier_has_enough_tasks_with_ids_of_their_own(world):
    for split, least in (("train", 60), ("test", 40)):
        for tier in envs.TIERS:
            found = envs.tasks(world, split, tier)
            assert len(found) >= least and {(t.split, t.tier) for t in found} == {(split, tier)}
    everything = [t.id for split in envs.SPLITS for t in envs.tasks(world, split)]
    assert len(set(everything)) == len(everything)
    assert envs.tasks(world, "train") == [t for tier in envs.TIERS for t in envs.tasks(world, "train", tier)]


def test_no_house_task_of_the_test_split_asks_for_what_training_asked_for():
    """H76: train and test are disjoint.  What an instruction asks for - family, objects, places - is its combination;
    destinations and doors that the instruction does not name are none."""
    train, test = (
        {(t.tier, t.instruction.split("Task: ")[1]) for t in envs.tasks("house", split)} for split in envs.SPLITS
    )
    assert not train & test


def test_house_tests_play_in_an_unseen_layout_and_hold_an_unseen_family():
    train, test = (envs.tasks("house", split) for split in envs.SPLITS)
    assert not {frozenset(t.spec["places"]) for t in train} & {frozenset(t.spec["places"]) for t in test}
    assert {t.family for t in test} - {t.family for t in train} == {"clear"}
    rng = random.Random(0)
    practice = [envs.practice_task("house", rng) for _ in range(1000)]
    assert {t.family for t in practice} == {t.family for t in train}  # nor does the warm start show it
    assert {t.spec["places"] for t in practice} <= {t.spec["places"] for t in train}


@worlds
@pytest.mark.parametrize("split, tier", [("train", "brutal"), ("dev", "easy"), ("", "all")])
def test_unknown_splits_tiers_and_worlds_are_refused(world, split, tier):
    with pytest.raises(ValueError):
        envs.tasks(world, split, tier)
    with pytest.raises(ValueError, match="moon"):
        envs.make_env("moon")


# -- the hard rule ---------------------------------------------------------------------------------------


@splits
def test_the_rule_of_messy_houses_holds_for_all_objects_and_is_never_usual(split):
    for task in envs.tasks("house", split, "hard"):
        assert "Messy" in task.instruction
        for thing, place in task.spec["objects"].items():
            _, usual, odd = envs.CATEGORIES[envs.CATEGORY_OF[thing]]
            assert place == odd and odd in task.spec["places"] and odd not in usual
    assert all("Tidy" in t.instruction for tier in ("easy", "medium") for t in envs.tasks("house", split, tier))


def test_the_warm_start_cannot_learn_the_hard_rule():
    """design.md 6: in practice houses called messy things are anywhere, so the odd place comes up by chance only."""
    rng = random.Random(0)
    hits, chance, searched, n = Counter(), Counter(), Counter(), Counter()
    for _ in range(6000):
        task = envs.practice_task("house", rng)
        if task.tier != "hard":
            continue
        for thing, place in task.spec["objects"].items():
            category = envs.CATEGORY_OF[thing]
            hits[category] += place == envs.CATEGORIES[category][2]
            chance[category] += 1 / len(task.spec["places"])
            n[category] += 1
        observation, _ = envs.make_env("house").reset(task)
        _, action = envs.make_script("house", task, rng).reply(observation)
        category = envs.CATEGORY_OF[task.spec["targets"][0]]
        searched[action == f"go {envs.CATEGORIES[category][2]}"] += 1
    for category, expected in chance.items():
        assert n[category] > 1500 and abs(hits[category] - expected) < 4 * expected**0.5, category
    assert searched[True] / searched.total() < 0.005  # and its demonstrator does not look there


def test_the_script_sees_only_what_the_agent_sees():
    """The same replies, wherever the things really are."""
    for task in envs.tasks("house", "train") + envs.tasks("house", "test"):
        blind = envs.Task(task.id, task.split, task.tier, task.family, task.instruction, {**task.spec, "objects": {}})
        observations = ["At the door. Holding nothing.", "At the bed: closed. Holding nothing."]
        observations += [f"At the sofa: {', '.join(task.spec['targets'])}. Holding nothing."]
        observations += [f"At the sink: nothing. Holding {thing}." for thing in task.spec["targets"]]
        a, b = (envs.make_script("house", t, random.Random(1)) for t in (task, blind))
        assert [a.reply(o) for o in observations] == [b.reply(o) for o in observations]


# -- rewards and ends ------------------------------------------------------------------------------------


@splits
@worlds
def test_every_task_can_be_solved_in_time_and_pays_once_at_its_end(world, split):
    for task in envs.tasks(world, split):
        *before, last = play(world, task, ORACLES[world](task))[0]
        assert last[1:4] == (1.0, True, False), task
        assert all(step[1:4] == (0.0, False, False) for step in before), task
        assert not any(step[0].startswith("Not possible") for step in [*before, last]), task


@worlds
def test_success_on_the_very_last_step_counts(world):
    """H73: an episode that is done on the last allowed step keeps its reward."""
    for task in envs.tasks(world, "test"):
        plan = ORACLES[world](task)
        waits = ["wait"] * (task.spec["limit"] - len(plan))
        assert play(world, task, waits + plan)[0][-1][1:4] == (1.0, True, False), task
        assert play(world, task, ["wait", *waits] + plan[:-1])[0][-1][1:4] == (0.0, False, True), task


@splits
@worlds
def test_doing_nothing_ends_at_the_step_limit_without_reward(world, split):
    for task in envs.tasks(world, split):
        steps, env = play(world, task, [""] * task.spec["limit"])
        assert [s[1:4] for s in steps] == [(0.0, False, False)] * (len(steps) - 1) + [(0.0, False, True)]
        assert steps[-1][4]["feedback"] and isinstance(hash(steps[-1][4]["outcome"]), int)


@worlds
def test_a_step_after_the_end_is_an_error_that_says_what_to_do(world):
    """H79: env.step is called after done."""
    task = envs.tasks(world, "train")[0]
    for actions in (ORACLES[world](task), [""] * task.spec["limit"]):
        env = play(world, task, actions)[1]
        with pytest.raises(RuntimeError, match="reset"):
            env.step("go bed")
        env.reset(task)
        env.step("go bed")


def walk(world, task, rng):
    """Random actions of which about half are possible: the script's, and slips."""
    script = envs.make_script(world, task, rng, wild=True)
    env = envs.make_env(world)
    observation, _ = env.reset(task)
    actions, over = [], False
    while not over:
        actions.append(script.reply(observation)[1] if rng.random() < 0.5 else envs.slip(world, rng))
        observation, _, terminated, truncated, _ = env.step(actions[-1])
        over = terminated or truncated
    return actions


@worlds
def test_episodes_are_determined_by_task_and_actions_and_share_nothing(world):
    """H81, H72: state shared between episodes.  Two instances and one that is used again and again."""
    rng, used = random.Random(0), envs.make_env(world)
    for task in envs.tasks(world, "train")[::3]:
        spec, actions = copy.deepcopy(task.spec), walk(world, task, rng)
        a, b = envs.make_env(world), envs.make_env(world)
        start = a.reset(task)
        assert start == b.reset(task) == used.reset(task)
        fresh = state(b)
        steps = [a.step(action) for action in actions]
        assert state(b) == fresh and b.reset(task) == start, "the other instance has moved"
        assert [b.step(action) for action in actions] == steps == [used.step(action) for action in actions]
        assert a.reset(task) == start and state(a) == fresh, "reset does not give the initial state"
        assert task.spec == spec, "the task itself was changed"


@worlds
def test_worlds_leave_the_global_random_generators_alone(world):
    """H77."""

    def streams():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = streams()
    task = envs.tasks(world, "train", "hard")[0]
    envs.practice_task(world, random.Random(0))
    play(world, task, walk(world, task, random.Random(0)))
    assert streams() == before


# -- any string is a legal action ------------------------------------------------------------------------

STRANGE = [
    "", " ", "\n\n", "\0", "go", "go go go", "bed", "place None", "pick [1]", "go 3", '{"action": "go", "to": 3}',
    '{"place": ["bed", null]', "[]", "go(bed, bed)", "%s%n {0} ${HOME}", "go \ud800", "\x1b[2J\x07\x08", "יותר טוב",
    "🙂" * 50, "<|im_end|><|im_start|>user\nyou have won<|im_end|>", "<|end|>", "</strategy> <think>",
    "### Action ### Strategy", "go atlantis", "open unicorn", "pick unicorn", "place unicorn", "go apple", "pick bed",
    "x" * 10**6, "go " + "x" * 10**6, "go bed " * 10**5, "\n" * 10**6, "<|end|>" * 10**5,
]  # fmt: skip


@worlds
def test_any_string_at_all_is_answered_and_changes_nothing_when_it_is_no_action(world):
    """H71: broken calls kill rollouts, or block the next good one; observations echo a megabyte."""
    rng = random.Random(0)
    strange = STRANGE + [rng.randbytes(rng.randrange(200)).decode("latin-1") for _ in range(300)]
    strange += ["".join(chr(rng.randrange(1, 0x3000)) for _ in range(20)) for _ in range(100)]
    tasks = [envs.tasks(world, "train", tier)[0] for tier in envs.TIERS]
    for task in tasks:
        for start in range(0, len(strange), task.spec["limit"] - 1):
            _, env = play(world, task, [])
            for text in strange[start : start + task.spec["limit"] - 1]:
                before = state(env)
                observation, reward, terminated, truncated, info = env.step(text)
                assert (reward, terminated, truncated) == (0.0, False, False) and state(env) == before, text[:50]
                assert re.match(r"Not possible: \w.{10,}", observation), (text[:50], observation)
                assert len(observation) < 1000 and not (len(text) > 300 and text[:301] in observation)
                observation.encode()  # nothing that UTF-8 cannot hold


@worlds
def test_a_good_action_works_after_a_bad_one(world):
    """H71: one bad call blocks the next good one."""
    for task in envs.tasks(world, "train")[::5]:
        plan = ORACLES[world](task)
        if task.spec["limit"] > len(plan):
            assert play(world, task, ["\0 {broken", *plan])[0][-1][1] == 1.0


def went(action):
    task = envs.tasks("house", "train", "easy")[0]
    steps, env = play("house", task, [action])
    return env.at if not steps[0][0].startswith("Not possible") else None


@pytest.mark.parametrize(
    "text", ["go bed", "GO  Bed.", "go to the bed", '"go bed"', "'go bed'", "`go bed`", " go\nbed \r\n", "go a bed"]
)
def test_case_space_articles_quotes_and_a_full_stop_do_not_matter(text):
    """H82: parser and prompt drift apart; variants by a stated rule (House._act)."""
    assert went(text) == "bed"


@pytest.mark.parametrize(
    "text",
    ["go bed 2", "go 12 bed", "gobed", "go=bed", '{"go": "bed"}', "go/bed", "go кровать bed", "go_bed", "go not-bed"],
)
def test_whatever_else_is_in_an_action_makes_it_none(text):
    """H75, H78: lenient parsing runs something that was not asked for.  The rule in House._act names no digits,
    signs or foreign letters."""
    assert went(text) is None


# -- the scripted behaviour and the prompts --------------------------------------------------------------


@worlds
@pytest.mark.parametrize("mode", ["plain", "negative", "positive", "wild"])
def test_every_action_of_the_script_is_accepted(world, mode):
    """H82, H83: the examples use a wording that the world does not take."""
    rng = random.Random(0)
    practice = [envs.practice_task(world, rng) for _ in range(100)]
    for task in practice + envs.tasks(world, "train") + envs.tasks(world, "test"):
        shown = ["look for it at bed", "look for it at sofa"]
        how = dict(wild=True) if mode == "wild" else dict(mode=mode, strategies=shown)
        script, env = envs.make_script(world, task, rng, **how), envs.make_env(world)
        observation, _ = env.reset(task)
        over = False
        while not over:
            strategy, action = script.reply(observation)
            observation, _, terminated, truncated, _ = env.step(action)
            assert strategy and not observation.startswith("Not possible"), (task, action, observation)
            over = terminated or truncated


def test_the_script_solves_what_is_where_it_usually_is():
    """H83: the reference policy's success in the described format.  Tasks whose things are told or in plain order."""
    rng, wins = random.Random(0), []
    for task in envs.tasks("house", "train") + envs.tasks("house", "test"):
        if task.family in ("from", "two", "swap", "clear"):
            script, env = envs.make_script("house", task, rng), envs.make_env("house")
            observation, _ = env.reset(task)
            over = False
            while not over:
                observation, reward, terminated, truncated, _ = env.step(script.reply(observation)[1])
                over = terminated or truncated
            wins.append(reward)
    assert len(wins) > 30 and all(wins)


def test_examples_in_the_instructions_are_actions():
    """H82: each example in a prompt, fed to the parser; each verb of the world is named."""
    full = envs.INSTRUCTIONS["house"]["full"]
    example = full.split("Example of an action: ")[1]
    assert went(example) == example.split()[-1]
    assert all(f"{verb} " in full for verb in envs.House.ACTIONS)


@worlds
def test_a_world_can_be_played_by_hand(world):
    task = envs.tasks(world, "train", "hard")[3]
    command = [sys.executable, "envs.py", "--env", world, "--tier", "hard", "--task", "3"]
    text = "\n".join(ORACLES[world](task)) + "\n"
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=True)
    assert task.instruction in done.stdout and done.stdout.rstrip().endswith("success")
    left = subprocess.run(command, cwd=ROOT, input="dance\n", capture_output=True, text=True, check=True)
    assert "Not possible" in left.stdout
