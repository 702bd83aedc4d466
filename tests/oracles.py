"""Plans that know everything: actions that solve any task of any world from the hidden state.  And how to play them.

  plan        the shortest actions that reach a task's goal
  play        what a world answers to given actions
  follow      an episode of a scripted behaviour, or of anything with reply(observation) -> (strategy, action)
  state       what an environment knows, to see that an action changed nothing
"""

import copy
import inspect
import random
import textwrap
from collections import Counter

import envs
import problems
from envs import PHONE_MEANS, PHONE_ODD, PhoneScript


def plan(world: str, task: envs.Task) -> list[str]:
    return {"house": house_plan, "phone": phone_plan, "apps": apps_plan, "code": code_plan}[world](task)


def house_plan(task):
    """The shortest way that one hand allows."""
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


class PhoneOracle(PhoneScript):
    """The scripted behaviour, told which means works.  wasted: means that it tries in vain on every category before."""

    def __init__(self, task, rng, wasted=0):
        super().__init__(task, rng)
        self.works, self.wasted, self.chosen = task.spec["works"], wasted, Counter()

    def _choose(self, category, goal):
        wrong = [m for m in PHONE_MEANS[category][0] + PHONE_ODD if m not in (self.works[category], "name")]
        self.chosen[category] += 1
        n = self.chosen[category]
        self.last = category, wrong[n - 1] if n <= self.wasted else self.works[category]
        return self.last[1]


def phone_plan(task):
    steps, _ = follow("phone", task, PhoneOracle(task, random.Random(0)))
    return [action for _, action, _ in steps]


def apps_plan(task):
    """One call a job, and the logins that it takes."""
    spec, opened, plan, requests = task.spec, set(task.spec["open"]), [], envs._APPS_REQUESTS
    for kind, first, second in spec["jobs"]:
        works = spec["works"].get(kind, "by")
        app = requests[kind][0] if kind in requests else {"sort": "tasks"}.get(kind, second)
        token = spec["tokens"][app]
        if works.startswith("by") and app not in opened:
            plan.append(f"{app}.login({spec['passwords'][app]})")
            opened.add(app)
        if works.startswith("via"):
            plan.append(f"{works.split()[1]}.ask({kind} {first} {second})")
        elif kind in requests:
            plan.append(f"{app}.{kind}({token}, {first}, {second}, by={works.split()[1]})")
        elif kind == "drop":
            number = next(i for i, text in spec["tables"][app].items() if text == first)
            plan.append(f"{app}.delete({token}, id={number})")
        else:
            plan.append(f"{app}.add({token}, {first}" + (f", {spec['codes'][second]})" if kind == "sort" else ")"))
    return [*plan, "me.done()"]


def code_plan(task):
    """The program in the reading that the tests want; of the bank's problems, the reference."""
    if task.family != "problem":
        return [envs._code_write(task.spec, task.spec["reading"])]
    solve = next(p.solve for p in problems.PROBLEMS if p.solve.__name__ == task.spec["entry"])
    source = textwrap.dedent(inspect.getsource(solve))
    return [source[source.index("\ndef ") + 1 :]]


def play(world, task, actions):
    """[(observation, reward, terminated, truncated, info), ...] of a fresh environment, and that environment."""
    env = envs.make_env(world)
    env.reset(task)
    return [env.step(action) for action in actions], env


def follow(world, task, script):
    """[(strategy, action, what the world answered), ...] of an episode, and its reward."""
    env, steps, over = envs.make_env(world), [], False
    observation, _ = env.reset(task)
    while not over:
        strategy, action = script.reply(observation)
        observation, reward, terminated, truncated, _ = env.step(action)
        steps.append((strategy, action, observation))
        over = terminated or truncated
    return steps, reward


def state(env):
    """Everything an environment knows that an action without effect must leave alone."""
    return copy.deepcopy({k: v for k, v in vars(env).items() if k not in ("steps", "over", "task")})
